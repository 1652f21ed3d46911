use super::*;
use crate::MemoryKind;
use crate::gpu;
use crate::gpu::tests::{bytes_of, filled, piece};
use crate::reduction::{Computation, DataType, ReduceOp, Reduction};

const LATER: Nanos = Nanos(1_000_000_000);

#[test]
fn the_cpu_accesses_memory_only_by_copies() {
    let device = Strict::default().open().unwrap();
    let mut memory = filled(&*device, b"0123456789abcdef");
    assert_eq!((memory.kind(), memory.device().unwrap().name()), (MemoryKind::Device, "strict:0"));
    assert!(memory.bytes().is_err() && memory.bytes_mut().is_err() && memory.share().is_ok());
    assert!(memory.span(0, 1).is_none() && memory.payload(0, 1).is_none());
    assert!(!memory.write_by_cpu(1, b"x") && memory.atomics().is_err());
    assert_eq!(memory.load_u64(4).unwrap(), u64::from_ne_bytes(*b"456789ab"));
    memory.store_u64(5, u64::from_ne_bytes(*b"ABCDEFGH")).unwrap();
    assert_eq!(bytes_of(&memory), b"01234ABCDEFGHdef");
    for error in [memory.fetch_add(0, 1), memory.compare_swap(3, 0, 1)] {
        assert_eq!(
            error.unwrap_err().to_string(),
            "memory of a device has no atomics: load and store its words"
        );
    }
    let outside = memory.read(10, &mut [0; 7]).unwrap_err();
    assert_eq!(outside.to_string(), "7 bytes from offset 10 on, of memory of 16 bytes");
    assert!(memory.load_u64(9).is_err() && memory.write(16, b"x").is_err() && memory.write(16, b"").is_ok());
}

