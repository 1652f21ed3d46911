//! A runner with three workers: the context is on a thread of its own, and each worker is a thread with a handle and a
//! completion queue. A worker sleeps until a request comes to its queue pair.
//!
//! Who asks has a handle, too. Here each queue pair is its own peer, so requests come from this program.

use std::error::Error;
use std::thread;
use std::time::Duration;

use ferroce::*;

const WORKERS: usize = 3;
const REQUESTS: u32 = 1000;
const LONG: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn Error>> {
    let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    let (pd, sent) = (context.alloc_pd()?, context.create_cq(256)?);
    let mut ends = Vec::new();
    for _ in 0..WORKERS {
        let received = context.create_cq(256)?;
        let qp = context.create_qp(&QpConfig::rc(pd, sent).recv_cq(received))?;
        // GID index 0: the port has one address.
        let own = context.endpoint(qp, 0)?;
        context.handshake(qp, &own, &own)?;
        ends.push((received, qp));
    }
    let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block))?;
    let handle = || runner.handle(&HandleConfig::default().idle(Idle::Block));
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for &(received, qp) in &ends {
            let handle = handle()?;
            workers.push(scope.spawn(move || work(handle, received, qp)));
        }
        ask(handle()?, sent, &ends)?;
        for worker in workers {
            let sum = worker.join().map_err(|_| "a worker has panicked")??;
            println!("a worker has had {REQUESTS} requests, and their sum is {sum}");
            assert_eq!(sum, REQUESTS * (REQUESTS - 1) / 2);
        }
        Ok(())
    })
}

/// Requests are numbers; they come as immediates, so receives need no memory.
fn work(mut handle: RunnerHandle, received: Cq, qp: Qp) -> Result<u32, ferroce::Error> {
    handle.deliver(received)?;
    let receive = ReceiveWorkRequest { wr_id: 0, sges: &[] };
    handle.post_recv(qp, &receive)?;
    let mut sum = 0;
    for _ in 0..REQUESTS {
        // In an asynchronous task it is `handle.next().await?`.
        let Some(Delivery::Completed { completion, .. }) = handle.wait(LONG)? else { panic!("no request") };
        handle.post_recv(qp, &receive)?;
        sum += completion.immediate.unwrap_or_default();
    }
    Ok(sum)
}

/// Asks all workers at once, and again when they have the requests.
fn ask(mut handle: RunnerHandle, sent: Cq, ends: &[(Cq, Qp)]) -> Result<(), ferroce::Error> {
    handle.deliver(sent)?;
    for number in 0..REQUESTS {
        for &(_, qp) in ends {
            let (op, flags) = (SendOp::SendWithImm(number), SendFlags::SIGNALED);
            handle.post_send(qp, &SendWorkRequest { wr_id: 0, op, data: Data::Inline(&[]), flags })?;
        }
        for _ in ends {
            let Some(Delivery::Completed { completion, .. }) = handle.wait(LONG)? else { panic!("no end") };
            assert_eq!(completion.status, WcStatus::Success);
        }
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn each_request_reaches_its_worker() {
    main().expect("each sum is right");
}
