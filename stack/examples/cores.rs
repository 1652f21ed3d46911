//! Several contexts on several cores, each with its port and its runner; an application thread for each.
//!
//! Here the ports are of a switch in this process. Queues of an interface are opened in their place with
//! `Device::open(&format!("af_xdp:eth0:{n}"))?`, a context for each queue. Each context
//! writes to itself for a second.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce::*;

const DEPTH: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let switch = Switch::new(SwitchConfig::default())?;
    let ports = (1..=4).map(|n| Box::new(switch.port(&[[10, 0, 0, n].into()])));
    let cores = thread::available_parallelism()?.get();
    let mut runners = Vec::new();
    for (n, port) in ports.enumerate() {
        let (context, writer) = Writer::new(port)?;
        let name = context.port().interface.clone();
        let runner = Runner::start(context, &RunnerConfig::default().core(n % cores))?;
        runners.push((name, runner, writer));
    }
    // One thread could have a handle to each of them as well.
    thread::scope(|scope| {
        let writing = |(name, runner, writer): &(String, Runner, Writer)| {
            let rate = writer.run(runner.handle(&HandleConfig::default())?)?;
            println!("{name}: {rate:.0} WRITEs of 8 bytes in a second");
            Ok(())
        };
        let threads: Vec<_> = runners.iter().map(|runner| scope.spawn(move || writing(runner))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
    .map_err(|error: ferroce::Error| error.into())
}

/// A queue pair that is connected to itself.
struct Writer {
    cq: Cq,
    qp: Qp,
    remote: RemoteAddress,
}

impl Writer {
    fn new(port: Box<dyn PacketDriver>) -> Result<(Context, Writer), Box<dyn Error>> {
        let mut context = Context::open(port, &Config::default())?;
        let (pd, cq) = (context.alloc_pd()?, context.create_cq(1024)?);
        let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
        let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        // GID index 0: the port has one address.
        let own = context.endpoint(qp, 0)?;
        context.handshake(qp, &own, &own)?;
        let remote = context.remote(mr)?.at(0);
        Ok((context, Writer { cq, qp, remote }))
    }

    /// WRITEs in a second, as many as go.
    fn run(&self, mut handle: RunnerHandle) -> Result<f64, ferroce::Error> {
        handle.deliver(self.cq)?;
        let (mut posted, mut ended, start) = (0, 0, Instant::now());
        while start.elapsed() < Duration::from_secs(1) || ended < posted {
            let more = start.elapsed() < Duration::from_secs(1);
            let (op, data, flags) = (SendOp::Write(self.remote), Data::Inline(&[7; 8]), SendFlags::SIGNALED);
            while more
                && posted - ended < DEPTH
                && handle.post_send(self.qp, &SendWorkRequest { wr_id: posted, op, data, flags }).is_ok()
            {
                posted += 1;
            }
            match handle.wait(Duration::from_secs(5))? {
                Some(Delivery::Completed { completion, .. }) if completion.status == WcStatus::Success => {
                    ended += 1
                }
                other => panic!("a WRITE failed: {other:?}"),
            }
        }
        Ok(ended as f64 / start.elapsed().as_secs_f64())
    }
}
