use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros};

use super::*;
use crate::UniqueId;

/// All tests end within seconds; a hang exceeds one of these timeouts.
const TIMEOUT: Duration = Duration::from_millis(700);

fn card(rank: u32) -> Card {
    Card {
        rails: FromZeros::new_zeroed(),
        rail_count: U32::new(rank ^ 0x100),
        nonce: U64::new(rank.into()),
        host: [7; 16],
        chunk_bytes: U32::new(4096),
        eager_bytes: U32::new(1024),
        algorithm: U32::new(0),
        shared_memory: U32::new(0),
        has_model: U32::new(0),
        byte_order: Card::BYTE_ORDER,
        device: U32::new(0),
        board_pid: U32::new(0),
        board_fd: U32::new(0),
        board_bytes: U32::new(0),
        board_namespace: U64::new(0),
        board_nonce: U64::new(0),
    }
}

fn hello(rank: u32, size: u32) -> Hello {
    Hello::new(rank, size, 0, card(rank))
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn bootstrap(rank: u32, size: u32, master: SocketAddr) -> Bootstrap {
    Bootstrap::new(rank, size, master).unwrap().timeout(TIMEOUT)
}

/// The answer of rank 0 to these bytes; `None` if it only closes the connection.
fn answer(address: SocketAddr, bytes: &[u8]) -> Option<String> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(bytes).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut start = [0; size_of::<Reply>()];
    stream.read_exact(&mut start).ok()?;
    let reply = Reply::read_from_bytes(&start).unwrap();
    assert_eq!(reply.kind.get(), REFUSAL);
    let mut reason = vec![0; reply.length.get() as usize];
    stream.read_exact(&mut reason).unwrap();
    Some(String::from_utf8(reason).unwrap())
}

#[test]
fn ranks_started_in_any_order_get_all_cards() {
    let (listener, address) = listener();
    let size = 5;
    thread::scope(|scope| {
        let mut listener = Some(listener);
        let handles: Vec<_> = [3, 1, 0, 4, 2]
            .into_iter()
            .map(|rank| {
                let mut bootstrap = bootstrap(rank, size, address).timeout(Duration::from_secs(20));
                if rank == 0 {
                    bootstrap = bootstrap.listener(listener.take().unwrap());
                }
                sleep(Duration::from_millis(20));
                scope.spawn(move || rendezvous(bootstrap, card(rank)).unwrap())
            })
            .collect();
        for handle in handles {
            assert_eq!(handle.join().unwrap(), (0..size).map(card).collect::<Vec<_>>());
        }
    });
}

/// Jobs that use the same port, such as that of a job that has ended, do not mix.
#[test]
fn ranks_of_another_job_are_refused() {
    let (id, listener) = UniqueId::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let (other, other_listener) = UniqueId::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    drop(other_listener);
    let (text, other) = (id.to_string(), other.to_string());
    let (_, other_nonce) = other.rsplit_once(':').unwrap();
    let stranger = format!("{}:{other_nonce}", text.rsplit_once(':').unwrap().0);
    let with = |rank, text: &str| {
        Bootstrap::with_id(rank, 2, text.parse().unwrap()).unwrap().timeout(Duration::from_secs(20))
    };
    thread::scope(|scope| {
        let root = with(0, &text).listener(listener);
        let root = scope.spawn(move || rendezvous(root, card(0)));
        // A rank of the other job, and one without a job.
        let none = Bootstrap::new(1, 2, id.address()).unwrap();
        for stranger in [with(1, &stranger), none] {
            let refused = rendezvous(stranger, card(1)).unwrap_err().to_string();
            assert!(refused.contains("rank 1 was refused") && refused.contains("another job"), "{refused}");
        }
        let worker = rendezvous(with(1, &text), card(1));
        for met in [worker, root.join().unwrap()] {
            assert_eq!(met.unwrap(), [0, 1].map(card));
        }
    });
}

#[test]
fn a_missing_rank_is_named_at_all_ranks() {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let worker = scope.spawn(move || rendezvous(bootstrap(1, 4, address), card(1)).err().unwrap());
        let start = Instant::now();
        let root = rendezvous(bootstrap(0, 4, address).listener(listener), card(0)).err().unwrap();
        assert!(start.elapsed() < TIMEOUT + Duration::from_secs(2), "{:?}", start.elapsed());
        let message = root.to_string();
        assert!(
            message.contains("ranks 2, 3 missing of 4") && message.contains(&address.to_string()),
            "{message}"
        );
        let message = worker.join().unwrap().to_string();
        assert!(
            message.contains("rank 1 was refused") && message.contains("ranks 2, 3 missing"),
            "{message}"
        );
    });
}

