use std::fs::{File, OpenOptions};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_driver_test_support::random::Random;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::memory::{HEADER, Header, READY};
use super::*;

fn pair(slots: usize, length: usize) -> (Producer, Consumer) {
    let producer = Producer::create(slots, length).unwrap();
    let consumer = Consumer::open(memory_of(&producer)).unwrap();
    (producer, consumer)
}

fn memory_of(producer: &Producer) -> OwnedFd {
    producer.as_fd().try_clone_to_owned().unwrap()
}

fn filled(slot: &FullSlot<'_>, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    slot.read(0, &mut bytes);
    bytes
}

#[test]
fn slots_are_received_in_order() {
    let (mut producer, mut consumer) = pair(8, 100);
    let sender = std::thread::spawn(move || {
        let mut sent = 0u8;
        while sent < 250 {
            let fill = |mut slot: VacantSlot<'_>| {
                slot.write(0, &[sent; 60]);
                slot.write(60, &[sent; 40]);
                sent += 1;
            };
            producer.push(3, fill).unwrap();
            std::thread::yield_now();
        }
        producer
    });
    let mut seen = 0u8;
    while seen < 250 {
        let empty = |slot: FullSlot<'_>| {
            assert_eq!(filled(&slot, 100), [seen; 100]);
            seen += 1;
        };
        consumer.pop(5, empty).unwrap();
    }
    sender.join().unwrap();
}

#[test]
fn a_full_ring_refuses_and_an_empty_one_returns_nothing() {
    let (mut producer, mut consumer) = pair(4, 1);
    assert_eq!(consumer.pop(9, |_| ()).unwrap(), 0);
    assert_eq!((producer.push(9, |_| ()).unwrap(), producer.push(1, |_| ()).unwrap()), (4, 0));
    assert_eq!((consumer.pop(3, |_| ()).unwrap(), producer.push(9, |_| ()).unwrap()), (3, 3));
}

#[test]
fn a_ring_is_passed_through_a_socket() {
    let mut producer = Producer::create(4, 8).unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    producer.send(&here).unwrap();
    let mut consumer = Consumer::receive(&there).unwrap();
    producer.push(1, |mut slot| slot.write(0, b"hello   ")).unwrap();
    consumer.pop(1, |slot| assert_eq!(filled(&slot, 8), b"hello   ")).unwrap();

    // A byte without a descriptor, and a closed stream.
    io::Write::write_all(&mut &here, b"R").unwrap();
    let error = Consumer::receive(&there).unwrap_err().to_string();
    assert_eq!(error, "receiving a descriptor: none came");
    drop(here);
    let error = Consumer::receive(&there).unwrap_err().to_string();
    assert_eq!(error, "receiving a descriptor: the other end is gone");
}

#[test]
fn second_consumers_and_invalid_sizes_are_refused() {
    let producer = Producer::create(4, 64).unwrap();
    let _first = Consumer::open(memory_of(&producer)).unwrap();
    assert!(matches!(Consumer::open(memory_of(&producer)), Err(RingError::Taken)));
    for (slots, length) in [(3, 64), (0, 64), (4, 0), (1 << 21, 1), (4, 1 << 21), (1 << 20, 1025)] {
        assert!(matches!(Producer::create(slots, length), Err(RingError::Size { .. })));
    }
}

/// Mapping and filling it would cost its opener memory that the sender has never written.
#[test]
fn opening_a_sparse_file_does_not_fill_it() {
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let sparse = File::from(sealed(256 << 20, both, &[]));
    let opened = Consumer::open(sparse.try_clone().unwrap().into());
    assert!(matches!(opened, Err(RingError::NotARing(_))), "{opened:?}");
    let taken = rustix::fs::fstat(&sparse).unwrap().st_blocks * 512;
    assert!(taken <= 1 << 20, "{taken} bytes");

    let vast = Consumer::open(sealed(1 << 40, both, &[]));
    assert!(matches!(vast, Err(RingError::NotARing(_))), "{vast:?}");

    // A valid ring of which only the header was ever written.
    let (slots, length) = (1u64 << 18, 1000u64);
    let right = Producer::create(4, 1000).unwrap();
    let mut header = [0; 24];
    File::from(memory_of(&right)).read_exact_at(&mut header, 0).unwrap();
    header[offset_of!(Header, slots)..][..8].copy_from_slice(&slots.to_ne_bytes());
    header[offset_of!(Header, length)..][..8].copy_from_slice(&length.to_ne_bytes());
    let sparse = File::from(sealed(HEADER as u64 + slots * 1024, both, &header));
    let mut consumer = Consumer::open(sparse.try_clone().unwrap().into()).unwrap();
    assert_eq!(consumer.pop(1, |_| ()).unwrap(), 0);
    let taken = rustix::fs::fstat(&sparse).unwrap().st_blocks * 512;
    assert!(taken <= 1 << 20, "{taken} bytes");
}

