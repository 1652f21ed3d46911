//! Processes of one host: a switch in shared memory, and addresses whose contexts find each other's memory automatically.
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferroce::*;

const LONG: Duration = Duration::from_secs(20);
const SIZE: usize = 1 << 18;

/// A context with a queue pair that is connected, and its memory.
struct End {
    context: Context,
    cq: Cq,
    mr: Mr,
    qp: Qp,
}

impl End {
    fn open(device: &str) -> End {
        let mut context = Context::open(Device::open(device).unwrap(), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(256).unwrap());
        let mr = context.register(pd, Memory::zeroed(SIZE).unwrap(), all()).unwrap();
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: all() }).unwrap();
        End { context, cq, mr, qp }
    }

    fn post(&mut self, op: SendOp, length: u32) {
        let sges = [Sge { mr: self.mr, offset: 0, length }];
        let data = if length == 0 { Data::Sges(&[]) } else { Data::Sges(&sges) };
        let wr = SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED };
        self.context.post_send(self.qp, &wr).unwrap();
    }

    fn fill(&mut self, seed: usize) {
        let bytes = self.context.bytes_mut(self.mr).unwrap();
        bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + (at >> 8) + seed) as u8);
    }
}

fn all() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

fn drive(ends: &mut [End], mut done: impl FnMut(&mut [End]) -> bool) {
    let mut clock = Clock::start();
    let deadline = Instant::now() + LONG;
    while !done(ends) {
        for end in ends.iter_mut() {
            end.context.poll(clock.now()).unwrap();
        }
        if Instant::now() >= deadline {
            for End { context, .. } in ends {
                println!("{:?}\n{}", context.driver_stats(), context.counters());
            }
            panic!("it does not come");
        }
    }
}

/// Connects two ends by address and port, which uses both kinds of packets: those of QP1 and those of queue pairs.
fn connect(ends: &mut [End], to: SocketAddr) {
    ends[1].context.listen(PortSpace::Tcp, to, &ListenConfig::default()).unwrap();
    let (qps, none) = ([ends[0].qp, ends[1].qp], ConnectionParameters::default());
    ends[0].context.connect(qps[0], to, &none).unwrap();
    let mut up = [false; 2];
    drive(ends, |ends| {
        for (n, end) in ends.iter_mut().enumerate() {
            match end.context.next_cm_event() {
                Some(CmEvent::ConnectionRequest(request)) => {
                    end.context.accept(request.id, qps[n], &none).unwrap();
                }
                Some(CmEvent::Established { .. }) => up[n] = true,
                Some(other) => panic!("{other:?}"),
                None => {}
            }
        }
        up == [true; 2]
    });
}

/// Every operation, of sizes around those at which frames are built differently.
fn exchange(ends: &mut [End]) {
    let remote = ends[1].context.remote(ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    for (seed, length) in
        [1u32, 8, 511, 512, 513, 4095, 4096, 4097, 65_537, SIZE as u32].into_iter().enumerate()
    {
        for op in [SendOp::Write(remote), SendOp::Read(remote), SendOp::Send] {
            let from = usize::from(matches!(op, SendOp::Read(_)));
            ends[from].fill(seed + 1);
            ends[1 - from].fill(seed + 100);
            if op == SendOp::Send {
                let sges = [Sge { mr: ends[1].mr, offset: 0, length }];
                let qp = ends[1].qp;
                ends[1].context.post_recv(qp, &ReceiveWorkRequest { wr_id: 2, sges: &sges }).unwrap();
            }
            ends[0].post(op, length);
            let mut wanted = if op == SendOp::Send { 2 } else { 1 };
            drive(ends, |ends| {
                for end in ends.iter_mut() {
                    while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
                        assert_eq!(wc.status, WcStatus::Success, "{op:?} of {length}");
                        wanted -= 1;
                    }
                }
                wanted == 0
            });
            let [sent, came] = [0, 1].map(|n| ends[n].context.bytes(ends[n].mr).unwrap());
            assert!(sent[..length as usize] == came[..length as usize], "{op:?} of {length}");
            assert!(
                length as usize == SIZE || sent[length as usize] != came[length as usize],
                "beyond {length}"
            );
        }
    }
    ends[0].post(SendOp::FetchAdd { remote, add: 5 }, 8);
    let mut done = false;
    drive(ends, |ends| {
        done |= ends[0].context.poll_cq(ends[0].cq).unwrap().is_some_and(|wc| wc.status == WcStatus::Success);
        done
    });
}

