use std::ffi::CString;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::gpu::{Ticket, Tickets};
use crate::memory::Piece;
use crate::reduction::{DataType, ReduceOp, reduce};
use crate::{MemoryKind, Nanos};

/// CI's machines have no GPU of NVIDIA, so that it is no failure there either.
fn first() -> Option<Arc<Cuda>> {
    open(0).inspect_err(|error| println!("skipped: {error}")).ok()
}

fn random(chance: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    chance.fill_bytes(&mut bytes);
    bytes
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn piece(memory: &Memory, offset: u64, len: usize) -> Piece<'_> {
    memory.piece(offset, len).unwrap()
}

/// Until the ticket has ended, within 10 s.
fn wait(queue: &mut (impl Tickets + ?Sized), ticket: Ticket) {
    let limit = Instant::now() + Duration::from_secs(10);
    while queue.done(Nanos(0)).unwrap() < ticket {
        assert!(Instant::now() < limit && queue.next_deadline(Nanos(5)) == Some(Nanos(5)));
    }
}

/// The kernels as PTX, or why they can't be tried.
fn compiled(source: &CStr) -> Result<CString, GpuError> {
    compiler::compile("cuda:0", source, (7, 5)).inspect_err(|error| println!("skipped: {error}"))
}

#[test]
fn without_a_driver_everything_says_what_is_missing() {
    // SAFETY: the driver's library, as `open` loads it.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        println!("skipped: there is a driver");
        return;
    }
    let reason = "libcuda.so.1: cannot open shared object file: No such file or directory; it comes with NVIDIA's driver, 515 or later \
                  (Debian: libcuda1, Ubuntu: nvidia-driver-580; containers: nvidia-container-toolkit)";
    assert_eq!(devices().unwrap_err().to_string(), format!("cuda: {reason}"));
    for _ in 0..2 {
        assert_eq!(open(7).unwrap_err().to_string(), format!("cuda:7: {reason}"));
    }
    assert!(matches!(open(usize::MAX), Err(GpuError::NoDevice { .. })));
}

#[test]
fn memory_of_others_has_no_pointer() {
    assert_eq!(Cuda::pointer(&Memory::zeroed(8).unwrap()), None);
}

/// Where NVRTC is, and without a GPU.
#[test]
fn the_kernels_are_compiled_by_nvrtc() {
    let ptx = match compiled(reducer::SOURCE) {
        Ok(ptx) => ptx.into_string().unwrap(),
        Err(error) => {
            assert!(matches!(error, GpuError::Unsupported { .. }), "{error}");
            return;
        }
    };
    for (data_type, op) in DataType::ALL.iter().flat_map(|data_type| ReduceOp::ALL.map(|op| (data_type, op)))
    {
        assert!(ptx.contains(&format!(".entry {op}_{data_type}(")), "no {op}_{data_type} in {ptx}");
    }
    // Neither fused nor flushed.
    assert!(!ptx.contains("fma.") && !ptx.contains(".ftz"), "{ptx}");
    let refused = compiled(c"void kernel( {").unwrap_err().to_string();
    assert!(
        refused.starts_with(
            "cuda:0: nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6) for compute_75: reduce.c(1)"
        ),
        "{refused}"
    );
}

