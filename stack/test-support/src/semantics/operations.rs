//! Send work requests of RC and UC.

use ferroce::*;

use super::pair::ALL;
use super::{Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("RC SEND: bytes, length, numbers", rc_send),
    ("UC SEND: bytes, length, numbers", uc_send),
    ("SEND of no bytes", empty_send),
    ("SEND with immediate", send_with_immediate),
    ("SEND of inline data", inline),
    ("SEND of three pieces into two", pieces),
    ("SEND of many packets", long_send),
    ("lists of sends and receives, in their order", lists),
    ("RC WRITE", rc_write),
    ("UC WRITE", uc_write),
    ("WRITE with immediate takes a receive", write_with_immediate),
    ("READ", read),
    ("READ of many packets", long_read),
    ("FETCH ADD", fetch_add),
    ("COMPARE SWAP, equal and not", compare_swap),
    ("a success that is not signaled is not told", unsignaled),
    ("a queue pair that signals all", signal_all),
    ("a send queue whose sends are not signaled gets room again", never_signaled),
    ("fence: a WRITE behind a READ", fence),
    ("FLUSH", flush),
    ("ATOMIC WRITE", atomic_write),
];

fn rc_send(pair: &mut Pair) -> Outcome {
    send(pair, QpType::Rc)
}

fn uc_send(pair: &mut Pair) -> Outcome {
    send(pair, QpType::Uc)
}

fn send(pair: &mut Pair, qp_type: QpType) -> Outcome {
    let qps = pair.connected(qp_type, |config| config)?;
    let from = pair.ends[0].region(100, &[])?;
    let to = pair.ends[1].zeros(200, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 7, &[to.sge(50..200)])?;
    pair.ends[0].send(qps[0], 8, SendOp::Send, &[from.sge(0..100)])?;
    let sent = pair.completes(0, 8, WcStatus::Success)?;
    same!((sent.opcode, sent.qp, sent.immediate), (WcOpcode::Send, qps[0], None));
    same!(sent.byte_len, 100);
    let received = pair.completes(1, 7, WcStatus::Success)?;
    same!(received.src_qpn, sent.qpn);
    same!((received.opcode, received.byte_len, received.qp), (WcOpcode::Recv, 100, qps[1]));
    same!((received.grh, received.immediate, received.invalidated), (false, None, None));
    let attributes = pair.ends[1].context.query_qp(qps[1])?;
    same!((received.qpn, attributes.outstanding_receives), (attributes.qpn, 0));
    same!(pair.ends[1].bytes(to, 50..150)?, pair.ends[0].bytes(from, 0..100)?);
    same!(pair.ends[1].bytes(to, 0..50)?, vec![0; 50]);
    pair.silence()
}

fn empty_send(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.byte_len, 0);
    Ok(())
}

fn send_with_immediate(pair: &mut Pair) -> Outcome {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let qps = pair.connected(qp_type, |config| config)?;
        pair.ends[1].receive(qps[1], 1, &[])?;
        pair.ends[0].send(qps[0], 2, SendOp::SendWithImm(0x0102_0304), &[])?;
        pair.completes(0, 2, WcStatus::Success)?;
        let received = pair.completes(1, 1, WcStatus::Success)?;
        same!((received.opcode, received.immediate), (WcOpcode::Recv, Some(0x0102_0304)));
    }
    Ok(())
}

fn inline(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config.max_inline_data(32))?;
    let to = pair.ends[1].zeros(64, &ALL)?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(0..32)])?;
    let mut bytes = *b"gone when the call has returned.";
    pair.ends[0].context.post_send(qps[0], &request(&bytes))?;
    bytes.fill(0);
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.byte_len, 32);
    same!(pair.ends[1].bytes(to, 0..32)?, b"gone when the call has returned.".to_vec());
    let remote = pair.ends[1].context.remote(to)?;
    let write = SendWorkRequest { op: SendOp::Write(remote.at(32)), ..request(&[5; 8]) };
    pair.ends[0].context.post_send(qps[0], &write)?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.ends[1].bytes(to, 32..40)?, vec![5; 8]);
    refused!(pair.ends[0].context.post_send(qps[0], &request(&[0; 33])), Error::Invalid { .. });
    let read = SendWorkRequest { op: SendOp::Read(remote.at(0)), ..request(&[0; 8]) };
    refused!(pair.ends[0].context.post_send(qps[0], &read), Error::Invalid { .. });
    Ok(())
}

