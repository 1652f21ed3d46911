//! Memory of a GPU, by its dma-buf.

use std::{env, fs, process};

use ferroce_driver::gpu::Device as _;
use ferroce_driver::gpu::strict::Strict;
use ferroce_driver::rnic::{ProtectionDomain, Region, Remote, SendOperation, Verbs, access};
use ferroce_driver::{Error, Memory, MemoryError};
use ferroce_driver_test_support::file_gpu::{FileGpu, descriptors};
use ferroce_driver_test_support::rnic_stub::{DmaBufRegistration, HISILICON, INTEL, OPTIONAL, Stub, setting};

use crate::ends::{Kind, RC, REMOTE, good, pair, warnings};

const IOVA: u64 = 0x7000_1000;
const LEN: usize = 8192;
/// The end of the refusals.
const COPY: &str = "register memory of the host and copy (Memory::read and write, or a gpu::Queue), or use the software \
                    stack, which copies itself";

/// With cards whose provider does not copy with the CPU.
fn intel() -> Option<Stub> {
    let stub = good()?;
    stub.set_vendor(INTEL);
    Some(stub)
}

fn domain(stub: &Stub) -> ProtectionDomain {
    ProtectionDomain::new(&Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap()).unwrap()
}

/// Registers memory with contents, which is refused and returned.
fn refused(stub: &Stub, gpu: FileGpu, rights: u32, iova: u64) -> Error {
    let domain = domain(stub);
    let (mut memory, file) = gpu.memory(LEN);
    memory.write(5, b"here").unwrap();
    let live = stub.live_objects();
    let (memory, error) = Region::new(&domain, memory, rights, iova).unwrap_err();
    let mut bytes = [0; 4];
    memory.read(5, &mut bytes).unwrap();
    assert_eq!((&bytes, stub.live_objects(), descriptors(file)), (b"here", live, 1), "{error}");
    drop(memory);
    assert_eq!(descriptors(file), 0);
    error
}

/// Whether the addresses are reserved: a line of /proc/self/maps without rights contains them.
fn is_empty(first: u64, len: u64) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap());
        rest.starts_with("---p") && start <= first && first + len <= end
    })
}

#[test]
fn a_region_is_registered_by_the_descriptor_of_its_memory() {
    let Some(stub) = intel() else { return };
    let domain = domain(&stub);
    for (offset, iova) in [(0, IOVA), (0x3000, 0), (0x3210, IOVA + 0x210)] {
        let before = stub.dma_bufs().len();
        let (memory, (dev, ino)) = FileGpu { offset, keeps: false }.memory(LEN);
        let region = Region::new(&domain, memory, REMOTE, iova).unwrap();
        let [own, for_peers] = stub.dma_bufs()[before..] else { panic!("{:?}", stub.dma_bufs()) };
        let length = LEN as u64;
        let (lkey, rkey) = (u64::from(region.lkey()), u64::from(region.rkey()));
        let access = u64::from(access::LOCAL_WRITE);
        let told =
            DmaBufRegistration { dev, ino, offset, length, access, iova: own.iova, lkey, rkey: own.rkey };
        assert_eq!(own, told);
        let access = u64::from(REMOTE);
        assert_eq!(for_peers, DmaBufRegistration { access, iova, rkey, lkey: for_peers.lkey, ..told });
        // The addresses in work requests can't be written.
        assert!(own.iova % 4096 == offset % 4096 && is_empty(own.iova, length), "{own:x?}");
        // The kernel has a reference to the buffer.
        assert_eq!(descriptors((dev, ino)), 1);
        let memory = region.deregister().unwrap();
        drop(memory);
        assert_eq!(descriptors((dev, ino)), 0);
    }
    // This one is not for peers, so any addresses are possible.
    let before = stub.dma_bufs().len();
    let region = Region::new(&domain, FileGpu::default().memory(LEN).0, access::LOCAL_WRITE, 8).unwrap();
    assert_eq!((stub.dma_bufs().len(), region.len()), (before + 1, LEN));
    drop((region, domain));
    assert_eq!(stub.live_objects(), 0);
}