/// Its addresses are invalid for the kernel too, which returns an error instead of a signal.
#[test]
fn access_by_the_cpu_faults() {
    let memory = Strict::default().open().unwrap().allocate(4096).unwrap();
    let null = File::options().write(true).open("/dev/random").unwrap();
    // SAFETY: the kernel checks the address, and /dev/null reads nothing from it.
    let written = unsafe { libc::write(null.as_raw_fd(), memory.address().as_ptr().cast(), 16) };
    assert_eq!((written, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
}

#[test]
fn copies_land_when_they_are_due_and_end_in_their_order() {
    let device = Strict { seed: 7, latest: Duration::from_millis(10), ..Strict::default() }.open().unwrap();
    let (from, to) = (filled(&*device, &[7; 64]), filled(&*device, &[0; 64]));
    let staging = Staging::new(128).unwrap();
    let mut queue = device.queue(&staging).unwrap();
    let mut tickets = Vec::new();
    for n in 0..16 {
        tickets.push(queue.gather(Nanos(0), &[piece(&from, 4 * n, 4)], 4 * n as usize).unwrap());
    }
    assert_eq!(tickets, (1..=16).map(Ticket).collect::<Vec<_>>());
    let (mut out_of_order, mut watermark) = (false, Ticket::NONE);
    for now in (0..=10_000_000).step_by(10_000).map(Nanos) {
        let done = queue.done(now).unwrap();
        assert!(done >= watermark);
        watermark = done;
        let landed: Vec<bool> = (0..16).map(|n| staging.span(4 * n, 4).first::<1>() == Some([7])).collect();
        assert!(landed[..done.0 as usize].iter().all(|landed| *landed), "{done:?} has ended");
        out_of_order |= landed[done.0 as usize..].contains(&true);
    }
    assert!(out_of_order && watermark == Ticket(16));
    assert_eq!(queue.next_deadline(LATER), None);

    // A copy that depends on earlier ones waits for them.
    for round in 0..50 {
        staging.write(0, &[round; 64]);
        staging.write(64, &[100 + round; 64]);
        let first = queue.scatter(LATER, 0, &[piece(&to, 0, 64)], Ticket::NONE).unwrap();
        let last = queue.scatter(LATER, 64, &[piece(&to, 0, 64)], first).unwrap();
        while queue.done(queue.next_deadline(LATER).unwrap()).unwrap() < last {}
        assert_eq!(bytes_of(&to), [100 + round; 64]);
    }
}

#[test]
fn memory_is_kept_during_copies() {
    let device = Strict { latest: Duration::from_millis(10), ..Strict::default() }.open().unwrap();
    let mut memory = filled(&*device, b"kept");
    let staging = Staging::new(4).unwrap();
    let mut queue = device.queue(&staging).unwrap();
    queue.gather(Nanos(0), &[memory.piece(0, 4).unwrap()], 0).unwrap();
    assert!(memory.is_pinned());
    drop(memory);
    let found = staging.clone();
    drop((staging, queue));
    let mut bytes = [0; 4];
    found.read(0, &mut bytes);
    assert_eq!(&bytes, b"kept");
}

#[test]
fn copies_fail_one_by_one_and_all_of_a_lost_device() {
    let device = Strict { seed: 1, fails_one_in: 3, depth: 8, ..Strict::default() }.open().unwrap();
    let memory = filled(&*device, &[1; 8]);
    let staging = Staging::new(8).unwrap();
    let mut queue = device.queue(&staging).unwrap();
    let mut failed = Vec::new();
    for ticket in (1..=100).map(Ticket) {
        staging.write(0, &[0; 8]);
        assert_eq!(queue.gather(Nanos(0), &[memory.piece(0, 8).unwrap()], 0).unwrap(), ticket);
        let fails = match queue.done(Nanos(0)) {
            Ok(done) => done != ticket,
            Err(Failed { ticket: which, .. }) => which == ticket,
        };
        assert_eq!(staging.span(0, 8).first::<8>() == Some([0; 8]), fails);
        failed.extend(fails.then_some(ticket));
    }
    assert!((20..50).contains(&failed.len()), "{failed:?}");

    for _ in 0..8 {
        queue.gather(LATER, &[memory.piece(0, 8).unwrap()], 0).unwrap();
    }
    let full = queue.gather(LATER, &[memory.piece(0, 8).unwrap()], 0).unwrap_err();
    assert!(full.to_string().contains("8 copies or reductions are outstanding"), "{full}");
    device.lose();
    let ends: Vec<_> = (0..8).map(|_| queue.done(Nanos(0)).unwrap_err()).collect();
    assert_eq!(ends.iter().map(|end| end.ticket.0).collect::<Vec<_>>(), (101..=108).collect::<Vec<_>>());
    assert_eq!(ends[0].to_string(), "ticket 101 has failed: strict:1: copy: the device is lost");
    assert_eq!(queue.done(Nanos(0)).unwrap(), Ticket(108));
    assert!(memory.read(0, &mut [0]).unwrap_err().to_string().contains("the device is lost"));
    assert!(device.allocate(1).is_err() && device.queue(&staging).is_err());
}

#[test]
fn reductions_are_those_of_the_processor() {
    let device = Strict::default().open().unwrap();
    gpu::tests::reductions_are_those_of_the_processor(&*device, &mut *device.reducer().unwrap());
}

/// Each ends after the one before, however late that is, and its result is not visible before it is reported as ended.
#[test]
fn reductions_end_late_and_in_their_order() {
    let device = Strict::default().latest(Duration::from_millis(1)).open().unwrap();
    let (target, source) = (filled(&*device, &[1]), filled(&*device, &[2]));
    let mut reducer = device.reducer().unwrap();
    let [sum, product] = [ReduceOp::Sum, ReduceOp::Product].map(|op| {
        let pieces = [&target, &source].map(|memory| memory.piece(0, 1).unwrap());
        let computation = Computation::Reduce(Reduction::new(DataType::U8, op));
        reducer.compute(LATER, computation, pieces[0], &pieces).unwrap()
    });
    assert!(reducer.done(LATER).unwrap() < sum && bytes_of(&target) == [1]);
    while reducer.done(reducer.next_deadline(LATER).unwrap()).unwrap() < product {}
    assert_eq!(bytes_of(&target), [6]);
    device.lose();
    let piece = target.piece(0, 1).unwrap();
    let computation = Computation::Reduce(Reduction::new(DataType::U8, ReduceOp::Sum));
    let refused = reducer.compute(LATER, computation, piece, &[piece, piece]).unwrap_err().to_string();
    assert!(refused.contains("the device is lost"), "{refused}");
}

/// A copy takes a time proportional to its bytes, after earlier copies of the same direction; so does a reduction.
#[test]
fn copies_and_reductions_have_a_speed() {
    let device = Strict::default().speed(1_000_000_000, 500_000_000).open().unwrap();
    let (memory, staging) = (device.allocate(4000).unwrap(), Staging::new(4000).unwrap());
    let (mut queue, mut reducer) = (device.queue(&staging).unwrap(), device.reducer().unwrap());
    let piece = [memory.piece(0, 1000).unwrap()];
    for at in [0, 1000] {
        queue.gather(Nanos(0), &piece, at).unwrap();
    }
    queue.scatter(Nanos(0), 2000, &piece, Ticket::NONE).unwrap();
    let computation = Computation::Reduce(Reduction::new(DataType::U8, ReduceOp::Sum));
    reducer.compute(Nanos(5), computation, piece[0], &piece).unwrap();
    let watermarks = [999, 1000, 1999, 2000].map(|now| queue.done(Nanos(now)).unwrap().0);
    assert_eq!(watermarks, [0, 1, 1, 3]);
    assert_eq!(reducer.next_deadline(Nanos(0)), Some(Nanos(2005)));
}

/// With /dev/udmabuf, the pages are the same; without, the error says so.
#[test]
fn memory_is_exported_if_the_kernel_supports_it() {
    let device = Strict::default().open().unwrap();
    let memory = filled(&*device, &[9; 8192]);
    let exported = memory.export();
    if !std::path::Path::new("/dev/udmabuf").exists() {
        let refused = exported.unwrap_err().to_string();
        assert!(refused.contains("a dma-buf of its memory: /dev/udmabuf"), "{refused}");
        return;
    }
    let DmaBuf { fd, offset } = exported.unwrap();
    let mapped = map(&File::from(fd), 8192, libc::PROT_READ, 0).unwrap();
    let mut found = [0; 8192];
    // SAFETY: `found.len()` bytes are mapped.
    unsafe { mapped.copy_to_nonoverlapping(NonNull::from(&mut found).cast(), found.len()) };
    unmap(mapped, 8192);
    assert_eq!((offset, found), (0, [9; 8192]));
}
