//! Memory that others can access too: what is refused, what is safe, and the order in which a reader sees a WRITE.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferroce::driver::loopback::{Loopback, Switch, SwitchConfig};
use ferroce::driver::{Error as DriverError, FrameSource, Payload, Pinned, TAIL_MAX, Wrapper};
use ferroce::*;

fn access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

fn address(n: u8) -> IpAddr {
    [192, 0, 2, n].into()
}

/// Two contexts and a queue pair of each, connected.
struct Pair {
    ends: [Context; 2],
    pds: [Pd; 2],
    qps: [Qp; 2],
    cq: Cq,
    clock: Clock,
}

impl Pair {
    fn new() -> Pair {
        let config = SwitchConfig::default().mtu(4500);
        let switch = Switch::new(config).expect("as set up");
        let ports = [switch.port(&[address(1)]), switch.port(&[address(2)])];
        Pair::over(ports.map(|port| Box::new(port) as Box<dyn PacketDriver>))
    }

    fn over(ports: [Box<dyn PacketDriver>; 2]) -> Pair {
        let mut ends = ports.map(|port| Context::open(port, &Config::default()).expect("as set up"));
        let pds = ends.each_mut().map(|end| end.alloc_pd().expect("as set up"));
        let cqs = ends.each_mut().map(|end| end.create_cq(4096).expect("as set up"));
        let qps = [0, 1].map(|n| {
            let config = QpConfig::rc(pds[n], cqs[n]).max_send_wr(1024);
            ends[n].create_qp(&config).expect("as set up")
        });
        let qpns = [0, 1].map(|n| ends[n].query_qp(qps[n]).expect("as set up").qpn);
        for n in [0, 1] {
            let (end, qp, psn) = (&mut ends[n], qps[n], Psn::new(7));
            let to = AddressVector::new(address(2 - n as u8).into(), 0);
            end.modify_qp(qp, Transition::Init { access: access() | Access::REMOTE_ATOMIC })
                .expect("as set up");
            let ready = (ReadyToReceive::new(to, qpns[1 - n], psn)).path_mtu(PathMtu::Mtu4096);
            end.modify_qp(qp, Transition::ReadyToReceive(ready)).expect("as set up");
            end.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(psn))).expect("as set up");
        }
        Pair { ends, pds, qps, cq: cqs[0], clock: Clock::start() }
    }

    fn poll(&mut self) {
        for end in &mut self.ends {
            end.poll(self.clock.now()).expect("as set up");
        }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, sge: Sge) -> Result<(), Error> {
        let sges = [sge];
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        self.ends[0].post_send(self.qps[0], &wr)
    }

    fn completed(&mut self) -> WorkCompletion {
        for _ in 0..1_000_000 {
            self.poll();
            if let Some(wc) = self.ends[0].poll_cq(self.cq).expect("as set up") {
                return wc;
            }
        }
        panic!("no completion");
    }
}

/// The offset of message `n` in its slot, its length, and its byte, which differs from the previous contents.
fn message(n: u64) -> (u64, usize, u8) {
    (n / 8192 % 16, 1 + (n % 8192) as usize, (n % 251) as u8 + 1)
}

