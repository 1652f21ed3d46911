//! A table that its owner writes while peers READ it: a key-value server without a server loop. Each entry is guarded by
//! a sequence number, odd while it is written (a seqlock). A lookup is three READs in one round trip: the number, the
//! value, the number again. READs are carried out in order, the bytes of one in no particular order. (Not
//! with selective repeat when a response is lost: there the second and the third READ would need `SendFlags::fence`.)

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread;
use std::time::Duration;

use ferroce::*;

/// Words of a value; an entry has its sequence number in front.
const VALUE: usize = 63;
const ENTRY: u64 = 8 * (VALUE as u64 + 1);
const KEYS: u64 = 16;
const LOOKUPS: u64 = 20_000;

/// Writes an entry; one thread does.
fn put(table: &[AtomicU64], key: u64, value: u64) {
    let (sequence, words) = table[(key * ENTRY / 8) as usize..][..VALUE + 1].split_first().expect("an entry");
    let before = sequence.load(Ordering::Relaxed);
    sequence.store(before + 1, Ordering::Relaxed);
    fence(Ordering::Release);
    words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
    sequence.store(before + 2, Ordering::Release);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (near, far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let mut reader = Context::open(Box::new(near), &Config::default())?;
    let mut server = Context::open(Box::new(far), &Config::default())?;

    // Shared memory has a handle for the context and one for the thread that writes, and no slices.
    let table = Memory::shared((KEYS * ENTRY) as usize)?;
    let (pd, cq) = (server.alloc_pd()?, server.create_cq(16)?);
    let served = server.register(pd, table.share()?, Access::REMOTE_READ)?;
    let (remote, there) = (server.remote(served)?, server.create_qp(&QpConfig::rc(pd, cq))?);
    let (pd, cq) = (reader.alloc_pd()?, reader.create_cq(16)?);
    let (here, mr) = (reader.create_qp(&QpConfig::rc(pd, cq))?, Memory::zeroed(ENTRY as usize + 8)?);
    let mr = reader.register(pd, mr, Access::LOCAL_WRITE)?;
    // GID index 0: each port has one address.
    let (a, b) = (reader.endpoint(here, 0)?, server.endpoint(there, 0)?);
    reader.handshake(here, &a, &b)?;
    server.handshake(there, &b, &a)?;

    let runner = Runner::start(server, &RunnerConfig::default())?;
    let done = Arc::new(AtomicBool::new(false));
    let (writer, is_done) = (table.share()?, Arc::clone(&done));
    let writer = thread::spawn(move || {
        let words = writer.atomics().expect("shared memory");
        let values = (0..).take_while(|_| !is_done.load(Ordering::Relaxed));
        values.map(|value| put(words, value % KEYS, value)).count()
    });
    let torn = look_up(&mut reader, (here, cq, mr), remote)?;
    done.store(true, Ordering::Relaxed);
    let written = writer.join().expect("the writer ends");
    println!("{LOOKUPS} lookups beside {written} writes; {torn} found an entry that was being written");
    drop(runner.stop());
    Ok(())
}

fn look_up(reader: &mut Context, (qp, cq, mr): (Qp, Cq, Mr), table: RemoteMemory) -> Result<u64, Error> {
    let (mut torn, mut found) = (0, 0);
    let sges = [[mr.sge(0..8)], [mr.sge(8..ENTRY)], [mr.sge(ENTRY..ENTRY + 8)]];
    while found < LOOKUPS {
        let entry = found % KEYS * ENTRY;
        let read = |part: usize, at| SendWorkRequest {
            wr_id: part as u64,
            op: SendOp::Read(table.at(entry + at)),
            data: Data::Sges(&sges[part]),
            flags: SendFlags::default().signaled(part == 2),
        };
        reader.post_sends(qp, &[read(0, 0), read(1, 8), read(2, 0)])?;
        let completion = reader.wait_cq(cq, Duration::from_secs(5))?.expect("an answer");
        assert_eq!(completion.status, WcStatus::Success);
        let before = reader.load_u64(mr, 0)?;
        if before % 2 == 1 || before != reader.load_u64(mr, ENTRY)? {
            torn += 1;
            continue;
        }
        let value = &reader.bytes(mr)?[8..ENTRY as usize];
        assert!(value.chunks(8).all(|word| word == &value[..8]), "half of one and half of another");
        found += 1;
    }
    Ok(torn)
}

#[cfg(test)]
#[test]
fn no_entry_is_torn() {
    main().expect("all lookups end");
}