/// What differs from the C of OpenCL, by another compiler than NVIDIA's.
#[test]
fn the_kernels_are_cpp() {
    let compiler = Command::new("g++")
        .args(["-x", "c++", "-fsyntax-only", "-Werror", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut compiler = match compiler {
        Ok(compiler) => compiler,
        Err(error) => return println!("skipped: g++: {error}"),
    };
    let cuda = "
        #define __global__
        #define __device__
        #define asm(...)
        static struct { unsigned x; } blockIdx, blockDim, threadIdx;
        float __uint_as_float(unsigned);
        unsigned __float_as_uint(float);
        double __longlong_as_double(long long);
        long long __double_as_longlong(double);
    ";
    let source = [cuda, reducer::SOURCE.to_str().unwrap()].concat();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let ended = compiler.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn devices_are_listed_and_opened_by_their_number() {
    let Some(device) = first() else { return };
    let listed = devices().unwrap();
    assert!(listed.iter().map(|found| found.index).eq(0..listed.len()));
    assert!(!listed[0].name.is_empty() && listed[0].memory > 1 << 20);
    assert_eq!(listed[0].pci.as_ref().unwrap().len(), "0000:3b:00.0".len());
    assert_eq!(Device::name(&*device), "cuda:0");
    let refused = open(listed.len()).unwrap_err().to_string();
    assert_eq!(refused, format!("cuda:{0}: there are {0} devices of CUDA, counted from 0", listed.len()));
}

#[test]
fn memory_is_zeroed_written_and_read() {
    let Some(device) = first() else { return };
    let mut memory = device.allocate(100_000).unwrap();
    assert_eq!((memory.kind(), bytes_of(&memory)), (MemoryKind::Device, vec![0; 100_000]));
    assert_eq!(Cuda::pointer(&memory), Some(memory.address().as_ptr() as u64));
    let bytes = random(&mut ChaCha8Rng::seed_from_u64(1), 5000);
    memory.write(77, &bytes).unwrap();
    assert_eq!(bytes_of(&memory)[77..5077], bytes);
    assert!(memory.span(0, 1).is_none() && memory.write(99_999, &[0; 2]).is_err());
    assert_eq!(device.allocate(0).unwrap().len(), 0);
    let refused = device.allocate(1 << 50).unwrap_err().to_string();
    assert_eq!(refused, "cuda:0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

#[test]
fn memory_is_exported_where_the_driver_can() {
    let Some(device) = first() else { return };
    let memory = device.allocate(100_000).unwrap();
    match (devices().unwrap()[0].has_dma_buf, memory.export()) {
        (true, exported) => {
            let exported = exported.unwrap();
            assert_eq!(exported.offset, memory.address().as_ptr() as u64 % rustix::param::page_size() as u64);
            assert!(rustix::fs::fstat(&exported.fd).unwrap().st_size as u64 >= exported.offset + 100_000);
        }
        (false, refused) => {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("its driver exports none"), "{refused}");
        }
    }
}

#[test]
fn copies_are_there_when_they_have_ended() {
    let Some(device) = first() else { return };
    let chance = &mut ChaCha8Rng::seed_from_u64(2);
    let len = 300_000;
    let (from, mut to) = (random(chance, len), device.allocate(len).unwrap());
    let mut source = device.allocate(len).unwrap();
    source.write(0, &from).unwrap();
    let staging = Staging::new(len).unwrap();
    let mut gathers = device.queue(&staging).unwrap();
    let mut scatters = device.queue(&staging).unwrap();
    // In two pieces, which change their places.
    let ticket = gathers.gather(Nanos(0), &[piece(&source, 1000, len - 1000), piece(&source, 0, 1000)], 0);
    assert!(source.is_pinned());
    wait(&mut *gathers, ticket.unwrap());
    let turned = [&from[1000..], &from[..1000]].concat();
    let mut staged = vec![0; len];
    staging.read(0, &mut staged);
    assert!(staged == turned && !source.is_pinned());
    // The staging stays pinned for the other queue.
    drop(gathers);
    let ticket = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, len)], Ticket::NONE).unwrap();
    wait(&mut *scatters, ticket);
    assert!(bytes_of(&to) == turned);
    // One that is to wait for others does, of either direction.
    for round in 0..100_u8 {
        staging.write(0, &[round; 64 << 10]);
        staging.write(128 << 10, &[100 + round; 100]);
        let first = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, 64 << 10)], Ticket::NONE).unwrap();
        let second = scatters.scatter(Nanos(0), 128 << 10, &[piece(&to, 500, 100)], first).unwrap();
        wait(&mut *scatters, second);
        assert_eq!(bytes_of(&to)[500..600], [100 + round; 100]);
        source.write(0, &[round; 64 << 10]).unwrap();
        let third = scatters.gather(Nanos(0), &[piece(&source, 0, 64 << 10)], 200_000).unwrap();
        let last = scatters.scatter(Nanos(0), 200_000, &[piece(&to, 0, 64 << 10)], third).unwrap();
        wait(&mut *scatters, last);
        assert_eq!(bytes_of(&to)[..64 << 10], [round; 64 << 10]);
    }
    // Nothing to copy ends too.
    let ticket = scatters.gather(Nanos(0), &[], 0).unwrap();
    wait(&mut *scatters, ticket);
    let mut submitted = 0;
    let full = loop {
        match scatters.scatter(Nanos(0), 0, &[piece(&to, 0, 64 << 10)], Ticket::NONE) {
            Ok(_) => submitted += 1,
            Err(error) => break error,
        }
        assert!(submitted < 1000, "nobody asks what has ended, so it must be full");
    };
    assert!(full.to_string().contains("64 copies or reductions are under way"), "{full}");
    // What is under way ends with the queue.
    drop(scatters);
    assert!(!to.is_pinned());
    to.write(0, b"ours again").unwrap();
}

#[test]
fn memory_of_another_handle_is_refused() {
    let (Some(device), Some(other)) = (first(), first()) else { return };
    let memory = other.allocate(10).unwrap();
    let mut queue = device.queue(&Staging::new(10).unwrap()).unwrap();
    let gather = || queue.gather(Nanos(0), &[piece(&memory, 0, 10)], 0);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(gather)).unwrap_err();
    let said = panic.downcast_ref::<String>().unwrap();
    assert_eq!(said, "a piece of another device's memory, in a queue of cuda:0");
}