/// The sender can remove pages from a file of huge pages despite its seals, and the next access would end the process.
#[test]
fn huge_pages_are_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let file = match memfd_create("test", flags) {
        Ok(file) => File::from(file),
        Err(error) => return eprintln!("not tested: this kernel makes no memory of huge pages: {error}"),
    };
    file.set_len(2 << 20).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let opened = Consumer::open(file.into());
    assert!(matches!(opened, Err(RingError::NotTmpfs { .. })), "{opened:?}");
}

fn sealed(length: u64, seals: SealFlags, header: &[u8]) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("test", flags).unwrap());
    file.set_len(length).unwrap();
    file.write_all_at(header, 0).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

#[test]
fn refuses_memory_that_could_change_its_size() {
    let right = Producer::create(4, 64).unwrap();
    let mut header = [0; 24];
    File::from(memory_of(&right)).read_exact_at(&mut header, 0).unwrap();
    let length = (HEADER + 4 * 64) as u64;
    let both = SealFlags::SHRINK | SealFlags::GROW;
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
        let opened = Consumer::open(sealed(length, seals, &header));
        assert!(matches!(opened, Err(RingError::Unsealed { .. })), "{seals:?}: {opened:?}");
    }
    Consumer::open(sealed(length, both, &header)).unwrap();
    // A file with a name has no seals.
    let path = std::env::temp_dir().join(format!("ferroce-shared-{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(length).unwrap();
    file.write_all_at(&header, 0).unwrap();
    let opened = Consumer::open(file.into());
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(opened, Err(RingError::Unsealed { .. })), "{opened:?}");
    let (pipe, _) = UnixStream::pair().unwrap();
    assert!(matches!(Consumer::open(pipe.into()), Err(RingError::Unsealed { .. })));
    // A producer's own memory keeps its seals for every holder.
    let memory = memory_of(&right);
    assert!(fcntl_add_seals(&memory, SealFlags::FUTURE_WRITE).is_err());
}

#[test]
fn refuses_sealed_memory_that_is_no_ring() {
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let header = |state: u64, slots: u64, length: u64| {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&state.to_ne_bytes());
        bytes[8..16].copy_from_slice(&slots.to_ne_bytes());
        bytes[16..].copy_from_slice(&length.to_ne_bytes());
        bytes
    };
    let right = (HEADER + 4 * 64) as u64;
    for (bytes, header) in [
        (24, header(READY, 4, 64)),
        (right, header(0, 4, 64)),
        (right, header(READY ^ 1, 4, 64)),
        (right, header(READY, 4, 65)),
        (right, header(READY, 8, 64)),
        (right, header(READY, 3, 64)),
        (right, header(READY, 0, 64)),
        (right, header(READY, 4, 0)),
        (right, header(READY, u64::MAX, u64::MAX)),
        (right, header(READY, 1 << 63, 2)),
        (right + 1, header(READY, 4, 64)),
        // A sparse file: it has this length, but no contents.
        (1 << 50, header(READY, 4, 64)),
    ] {
        let opened = Consumer::open(sealed(bytes, both, &header));
        assert!(matches!(opened, Err(RingError::NotARing(_))), "{bytes} bytes, {header:?}: {opened:?}");
    }
}

/// Another holder of the memory.
struct Liar(File);

impl Liar {
    fn of(producer: &Producer) -> Liar {
        Liar(File::from(memory_of(producer)))
    }

    fn write(&self, offset: usize, value: u64) {
        self.0.write_all_at(&value.to_ne_bytes(), offset as u64).unwrap();
    }
}

