//! A process that is killed while others communicate with it through shared memory. It has its own program, which counts
//! its mappings.
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferroce::*;

const LONG: Duration = Duration::from_secs(20);
const SIZE: usize = 1 << 18;

fn all() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE
}

/// A killed peer ends the work with an error, and its memory is released; its successor is found.
#[test]
fn a_peer_that_is_killed_ends_the_work_and_leaves_nothing() {
    const PEER: &str = "FERROCE_SHARED_MEMORY_PEER";
    let to: SocketAddr = "127.0.0.1:7472".parse().unwrap();
    if let Ok(device) = std::env::var(PEER) {
        return serve(&device, to);
    }
    let device = format!("shm:killed-{}", std::process::id());
    let start = || -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_peer_that_is_killed_ends_the_work_and_leaves_nothing", "--nocapture"]);
        command.env(PEER, &device).stdout(Stdio::piped()).spawn().unwrap()
    };
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("ferroce-shm")).count()
    };
    let mut context = Context::open(Device::open(&device).unwrap(), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(256).unwrap());
    let mr = context.register(pd, Memory::zeroed(SIZE).unwrap(), all()).unwrap();
    for round in 0..4 {
        let mut peer = start();
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: all() }).unwrap();
        let quick = ConnectionParameters::default().timeout_at_least(Duration::from_millis(10));
        // Until it listens.
        let deadline = Instant::now() + LONG;
        let answer = loop {
            match context.connect_blocking(qp, to, &quick, LONG) {
                Ok((_, answer)) => break answer,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let remote = RemoteMemory::from_bytes(&answer[..RemoteMemory::LEN]).unwrap();
        let op = SendOp::Write(RemoteAddress { addr: remote.addr, rkey: remote.rkey });
        let sges = [mr.sge(0..SIZE as u64)];
        let (mut completed, mut is_killed, mut failed, mut poller) = (0, false, None, Poller::new());
        let post = |context: &mut Context| {
            let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
            let _ = context.post_send(qp, &wr);
        };
        (0..8).for_each(|_| post(&mut context));
        while failed.is_none() {
            poller.poll(&mut context).unwrap();
            assert!(Instant::now() < deadline, "no completion in error");
            while let Some(wc) = context.poll_cq(cq).unwrap() {
                if wc.status != WcStatus::Success {
                    failed = failed.or(Some(wc.status));
                    continue;
                }
                completed += 1;
                // A ring in each direction; a process that replaces one that has just ended is asked for it after a while.
                if completed >= 50 + 37 * round && mapped() == 2 && !is_killed {
                    is_killed = true;
                    peer.kill().unwrap();
                }
                post(&mut context);
            }
        }
        assert_eq!(failed, Some(WcStatus::RetryExcErr));
        assert_eq!(peer.wait().unwrap().signal(), Some(9));
        while mapped() > 0 {
            poller.poll(&mut context).unwrap();
            assert!(Instant::now() < deadline, "memory of a process that is gone");
        }
        context.destroy_qp(qp).unwrap();
        while context.poll_cq(cq).unwrap().is_some() {}
    }
}

/// The process to be killed.
fn serve(device: &str, own: SocketAddr) {
    let mut context = Context::open(Device::open(device).unwrap(), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(256).unwrap());
    let mr = context.register(pd, Memory::zeroed(SIZE).unwrap(), all()).unwrap();
    let remote = context.remote(mr).unwrap().to_bytes();
    context.listen(PortSpace::Tcp, own, &ListenConfig::default()).unwrap();
    let mut poller = Poller::new();
    loop {
        poller.poll(&mut context).unwrap();
        if let Some(CmEvent::ConnectionRequest(request)) = context.next_cm_event() {
            let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
            context.modify_qp(qp, Transition::Init { access: all() }).unwrap();
            let parameters = ConnectionParameters::default().private_data(&remote);
            context.accept(request.id, qp, &parameters).unwrap();
        }
    }
}