#[test]
fn a_missing_rank_0_is_reported_with_its_address() {
    let (listener, address) = listener();
    drop(listener);
    let message = rendezvous(bootstrap(1, 2, address), card(1)).err().unwrap().to_string();
    assert!(
        message.contains("rank 1: no process listens") && message.contains(&address.to_string()),
        "{message}"
    );
}

#[test]
fn a_port_in_use_is_reported() {
    let (_listener, address) = listener();
    let message = rendezvous(bootstrap(0, 2, address), card(0)).err().unwrap().to_string();
    assert!(message.contains(&address.to_string()) && message.contains("FERROCE_MASTER_PORT"), "{message}");
}

/// After any invalid connections, the correct rank is accepted.
#[test]
fn invalid_connections_are_refused_and_harmless() {
    let (listener, address) = listener();
    let slow = Duration::from_secs(20);
    thread::scope(|scope| {
        let root = bootstrap(0, 3, address).listener(listener).timeout(slow);
        let root = scope.spawn(move || rendezvous(root, card(0)));

        // A connection that sends nothing, and one that sends half a hello; both stay.
        let silent = TcpStream::connect(address).unwrap();
        let mut half = TcpStream::connect(address).unwrap();
        half.write_all(&hello(1, 3).as_bytes()[..20]).unwrap();
        let _ = TcpStream::connect(address).unwrap().shutdown(Shutdown::Both);

        let told = answer(address, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(told.contains("'GET ' is not the start"), "{told}");
        let told = answer(address, Hello { version: U32::new(9), ..hello(1, 3) }.as_bytes()).unwrap();
        assert!(told.contains("version 9: must be 2"), "{told}");
        let told = answer(address, hello(1, 7).as_bytes()).unwrap();
        assert!(told.contains("rank 1 has 7, rank 0 has 3"), "{told}");
        for rank in [0, 3, u32::MAX] {
            let told = answer(address, hello(rank, 3).as_bytes()).unwrap();
            assert!(told.contains(&format!("rank {rank}: must be 1 to 2")), "{told}");
        }
        let told = answer(address, Hello { nonce: U64::new(9), ..hello(1, 3) }.as_bytes()).unwrap();
        assert_eq!(told, "rank 1 belongs to another job than rank 0: their unique ids differ");
        let mut other = hello(1, 3);
        other.card.chunk_bytes = U32::new(8192);
        let told = answer(address, other.as_bytes()).unwrap();
        assert!(told.contains("chunk_bytes differs: rank 0 has 4096, rank 1 has 8192"), "{told}");
        let mut other = hello(1, 3);
        other.card.byte_order.reverse();
        let told = answer(address, other.as_bytes()).unwrap();
        assert!(told.contains("byte order"), "{told}");

        let first = scope.spawn(move || rendezvous(bootstrap(1, 3, address).timeout(slow), card(1)));
        // A second claim of rank 1 before rank 1 has connected would be accepted.
        sleep(Duration::from_millis(300));
        let told = answer(address, hello(1, 3).as_bytes()).unwrap();
        assert!(told.contains("rank 1 has already joined"), "{told}");
        let second = rendezvous(bootstrap(2, 3, address).timeout(slow), card(2));
        for met in [root.join().unwrap(), first.join().unwrap(), second] {
            assert_eq!(met.unwrap(), [0, 1, 2].map(card));
        }
        drop((silent, half));
    });
}

#[test]
fn refusals_are_part_of_the_error_about_missing_ranks() {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let root = scope.spawn(move || rendezvous(bootstrap(0, 2, address).listener(listener), card(0)));
        let told = answer(address, Hello { version: U32::new(3), ..hello(1, 2) }.as_bytes());
        assert!(told.is_some());
        let message = root.join().unwrap().err().unwrap().to_string();
        assert!(
            message.contains("rank 1 missing of 2") && message.contains("refused: 127.0.0.1"),
            "{message}"
        );
        assert!(message.contains("version 3"), "{message}");
    });
}

