//! Regions and windows.

use ferroce::*;

use super::pair::ALL;
use super::{End, Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("bytes by copies and words", copies),
    ("shared memory: atomics, and another handle", shared),
    ("slices of registered memory", slices),
    ("a region at an address of its own", at_an_address),
    ("rights that do not go together", rights),
    ("a region that posted work names is busy", busy_region),
    ("a region, deregistered, is nobody's", deregistered),
    ("memory of a region exchanged", exchanged),
    ("a window: bound, written through, revoked here", window),
    ("SEND with invalidate of a window", invalidated_window),
    ("SEND with invalidate of a region", invalidated_region),
    ("a window of a region that may have none", bind_refused),
    ("a region with a bound window is busy", busy_window),
    ("a protection domain in use is busy", busy_domain),
];

fn copies(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let mr = end.region(64, &[])?;
        end.context.write(mr, 3, b"hello")?;
        same!(end.bytes(mr, 2..9)?, b"\x03hello\x09".to_vec());
        end.context.store_u64(mr, 16, 0x0102_0304_0506_0708)?;
        same!(end.context.load_u64(mr, 16)?, 0x0102_0304_0506_0708);
        refused!(end.context.write(mr, 60, b"hello"), Error::Region { .. });
        refused!(end.context.read(mr, 65, &mut []), Error::Region { .. });
        refused!(end.context.load_u64(mr, 57), Error::Region { .. });
    }
    Ok(())
}

fn shared(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let memory = Memory::shared(4096)?;
        let mut here = memory.share()?;
        let mr = end.context.register(end.pd, memory, Access::LOCAL_WRITE)?;
        here.store_u64(8, 7)?;
        same!(end.context.load_u64(mr, 8)?, 7);
        same!(end.context.atomics(mr)?[1].load(std::sync::atomic::Ordering::Relaxed), 7);
        same!(end.context.deregister(mr)?.len(), 4096);
    }
    Ok(())
}

fn slices(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let mr = end.region(8, &[])?;
        end.context.bytes_mut(mr)?[0] = 9;
        same!(end.context.bytes(mr)?[..3], [9, 2, 3]);
    }
    Ok(())
}

fn at_an_address(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let End { context, pd, .. } = &mut pair.ends[1];
    let memory = Memory::zeroed(4096)?;
    let access = ALL.into_iter().fold(Access::NONE, |all, one| all | one);
    let to = context.register_at(*pd, memory, access, 0x7000_0000_1000)?;
    let remote = context.remote(to)?;
    same!((remote.addr, remote.length), (0x7000_0000_1000, 4096));
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote.at(4088)), &[from.sge(0..8)])?;
    pair.completes(0, 1, WcStatus::Success)?;
    same!(pair.ends[1].bytes(to, 4088..4096)?, vec![1, 2, 3, 4, 5, 6, 7, 8]);
    // On this side offsets are unchanged.
    pair.ends[1].context.write(to, 0, b"there")?;
    let back = pair.ends[0].zeros(8, &[Access::LOCAL_WRITE])?;
    pair.ends[0].receive(qps[0], 2, &[back.sge(0..8)])?;
    pair.ends[1].send(qps[1], 3, SendOp::Send, &[to.sge(0..5)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 3, WcStatus::Success)?;
    same!(pair.ends[0].bytes(back, 0..5)?, b"there".to_vec());
    pair.ends[1].context.deregister(to)?;
    Ok(())
}

fn rights(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
            let refusal = end
                .context
                .register(end.pd, Memory::zeroed(8)?, access)
                .map_err(|e| (e.memory.len(), e.source));
            refused!(refusal, (8, Error::Access { .. }));
        }
        let memory = Memory::zeroed(64)?;
        let passing =
            end.context.register_at(end.pd, memory, Access::NONE, u64::MAX - 8).map_err(|e| e.source);
        refused!(passing, Error::Invalid { .. });
    }
    Ok(())
}

fn busy_region(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(8, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(0..8)])?;
    refused!(pair.ends[1].context.deregister(to), Error::Busy { .. });
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    pair.completes(1, 1, WcStatus::Success)?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.ends[1].release_mr(to);
    same!(pair.ends[1].context.deregister(to)?.len(), 8);
    Ok(())
}

