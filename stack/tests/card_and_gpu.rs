//! GPU memory that is registered with a card: by its dma-buf, or an error with the remedy.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::driver::rnic::Verbs;
use ferroce::*;
use ferroce_driver_test_support::file_gpu::{FileGpu, descriptors};
use ferroce_driver_test_support::rnic_stub::{INTEL, Stub};

const LEN: usize = 8192;

fn open(stub: &Stub) -> Context {
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let port = RnicPort::open_by(&verbs, "stub0", None, None).unwrap();
    Context::open(port, &Config::default().seed([3; 32])).unwrap()
}

/// Polls until there is a completion.
fn completed(context: &mut Context, cq: Cq, now: &mut u64) -> WorkCompletion {
    for _ in 0..1000 {
        *now += 1;
        context.poll(Nanos(*now)).unwrap();
        if let Some(told) = context.poll_cq(cq).unwrap() {
            return told;
        }
    }
    panic!("no completion");
}

#[test]
fn gpu_memory_is_accessed_by_the_card_and_read_by_the_device() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    stub.set_vendor(INTEL);
    let mut context = open(&stub);
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let qps = [(); 2].map(|()| context.create_qp(&QpConfig::rc(pd, cq)).unwrap());
    let ends = qps.map(|qp| context.endpoint(qp, 0).unwrap());
    context.handshake(qps[0], &ends[0], &ends[1]).unwrap();
    context.handshake(qps[1], &ends[1], &ends[0]).unwrap();

    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let (mut memory, file) = FileGpu::default().memory(LEN);
    memory.write(0, b"from the GPU").unwrap();
    let gpu = context.register_at(pd, memory, rights, 0x5000).unwrap();
    let host = context.register(pd, Memory::zeroed(LEN).unwrap(), rights).unwrap();
    let [own, for_peers] = stub.dma_bufs()[..] else { panic!("{:?}", stub.dma_bufs()) };
    assert_eq!(((own.dev, own.ino), (for_peers.dev, for_peers.ino)), (file, file));
    assert_eq!((own.offset, own.length, for_peers.iova), (0, LEN as u64, 0x5000));
    let remote = context.remote(gpu).unwrap();
    assert_eq!((remote.addr, u64::from(remote.rkey.value())), (0x5000, for_peers.rkey));

    let mut now = 0;
    let sges = [gpu.sge(5..12)];
    for (wr_id, op) in [
        (1, SendOp::Write(context.remote(host).unwrap().at(100))),
        // Back, to another offset.
        (2, SendOp::Read(context.remote(host).unwrap().at(98))),
    ] {
        let (data, flags) = (Data::Sges(&sges), SendFlags::SIGNALED);
        context.post_send(qps[0], &SendWorkRequest { wr_id, op, data, flags }).unwrap();
        assert_eq!(stub.last_piece(), (own.iova + 5, 7, own.lkey as u32));
        let told = completed(&mut context, cq, &mut now);
        assert_eq!((told.wr_id, told.status), (wr_id, WcStatus::Success));
    }
    let mut bytes = [0; 12];
    context.read(host, 100, &mut bytes[..7]).unwrap();
    assert_eq!(&bytes[..7], b"the GPU");
    context.read(gpu, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from \0\0the G");
    context.write(gpu, 0, b"written by a copy").unwrap();
    context.store_u64(gpu, 24, 77).unwrap();
    assert_eq!(context.load_u64(gpu, 24).unwrap(), 77);
    for error in [
        context.bytes(gpu).unwrap_err().to_string(),
        context.bytes_mut(gpu).map(drop).unwrap_err().to_string(),
    ] {
        assert!(error.contains("has no slices") && error.contains("use read and write"), "{error}");
    }
    let error = context.atomics(gpu).unwrap_err().to_string();
    assert!(error.contains("memory of a device has no atomics"), "{error}");

    let memory = context.deregister(gpu).unwrap();
    assert_eq!((memory.kind(), memory.len(), descriptors(file)), (MemoryKind::Device, LEN, 1));
    let mut bytes = [0; 17];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"written by a copy");
    drop((memory, context));
    assert_eq!((descriptors(file), stub.live_objects()), (0, 0));
}

#[test]
fn a_refusal_has_a_remedy_and_returns_the_memory() {
    type Wrong = fn(&Stub) -> FileGpu;
    let kept: Wrong = |_| FileGpu { offset: 0, keeps: true };
    let not_taken: Wrong = |stub| {
        stub.refuse_dma_buf(95);
        FileGpu::default()
    };
    let as_usual: Wrong = |_| FileGpu::default();
    for (setting, wrong, rights, words) in [
        (
            "NOTHING_WRONG",
            not_taken,
            Access::LOCAL_WRITE,
            "ibv_reg_dmabuf_mr of stub0: Operation not supported (os error 95); the card, its driver or this kernel \
             does not accept memory of a GPU (8192 bytes of files:0) as a dma-buf",
        ),
        (
            "MISSING_REG_DMABUF_MR",
            as_usual,
            Access::LOCAL_WRITE,
            "ibv_reg_dmabuf_mr of stub0: this libibverbs has no such function; that of rdma-core 34 or later has it",
        ),
        (
            "NOTHING_WRONG",
            kept,
            Access::LOCAL_WRITE,
            "stub0 accesses memory of a GPU through a dma-buf, and there is none: files:0: a dma-buf of its memory: \
             it has none",
        ),
        ("NOTHING_WRONG", as_usual, Access::MW_BIND, "access = MW_BIND: none for memory of a GPU"),
    ] {
        let Some(stub) = Stub::build(&[setting]) else { return };
        stub.set_vendor(INTEL);
        let mut context = open(&stub);
        let pd = context.alloc_pd().unwrap();
        let (memory, file) = wrong(&stub).memory(LEN);
        let RegisterError { memory, source, .. } = context.register(pd, memory, rights).unwrap_err();
        let text = source.to_string();
        assert!(text.contains(words), "{text}");
        if rights == Access::LOCAL_WRITE {
            let remedy = "register memory of the host and copy (Memory::read and write, or a gpu::Queue), or use the software";
            assert!(text.contains(remedy), "{text}");
        }
        assert_eq!((memory.kind(), descriptors(file)), (MemoryKind::Device, 1));
        // The card continues to work.
        let host = context.register(pd, Memory::zeroed(LEN).unwrap(), rights).unwrap();
        context.deregister(host).unwrap();
        context.dealloc_pd(pd).unwrap();
    }
}