/// Refusals contain bytes of the client, and the log must not grow without limit.
#[test]
fn invalid_connections_do_not_fill_the_log() {
    let (listener, address) = listener();
    let warnings = Warnings::default();
    let log = tracing::Dispatch::new(warnings.clone());
    thread::scope(|scope| {
        let root = bootstrap(0, 2, address).listener(listener).timeout(Duration::from_secs(20));
        let rendezvous = move || rendezvous(root, card(0));
        let root = scope.spawn(move || tracing::dispatcher::with_default(&log, rendezvous));
        for version in 3..33 {
            let told =
                answer(address, Hello { version: U32::new(version), ..hello(1, 2) }.as_bytes()).unwrap();
            assert!(told.contains(&format!("version {version}")), "{told}");
        }
        let met = super::rendezvous(bootstrap(1, 2, address), card(1));
        assert!(met.is_ok() && root.join().unwrap().is_ok());
    });
    assert_eq!(warnings.0.load(Ordering::Relaxed), lobby::MAX_REMEMBERED);
}

/// A log that counts warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A rank checks the lengths sent by rank 0.
#[test]
fn a_rank_refuses_invalid_tables() {
    let newer = Reply { version: U32::new(3), ..Reply::new(TABLE, 0) };
    let endless = Reply::new(TABLE, u32::MAX as usize);
    let long_winded = Reply::new(REFUSAL, MAX_REFUSAL + 1);
    let garbage: [(&[u8], &str); 5] = [
        (b"HTTP/1.1 400 Bad Request\r\n", "'HTTP' is not the start"),
        (newer.as_bytes(), "version 3"),
        (endless.as_bytes(), "kind 1 and 4294967295 bytes"),
        (long_winded.as_bytes(), "kind 2 and 513 bytes"),
        (b"frcc", "closed the connection"),
    ];
    for (bytes, expected) in garbage {
        let (listener, address) = listener();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; size_of::<Hello>()]).unwrap();
                stream.write_all(bytes).unwrap();
            });
            let message = rendezvous(bootstrap(1, 2, address), card(1)).err().unwrap().to_string();
            assert!(message.contains(expected), "{message}");
        });
    }
}

/// Rank 0 and rank 1 meet after `before` has connected to the port.
fn meet_after(before: impl FnOnce(SocketAddr)) {
    let (listener, address) = listener();
    let slow = Duration::from_secs(20);
    thread::scope(|scope| {
        let root = bootstrap(0, 2, address).listener(listener).timeout(slow);
        let root = scope.spawn(move || rendezvous(root, card(0)));
        before(address);
        let worker = rendezvous(bootstrap(1, 2, address).timeout(slow), card(1));
        for met in [worker, root.join().unwrap()] {
            assert_eq!(met.unwrap(), [0, 1].map(card));
        }
    });
}

#[test]
fn silent_connections_do_not_block_ranks() {
    let mut idle = Vec::new();
    meet_after(|address| {
        idle.extend((0..300).map(|_| TcpStream::connect(address).unwrap()));
        // Until all connections are accepted.
        sleep(Duration::from_millis(300));
    });
}

#[test]
fn a_slow_connection_is_accepted_within_its_time() {
    meet_after(|address| {
        let [mut silent, mut half] = [(), ()].map(|()| TcpStream::connect(address).unwrap());
        half.write_all(&hello(1, 2).as_bytes()[..20]).unwrap();
        for (stream, said) in [(&mut silent, ""), (&mut half, "no complete hello")] {
            stream.set_read_timeout(Some(lobby::PATIENCE * 3)).unwrap();
            let mut told = Vec::new();
            stream.read_to_end(&mut told).unwrap();
            assert!(String::from_utf8_lossy(&told).contains(said), "{said}: {told:?}");
        }
    });
}

/// A rank that sends these bytes and ends is accepted again from another process.
fn comes_again(first_words: &[u8]) {
    let (listener, address) = listener();
    let slow = Duration::from_secs(20);
    thread::scope(|scope| {
        let root = bootstrap(0, 3, address).listener(listener).timeout(slow);
        let root = scope.spawn(move || rendezvous(root, card(0)));
        let mut first = TcpStream::connect(address).unwrap();
        first.write_all(first_words).unwrap();
        sleep(Duration::from_millis(300));
        drop(first);
        sleep(Duration::from_millis(300));
        let one = scope.spawn(move || rendezvous(bootstrap(1, 3, address).timeout(slow), card(1)));
        sleep(Duration::from_millis(300));
        let two = rendezvous(bootstrap(2, 3, address).timeout(slow), card(2));
        for met in [root.join().unwrap(), one.join().unwrap(), two] {
            assert_eq!(met.unwrap(), [0, 1, 2].map(card));
        }
    });
}

#[test]
fn a_rank_that_disconnected_may_reconnect() {
    comes_again(hello(1, 3).as_bytes());
}

