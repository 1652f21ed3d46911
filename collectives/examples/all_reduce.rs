//! An all-reduce: each rank brings a million numbers, and all of them get the sums.
//!
//! Alone, four ranks as threads of one process: `cargo run -p ferroce-collectives --example all_reduce`
//!
//! In two terminals, each a rank; `udp:ADDRESS` is an address of that host, `eth0` an interface. Rank 0 is met at
//! `MASTER_ADDR`, by TCP; torchrun sets the same variables.
//!
//! ```sh
//! export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
//! RANK=0 cargo run -p ferroce-collectives --example all_reduce udp:127.0.0.1
//! RANK=1 cargo run -p ferroce-collectives --example all_reduce udp:127.0.0.2
//! ```

use std::error::Error;
use std::net::TcpListener;
use std::thread;

use ferroce_collectives::ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce_collectives::ferroce::{Config, Context, Device};
use ferroce_collectives::{Bootstrap, Collectives, DataType, Operation, Options, ReduceOp};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

const COUNT: usize = 1 << 20;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => alone(4),
        [device] => reduce(Device::open(device)?, Bootstrap::from_env()?),
        _ => {
            Err("usage: all_reduce; all_reduce DEVICE, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
                .into())
        }
    }
}

fn alone(ranks: u8) -> Outcome {
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
        let port = Box::new(switch.port(&[[192, 0, 2, rank + 1].into()]));
        threads.push(thread::spawn(move || reduce(port.into(), bootstrap)));
    }
    threads.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank has panicked")?)
}

/// What one rank does.
fn reduce(device: Device, bootstrap: Bootstrap) -> Outcome {
    let context = Context::open(device, &Config::default())?;
    let mut collectives = Collectives::new(context)?;
    let all = collectives.join(bootstrap, &Options::default())?;
    let (rank, size) = (all.rank(), all.size());

    let own = (rank as f32 + 1.0).to_ne_bytes();
    let buffer = collectives.allocate(size_of::<f32>() * COUNT)?;
    collectives.write(buffer, 0, &own.repeat(COUNT))?;
    // In place: input and output are the same buffer.
    collectives.run(all, &Operation::all_reduce(buffer, buffer, COUNT, DataType::F32, ReduceOp::Sum))?;

    let mut sums = vec![0; size_of::<f32>() * COUNT];
    collectives.read(buffer, 0, &mut sums)?;
    let expected = (1..=size).sum::<u32>() as f32;
    let wrong = sums.chunks(size_of::<f32>()).filter(|sum| *sum != expected.to_ne_bytes()).count();
    println!("rank {rank} of {size}: {COUNT} sums, {wrong} of them wrong; each is {expected}");
    // Waits for the other ranks, which may still need an answer.
    collectives.finish()?;
    if wrong == 0 { Ok(()) } else { Err(format!("rank {rank} has {wrong} wrong sums").into()) }
}

#[cfg(test)]
#[test]
fn each_rank_gets_the_sums() {
    alone(4).expect("each sum is right");
}