/// A reader that polls memory: every size up to 8 KiB, at every address modulo 16. `FERROCE_ORDERED` messages.
#[test]
fn the_last_byte_of_a_write_is_never_seen_before_the_others() {
    const SLOTS: u64 = 64;
    const SLOT: u64 = 8192 + 64;
    let count = std::env::var("FERROCE_ORDERED").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000u64);
    let mut pair = Pair::new();
    let target = Memory::shared((SLOTS * SLOT) as usize).expect("as set up");
    let watched = target.share().expect("as set up");
    let target = pair.ends[1].register(pair.pds[1], target, access()).expect("as set up");
    let RemoteMemory { addr, rkey, .. } = pair.ends[1].remote(target).expect("as set up");
    let bytes = Memory::zeroed((SLOTS * SLOT) as usize).expect("as set up");
    let source = pair.ends[0].register(pair.pds[0], bytes, Access::NONE).expect("as set up");
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let words = watched.atomics().expect("as set up");
            let byte =
                |at: u64| words[(at / 8) as usize].load(Ordering::Acquire).to_ne_bytes()[at as usize % 8];
            let (mut spins, mut copy) = (0u64, [0; 8192]);
            for n in 0..count {
                let (start, length, value) = message(n);
                let start = n % SLOTS * SLOT + start;
                let last = start + length as u64 - 1;
                while byte(last) != value {
                    spins += 1;
                    std::hint::spin_loop();
                }
                let found = &mut copy[..length];
                watched.read(start, found).expect("as set up");
                let missing = found.iter().position(|byte| *byte != value);
                assert_eq!(missing, None, "a byte of message {n}, of {length} bytes, is not there yet");
                seen.store(n + 1, Ordering::Release);
            }
            spins
        });
        let mut posted = 0;
        while posted < count && !reader.is_finished() {
            if posted < seen.load(Ordering::Acquire) + SLOTS {
                let (start, length, value) = message(posted);
                let offset = posted % SLOTS * SLOT + start;
                pair.ends[0].bytes_mut(source).expect("as set up")[offset as usize..][..length].fill(value);
                let op = SendOp::Write(RemoteAddress { addr: addr + offset, rkey });
                pair.post(posted, op, Sge { mr: source, offset, length: length as u32 }).expect("as set up");
                posted += 1;
            }
            pair.poll();
            while pair.ends[0].poll_cq(pair.cq).expect("as set up").is_some() {}
        }
        while !reader.is_finished() {
            pair.poll();
        }
        let spins = reader.join().expect("every byte is there when the last is");
        println!("{count} messages, {spins} looks at a last byte that was not there yet");
    });
}

#[test]
fn shared_memory_has_copies_and_words_but_no_slices() {
    let mut pair = Pair::new();
    let kinds = [(Memory::shared(4096).expect("as set up"), "shared"), (foreign(4096), "foreign")];
    for (memory, kind) in kinds {
        let length = memory.len();
        let mr = pair.ends[0].register(pair.pds[0], memory, access()).expect("as set up");
        let said = [
            pair.ends[0].bytes(mr).unwrap_err().to_string(),
            pair.ends[0].bytes_mut(mr).unwrap_err().to_string(),
        ];
        for said in said {
            let expected = format!(
                "{kind} memory has no slices, because other processes may write it at any time: use read and write, \
                 load_u64 and store_u64, or atomics"
            );
            assert!(said.starts_with("MR ") && said.ends_with(&expected), "{said}");
        }
        assert_eq!(pair.ends[0].atomics(mr).expect("as set up").len(), length / 8);
        let beyond = pair.ends[0].read(mr, length as u64, &mut [0]).unwrap_err();
        assert!(
            beyond.to_string().contains(&format!("1 bytes from offset {length} on, of memory of {length}"))
        );
        pair.ends[0].deregister(mr).expect("as set up");
    }
    let mr = pair.ends[0]
        .register(pair.pds[0], Memory::zeroed(64).expect("as set up"), access())
        .expect("as set up");
    pair.ends[0].write(mr, 60, b"last").expect("as set up");
    pair.ends[0].store_u64(mr, 8, 7).expect("as set up");
    let mut found = [0; 4];
    pair.ends[0].read(mr, 60, &mut found).expect("as set up");
    assert_eq!((&found, pair.ends[0].load_u64(mr, 8).expect("as set up")), (b"last", 7));
    assert!(pair.ends[0].write(mr, 61, b"last").is_err() && pair.ends[0].store_u64(mr, 57, 1).is_err());
    let said = pair.ends[0].atomics(mr).unwrap_err().to_string();
    assert!(said.ends_with("make memory for several with Memory::shared"), "{said}");
}

/// A buffer of this program, which a context may use too.
fn foreign(len: usize) -> Memory {
    let mut buffer = vec![0u64; len / 8];
    let base = NonNull::from(buffer.as_mut_slice()).cast();
    // SAFETY: the owner is the buffer, which is only accessed through this memory.
    unsafe { Memory::from_raw(base, len, buffer) }
}

