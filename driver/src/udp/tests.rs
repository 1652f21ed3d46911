use super::*;

/// With a line for each refused packet, alternating between many hosts, the log could block the process.
#[test]
fn refusals_are_logged_once_a_second() {
    let mut told = Told::default();
    let peer = |n: u64| IpAddr::from([10, 0, 0, n as u8]);
    let said = |told: &mut Told, ms: u64| {
        let now = Nanos(ms * 1_000_000);
        (0..100).filter(|n| told.is_news((Some(libc::EHOSTUNREACH), peer(*n)), now)).count()
    };
    assert_eq!([0, 10, 999, 1000, 1001, 1999, 2000].map(|ms| said(&mut told, ms)), [1, 0, 0, 1, 0, 0, 1]);
    // The same refusal again is not reported.
    let last = told.last.map(|(refusal, _)| refusal).expect("something was said");
    assert!(!told.is_news(last, Nanos(10_000_000_000)));
}

fn own(last: u8) -> IpAddr {
    IpAddr::from([127, 80, 0, last])
}

/// A packet of the connection manager, beginning with its BTH, with this body after the MAD's header.
fn mad(attribute: u16, body: &[u8]) -> Vec<u8> {
    let mut mad = vec![0; 300];
    mad[7] = 1;
    mad[36..38].copy_from_slice(&attribute.to_be_bytes());
    mad[44..44 + body.len()].copy_from_slice(body);
    mad
}

const REQ: u16 = 0x10;
const DREQ: u16 = 0x15;

fn send_to(address: IpAddr, datagram: &[u8]) {
    let socket = UdpSocket::bind((own(250), 0)).unwrap();
    socket.send_to(datagram, (address, PORT)).unwrap();
}