fn deregistered(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let to = pair.ends[1].zeros(8, &ALL)?;
    let remote = pair.ends[1].context.remote(to)?;
    pair.ends[1].release_mr(to);
    pair.ends[1].context.deregister(to)?;
    refused!(pair.ends[1].context.remote(to), Error::InvalidHandle { .. });
    refused!(pair.ends[1].receive(qps[1], 1, &[to.sge(0..8)]), Error::InvalidHandle { .. });
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote.at(0)), &[from.sge(0..8)])?;
    pair.completes(0, 1, WcStatus::RemAccessErr)?;
    Ok(())
}

fn exchanged(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let mr = end.region(8, &[])?;
        let old = end.context.exchange(mr, Memory::copy_of(&[7; 8])?).map_err(|refused| refused.source)?;
        same!((old.len(), end.bytes(mr, 0..8)?), (8, vec![7; 8]));
    }
    Ok(())
}

const WINDOWS: [Access; 3] = [Access::LOCAL_WRITE, Access::MW_BIND, Access::REMOTE_READ];

/// A window over bytes 16 to 48 of a region at the second end, bound for the first.
fn bound(pair: &mut Pair, qps: [Qp; 2]) -> Result<(Mr, Mw, RemoteMemory), Box<dyn std::error::Error>> {
    let end = &mut pair.ends[1];
    let (mr, mw) = (end.zeros(64, &WINDOWS)?, end.window()?);
    same!(end.context.remote_window(mw)?, None);
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    end.send(qps[1], 90, SendOp::BindMw { mw, mr, offset: 16, length: 32, access }, &[])?;
    same!(pair.completes(1, 90, WcStatus::Success)?.opcode, WcOpcode::BindMw);
    let remote = pair.ends[1].context.remote_window(mw)?.ok_or("a bound window has an address")?;
    same!((remote.addr, remote.length), (16, 32));
    Ok((mr, mw, remote))
}

fn window(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let (mr, mw, remote) = bound(pair, qps)?;
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote.at(24)), &[from.sge(0..8)])?;
    pair.completes(0, 1, WcStatus::Success)?;
    same!(pair.ends[1].bytes(mr, 40..48)?, vec![1, 2, 3, 4, 5, 6, 7, 8]);
    pair.ends[1].send(qps[1], 2, SendOp::LocalInvalidate(remote.rkey), &[])?;
    same!(pair.completes(1, 2, WcStatus::Success)?.opcode, WcOpcode::LocalInv);
    same!(pair.ends[1].context.remote_window(mw)?, None);
    pair.ends[0].send(qps[0], 3, SendOp::Write(remote.at(0)), &[from.sge(0..8)])?;
    pair.completes(0, 3, WcStatus::RemAccessErr)?;
    same!(pair.ends[1].bytes(mr, 16..24)?, vec![0; 8]);
    Ok(())
}

fn invalidated_window(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let (_, mw, remote) = bound(pair, qps)?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendWithInvalidate(remote.rkey), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.invalidated, Some(remote.rkey));
    same!(pair.ends[1].context.remote_window(mw)?, None);
    Ok(())
}

fn invalidated_region(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let mr = pair.ends[1].zeros(8, &[Access::REMOTE_READ, Access::REMOTE_INVALIDATE])?;
    let rkey = pair.ends[1].context.remote(mr)?.rkey;
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendWithInvalidate(rkey), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.invalidated, Some(rkey));
    Ok(())
}

fn bind_refused(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let end = &mut pair.ends[1];
    let (mr, mw) = (end.zeros(64, &ALL)?, end.window()?);
    let bind = |length, access| SendOp::BindMw { mw, mr, offset: 0, length, access };
    refused!(end.send(qps[1], 1, bind(0, Access::REMOTE_READ), &[]), Error::Invalid { .. });
    refused!(end.send(qps[1], 1, bind(8, Access::LOCAL_WRITE), &[]), Error::Access { .. });
    end.send(qps[1], 2, bind(8, Access::REMOTE_READ), &[])?;
    pair.completes(1, 2, WcStatus::MwBindErr)?;
    same!(pair.ends[1].context.remote_window(mw)?, None);
    Ok(())
}

fn busy_window(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let (mr, ..) = bound(pair, qps)?;
    refused!(pair.ends[1].context.deregister(mr), Error::Busy { .. });
    Ok(())
}

fn busy_domain(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let pd = end.context.alloc_pd()?;
        let mr = end.context.register(pd, Memory::zeroed(8)?, Access::NONE)?;
        refused!(end.context.dealloc_pd(pd), Error::Busy { .. });
        end.context.deregister(mr)?;
        end.context.dealloc_pd(pd)?;
        refused!(end.context.dealloc_pd(pd), Error::InvalidHandle { .. });
    }
    Ok(())
}
