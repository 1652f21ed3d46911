//! Memory that others reach too: what is refused, what is safe, and in which order a reader sees a WRITE.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferroce::driver::loopback::{Loopback, Switch, SwitchConfig};
use ferroce::driver::{Error as DriverError, FrameSource, Pinned, TAIL_MAX, Wrapper};
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
        let config = SwitchConfig { mtu: 4500, ..SwitchConfig::default() };
        let switch = Switch::new(config).unwrap();
        let ports = [switch.port(&[address(1)]), switch.port(&[address(2)])];
        Pair::over(ports.map(|port| Box::new(port) as Box<dyn PacketDriver>))
    }

    fn over(ports: [Box<dyn PacketDriver>; 2]) -> Pair {
        let mut ends = ports.map(|port| Context::open(port, &Config::default()).unwrap());
        let pds = ends.each_mut().map(|end| end.alloc_pd().unwrap());
        let cqs = ends.each_mut().map(|end| end.create_cq(4096).unwrap());
        let qps = [0, 1].map(|n| {
            let config = QpConfig { max_send_wr: 1024, ..QpConfig::rc(pds[n], cqs[n]) };
            ends[n].create_qp(&config).unwrap()
        });
        let qpns = [0, 1].map(|n| ends[n].query_qp(qps[n]).unwrap().qpn);
        for n in [0, 1] {
            let (end, qp, psn) = (&mut ends[n], qps[n], Psn::new(7));
            let to = AddressVector::new(address(2 - n as u8).into(), 0);
            end.modify_qp(qp, Transition::Init { access: access() | Access::REMOTE_ATOMIC }).unwrap();
            let ready =
                ReadyToReceive { path_mtu: PathMtu::Mtu4096, ..ReadyToReceive::new(to, qpns[1 - n], psn) };
            end.modify_qp(qp, Transition::ReadyToReceive(ready)).unwrap();
            end.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(psn))).unwrap();
        }
        Pair { ends, pds, qps, cq: cqs[0], clock: Clock::start() }
    }

    fn poll(&mut self) {
        for end in &mut self.ends {
            end.poll(self.clock.now()).unwrap();
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
            if let Some(wc) = self.ends[0].poll_cq(self.cq).unwrap() {
                return wc;
            }
        }
        panic!("no completion");
    }
}

/// Where the message `n` goes in its slot, how long it is, and its bytes: each other than what was there before.
fn message(n: u64) -> (u64, usize, u8) {
    (n / 8192 % 16, 1 + (n % 8192) as usize, (n % 251) as u8 + 1)
}

/// One that polls on memory: every size to 8 KiB, from every address modulo 16. `FERROCE_ORDERED` messages.
#[test]
fn the_last_byte_of_a_write_is_never_seen_before_the_others() {
    const SLOTS: u64 = 64;
    const SLOT: u64 = 8192 + 64;
    let count = std::env::var("FERROCE_ORDERED").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000u64);
    let mut pair = Pair::new();
    let target = Memory::shared((SLOTS * SLOT) as usize).unwrap();
    let watched = target.share().unwrap();
    let target = pair.ends[1].register(pair.pds[1], target, access()).unwrap();
    let RemoteMemory { addr, rkey, .. } = pair.ends[1].remote(target).unwrap();
    let bytes = Memory::zeroed((SLOTS * SLOT) as usize).unwrap();
    let source = pair.ends[0].register(pair.pds[0], bytes, Access::NONE).unwrap();
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let words = watched.atomics().unwrap();
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
                watched.read(start, found).unwrap();
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
                pair.ends[0].bytes_mut(source).unwrap()[offset as usize..][..length].fill(value);
                let op = SendOp::Write(RemoteAddress { addr: addr + offset, rkey });
                pair.post(posted, op, Sge { mr: source, offset, length: length as u32 }).unwrap();
                posted += 1;
            }
            pair.poll();
            while pair.ends[0].poll_cq(pair.cq).unwrap().is_some() {}
        }
        while !reader.is_finished() {
            pair.poll();
        }
        let spins = reader.join().expect("every byte is there when the last is");
        println!("{count} messages, {spins} looks at a last byte that was not there yet");
    });
}

#[test]
fn memory_that_others_write_has_copies_and_words_and_no_slices() {
    let mut pair = Pair::new();
    let kinds = [(Memory::shared(4096).unwrap(), "shared"), (foreign(4096), "foreign")];
    for (memory, kind) in kinds {
        let length = memory.len();
        let mr = pair.ends[0].register(pair.pds[0], memory, access()).unwrap();
        let said = [
            pair.ends[0].bytes(mr).unwrap_err().to_string(),
            pair.ends[0].bytes_mut(mr).unwrap_err().to_string(),
        ];
        for said in said {
            let expected = format!(
                "{kind} memory has no slices, because others may write it at any time: use read and write, load_u64 \
                 and store_u64, or atomics"
            );
            assert!(said.starts_with("MR ") && said.ends_with(&expected), "{said}");
        }
        assert_eq!(pair.ends[0].atomics(mr).unwrap().len(), length / 8);
        let beyond = pair.ends[0].read(mr, length as u64, &mut [0]).unwrap_err();
        assert!(
            beyond.to_string().contains(&format!("1 bytes from offset {length} on, of memory of {length}"))
        );
        pair.ends[0].deregister(mr).unwrap();
    }
    let mr = pair.ends[0].register(pair.pds[0], Memory::zeroed(64).unwrap(), access()).unwrap();
    pair.ends[0].write(mr, 60, b"last").unwrap();
    pair.ends[0].store_u64(mr, 8, 7).unwrap();
    let mut found = [0; 4];
    pair.ends[0].read(mr, 60, &mut found).unwrap();
    assert_eq!((&found, pair.ends[0].load_u64(mr, 8).unwrap()), (b"last", 7));
    assert!(pair.ends[0].write(mr, 61, b"last").is_err() && pair.ends[0].store_u64(mr, 57, 1).is_err());
    let said = pair.ends[0].atomics(mr).unwrap_err().to_string();
    assert!(said.ends_with("make memory for several with Memory::shared"), "{said}");
}

