use std::io::Write;
use std::process::{Command, Stdio};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::*;
use crate::gpu::strict::Strict;
use crate::gpu::tests::{self, bytes_of, piece, random, wait};
use crate::reduction::{Computation, DataType, ReduceOp, Reduction};
use crate::{MemoryKind, Nanos};

/// CI machines have no NVIDIA GPU, so a missing one is no failure there either.
fn first() -> Option<Arc<Cuda>> {
    open(0).inspect_err(|error| println!("skipped: {error}")).ok()
}

/// The kernels as PTX, or why they can't be compiled.
fn compiled(source: &CStr, capability: (i32, i32)) -> Result<String, GpuError> {
    let kernels = compiler::compile("cuda:0", source, capability);
    let kernels = kernels.inspect_err(|error| println!("skipped: {error}"))?;
    Ok(String::from_utf8_lossy(&kernels).into_owned())
}

#[test]
fn without_a_driver_errors_name_what_is_missing() {
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
    let strict = Strict::default().open().unwrap().allocate(8).unwrap();
    assert_eq!(Cuda::pointer(strict.piece(0, 8).unwrap()), None);
}

/// Needs NVRTC, but no GPU.
#[test]
fn the_kernels_are_compiled_by_nvrtc() {
    // Machine code for a device that it supports, PTX for a later one.
    let (code, ptx) = match (compiled(reducer::SOURCE, (7, 5)), compiled(reducer::SOURCE, (99, 0))) {
        (Ok(code), Ok(ptx)) => (code, ptx),
        (Err(error), _) | (_, Err(error)) => {
            assert!(matches!(error, GpuError::Unsupported { .. }), "{error}");
            return;
        }
    };
    assert!(code.starts_with("\x7fELF") && ptx.ends_with('\0'));
    for data_type in DataType::ALL {
        let of_two = ReduceOp::ALL.map(|op| format!("{op}_{data_type}"));
        let of_many = ReduceOp::ALL.map(|op| format!("{op}_{data_type}_of_many"));
        for kernel in of_two.into_iter().chain(of_many).chain([format!("scaled_{data_type}")]) {
            assert!(ptx.contains(&format!(".entry {kernel}(")), "no {kernel} in {ptx}");
            assert!(code.contains(&format!(".text.{kernel}\0")), "no {kernel}");
        }
    }
    // Operations are not fused, and subnormal numbers are not flushed to zero.
    assert!(!ptx.contains("fma.") && !ptx.contains(".ftz"), "{ptx}");
    let refused = compiled(c"void kernel( {", (7, 5)).unwrap_err().to_string();
    let expected =
        "cuda:0: nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6) for compute capability 75: reduce.c(1)";
    assert!(refused.starts_with(expected), "{refused}");
    let refused = compiled(reducer::SOURCE, (1, 0)).unwrap_err().to_string();
    assert!(refused.contains("NVRTC compiles for no device as old as compute capability 1.0"), "{refused}");
}

/// Checks the differences from OpenCL C, with a compiler other than NVIDIA's.
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
    assert_eq!(refused, format!("cuda:{}: {}", listed.len(), crate::gpu::choices("cuda", listed.len())));
}

