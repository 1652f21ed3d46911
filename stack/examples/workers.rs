//! A runner with three workers: the context is on a thread of its own, and each worker is a thread with a handle, a
//! completion queue and a queue pair. A worker sleeps until a request is there, and answers it with its square.
//!
//! Who asks has a handle, too; here its queue pairs are at the same port, which is one inside this process.

use std::error::Error;
use std::thread;
use std::time::Duration;

use ferroce::driver::loopback;
use ferroce::*;

const WORKERS: usize = 3;
const REQUESTS: u32 = 1000;
const LONG: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn Error>> {
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
    let mut context = Context::open(Box::new(port), &Config::default())?;
    let (pd, asking) = (context.alloc_pd()?, context.create_cq(256)?);
    let mut pairs = Vec::new();
    for _ in 0..WORKERS {
        let answering = context.create_cq(64)?;
        let ours = context.create_qp(&QpConfig::rc(pd, asking))?;
        let theirs = context.create_qp(&QpConfig::rc(pd, answering))?;
        connect(&mut context, ours, theirs)?;
        connect(&mut context, theirs, ours)?;
        pairs.push((ours, theirs, answering));
    }
    let runner = Runner::start(context, &RunnerConfig { idle: Idle::Block, core: None })?;
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for &(_, qp, cq) in &pairs {
            let handle = runner.handle(&HandleConfig { idle: Idle::Block, ..HandleConfig::default() })?;
            workers.push(scope.spawn(move || work(handle, cq, qp)));
        }
        ask(runner.handle(&HandleConfig::default())?, asking, pairs.iter().map(|pair| pair.0).collect())?;
        for worker in workers {
            println!("a worker has answered {} requests", worker.join().map_err(|_| "it has panicked")??);
        }
        Ok(())
    })
}

fn work(mut handle: RunnerHandle, cq: Cq, qp: Qp) -> Result<u32, ferroce::Error> {
    handle.deliver(cq)?;
    handle.post_recv(qp, &RECEIVE)?;
    let (mut answered, mut acknowledged) = (0, 0);
    while acknowledged < REQUESTS {
        // In an asynchronous task it is `handle.next().await?`.
        match handle.wait(LONG)? {
            Some(Delivery::Completed {
                completion: WorkCompletion { immediate: Some(number), .. }, ..
            }) => {
                handle.post_recv(qp, &RECEIVE)?;
                handle.post_send(qp, &message(number * number))?;
                answered += 1;
            }
            Some(Delivery::Completed { .. }) => acknowledged += 1,
            other => panic!("{other:?}"),
        }
    }
    Ok(answered)
}

/// A request at a time of each worker.
fn ask(mut handle: RunnerHandle, cq: Cq, qps: Vec<Qp>) -> Result<(), ferroce::Error> {
    handle.deliver(cq)?;
    let mut answered = [0; WORKERS];
    for &qp in &qps {
        handle.post_recv(qp, &RECEIVE)?;
        handle.post_send(qp, &message(0))?;
    }
    while answered != [REQUESTS; WORKERS] {
        let Some(Delivery::Completed { completion, .. }) = handle.wait(LONG)? else { panic!("no answer") };
        assert_eq!(completion.status, WcStatus::Success);
        let (Some(square), Some(n)) = (completion.immediate, qps.iter().position(|qp| *qp == completion.qp))
        else {
            continue; // a request was acknowledged
        };
        assert_eq!(square, answered[n] * answered[n]);
        answered[n] += 1;
        if answered[n] < REQUESTS {
            handle.post_recv(qps[n], &RECEIVE)?;
            handle.post_send(qps[n], &message(answered[n]))?;
        }
    }
    Ok(())
}

/// Requests and answers are immediates, so receives need no memory.
const RECEIVE: ReceiveWorkRequest<'static> = ReceiveWorkRequest { wr_id: 0, sges: &[] };

fn message(immediate: u32) -> SendWorkRequest<'static> {
    let (op, flags) = (SendOp::SendWithImm(immediate), SendFlags::SIGNALED);
    SendWorkRequest { wr_id: 0, op, data: Data::Inline(&[]), flags }
}

fn connect(context: &mut Context, qp: Qp, peer: Qp) -> Result<(), ferroce::Error> {
    let (gid, psn) = (context.port().gids[0].gid, Psn::new(1));
    let peer = ReadyToReceive::new(AddressVector::new(gid, 0), context.query_qp(peer)?.qpn, psn);
    context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    context.modify_qp(qp, Transition::ReadyToReceive(peer))?;
    context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(psn)))
}

#[cfg(test)]
#[test]
fn each_request_is_answered() {
    main().expect("each answer is right");
}