fn by_memory(end: &End) -> [u64; 2] {
    let stats = end.context.driver_stats();
    [stats.tx_by_memory, stats.rx_by_memory]
}

/// Nearly all frames were sent through memory, and none was lost.
fn assert_by_memory(ends: &[End]) {
    for end in ends {
        assert!(by_memory(end).iter().all(|frames| *frames > 100), "{:?}", end.context.driver_stats());
        assert!(end.context.counters().drops().all(|(_, count)| count == 0), "{}", end.context.counters());
    }
}

#[test]
fn a_switch_carries_every_operation() {
    for options in [["", ""], [",shm=noicrc", ""], ["", ",shm=noicrc"], [",shm=noicrc", ",shm=noicrc"]] {
        let mut ends = options.map(|option| End::open(&format!("shm:test-{}{option}", std::process::id())));
        connect(&mut ends, "127.0.0.1:7471".parse().unwrap());
        exchange(&mut ends);
        assert_by_memory(&ends);
    }
}

/// Two processes on one address, and on two.
#[test]
fn contexts_on_this_host_share_memory_automatically() {
    for devices in [
        ["udp:127.83.0.1"; 2],
        ["udp:127.83.0.2", "udp:127.83.0.3"],
        ["udp:127.83.0.9,shm=noicrc", "udp:127.83.0.10,shm=noicrc"],
    ] {
        let mut ends = devices.map(End::open);
        let to = format!("{}:7471", devices[1][4..].trim_end_matches(",shm=noicrc"));
        connect(&mut ends, to.parse().unwrap());
        exchange(&mut ends);
        assert_by_memory(&ends);
    }
}

/// With the option off at either end, frames are sent through the kernel's UDP.
#[test]
fn with_the_option_off_it_is_udp() {
    for devices in [
        ["udp:127.83.0.4,shm=off", "udp:127.83.0.5"],
        ["udp:127.83.0.6", "udp:127.83.0.7,shm=off"],
        ["udp:127.83.0.8,shm=off", "udp:127.83.0.8,shm=off"],
    ] {
        let mut ends = devices.map(End::open);
        let to = format!("{}:7471", devices[1][4..].trim_end_matches(",shm=off"));
        connect(&mut ends, to.parse().unwrap());
        exchange(&mut ends);
        assert_eq!(ends.each_ref().map(by_memory), [[0; 2]; 2]);
    }
}

/// An AF_XDP port has slot 0 of its addresses; a later process that opens the interface gets a UDP socket.
#[cfg(feature = "af_xdp")]
mod beside_af_xdp {
    use std::sync::atomic::{AtomicBool, Ordering};

    use ferroce_driver_test_support::namespaces::{Namespaces, VETH};

    use super::*;

