//! The entry points of the fuzzer (`tools/fuzz`): the parsers of bytes from a peer before there is a connection.

use std::mem::size_of;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::frame::{Answer, Hello, Reply, table};
use crate::card::Card;

const SIZE: u32 = 4;
const NONCE: u64 = 0;

/// Parses bytes received by rank 0, possibly incomplete.
pub fn hello(bytes: &[u8]) {
    let own = Card::new_zeroed();
    let bytes = &bytes[..bytes.len().min(size_of::<Hello>())];
    let Ok(Some(hello)) = Hello::parse(bytes) else { return };
    assert_eq!(hello.as_bytes(), bytes);
    for here in [false, true] {
        let is_here = |rank: u32| {
            assert!((1..SIZE).contains(&rank), "rank {rank} has no place");
            here
        };
        if hello.problem(SIZE, NONCE, &own, is_here).is_none() {
            assert!(!here && hello.size.get() == SIZE && hello.nonce.get() == NONCE);
        }
    }
}

/// Parses bytes received by another rank.
pub fn answer(bytes: &[u8]) {
    let Some((rank, bytes)) = bytes.split_first() else { return };
    let Some((start, body)) = bytes.split_first_chunk::<{ size_of::<Reply>() }>() else { return };
    let Ok(answer) = Answer::parse(start, SIZE) else { return };
    assert!(answer.length() <= 4096, "{answer:?}");
    let Some(body) = body.get(..answer.length()) else { return };
    let rank = u32::from(*rank) % SIZE;
    if let Answer::Table(_) = answer {
        let at = rank as usize * size_of::<Card>();
        let own = Card::read_from_bytes(&body[at..at + size_of::<Card>()]).expect("it is as long");
        let cards = table(body, rank, &own).expect("it has the own card");
        assert_eq!(cards.as_bytes(), body);
    }
}