#[test]
fn a_consumer_refuses_invalid_indices() {
    let (mut producer, mut consumer) = pair(4, 64);
    let liar = Liar::of(&producer);
    producer.push(3, |_| ()).unwrap();
    assert_eq!(consumer.pop(1, |_| ()).unwrap(), 1);
    // 3 are published and 1 is released: 3 to 5 are valid.
    for tail in [6, 2, 0, 1 << 32, u64::MAX, u64::MAX - 3, 1 << 63] {
        liar.write(offset_of!(Header, tail), tail);
        let error = consumer.full(4).unwrap_err();
        let expected = format!("the other end's tail is {tail}; 3 to 5 can be");
        assert_eq!(error.to_string(), expected);
        let popped = consumer.pop(9, |_| panic!("a slot that was never full"));
        assert!(matches!(popped, Err(RingError::Corrupt { index: "tail", .. })));
    }
    // The earlier state is kept: 2 slots are full.
    assert_eq!(consumer.full(2).unwrap(), 2);
    // A plausible wrong index yields slots, but never more than there are.
    liar.write(offset_of!(Header, tail), 5);
    assert_eq!(consumer.pop(9, |_| ()).unwrap(), 4);
}

#[test]
fn a_producer_refuses_invalid_indices() {
    let (mut producer, mut consumer) = pair(4, 64);
    let liar = Liar::of(&producer);
    producer.push(4, |_| ()).unwrap();
    consumer.pop(2, |_| ()).unwrap();
    assert_eq!(producer.free(4).unwrap(), 2);
    for head in [5, 1, 0, 1 << 32, u64::MAX, 1 << 63] {
        liar.write(offset_of!(Header, head), head);
        let error = producer.free(4).unwrap_err();
        let expected = format!("the other end's head is {head}; 2 to 4 can be");
        assert_eq!(error.to_string(), expected);
        let pushed = producer.push(9, |_| panic!("a slot that was never released"));
        assert!(matches!(pushed, Err(RingError::Corrupt { index: "head", .. })));
    }
    assert_eq!(producer.free(2).unwrap(), 2);
    liar.write(offset_of!(Header, head), 4);
    assert_eq!(producer.push(9, |_| ()).unwrap(), 4);
}

#[test]
fn indices_wrap_around() {
    let (mut producer, mut consumer) = pair(4, 64);
    let liar = Liar::of(&producer);
    let start = u64::MAX - 1;
    (producer.head, producer.tail, consumer.head, consumer.tail) = (start, start, start, start);
    liar.write(offset_of!(Header, head), start);
    liar.write(offset_of!(Header, tail), start);
    for turn in 0..10u8 {
        assert_eq!(producer.push(3, |mut slot| slot.write(0, &[turn])).unwrap(), 3);
        assert_eq!(consumer.pop(9, |slot| assert_eq!(filled(&slot, 1), [turn])).unwrap(), 3);
    }
}

#[test]
fn the_size_is_fixed_at_opening() {
    let (mut producer, mut consumer) = pair(4, 64);
    let liar = Liar::of(&producer);
    for (slots, length) in [(1 << 20, 1 << 20), (0, 0), (u64::MAX, u64::MAX)] {
        liar.write(offset_of!(Header, slots), slots);
        liar.write(offset_of!(Header, length), length);
        liar.write(offset_of!(Header, state), slots);
        assert_eq!(producer.push(9, |mut slot| slot.write(0, &[5; 64])).unwrap(), 4);
        assert_eq!(consumer.pop(9, |slot| assert_eq!(filled(&slot, 64), [5; 64])).unwrap(), 4);
    }
}

/// A read returns a copy, which does not change with the slot.
#[test]
fn a_copy_does_not_change_with_its_slot() {
    let (mut producer, mut consumer) = pair(4, 64);
    let liar = Liar::of(&producer);
    producer.push(1, |mut slot| slot.write(0, &[7; 64])).unwrap();
    let empty = |slot: FullSlot<'_>| {
        let read = filled(&slot, 64);
        liar.write(HEADER, 0x0909_0909_0909_0909);
        assert_eq!(read, [7; 64]);
        assert_eq!(filled(&slot, 8), [9; 8]);
    };
    consumer.pop(1, empty).unwrap();
}