#[test]
fn memory_is_zeroed_written_and_read() {
    let Some(device) = first() else { return };
    let mut memory = device.allocate(100_000).unwrap();
    assert_eq!((memory.kind(), bytes_of(&memory)), (MemoryKind::Device, vec![0; 100_000]));
    assert_eq!(Cuda::pointer(piece(&memory, 0, 1)), Some(memory.address().as_ptr() as u64));
    let bytes = random(&mut ChaCha8Rng::seed_from_u64(1), 5000);
    memory.write(77, &bytes).unwrap();
    assert_eq!(bytes_of(&memory)[77..5077], bytes);
    assert!(memory.span(0, 1).is_none() && memory.write(99_999, &[0; 2]).is_err());
    assert_eq!(device.allocate(0).unwrap().len(), 0);
    let refused = device.allocate(1 << 50).unwrap_err().to_string();
    assert_eq!(refused, "cuda:0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

#[test]
fn memory_is_exported_if_the_driver_supports_it() {
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
    tests::copies_are_there_when_they_have_ended(&*device);
}

#[test]
fn memory_of_another_handle_is_refused() {
    let (Some(device), Some(other)) = (first(), first()) else { return };
    let memory = other.allocate(10).unwrap();
    let mut queue = device.queue(&Staging::new(10).unwrap()).unwrap();
    let gather = || queue.gather(Nanos(0), &[piece(&memory, 0, 10)], 0);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(gather)).unwrap_err();
    let said = panic.downcast_ref::<String>().unwrap();
    assert_eq!(said, "memory of another device, or of another handle of it, in a queue of cuda:0");
}

#[test]
fn reductions_are_those_of_the_processor() {
    let Some(device) = first() else { return };
    let mut reducer = device.reducer().unwrap();
    if let Err(error @ GpuError::Unsupported { .. }) = device.module() {
        return println!("skipped: {error}");
    }
    tests::reductions_are_those_of_the_processor(&*device, &mut *reducer);
    let memory = Arc::new(device.allocate(64).unwrap());
    let sum = Computation::Reduce(Reduction::new(DataType::F32, ReduceOp::Sum));
    // Misaligned memory.
    let askew = Cuda::pointer(piece(&memory, 2, 1)).unwrap();
    // SAFETY: bytes of the memory, which is kept.
    let imported = unsafe { device.import(askew, 16, Arc::clone(&memory) as _) }.unwrap();
    let target = piece(&memory, 0, 16);
    let refused = reducer.compute(Nanos(0), sum, target, &[target, piece(&imported, 0, 16)]);
    assert!(matches!(refused, Err(GpuError::Unaligned { size: 4, offset, .. }) if offset == askew));
    let ticket = reducer.compute(Nanos(0), sum, piece(&memory, 0, 0), &[piece(&memory, 0, 0); 2]).unwrap();
    wait(&mut *reducer, ticket);
}

#[test]
fn memory_of_others_is_imported() {
    let (Some(theirs), Some(ours)) = (first(), first()) else { return };
    let mut tensor = theirs.allocate(1000).unwrap();
    tensor.write(0, &[7; 1000]).unwrap();
    let pointer = Cuda::pointer(piece(&tensor, 0, 1)).unwrap();
    let tensor = Arc::new(tensor);
    let owner = Arc::downgrade(&tensor);
    // SAFETY: bytes of the tensor, which is kept.
    let mut imported = unsafe { ours.import(pointer + 100, 900, tensor) }.unwrap();
    assert_eq!((imported.len(), bytes_of(&imported)), (900, vec![7; 900]));
    imported.write(10, b"written").unwrap();
    let mut found = [0; 7];
    owner.upgrade().unwrap().read(110, &mut found).unwrap();
    assert_eq!(&found, b"written");
    // More than the allocation, host memory, and an invalid address.
    let nobody: Arc<dyn Any + Send + Sync> = Arc::new(());
    // SAFETY: these calls are refused, or import bytes of the tensor.
    let import = |pointer, len| unsafe { ours.import(pointer, len, Arc::clone(&nobody)) };
    let refused = import(pointer, 64 << 20).unwrap_err().to_string();
    assert!(refused.contains("67108864 bytes at 0x") && refused.contains("its allocation is "), "{refused}");
    assert!(import(pointer, usize::MAX).is_err());
    for pointer in [0, 0x10, (&raw const refused) as u64] {
        let refused = import(pointer, 8).unwrap_err().to_string();
        assert!(refused.contains("no address of CUDA's"), "{refused}");
    }
    // The tensor is kept while it is imported.
    assert!(owner.upgrade().is_some());
    drop(imported);
    assert!(owner.upgrade().is_none());
}
