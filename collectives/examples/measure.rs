//! throw-away
use ferroce::{Config, Context, Device};
use ferroce_collectives::*;
use std::time::Instant;
fn main() {
    let device = std::env::args().nth(1).unwrap();
    let only: Option<usize> = std::env::var("ONLY").ok().and_then(|v| v.parse().ok());
    let mut options = Options::default();
    if let Ok(a) = std::env::var("ALGORITHM") {
        options = options.algorithm(a.parse::<Algorithm>().unwrap());
    }
    if let Ok(a) = std::env::var("CHUNK") {
        options = options.chunk_bytes(a.parse().unwrap());
    }
    if let Ok(a) = std::env::var("EAGER") {
        options = options.eager_bytes(a.parse().unwrap());
    }
    let context = Context::open(Device::open(&device).unwrap(), &Config::default()).unwrap();
    let mut c = Collectives::new(context).unwrap();
    let all = c.join(Bootstrap::from_env().unwrap(), &options).unwrap();
    let max = 64 << 20;
    let b = c.allocate(max).unwrap();
    let o = c.allocate(max).unwrap();
    for (s, it) in [
        (256, 3000),
        (4096, 3000),
        (16384, 2000),
        (65536, 1000),
        (262144, 400),
        (1 << 20, 200),
        (4 << 20, 60),
        (64 << 20, 7),
    ] {
        if only.is_some_and(|o| o != s) {
            continue;
        }
        let op = Operation::all_reduce(b, o, s / 4, DataType::F32, Reduction::Sum);
        for _ in 0..it / 10 + 2 {
            c.run(all, &op).unwrap();
        }
        let p0 = c.context().driver_stats().tx_frames;
        let mut t = Vec::new();
        for _ in 0..it {
            c.run(all, &Operation::barrier()).unwrap();
            let a = Instant::now();
            c.run(all, &op).unwrap();
            t.push(a.elapsed().as_nanos() as f64 / 1e3);
        }
        let a = Instant::now();
        let p1 = c.context().driver_stats().tx_frames;
        for _ in 0..it {
            c.run(all, &op).unwrap();
        }
        let bb = a.elapsed().as_nanos() as f64 / 1e3 / it as f64;
        let p2 = c.context().driver_stats().tx_frames;
        t.sort_by(|a, b| a.total_cmp(b));
        if all.rank() == 0 {
            println!(
                "{s:9} B median {:10.2} us p99 {:10.2} back-to-back {bb:10.2} us packets {:.2} ({:.2})",
                t[it / 2],
                t[it * 99 / 100],
                (p2 - p1) as f64 / it as f64,
                (p1 - p0) as f64 / it as f64
            );
        }
    }
    c.finish().unwrap();
}