    fn driver(end: &End) -> &'static str {
        end.context.capabilities().driver
    }

    /// Connects two ends, and exchanges messages in both directions.
    fn talk(a: End, b: End, to: &str) -> [End; 2] {
        let mut ends = [a, b];
        connect(&mut ends, to.parse().unwrap());
        exchange(&mut ends);
        ends
    }

    /// While `others` on the address poll: QP1 belongs to the first of them.
    fn beside<T>(others: &mut [End], f: impl FnOnce() -> T) -> T {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut clock = Clock::start();
                while !stop.load(Ordering::Relaxed) {
                    for end in others.iter_mut() {
                        end.context.poll(clock.now()).unwrap();
                    }
                }
            });
            let done = f();
            stop.store(true, Ordering::Relaxed);
            done
        })
    }

    /// A peer on another host, whose packets never use memory.
    fn talk_far(near: End, others: &mut [End], namespaces: &Namespaces, to: &str) -> [End; 2] {
        let far = namespaces.in_a(|| End::open(VETH));
        let ends = beside(others, || talk(far, near, to));
        assert_eq!(by_memory(&ends[0]), [0; 2]);
        for (n, end) in ends.iter().enumerate() {
            let counters = end.context.counters();
            // Answers of the near end to a peer that has just ended are received by the next one there.
            let is_none = |(counter, count)| count == 0 || counter == Counter::CmRxUnknown.name();
            assert!(counters.drops().all(is_none), "end {n}: {counters}");
        }
        ends
    }

    #[test]
    fn each_receives_its_own_packets() {
        let Some(namespaces) = Namespaces::new(1500) else { return };
        namespaces.in_b(|| {
            for address in ["10.9.0.2", "[fd09::2]"] {
                let mut first = [End::open(VETH)];
                let mut second = End::open(VETH);
                assert_eq!((driver(&first[0]), driver(&second)), ("af_xdp", "udp"));
                if address.starts_with('[') {
                    second = End::open("udp:fd09::2");
                }
                // The second one's requests are received by the first one's QP1.
                let [_, second] = talk_far(second, &mut first, &namespaces, &format!("{address}:7471"));
                assert!(second.context.driver_stats().rx_frames > 100);
                let [first] = first;
                let [_, first] = talk_far(first, &mut [second], &namespaces, &format!("{address}:7472"));
                assert!(first.context.driver_stats().handed_on > 0, "{:?}", first.context.driver_stats());
            }
        });
    }

    #[test]
    fn they_reach_each_other_by_memory_or_as_mail() {
        let Some(namespaces) = Namespaces::new(1500) else { return };
        namespaces.in_b(|| {
            for option in ["", ",shm=noicrc", ",shm=off"] {
                for server in [0, 1] {
                    println!("{option}, server {server}");
                    let device = format!("{VETH}{option}");
                    let mut ends = [End::open(&device), End::open(&device)];
                    assert_eq!(ends.each_ref().map(driver), ["af_xdp", "udp"]);
                    if server == 0 {
                        ends.reverse();
                    }
                    let [a, b] = ends;
                    let ends = talk(a, b, "10.9.0.2:7471");
                    match option {
                        ",shm=off" => assert_eq!(ends.each_ref().map(by_memory), [[0; 2]; 2]),
                        _ => assert_by_memory(&ends),
                    }
                }
            }
        });
    }

    /// The same for a port with another driver.
    #[test]
    fn other_addresses_of_the_host_are_reached_too() {
        let Some(namespaces) = Namespaces::new(9000) else { return };
        namespaces.in_b(|| {
            // The port's rings are those of its IPv4 address, and carry packets for its other addresses too.
            for (devices, to) in [
                (["udp:127.0.0.1", VETH], "10.9.0.2:7471"),
                ([VETH, "udp:127.0.0.1"], "127.0.0.1:7471"),
                ([VETH, "udp:fd09::2"], "[fd09::2]:7471"),
            ] {
                let [a, b] = devices.map(End::open);
                assert_by_memory(&talk(a, b, to));
            }
        });
    }

    /// The first one ends while the second one communicates, and the next one gets the port's slot again.
    #[test]
    fn the_next_process_gets_the_slot() {
        let Some(namespaces) = Namespaces::new(1500) else { return };
        namespaces.in_b(|| {
            let mut first = [End::open(VETH)];
            let mut ends = talk_far(End::open(VETH), &mut first, &namespaces, "10.9.0.2:7471");
            drop(first);
            exchange(&mut ends);
            let next = End::open(VETH);
            assert_eq!(driver(&next), "af_xdp");
            exchange(&mut ends);
            drop(ends);
            talk_far(next, &mut [], &namespaces, "10.9.0.2:7472");
            // A socket that receives all packets of the address leaves nothing to AF_XDP.
            let _socket = End::open("udp:10.9.0.2");
            assert_eq!(driver(&End::open(VETH)), "udp");
            let error = Device::open("af_xdp:veth0").err().unwrap().to_string();
            assert!(error.contains("in use by"), "{error}");
        });
    }
}
