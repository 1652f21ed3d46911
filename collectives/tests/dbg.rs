#![allow(clippy::unwrap_used)]
mod group;
use ferroce_collectives::*;
use group::run;
#[test]
fn hang() {
    for bytes in [200_000, 262_080, 262_144, 1 << 20] {
        let start = std::time::Instant::now();
        run(2, Options::default(), None, std::time::Duration::from_secs(20), move |mut ranks, all| {
            let a = ranks.allocate(bytes).unwrap();
            let b = ranks.allocate(bytes).unwrap();
            for i in 0..50 {
                ranks
                    .run(all, &Operation::all_reduce(a, b, bytes / 4, DataType::I32, ReduceOp::Sum))
                    .unwrap();
                if all.rank() == 0 && i % 10 == 0 {
                    println!("{bytes} {i}");
                }
            }
            ranks.finish().unwrap();
        });
        println!("{bytes} {:?}", start.elapsed());
    }
}