fn request(bytes: &[u8]) -> SendWorkRequest<'_> {
    SendWorkRequest { wr_id: 2, op: SendOp::Send, data: Data::Inline(bytes), flags: SendFlags::SIGNALED }
}

fn pieces(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(100, &[])?;
    let to = pair.ends[1].zeros(100, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(60..90), to.sge(0..50)])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(10..20), from.sge(0..0), from.sge(50..80)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.byte_len, 40);
    let all = [pair.ends[0].bytes(from, 10..20)?, pair.ends[0].bytes(from, 50..80)?].concat();
    same!([pair.ends[1].bytes(to, 60..90)?, pair.ends[1].bytes(to, 0..10)?].concat(), all);
    let five = [from.sge(0..1); 5];
    refused!(pair.ends[0].send(qps[0], 3, SendOp::Send, &five), Error::Invalid { .. });
    refused!(pair.ends[1].receive(qps[1], 3, &[to.sge(0..1); 5]), Error::Invalid { .. });
    Ok(())
}

fn long_send(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(100_001, &[])?;
    let to = pair.ends[1].zeros(100_001, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(0..100_001)])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(0..100_001)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.byte_len, 100_001);
    same!(pair.ends[1].bytes(to, 0..100_001)? == pair.ends[0].bytes(from, 0..100_001)?, true);
    Ok(())
}

fn lists(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config.max_send_wr(32).max_recv_wr(32))?;
    let from = pair.ends[0].region(32, &[])?;
    let to = pair.ends[1].zeros(32, &[Access::LOCAL_WRITE])?;
    let places: Vec<[Sge; 1]> = (0..32).map(|n| [to.sge(n..n + 1)]).collect();
    let receives: Vec<_> =
        places.iter().zip(0..).map(|(sges, wr_id)| ReceiveWorkRequest { wr_id, sges }).collect();
    pair.ends[1].context.post_recvs(qps[1], &receives)?;
    let places: Vec<[Sge; 1]> = (0..32).map(|n| [from.sge(n..n + 1)]).collect();
    let send = |(sges, wr_id)| {
        let (op, data, flags) = (SendOp::SendWithImm(wr_id as u32), Data::Sges(sges), SendFlags::SIGNALED);
        SendWorkRequest { wr_id, op, data, flags }
    };
    let sends: Vec<_> = places.iter().map(|sges| &sges[..]).zip(100..).map(send).collect();
    pair.ends[0].context.post_sends(qps[0], &sends)?;
    for n in 0..32 {
        pair.completes(0, 100 + n, WcStatus::Success)?;
        same!(pair.completes(1, n, WcStatus::Success)?.immediate, Some(100 + n as u32));
    }
    same!(pair.ends[1].bytes(to, 0..32)?, pair.ends[0].bytes(from, 0..32)?);
    // The first refused one ends the list.
    let mut wrong = sends[..3].to_vec();
    let six = [from.sge(0..1); 6];
    wrong[1].data = Data::Sges(&six);
    let refusal = pair.ends[0].context.post_sends(qps[0], &wrong).map_err(|error| error.posted);
    same!(refusal, Err(1));
    pair.ends[1].receive(qps[1], 5, &[to.sge(0..1)])?;
    pair.completes(0, 100, WcStatus::Success)?;
    pair.completes(1, 5, WcStatus::Success)?;
    pair.silence()
}

fn rc_write(pair: &mut Pair) -> Outcome {
    write(pair, QpType::Rc)
}

fn uc_write(pair: &mut Pair) -> Outcome {
    write(pair, QpType::Uc)
}