#[test]
fn work_requests_and_peers_reach_it() {
    let Some(stub) = intel() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let offset = 0x1000;
    let gpu = FileGpu { offset, keeps: false };
    let mut near = Region::new(&a.domain, gpu.memory(LEN).0, REMOTE, IOVA).unwrap();
    let mut far = Region::new(&b.domain, gpu.memory(LEN).0, REMOTE, IOVA).unwrap();
    let own = stub.dma_bufs().into_iter().find(|told| told.lkey == near.lkey().into()).unwrap().iova;
    let remote = |at: u64, rkey| Remote { addr: IOVA + at, rkey };

    // Short and long.
    for len in [16_u32, 3000] {
        let ours: Vec<u8> = (0..len).map(|byte| byte as u8 | 1).collect();
        let theirs: Vec<u8> = (0..len).map(|byte| byte as u8 ^ 0x55).collect();
        near.write(100, &ours).unwrap();
        far.write(4000, &theirs).unwrap();
        let mut bytes = vec![0; len as usize];

        let write = SendOperation::Write(remote(50, far.rkey()));
        assert_eq!(a.carry_out(write, &[near.piece(100, len)]).status, 0);
        assert_eq!(stub.last_piece(), (own + 100, len, near.lkey()));
        far.read(50, &mut bytes).unwrap();
        assert_eq!(bytes, ours);

        let read = SendOperation::Read(remote(4000, far.rkey()));
        assert_eq!(a.carry_out(read, &[near.piece(3100, len)]).status, 0);
        assert_eq!(stub.last_piece(), (own + 3100, len, near.lkey()));
        near.read(3100, &mut bytes).unwrap();
        assert_eq!(bytes, theirs);

        a.receive(1, &[near.piece(200, len)]);
        assert_eq!(stub.last_piece(), (own + 200, len, near.lkey()));
        assert_eq!(b.carry_out(SendOperation::Send, &[far.piece(4000, len)]).status, 0);
        assert_eq!(a.received()[0].status, 0);
        near.read(200, &mut bytes).unwrap();
        assert_eq!(bytes, theirs);
    }
    // The device accesses words, but has no atomics.
    near.store_u64(8, 7).unwrap();
    let add = SendOperation::FetchAdd { remote: remote(8, near.rkey()), add: 3 };
    assert_eq!((b.carry_out(add, &[far.piece(0, 8)]).status, near.load_u64(8).unwrap()), (0, 10));
    assert_eq!((far.load_u64(0).unwrap(), near.atomics().unwrap_err()), (7, MemoryError::NoAtomics));
    // Outside.
    let outside = a.carry_out(SendOperation::Write(remote(0, far.rkey())), &[near.piece(LEN as u64 - 1, 2)]);
    assert_eq!(outside.status, 4);
}

#[test]
fn a_refusing_card_is_named_with_the_remedy() {
    let Some(stub) = intel() else { return };
    for (errno, told) in [
        (libc::EOPNOTSUPP, "Operation not supported (os error 95)"),
        (libc::EPROTONOSUPPORT, "Protocol not supported (os error 93)"),
        (libc::ENOSYS, "Function not implemented (os error 38)"),
    ] {
        stub.refuse_dma_buf(errno);
        assert_eq!(
            refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string(),
            format!(
                "ibv_reg_dmabuf_mr of stub0: {told}; the card, its driver or this kernel does not accept memory of a \
                 GPU (8192 bytes of files:0) as a dma-buf: {COPY}"
            )
        );
    }
    stub.refuse_dma_buf(libc::EINVAL);
    assert_eq!(
        refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string(),
        format!(
            "ibv_reg_dmabuf_mr of stub0: Invalid argument (os error 22); the memory is a dma-buf with 8192 bytes of \
             files:0: {COPY}"
        )
    );
    stub.refuse_dma_buf(0);
    // The registration for this side, or the one for peers.
    for nth in [1, 2] {
        stub.fail(OPTIONAL, nth);
        let error = refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string();
        assert!(
            error.starts_with("ibv_reg_dmabuf_mr of stub0: Operation not supported (os error 95); "),
            "{error}"
        );
    }
}

#[test]
fn a_library_without_the_function_serves_all_except_gpus() {
    let Some(stub) = Stub::build(&[&setting("MISSING", OPTIONAL)]) else { return };
    stub.set_vendor(INTEL);
    assert_eq!(
        refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string(),
        format!(
            "ibv_reg_dmabuf_mr of stub0: this libibverbs has no such function; that of rdma-core 34 or later has it; {COPY}"
        )
    );
    let region = Region::new(&domain(&stub), Memory::zeroed(LEN).unwrap(), REMOTE, IOVA).unwrap();
    assert_eq!(region.deregister().unwrap().len(), LEN);
}