/// A buffer of this program's own, which a context may have too.
fn foreign(len: usize) -> Memory {
    let mut buffer = vec![0u64; len / 8];
    let base = NonNull::from(buffer.as_mut_slice()).cast();
    // SAFETY: the owner is the buffer, and nobody reaches it but by this memory.
    unsafe { Memory::from_raw(base, len, buffer) }
}

/// A WRITE from foreign memory to foreign memory, a READ back, and an atomic, with what each is at the end.
#[test]
fn every_operation_works_on_every_kind() {
    type Make = fn() -> Memory;
    let kinds: [Make; 3] =
        [|| Memory::zeroed(4096).unwrap(), || Memory::shared(4096).unwrap(), || foreign(4096)];
    for make in kinds {
        let mut pair = Pair::new();
        let target = pair.ends[1].register(pair.pds[1], make(), access() | Access::REMOTE_ATOMIC).unwrap();
        let source = pair.ends[0].register(pair.pds[0], make(), Access::LOCAL_WRITE).unwrap();
        let RemoteMemory { addr, rkey, .. } = pair.ends[1].remote(target).unwrap();
        let to = |offset| RemoteAddress { addr: addr + offset, rkey };
        let sent: Vec<u8> = (0..=255).cycle().take(3001).collect();
        pair.ends[0].write(source, 0, &sent).unwrap();
        pair.post(1, SendOp::Write(to(16)), Sge { mr: source, offset: 0, length: 3001 }).unwrap();
        assert_eq!(pair.completed().status, WcStatus::Success);
        pair.post(2, SendOp::Read(to(16)), Sge { mr: source, offset: 1000, length: 3001 }).unwrap();
        assert_eq!(pair.completed().status, WcStatus::Success);
        let mut found = vec![0; 3001];
        pair.ends[0].read(source, 1000, &mut found).unwrap();
        assert_eq!(found, sent);
        let remote = to(8);
        pair.post(3, SendOp::FetchAdd { remote, add: 7 }, Sge { mr: source, offset: 0, length: 8 }).unwrap();
        assert_eq!(pair.completed().status, WcStatus::Success);
        assert_eq!(
            (pair.ends[0].load_u64(source, 0).unwrap(), pair.ends[1].load_u64(target, 8).unwrap()),
            (0, 7)
        );
    }
}

/// The words of a region that several reach must be words of memory: half of an atomic could be seen.
#[test]
fn atomics_on_shared_memory_need_words() {
    let mut pair = Pair::new();
    let memory = Memory::shared(64).unwrap();
    let access = access() | Access::REMOTE_ATOMIC;
    let refused = pair.ends[0].register_at(pair.pds[0], memory, access, 4).unwrap_err();
    assert!(refused.to_string().starts_with("iova = 0x4: the address 0x"), "{refused}");
    pair.ends[0].register_at(pair.pds[0], refused.memory, access, 8).unwrap();
}

/// A port that keeps what it is given to send, as a card whose ring is slow.
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
        while let Some(gathered) = source.gather(&mut head, &mut tail) {
            self.kept.lock().unwrap().extend(gathered.payload);
            sent += 1;
        }
        Ok(sent)
    }
}

#[test]
fn memory_that_a_port_still_sends_from_is_not_given_back() {
    for make in [|| Memory::zeroed(4096).unwrap(), || foreign(4096)] {
        let switch = Switch::new(SwitchConfig { mtu: 4500, ..SwitchConfig::default() }).unwrap();
        let kept = Arc::default();
        let keeper = Keeper { inner: switch.port(&[address(1)]), kept: Arc::clone(&kept) };
        let mut pair = Pair::over([Box::new(keeper), Box::new(switch.port(&[address(2)]))]);
        let mr = pair.ends[0].register(pair.pds[0], make(), Access::NONE).unwrap();
        pair.post(1, SendOp::Send, Sge { mr, offset: 0, length: 4096 }).unwrap();
        pair.poll();
        assert_eq!(kept.lock().unwrap().len(), 1, "the payload stays where it is");
        // The work request ends; the card has its payload still.
        pair.ends[0].modify_qp(pair.qps[0], Transition::Error).unwrap();
        assert_eq!(pair.completed().status, WcStatus::WrFlushErr);
        let said = pair.ends[0].deregister(mr).unwrap_err().to_string();
        assert!(
            said.ends_with("is in use by the port, which still sends from it: poll, and try again"),
            "{said}"
        );
        let refused = pair.ends[0].exchange(mr, Memory::zeroed(4096).unwrap()).unwrap_err();
        assert_eq!(refused.source.to_string(), said);
        kept.lock().unwrap().clear();
        pair.ends[0].deregister(mr).unwrap();
    }
}