/// Whatever bits are in the memory; but of what is no number nobody promises the bits.
#[test]
fn reductions_are_those_of_the_processor() {
    let Some(device) = first() else { return };
    let chance = &mut ChaCha8Rng::seed_from_u64(3);
    let mut reducer = match device.reducer() {
        Err(error @ GpuError::Unsupported { .. }) => return println!("skipped: {error}"),
        reducer => reducer.unwrap(),
    };
    for data_type in DataType::ALL {
        for op in ReduceOp::ALL {
            let (mut a, b, c) = (random(chance, 80_000), random(chance, 80_000), random(chance, 80_000));
            let [target, first, second] = [&a, &b, &c].map(|bytes| {
                let mut memory = device.allocate(bytes.len()).unwrap();
                memory.write(0, bytes).unwrap();
                memory
            });
            let last = [&first, &second].map(|source| {
                let (target, source) = (piece(&target, 16, 70_000), piece(source, 8, 70_000));
                reducer.reduce(Nanos(0), (data_type, op), target, source).unwrap()
            })[1];
            wait(&mut *reducer, last);
            for source in [b, c] {
                reduce(data_type, op, &mut a[16..70_016], &source[8..70_008]);
            }
            let size = data_type.size();
            let got = bytes_of(&target);
            for (n, (expected, got)) in a.chunks(size).zip(got.chunks(size)).enumerate() {
                let chooses = matches!(op, ReduceOp::Min | ReduceOp::Max);
                let none = is_no_number(data_type, expected) && is_no_number(data_type, got);
                assert!(
                    expected == got || none && !chooses,
                    "{op} of {data_type}, element {n}: {expected:x?} of the processor, {got:x?} of the device"
                );
            }
        }
    }
    let memory = Arc::new(device.allocate(64).unwrap());
    let f32_sum = (DataType::F32, ReduceOp::Sum);
    let refused = reducer.reduce(Nanos(0), f32_sum, piece(&memory, 0, 16), piece(&memory, 18, 16));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "cuda:0: elements of 4 bytes begin at byte 18 of its memory: a multiple of 4 is needed"
    );
    // Memory that begins askew.
    let askew = Cuda::pointer(&memory).unwrap() + 2;
    // SAFETY: bytes of the memory, which is kept.
    let imported = unsafe { device.import(askew, 16, Arc::clone(&memory) as _) }.unwrap();
    let refused = reducer.reduce(Nanos(0), f32_sum, piece(&memory, 0, 16), piece(&imported, 0, 16));
    assert!(matches!(refused, Err(GpuError::Unaligned { size: 4, offset, .. }) if offset == askew));
    let ticket = reducer.reduce(Nanos(0), f32_sum, piece(&memory, 0, 0), piece(&memory, 0, 0)).unwrap();
    wait(&mut *reducer, ticket);
}

fn is_no_number(data_type: DataType, bits: &[u8]) -> bool {
    match (data_type, bits) {
        (DataType::F32, [.., _, _]) => f32::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::F64, _) => f64::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::F16, _) => half::f16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::Bf16, _) => half::bf16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

#[test]
fn memory_of_others_is_imported() {
    let (Some(theirs), Some(ours)) = (first(), first()) else { return };
    let mut tensor = theirs.allocate(1000).unwrap();
    tensor.write(0, &[7; 1000]).unwrap();
    let pointer = Cuda::pointer(&tensor).unwrap();
    let tensor = Arc::new(tensor);
    let owner = Arc::downgrade(&tensor);
    // SAFETY: bytes of the tensor, which is kept.
    let mut imported = unsafe { ours.import(pointer + 100, 900, tensor) }.unwrap();
    assert_eq!((imported.len(), bytes_of(&imported)), (900, vec![7; 900]));
    imported.write(10, b"written").unwrap();
    let mut found = [0; 7];
    owner.upgrade().unwrap().read(110, &mut found).unwrap();
    assert_eq!(&found, b"written");
    // More than there is, memory of the host, and no memory.
    let nobody: Arc<dyn Any + Send + Sync> = Arc::new(());
    // SAFETY: these are refused, or bytes of the tensor.
    let import = |pointer, len| unsafe { ours.import(pointer, len, Arc::clone(&nobody)) };
    let refused = import(pointer, 64 << 20).unwrap_err().to_string();
    assert!(refused.contains("67108864 bytes at 0x") && refused.contains("its allocation is "), "{refused}");
    assert!(import(pointer, usize::MAX).is_err());
    for pointer in [0, 0x10, (&raw const refused) as u64] {
        let refused = import(pointer, 8).unwrap_err().to_string();
        assert!(refused.contains("no address of CUDA's"), "{refused}");
    }
    // It is kept for as long as it is imported.
    assert!(owner.upgrade().is_some());
    drop(imported);
    assert!(owner.upgrade().is_none());
}