#[test]
fn a_gpu_that_exports_nothing_gives_the_reason() {
    let Some(stub) = intel() else { return };
    assert_eq!(
        refused(&stub, FileGpu { offset: 0, keeps: true }, REMOTE, IOVA).to_string(),
        format!(
            "stub0 accesses memory of a GPU through a dma-buf, and there is none: files:0: a dma-buf of its memory: it \
             has none; {COPY}"
        )
    );
    // The strict device either has the kernel's udmabuf, or none.
    let memory = Strict::default().open().unwrap().allocate(LEN).unwrap();
    let what = memory.export().map(drop);
    match Region::new(&domain(&stub), memory, REMOTE, IOVA) {
        Ok(region) => assert_eq!((what.is_ok(), region.len()), (true, LEN)),
        Err((_, error)) => {
            let said = what.unwrap_err().to_string();
            assert!(said.contains("/dev/udmabuf") && error.to_string().contains(&said), "{error}");
        }
    }
}

#[test]
fn invalid_requests_are_refused_before_the_card_is_called() {
    let Some(stub) = intel() else { return };
    stub.refuse_dma_buf(libc::EIO);
    assert_eq!(
        refused(&stub, FileGpu::default(), REMOTE | access::MW_BIND, IOVA).to_string(),
        "access = MW_BIND: none for memory of a GPU: the kernel has no windows there"
    );
    assert_eq!(
        refused(&stub, FileGpu { offset: 0x1230, keeps: false }, REMOTE, IOVA).to_string(),
        "iova = 0x70001000: 560 modulo 4096, like the memory's place in its dma-buf; register_at sets the iova"
    );
    assert!(stub.dma_bufs().is_empty());
}

/// The providers of ConnectX and HiSilicon copy received data with the CPU.
#[test]
fn a_card_whose_provider_copies_by_the_processor_is_refused() {
    let Some(stub) = good() else { return };
    let does_not_copy = env::var("MLX5_SCATTER_TO_CQE").is_ok_and(|set| set == "0");
    if does_not_copy {
        let (a, b) = pair(&stub, Kind::of(RC));
        let mut near = Region::new(&a.domain, FileGpu::default().memory(LEN).0, REMOTE, IOVA).unwrap();
        near.write(0, b"short").unwrap();
        a.receive(1, &[near.piece(8, 5)]);
        assert_eq!(b.carry_out(SendOperation::Send, &[b.piece(0, 5)]).status, 0);
        return;
    }
    assert_eq!(
        refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string(),
        format!(
            "MLX5_SCATTER_TO_CQE = (not set): 0 in the environment of the program, for stub0 to take memory of a GPU: \
             otherwise its provider copies short messages with the CPU, which can't reach that memory; or {COPY}"
        )
    );
    stub.set_vendor(HISILICON);
    assert_eq!(
        refused(&stub, FileGpu::default(), REMOTE, IOVA).to_string(),
        format!(
            "ibv_reg_dmabuf_mr of stub0: the card's provider copies short messages with the CPU, which can't reach memory \
             of a GPU; {COPY}"
        )
    );
    let name = "dma_buf::a_card_whose_provider_copies_by_the_processor_is_refused";
    let mut again = process::Command::new(env::current_exe().unwrap());
    let output = again.env("MLX5_SCATTER_TO_CQE", "0").args(["--exact", name]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn memory_is_kept_if_deregistration_fails() {
    let Some(stub) = intel() else { return };
    let domain = domain(&stub);
    let (memory, file) = FileGpu::default().memory(LEN);
    let region = Region::new(&domain, memory, REMOTE, IOVA).unwrap();
    let own = stub.dma_bufs()[0].iova;
    stub.fail("ibv_dereg_mr", 1);
    let (region, error) = region.deregister().unwrap_err();
    assert_eq!(error.to_string(), "ibv_dereg_mr of stub0: Device or resource busy (os error 16)");
    stub.fail("ibv_dereg_mr", 2);
    let warned = warnings(|| drop(region));
    assert!(warned.len() == 1 && warned[0].contains("ibv_dereg_mr of stub0"), "{warned:?}");
    assert!(descriptors(file) == 1 && is_empty(own, LEN as u64));
}
