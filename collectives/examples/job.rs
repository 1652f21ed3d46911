//! A job as one would write it: several ports a rank, buffers in memory of a GPU where there is one, and a rank that dies in the middle.
//!
//! Alone, four ranks as threads of one process, of which the last one ends without a word:
//! `cargo run -p ferroce-collectives --example job`
//!
//! As ranks of torchrun, mpirun or srun, with a port of each of two networks (their *rails*), and a GPU by OpenCL:
//!
//! ```sh
//! export FERROCE_FLIGHT_DIR=/var/tmp/job   # where a communicator that fails leaves a recording for `ferroce flight`
//! mpirun -np 4 -H node1,node2,node3,node4 target/debug/examples/job eth0+eth1 opencl:0
//! ```

use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferroce_collectives::ferroce::driver::gpu::{self, GpuSpec};
use ferroce_collectives::ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce_collectives::ferroce::{Config, Context, Device};
use ferroce_collectives::{Bootstrap, Collectives, DataType, Operation, Options, ReduceOp};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const COUNT: usize = 1 << 20;
const STEPS: u32 = 10;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (ports, gpu) = match arguments.as_slice() {
        [] => return alone(4).map(drop),
        [ports] => (ports, None),
        [ports, gpu] => (ports, Some(gpu.parse::<GpuSpec>()?.open()?)),
        _ => return Err("usage: job; job PORT[+PORT...] [GPU], as a rank of torchrun, mpirun or srun".into()),
    };
    let ports = ports.split('+').map(Device::open).collect::<Result<_, _>>()?;
    // How long a rank may be silent before the others give it up: 8 times the ACK timeout. One that computes for long between
    // operations needs that much, or a `Runner`.
    let options = Options::default().ack_timeout(Duration::from_secs(4));
    work(ports, gpu, Bootstrap::from_env()?, &options, STEPS).map(drop)
}

/// What one rank does: `steps` of [`STEPS`], for it may end before. Returns the sum of the last step, and of how many ranks it is.
fn work(
    ports: Vec<Device>,
    gpu: Option<Arc<dyn gpu::Device>>,
    bootstrap: Bootstrap,
    options: &Options,
    steps: u32,
) -> Outcome<(f32, u32)> {
    let mut contexts = Vec::new();
    for port in ports {
        let mut context = Context::open(port, &Config::default())?;
        // For `ferroce stat`. A program that nobody can look at works as well.
        if let Err(error) = context.export() {
            eprintln!("not shown by ferroce stat: {error}");
        }
        contexts.push(context);
    }
    let mut contexts = contexts.into_iter();
    let first = contexts.next().ok_or("no port")?;
    let mut collectives = match gpu {
        Some(gpu) => Collectives::on_device(first, gpu)?,
        None => Collectives::new(first)?,
    };
    contexts.try_for_each(|context| collectives.add_rail(context))?;
    let mut all = collectives.join(bootstrap, options)?;

    // Of the GPU if there is one. All ranks of a communicator call the same operations in the same order.
    let buffer = collectives.allocate(size_of::<f32>() * COUNT)?;
    let mut sums = vec![0; size_of::<f32>() * COUNT];
    let mut step = 0;
    while step < steps {
        // Operations wait for no stream of the GPU: a kernel that fills the buffer must have ended here.
        collectives.write(buffer, 0, &(step as f32 + 1.0).to_ne_bytes().repeat(COUNT))?;
        let sum = Operation::all_reduce(buffer, buffer, COUNT, DataType::F32, ReduceOp::Sum);
        match collectives.run(all, &sum) {
            Ok(()) => {
                collectives.read(buffer, 0, &mut sums)?;
                step += 1;
            }
            // The communicator is of no use any more, at no rank; outputs hold anything. Who is left goes on, with new rank numbers.
            Err(error @ ferroce_collectives::Error::Failed { .. }) => {
                eprintln!("step {step}: {error}");
                all = collectives.shrink(all)?;
                eprintln!("going on as rank {} of {}", all.rank(), all.size());
                // The ranks need not have failed in the same step: they agree on the first that one of them lacks.
                step = agree(&mut collectives, all, step)?;
            }
            // Wrong arguments, or no memory: nothing has been begun.
            Err(error) => return Err(error.into()),
        }
    }
    if steps < STEPS {
        // As if it was killed.
        std::mem::forget(collectives);
    } else {
        // Waits for the other ranks, which may still need an answer.
        collectives.finish()?;
    }
    let sum = f32::from_ne_bytes([sums[0], sums[1], sums[2], sums[3]]);
    Ok((sum, all.size()))
}

/// The least step of all ranks.
fn agree(collectives: &mut Collectives, all: ferroce_collectives::Communicator, step: u32) -> Outcome<u32> {
    let room = collectives.allocate(4)?;
    collectives.write(room, 0, &step.to_ne_bytes())?;
    collectives.run(all, &Operation::all_reduce(room, room, 1, DataType::U32, ReduceOp::Min))?;
    let mut least = [0; 4];
    collectives.read(room, 0, &mut least)?;
    collectives.deregister(room)?;
    Ok(u32::from_ne_bytes(least))
}

/// Ranks as threads, of which the last one ends after half of the steps. What the others have in the end.
fn alone(ranks: u8) -> Outcome<Vec<(f32, u32)>> {
    let switch = Switch::new(SwitchConfig::default())?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let master = listener.local_addr()?;
    let mut listener = Some(listener);
    let mut threads = Vec::new();
    for rank in 0..ranks {
        let mut bootstrap = Bootstrap::new(rank.into(), ranks.into(), master)?;
        if let Some(listener) = listener.take() {
            bootstrap = bootstrap.listener(listener);
        }
        // Two rails.
        let ports = [1, 2].map(|net| switch.port(&[[192, 0, net, rank + 1].into()]));
        let ports = ports.into_iter().map(|port| Device::from(Box::new(port) as Box<_>)).collect();
        let steps = if rank + 1 == ranks { STEPS / 2 } else { STEPS };
        let options = Options::default().ack_timeout(Duration::from_millis(100));
        threads.push(thread::spawn(move || work(ports, None, bootstrap, &options, steps)));
    }
    let mut ends = Vec::new();
    for (rank, thread) in threads.into_iter().enumerate() {
        let (sum, size) = thread.join().map_err(|_| "a rank has panicked")??;
        println!("rank {rank}: the last sum is {sum}, of {size} ranks");
        ends.push((sum, size));
    }
    Ok(ends)
}

#[cfg(test)]
#[test]
fn the_others_continue_without_the_dead_rank() {
    let ends = alone(4).expect("those that are left have their sums");
    assert_eq!(ends[..3], [(3.0 * STEPS as f32, 3); 3]);
}