fn write(pair: &mut Pair, qp_type: QpType) -> Outcome {
    let qps = pair.connected(qp_type, |config| config)?;
    let from = pair.ends[0].region(10_000, &[])?;
    let to = pair.ends[1].zeros(20_000, &ALL)?;
    let remote = pair.ends[1].context.remote(to)?;
    same!(remote.length, 20_000);
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote.at(5_000)), &[from.sge(0..10_000)])?;
    same!(pair.completes(0, 1, WcStatus::Success)?.opcode, WcOpcode::RdmaWrite);
    let expected = pair.ends[0].bytes(from, 0..10_000)?;
    let last = *expected.last().unwrap_or(&0);
    pair.until("last byte", |pair| Ok((pair.ends[1].bytes(to, 14_999..15_000)? == [last]).then_some(())))?;
    same!(pair.ends[1].bytes(to, 5_000..15_000)? == expected, true);
    same!(pair.ends[1].bytes(to, 15_000..15_100)?, vec![0; 100]);
    pair.silence()
}

fn write_with_immediate(pair: &mut Pair) -> Outcome {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let qps = pair.connected(qp_type, |config| config)?;
        let from = pair.ends[0].region(3_000, &[])?;
        let to = pair.ends[1].zeros(3_000, &ALL)?;
        pair.ends[1].receive(qps[1], 1, &[])?;
        let op = SendOp::WriteWithImm(pair.ends[1].context.remote(to)?.at(0), 9);
        pair.ends[0].send(qps[0], 2, op, &[from.sge(0..3_000)])?;
        same!(pair.completes(0, 2, WcStatus::Success)?.opcode, WcOpcode::RdmaWrite);
        let told = pair.completes(1, 1, WcStatus::Success)?;
        same!((told.opcode, told.immediate), (WcOpcode::RecvRdmaWithImm, Some(9)));
        same!(pair.ends[1].bytes(to, 0..3_000)? == pair.ends[0].bytes(from, 0..3_000)?, true);
    }
    Ok(())
}

fn read(pair: &mut Pair) -> Outcome {
    read_of(pair, 100)
}

fn long_read(pair: &mut Pair) -> Outcome {
    read_of(pair, 50_003)
}

fn read_of(pair: &mut Pair, length: u64) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[0].zeros(length as usize, &[Access::LOCAL_WRITE])?;
    let from = pair.ends[1].region(length as usize + 10, &ALL)?;
    let remote = pair.ends[1].context.remote(from)?;
    pair.ends[0].send(qps[0], 1, SendOp::Read(remote.at(10)), &[to.sge(0..length)])?;
    let told = pair.completes(0, 1, WcStatus::Success)?;
    same!((told.opcode, told.byte_len), (WcOpcode::RdmaRead, length as u32));
    same!(pair.ends[0].bytes(to, 0..length)? == pair.ends[1].bytes(from, 10..length + 10)?, true);
    pair.silence()
}

fn fetch_add(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let old = pair.ends[0].zeros(8, &[Access::LOCAL_WRITE])?;
    let word = pair.ends[1].zeros(64, &ALL)?;
    pair.ends[1].context.store_u64(word, 16, u64::MAX - 1)?;
    let remote = pair.ends[1].context.remote(word)?.at(16);
    for expected in [u64::MAX - 1, 3] {
        pair.ends[0].send(qps[0], 1, SendOp::FetchAdd { remote, add: 5 }, &[old.sge(0..8)])?;
        same!(pair.completes(0, 1, WcStatus::Success)?.opcode, WcOpcode::FetchAdd);
        same!(pair.ends[0].context.load_u64(old, 0)?, expected);
    }
    same!(pair.ends[1].context.load_u64(word, 16)?, 8);
    let seven = pair.ends[0].send(qps[0], 1, SendOp::FetchAdd { remote, add: 5 }, &[old.sge(0..7)]);
    refused!(seven, Error::Invalid { .. });
    Ok(())
}