/// The number of packets received before a deadline.
fn received(port: &mut Udp, least: usize) -> usize {
    let (mut count, deadline) = (0, std::time::Instant::now() + Duration::from_secs(5));
    while count < least && std::time::Instant::now() < deadline {
        count += port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    count
}

#[test]
fn packets_from_before_sharing_are_not_forwarded() {
    let mut first = Udp::open(&UdpConfig::new(own(1))).unwrap();
    first.listen(7).unwrap();
    send_to(own(1), &mad(REQ, &[[0; 8], 7u64.to_be_bytes()].concat()));
    let mut second = Udp::open(&UdpConfig::new(own(1))).unwrap();
    assert!(first.slot.group().is_shared());
    assert_eq!((received(&mut first, 1), first.stats().handed_on), (1, 0));
    // Through the socket of QP1.
    send_to(own(1), &mad(REQ, &[[0; 8], 7u64.to_be_bytes()].concat()));
    assert_eq!((received(&mut first, 1), first.stats().handed_on, first.stats().rx_frames), (1, 0, 2));
    assert_eq!((received(&mut second, 0), second.stats().handed_on), (0, 0));
}

/// A DREQ to a process that has ended is delivered to another process's connection manager, which answers that it does
/// not know the connection.
#[test]
fn messages_to_an_ended_process_are_answered_by_another() {
    let open = || Udp::open(&UdpConfig::new(own(2))).unwrap();
    let [mut first, mut second, third] = [(); 3].map(|()| open());
    second.listen(7).unwrap();
    let dreq = mad(DREQ, &[[0, 0, 0, 1], [0, 0, 1, 2]].concat());
    drop(third);
    while first.slot.group().alive() != 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    send_to(own(2), &dreq);
    assert_eq!((received(&mut second, 1), received(&mut first, 0)), (1, 0));
    // A new process that has not been announced yet may own it, so that process is asked too.
    let _newcomer = slots::unheard(&name_of(own(2)), 2);
    std::thread::sleep(slots::VACANT);
    send_to(own(2), &dreq);
    while first.stats().rx_dropped == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((first.stats().rx_dropped, second.stats().rx_dropped), (1, 0));
    assert_eq!((received(&mut first, 0), received(&mut second, 0)), (0, 0));
}

/// Anyone can send a message without the receiver's communication id, and it costs work in every process on the
/// address.
#[test]
fn what_goes_to_all_is_bounded() {
    let [mut first, second] = [(); 2].map(|()| Udp::open(&UdpConfig::new(own(6))).unwrap());
    const REJ: u16 = 0x12;
    let (sent, start) = (1000, std::time::Instant::now());
    let socket = UdpSocket::bind((own(250), 0)).unwrap();
    for _ in 0..sent {
        socket.send_to(&mad(REJ, &[[0, 0, 0, 1], [0; 4]].concat()), (own(6), PORT)).unwrap();
    }
    let mut taken = 0;
    while taken + first.stats().rx_dropped < sent {
        taken +=
            received(&mut first, 0) as u64 + first.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap() as u64;
        assert!(start.elapsed() < Duration::from_secs(10), "{taken} {:?}", first.stats());
    }
    let windows = start.elapsed().as_millis() / 10 + 2;
    assert!(taken >= 1 && u128::from(taken) <= 64 * windows, "{taken} in {windows} windows");
    assert_eq!(second.stats().rx_dropped, 0);
}

/// Another user's full disk does not prevent a device from being opened.
#[test]
fn an_address_is_opened_alone_if_processes_cannot_meet() {
    let open = || Udp::open(&UdpConfig::new(own(7)));
    let first = open().unwrap();
    let directory = crate::private_directory::of_user();
    let names = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let mut names = names.map(|path| path.to_str().unwrap().to_owned());
    let name = names.find(|path| path.ends_with(&format!("{}-0", own(7)))).expect("its name");
    drop(first);
    let in_the_way = |part: &str| format!("{}{part}", name.strip_suffix('0').unwrap());
    for part in ["lock", "0"] {
        // No file can be created there.
        std::fs::create_dir(in_the_way(part)).unwrap();
        let alone = open();
        let second = open().map(|_port| ());
        std::fs::remove_dir(in_the_way(part)).unwrap();
        assert!(
            alone.is_ok() && matches!(second, Err(Error::PortInUse { .. })),
            "{part}: {alone:?} {second:?}"
        );
    }
    assert!(open().is_ok());
}

/// Every lost packet is counted exactly once, whether the socket of QP1 or the mailbox had no room for it.
#[test]
fn packets_to_qp1_are_counted_once() {
    let open = || Udp::open(&UdpConfig::new(own(3))).unwrap();
    let [mut first, second] = [(); 2].map(|()| open());
    let sent = 20_000;
    // The thread that serves QP1 does not read.
    let held = first.slot.group().parts();
    let socket = UdpSocket::bind((own(250), 0)).unwrap();
    for _ in 0..sent {
        socket.send_to(&mad(0x99, &[]), (own(3), PORT)).unwrap();
    }
    drop(held);
    let counted = |port: &Udp| port.stats().rx_frames + port.stats().rx_dropped;
    let (mut all, mut still) = (0, 0);
    while still < 200 {
        received(&mut first, 0);
        first.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap();
        still = if counted(&first) == all { still + 1 } else { 0 };
        all = counted(&first);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(socket::dropped(first.for_mads.as_fd()).unwrap() > 0, "the socket has room for all");
    assert_eq!((all, counted(&second)), (sent, 0));
    // The next process that serves it does not count it again.
    drop(first);
    while second.slot.group().is_shared() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _third = open();
    send_to(own(3), &mad(0x99, &[]));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(second.stats().rx_dropped, 0);
}

/// The thread receives packets from the socket of a port that receives its packets elsewhere.
#[cfg(feature = "af_xdp")]
#[test]
fn packets_to_a_slot_aside_are_counted_once() {
    let (slot, _) = join_aside(own(5)).unwrap();
    let sent: u64 = 20_000;
    let flood = || {
        // The thread does not read.
        let held = slot.group().parts();
        let socket = UdpSocket::bind((own(250), 0)).unwrap();
        for _ in 0..sent {
            socket.send_to(&mad(0x99, &[]), (own(5), PORT)).unwrap();
        }
        drop(held);
    };
    let mut taken = 0;
    for round in 1..=2 {
        flood();
        let (mut all, mut still) = (0, 0);
        while still < 200 {
            taken += std::iter::from_fn(|| slot.take_mail()).count() as u64;
            still = if taken + slot.lost() == all { still + 1 } else { 0 };
            all = taken + slot.lost();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(all, round * sent);
    }
    assert!(slot.lost() > 0, "the socket has room for all");
}

#[test]
fn a_socket_is_configured_for_its_new_process() {
    let config = UdpConfig::new(own(4));
    let polls = UdpConfig::new(own(4)).busy_poll(Duration::from_micros(50));
    let first = Udp::open(&polls).or_else(|_| Udp::open(&config)).unwrap();
    let second = Udp::open(&config.aggregation(false)).unwrap();
    let third = Udp::open(&config).unwrap();
    let aggregates = |port: &Udp| socket::aggregates(port.socket.as_fd());
    let buffer = |port: &Udp| socket::receive_buffer(port.socket.as_fd()).unwrap();
    assert_eq!([&first, &second, &third].map(aggregates), [true, false, true]);
    let large = buffer(&first);
    set_option(first.socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 5000i32).unwrap();
    assert!(buffer(&first) < large);
    let second_socket = second.socket.clone();
    drop((first, second));
    while third.slot.group().alive() != 4 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let again = Udp::open(&config.aggregation(false)).unwrap();
    assert_eq!((again.slot.number(), aggregates(&again), buffer(&again)), (0, false, large));
    assert_eq!(socket::busy_polls(again.socket.as_fd()), 0);
    let last = Udp::open(&polls).or_else(|_| Udp::open(&config)).unwrap();
    assert_eq!((last.slot.number(), aggregates(&last)), (1, true));
    drop(second_socket);
    let polls = last.capabilities.description.contains("busy polling");
    assert_eq!(socket::busy_polls(last.socket.as_fd()), if polls { 50 } else { 0 });
}