/// A WRITE from foreign memory to foreign memory, a READ back, and an atomic, with the resulting contents.
#[test]
fn every_operation_works_on_every_kind() {
    type Make = fn() -> Memory;
    let kinds: [Make; 3] = [
        || Memory::zeroed(4096).expect("as set up"),
        || Memory::shared(4096).expect("as set up"),
        || foreign(4096),
    ];
    for make in kinds {
        let mut pair = Pair::new();
        let target =
            pair.ends[1].register(pair.pds[1], make(), access() | Access::REMOTE_ATOMIC).expect("as set up");
        let source = pair.ends[0].register(pair.pds[0], make(), Access::LOCAL_WRITE).expect("as set up");
        let RemoteMemory { addr, rkey, .. } = pair.ends[1].remote(target).expect("as set up");
        let to = |offset| RemoteAddress { addr: addr + offset, rkey };
        let sent: Vec<u8> = (0..=255).cycle().take(3001).collect();
        pair.ends[0].write(source, 0, &sent).expect("as set up");
        pair.post(1, SendOp::Write(to(16)), Sge { mr: source, offset: 0, length: 3001 }).expect("as set up");
        assert_eq!(pair.completed().status, WcStatus::Success);
        pair.post(2, SendOp::Read(to(16)), Sge { mr: source, offset: 1000, length: 3001 })
            .expect("as set up");
        assert_eq!(pair.completed().status, WcStatus::Success);
        let mut found = vec![0; 3001];
        pair.ends[0].read(source, 1000, &mut found).expect("as set up");
        assert_eq!(found, sent);
        let remote = to(8);
        pair.post(3, SendOp::FetchAdd { remote, add: 7 }, Sge { mr: source, offset: 0, length: 8 })
            .expect("as set up");
        assert_eq!(pair.completed().status, WcStatus::Success);
        assert_eq!(
            (
                pair.ends[0].load_u64(source, 0).expect("as set up"),
                pair.ends[1].load_u64(target, 8).expect("as set up")
            ),
            (0, 7)
        );
    }
}

/// Atomics on a region that several can access must use words of memory: otherwise half of one could be seen.
#[test]
fn atomics_on_shared_memory_need_words() {
    let mut pair = Pair::new();
    let memory = Memory::shared(64).expect("as set up");
    let access = access() | Access::REMOTE_ATOMIC;
    let refused = pair.ends[0].register_at(pair.pds[0], memory, access, 4).unwrap_err();
    assert!(refused.to_string().starts_with("iova = 0x4: an iova that is 0 modulo 8"), "{refused}");
    pair.ends[0].register_at(pair.pds[0], refused.memory, access, 8).expect("as set up");
}

/// As at registration: memory that replaces a region's memory, and windows that grant atomics.
#[test]
fn exchange_and_windows_require_words_for_atomics() {
    let mut pair = Pair::new();
    let shared = || Memory::shared(64).expect("as set up");
    let access = access() | Access::REMOTE_ATOMIC;
    // In owned memory a word may have any address.
    let owned = Memory::zeroed(64).expect("as set up");
    let mr = pair.ends[0].register_at(pair.pds[0], owned, access, 4).expect("as set up");
    let refused = pair.ends[0].exchange(mr, shared()).unwrap_err();
    assert!(refused.to_string().starts_with("iova = 0x4: an iova that is 0 modulo 8"), "{refused}");
    assert_eq!(refused.memory.kind(), MemoryKind::Shared);
    pair.ends[0].exchange(mr, Memory::zeroed(64).expect("as set up")).expect("owned");
    // A window could grant atomics.
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let refused = pair.ends[0].register_at(pair.pds[0], shared(), access, 4).unwrap_err();
    assert!(refused.to_string().starts_with("iova = 0x4: an iova that is 0 modulo 8"), "{refused}");
    pair.ends[0].register_at(pair.pds[0], shared(), Access::MW_BIND, 4).expect("windows to read");
}