fn compare_swap(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let old = pair.ends[0].zeros(8, &[Access::LOCAL_WRITE])?;
    let word = pair.ends[1].zeros(8, &ALL)?;
    pair.ends[1].context.store_u64(word, 0, 7)?;
    let remote = pair.ends[1].context.remote(word)?.at(0);
    for (compare, swap, after) in [(7, 9, 9), (7, 11, 9)] {
        let before = pair.ends[1].context.load_u64(word, 0)?;
        pair.ends[0].send(qps[0], 1, SendOp::CompareSwap { remote, compare, swap }, &[old.sge(0..8)])?;
        same!(pair.completes(0, 1, WcStatus::Success)?.opcode, WcOpcode::CompSwap);
        same!(pair.ends[0].context.load_u64(old, 0)?, before);
        same!(pair.ends[1].context.load_u64(word, 0)?, after);
    }
    Ok(())
}

fn unsignaled(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    (0..3).try_for_each(|n| pair.ends[1].receive(qps[1], n, &[]))?;
    for (wr_id, signaled) in [(1, false), (2, false), (3, true)] {
        let flags = SendFlags::default().signaled(signaled);
        let wr = SendWorkRequest { wr_id, op: SendOp::Send, data: Data::Sges(&[]), flags };
        pair.ends[0].context.post_send(qps[0], &wr)?;
    }
    pair.completes(0, 3, WcStatus::Success)?;
    (0..3).try_for_each(|n| pair.completes(1, n, WcStatus::Success).map(drop))?;
    same!(pair.ends[0].context.query_qp(qps[0])?.outstanding_sends, 0);
    pair.silence()
}

fn signal_all(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config.signal_all(true))?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    let (op, data, flags) = (SendOp::Send, Data::Sges(&[]), SendFlags::default());
    pair.ends[0].context.post_send(qps[0], &SendWorkRequest { wr_id: 2, op, data, flags })?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 1, WcStatus::Success)?;
    Ok(())
}

fn never_signaled(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let to = pair.ends[1].zeros(8, &ALL)?;
    let op = SendOp::Write(pair.ends[1].context.remote(to)?.at(0));
    let sges = [from.sge(0..8)];
    for wr_id in 0..100 {
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&sges), flags: SendFlags::default() };
        pair.until("room in the send queue", |pair| match pair.ends[0].context.post_send(qps[0], &wr) {
            Ok(()) => Ok(Some(())),
            Err(Error::QueueFull { .. }) => Ok(None),
            Err(error) => Err(error),
        })?;
    }
    pair.silence()
}

fn fence(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let here = pair.ends[0].zeros(64, &[Access::LOCAL_WRITE])?;
    let there = pair.ends[1].region(64, &ALL)?;
    let remote = pair.ends[1].context.remote(there)?;
    // The WRITE sends the data of the READ.
    pair.ends[0].send(qps[0], 1, SendOp::Read(remote.at(0)), &[here.sge(0..32)])?;
    let flags = SendFlags::SIGNALED.fence(true);
    let (op, sges) = (SendOp::Write(remote.at(32)), [here.sge(0..32)]);
    let wr = SendWorkRequest { wr_id: 2, op, data: Data::Sges(&sges), flags };
    pair.ends[0].context.post_send(qps[0], &wr)?;
    pair.completes(0, 1, WcStatus::Success)?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.ends[1].bytes(there, 32..64)?, pair.ends[1].bytes(there, 0..32)?);
    Ok(())
}

fn flush(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(64, &[Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::FLUSH_GLOBAL])?;
    let remote = pair.ends[1].context.remote(to)?.at(0);
    let kind = FlushType { global_visibility: true, ..FlushType::default() };
    let op = SendOp::Flush { remote, length: 64, selectivity: Selectivity::Range, kind };
    pair.ends[0].send(qps[0], 1, op, &[])?;
    same!(pair.completes(0, 1, WcStatus::Success)?.opcode, WcOpcode::Flush);
    Ok(())
}

fn atomic_write(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let to = pair.ends[1].zeros(64, &ALL)?;
    let op = SendOp::AtomicWrite(pair.ends[1].context.remote(to)?.at(8));
    pair.ends[0].send(qps[0], 1, op, &[from.sge(0..8)])?;
    same!(pair.completes(0, 1, WcStatus::Success)?.opcode, WcOpcode::AtomicWrite);
    same!(pair.ends[1].bytes(to, 8..16)?, pair.ends[0].bytes(from, 0..8)?);
    Ok(())
}