#[test]
fn copies_stay_inside_their_slot() {
    let (mut producer, mut consumer) = pair(2, 60);
    let beyond = [(61, 0), (0, 61), (60, 1), (usize::MAX, 2), (1, usize::MAX >> 44)];
    for (offset, count) in beyond {
        let bytes = vec![0; count];
        let write = || producer.push(1, |mut slot| slot.write(offset, &bytes));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err(), "{offset}, {count}");
    }
    producer.push(1, |mut slot| slot.write(60, &[])).unwrap();
    for (offset, count) in beyond {
        let mut bytes = vec![0; count];
        let read = || consumer.pop(1, |slot| slot.read(offset, &mut bytes));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).is_err(), "{offset}, {count}");
    }
    assert_eq!(consumer.pop(1, |slot| slot.read(60, &mut [])).unwrap(), 1);
}

/// Runs one test of this program in another process, which opens the ring's memory by a path in /proc.
fn beside(test: &str, producer: &Producer) -> Child {
    let path = format!("/proc/{}/fd/{}", std::process::id(), producer.as_fd().as_raw_fd());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test]).env("FERROCE_SHARED", path).stdout(Stdio::null()).spawn().unwrap()
}

/// The memory, in the process started by [`beside`].
fn given() -> Option<File> {
    let path = std::env::var_os("FERROCE_SHARED")?;
    Some(OpenOptions::new().read(true).write(true).open(path).unwrap())
}

/// A file with a name, as used earlier, ended both processes by SIGBUS here.
#[test]
fn an_attempt_to_truncate_kills_no_process() {
    if let Some(file) = given() {
        let mut consumer = Consumer::open(file.try_clone().unwrap().into()).unwrap();
        for length in [0, 1, 4096, 1 << 30] {
            let refused = file.set_len(length).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{length}");
        }
        assert_eq!(consumer.pop(4, |slot| assert_eq!(filled(&slot, 4096), [7; 4096])).unwrap(), 4);
        return;
    }
    let mut producer = Producer::create(4, 4096).unwrap();
    producer.push(4, |mut slot| slot.write(0, &[7; 4096])).unwrap();
    let mut other = beside("shared::tests::an_attempt_to_truncate_kills_no_process", &producer);
    let status = other.wait().unwrap();
    assert!(status.success(), "signal {:?}", status.signal());
    assert_eq!(producer.push(4, |mut slot| slot.write(0, &[8; 4096])).unwrap(), 4);
}

/// Another process writes all of the memory all the time, header and slots.
#[test]
fn a_hostile_process_causes_only_errors_and_wrong_bytes() {
    if let Some(file) = given() {
        let length = file.metadata().unwrap().len();
        let (mut random, end) = (Random::new(1), Instant::now() + Duration::from_secs(20));
        // Until it is killed.
        while Instant::now() < end {
            let state = random.any();
            let index =
                [offset_of!(Header, tail), offset_of!(Header, head)][(state >> 8 & 1) as usize] as u64;
            let (offset, value) = match state % 4 {
                0 => (index, state >> 40 & 7),
                1 => (index, state),
                2 => (state >> 20 & 16, state),
                _ => (state % (length - 8), state),
            };
            file.write_all_at(&value.to_ne_bytes(), offset).unwrap();
        }
        return;
    }
    let (mut producer, mut consumer) = pair(4, 100);
    let test = "shared::tests::a_hostile_process_causes_only_errors_and_wrong_bytes";
    let mut other = beside(test, &producer);
    let (mut moved, mut refused) = (0u64, 0u64);
    let end = Instant::now() + Duration::from_secs(10);
    // Until both have happened often enough.
    while (moved < 10_000 || refused < 10_000) && Instant::now() < end {
        let pushed = producer.push(9, |mut slot| slot.write(0, &[1; 100]));
        let popped = consumer.pop(9, |slot| assert_eq!(filled(&slot, 100).len(), 100));
        for outcome in [pushed, popped] {
            match outcome {
                Ok(count) => {
                    assert!(count <= 4);
                    moved += count as u64;
                }
                Err(RingError::Corrupt { .. }) => {
                    refused += 1;
                    // Starts again: otherwise the first wrong index would end all progress.
                    (producer.head, producer.tail, consumer.head, consumer.tail) = (0, 0, 0, 0);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    other.kill().unwrap();
    let status = other.wait().unwrap();
    assert_eq!(status.signal(), Some(9), "it was busy to the end");
    assert!(moved >= 10_000 && refused >= 10_000, "{moved} slots, {refused} lies");
}