/// ATOMIC WRITE needs only REMOTE_WRITE, which WRITEs need for memory with any start. So registration requires no words,
/// and an ATOMIC WRITE that can't be atomic is refused, like one to a misaligned address.
#[test]
fn an_atomic_write_is_atomic_or_refused_as_misaligned() {
    let owned = || Memory::zeroed(64).expect("as set up");
    let shared = || Memory::shared(64).expect("as set up");
    let kinds: [(&dyn Fn() -> Memory, bool); 3] = [(&owned, false), (&shared, true), (&|| foreign(64), true)];
    for (memory, needs_words) in kinds {
        for (iova, refused) in [(0x1000, false), (0x1001, needs_words)] {
            let mut pair = Pair::new();
            let mr = pair.ends[1].register_at(pair.pds[1], memory(), access(), iova);
            let mr = mr.expect("WRITEs need no words");
            let source = Memory::copy_of(b"8 bytes!").expect("as set up");
            let source = pair.ends[0].register(pair.pds[0], source, Access::NONE).expect("as set up");
            let remote = pair.ends[1].remote(mr).expect("as set up");
            // A multiple of 8 for the peer, and the seventh or the eighth byte of the region.
            let offset = 0x1008 - iova;
            pair.post(1, SendOp::Write(remote.at(offset)), source.sge(0..7)).expect("as set up");
            assert_eq!(pair.completed().status, WcStatus::Success);
            pair.post(2, SendOp::AtomicWrite(remote.at(offset)), source.sge(0..8)).expect("as set up");
            let (status, last) = match refused {
                true => (WcStatus::RemInvReqErr, 0),
                false => (WcStatus::Success, b'!'),
            };
            assert_eq!(pair.completed().status, status, "{iova:#x}");
            let mut there = [0; 8];
            pair.ends[1].read(mr, offset, &mut there).expect("as set up");
            assert_eq!((&there[..7], there[7]), (&b"8 bytes"[..], last));
        }
    }
}

/// A port that keeps the payloads to send, like a card with a slow ring.
struct Keeper {
    inner: Loopback,
    kept: Arc<Mutex<Vec<Pinned>>>,
}

impl Wrapper for Keeper {
    type Inner = Loopback;

    fn inner(&self) -> &Loopback {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.inner
    }

    fn tx_burst(&mut self, _: Nanos, source: &mut dyn FrameSource) -> Result<usize, DriverError> {
        let (mut head, mut tail, mut sent) = ([0; 256], [0; TAIL_MAX], 0);
        while source.gather(&mut head, &mut tail).is_some() {
            self.kept.lock().expect("as set up").extend(source.payload().map(Payload::pin));
            sent += 1;
        }
        Ok(sent)
    }
}

/// Two contexts; the first one's port keeps its payloads.
fn over_keeper() -> (Pair, Arc<Mutex<Vec<Pinned>>>) {
    let switch = Switch::new(SwitchConfig::default().mtu(4500)).expect("as set up");
    let kept = Arc::default();
    let keeper = Keeper { inner: switch.port(&[address(1)]), kept: Arc::clone(&kept) };
    (Pair::over([Box::new(keeper), Box::new(switch.port(&[address(2)]))]), kept)
}

#[test]
fn memory_that_a_port_still_sends_is_not_returned() {
    let (mut pair, kept) = over_keeper();
    let memory = Memory::zeroed(4096).expect("as set up");
    let mr = pair.ends[0].register(pair.pds[0], memory, Access::NONE).expect("as set up");
    pair.post(1, SendOp::Send, Sge { mr, offset: 0, length: 4096 }).expect("as set up");
    pair.poll();
    assert_eq!(kept.lock().expect("as set up").len(), 1, "the payload stays where it is");
    // The work request ends; the card still has its payload.
    pair.ends[0].modify_qp(pair.qps[0], Transition::Error).expect("as set up");
    assert_eq!(pair.completed().status, WcStatus::WrFlushErr);
    let said = pair.ends[0].deregister(mr).unwrap_err().to_string();
    assert!(
        said.ends_with("is in use by the port, which still sends from it: poll, and try again"),
        "{said}"
    );
    let refused = pair.ends[0].exchange(mr, Memory::zeroed(4096).expect("as set up")).unwrap_err();
    assert_eq!(refused.source.to_string(), said);
    kept.lock().expect("as set up").clear();
    pair.ends[0].deregister(mr).expect("as set up");
}

/// The bytes that a port reads later may differ from those covered by the ICRC.
#[test]
fn a_port_gets_a_copy_of_shared_memory() {
    for make in [|| Memory::shared(4096).expect("as set up"), || foreign(4096)] {
        let (mut pair, kept) = over_keeper();
        let mr = pair.ends[0].register(pair.pds[0], make(), Access::NONE).expect("as set up");
        pair.post(1, SendOp::Send, Sge { mr, offset: 0, length: 4096 }).expect("as set up");
        pair.poll();
        assert_eq!(kept.lock().expect("as set up").len(), 0, "payloads that are not copied");
    }
}