/// The same with excess bytes, which stay in the socket.
#[test]
fn a_rank_that_sent_too_much_may_reconnect() {
    comes_again(&[hello(1, 3).as_bytes(), b"and more"].concat());
}

/// A rank that does not read, or reads a few bytes at a time, does not delay other ranks.
#[test]
fn a_rank_that_does_not_read_does_not_delay_others() {
    // More than two sockets can buffer.
    let table = vec![7; 1 << 25];
    let (listener, address) = listener();
    let connect = || {
        let theirs = TcpStream::connect(address).unwrap();
        let (ours, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        (ours, theirs)
    };
    let ([mut slow, mut good], mut streams) = {
        let ((a, slow), (b, good)) = (connect(), connect());
        ([slow, good], [a, b])
    };
    let start = Instant::now();
    let is_over = &AtomicUsize::new(0);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut read = vec![0; table.len()];
            good.read_exact(&mut read).unwrap();
            (read == table, start.elapsed())
        });
        scope.spawn(move || {
            while is_over.load(Ordering::Relaxed) == 0 && slow.read(&mut [0; 4096]).is_ok() {
                sleep(Duration::from_millis(20));
            }
        });
        let ended = distribute(&mut streams, &table, start + 4 * TIMEOUT);
        is_over.store(1, Ordering::Relaxed);
        let took = start.elapsed();
        drop(streams);
        let (whole, after) = reader.join().unwrap();
        assert!(whole && after < 4 * TIMEOUT, "{after:?}");
        assert!(took < 6 * TIMEOUT, "{took:?}");
        let message = ended.unwrap_err().to_string();
        assert!(
            message.contains("rank 1: it has accepted") && message.contains("of the 33554432 bytes"),
            "{message}"
        );
    });
}

/// Its hello may be longer than that of this version.
#[test]
fn a_peer_of_another_version_is_told_the_version() {
    meet_after(|address| {
        let newer = Hello { version: U32::new(9), ..hello(1, 2) };
        let long = [newer.as_bytes(), &[0; 60_000]].concat();
        for _ in 0..20 {
            let told = answer(address, &long).expect("no word");
            assert!(told.contains("version 9: must be 2; every rank needs"), "{told}");
        }
    });
}

#[test]
fn a_rank_whose_connection_was_closed_reconnects() {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let worker = bootstrap(1, 2, address).timeout(Duration::from_secs(20));
        let worker = scope.spawn(move || rendezvous(worker, card(1)));
        // One connection is reset, one is closed.
        drop(listener.accept().unwrap());
        let (mut second, _) = listener.accept().unwrap();
        second.read_exact(&mut [0; size_of::<Hello>()]).unwrap();
        drop(second);
        let root = bootstrap(0, 2, address).timeout(Duration::from_secs(20)).listener(listener);
        for met in [rendezvous(root, card(0)), worker.join().unwrap()] {
            assert_eq!(met.unwrap(), [0, 1].map(card));
        }
    });
}

/// A rank 0 with a low limit of open files, as a separate process.
const FEW_FILES: &str = "FERROCE_TEST_FEW_FILES";

#[test]
fn a_lack_of_descriptors_is_temporary() {
    let slow = Duration::from_secs(20);
    if std::env::var_os(FEW_FILES).is_some() {
        let (listener, address) = listener();
        println!("\nat {address}");
        let met = rendezvous(bootstrap(0, 2, address).listener(listener).timeout(slow), card(0));
        assert_eq!(met.unwrap(), [0, 1].map(card));
        return;
    }
    let name = "rendezvous::tests::a_lack_of_descriptors_is_temporary";
    let mut root = Command::new("sh");
    root.args(["-c", "ulimit -n 40 && exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    root.args(["--exact", name, "--nocapture"]).env(FEW_FILES, "1").stdout(Stdio::piped());
    let mut root = root.spawn().unwrap();
    let mut lines = BufReader::new(root.stdout.take().unwrap()).lines();
    let address = lines.find_map(|line| line.unwrap().strip_prefix("at ")?.parse::<SocketAddr>().ok());
    let address = address.expect("an address");
    let idle: Vec<_> = (0..60).map(|_| TcpStream::connect(address).unwrap()).collect();
    sleep(Duration::from_millis(300));
    let met = rendezvous(bootstrap(1, 2, address).timeout(slow), card(1));
    let rest: Vec<_> = lines.map_while(Result::ok).collect();
    assert!(root.wait().unwrap().success(), "{rest:#?}");
    assert_eq!(met.unwrap(), [0, 1].map(card));
    drop(idle);
}
