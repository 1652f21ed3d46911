use cl3::memory::{
    CL_MEM_HOST_NO_ACCESS, CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_WRITE_ONLY, CL_MEM_READ_WRITE, create_buffer,
    release_mem_object,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::*;
use crate::MemoryKind;
use crate::gpu::strict::Strict;
use crate::gpu::tests::{self, bytes_of, random};

/// As `ferroce_driver_test_support::opencl::first`, whose types are of another instance of this crate.
fn first() -> Option<Arc<OpenCl>> {
    match open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI tests everything: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

#[test]
fn devices_are_listed_and_opened_by_their_number() {
    let Some(device) = first() else { return };
    let listed = devices().unwrap();
    assert!(listed.iter().map(|found| found.index).eq(0..listed.len()));
    assert!(!listed[0].name.is_empty() && !listed[0].platform.is_empty() && listed[0].memory > 1 << 20);
    assert_eq!(Device::name(&*device), "opencl:0");
    let refused = open(listed.len()).unwrap_err().to_string();
    assert_eq!(refused, format!("opencl:{}: {}", listed.len(), crate::gpu::choices("opencl", listed.len())));
}

#[test]
fn memory_is_zeroed_written_and_read() {
    let Some(device) = first() else { return };
    let mut memory = device.allocate(100_000).unwrap();
    assert_eq!((memory.kind(), bytes_of(&memory)), (MemoryKind::Device, vec![0; 100_000]));
    let bytes = random(&mut ChaCha8Rng::seed_from_u64(1), 5000);
    memory.write(77, &bytes).unwrap();
    assert_eq!(bytes_of(&memory)[77..5077], bytes);
    assert!(memory.span(0, 1).is_none() && memory.write(99_999, &[0; 2]).is_err());
    let refused = memory.export().unwrap_err().to_string();
    assert!(refused.contains("OpenCL exports none"), "{refused}");
    assert_eq!(device.allocate(0).unwrap().len(), 0);
}

#[test]
fn copies_are_there_when_they_have_ended() {
    let Some(device) = first() else { return };
    tests::copies_are_there_when_they_have_ended(&*device);
}

#[test]
fn reductions_are_those_of_the_processor() {
    let Some(device) = first() else { return };
    let mut reducer = device.reducer().unwrap();
    tests::reductions_are_those_of_the_processor(&*device, &mut *reducer);
}

#[test]
fn buffers_of_a_programs_own_context_are_imported() {
    let Some(theirs) = first() else { return };
    // SAFETY: a context and one of its devices.
    let ours = unsafe { OpenCl::of_context("tensors", theirs.context(), theirs.id()) }.unwrap();
    let mut tensor = theirs.allocate(1000).unwrap();
    tensor.write(0, &[7; 1000]).unwrap();
    let (buffer, 0) = OpenCl::buffer(tensor.piece(0, 1000).unwrap()).unwrap() else { panic!("an offset") };
    // SAFETY: a buffer.
    let mut imported = unsafe { ours.import(buffer) }.unwrap();
    assert_eq!((imported.len(), bytes_of(&imported)), (1000, vec![7; 1000]));
    imported.write(10, b"written").unwrap();
    assert_eq!(&bytes_of(&tensor)[10..17], b"written");
    // The last reference keeps the buffer.
    drop(tensor);
    assert_eq!(&bytes_of(&imported)[10..17], b"written");
    // A buffer of another context is refused.
    let other = first().unwrap();
    // SAFETY: a buffer.
    let refused = unsafe { other.import(buffer) }.unwrap_err().to_string();
    assert!(refused.contains("a buffer of another context"), "{refused}");
    let strict = Strict::default().open().unwrap().allocate(8).unwrap();
    assert_eq!(OpenCl::buffer(strict.piece(0, 8).unwrap()), None);
    assert_eq!(OpenCl::buffer(imported.piece(30, 8).unwrap()), Some((buffer, 30)));
}

#[test]
fn buffers_that_the_host_may_not_copy_are_refused() {
    let Some(device) = first() else { return };
    for (flag, name) in [
        (CL_MEM_HOST_NO_ACCESS, "CL_MEM_HOST_NO_ACCESS"),
        (CL_MEM_HOST_READ_ONLY, "CL_MEM_HOST_READ_ONLY"),
        (CL_MEM_HOST_WRITE_ONLY, "CL_MEM_HOST_WRITE_ONLY"),
    ] {
        // SAFETY: a context, and no host memory.
        let raw =
            unsafe { create_buffer(device.context(), CL_MEM_READ_WRITE | flag, 64, null_mut()) }.unwrap();
        // SAFETY: a buffer.
        let refused = unsafe { device.import(raw) }.unwrap_err().to_string();
        assert!(refused.contains(name), "{refused}");
        // SAFETY: it was created above, and has no other owner.
        unsafe { release_mem_object(raw) }.unwrap();
    }
}
