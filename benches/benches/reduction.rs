//! Sums of two sources into the first of them, of every type, compared with a copy of one of them: as an all-reduce
//! adds received elements to its own. A copy transfers two bytes for each byte of a source, a sum of two sources three;
//! the ratio is that of transferred bytes.

use std::time::Instant;

use ferroce::driver::machine::Rounds;
use ferroce::driver::memory::SpanMut;
use ferroce::driver::reduction::{self, DataType, ReduceOp, Reduction};
use ferroce_benches::report::{Median, Options};
use serde_json::{Value, json};

/// Bytes of a source.
const SIZES: [usize; 3] = [4 << 10, 256 << 10, 16 << 20];

struct Scale {
    /// Of one source, in each round.
    bytes: usize,
    rounds: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let scale = options.scale(Scale { bytes: 16 << 20, rounds: 1 }, Scale { bytes: 256 << 20, rounds: 9 });
    let mut state = Rounds::new();
    println!(
        "sums of two sources in place ({}): GB/s of both sources, median of {} rounds (spread)",
        reduction::processor(),
        scale.rounds
    );
    println!(
        "of a copy: bytes read and written in a second, as a share of those of memcpy in the same round"
    );
    let rows = SIZES.iter().map(|size| measure(*size, &scale, &mut state)).collect::<Result<Vec<_>, _>>()?;
    let results = json!({ "level": reduction::processor(), "rows": rows.concat() });
    Ok(options.save_with(&state, results)?)
}

fn measure(size: usize, scale: &Scale, state: &mut Rounds) -> Result<Vec<Value>, Box<dyn std::error::Error>> {
    // Both are resident, and contain no values that are slower than numbers.
    let (mut own, theirs) = (vec![0_u8; size], vec![0_u8; size]);
    own.fill(1);
    let count = (scale.bytes / size).max(1);
    println!("\n{:>8} {:>9} {:>18} {:>18} {:>18}", "type", "bytes", "sum", "copy", "of a copy");
    let mut rows = Vec::new();
    for data_type in DataType::ALL {
        let sum = Reduction::new(data_type, ReduceOp::Sum);
        let rounds = state.hold(scale.rounds, |_| {
            let target = SpanMut::from(&mut own[..]);
            let theirs = theirs.as_slice().into();
            let copies = rate(count, size, || target.copy_from(theirs));
            let sums = rate(count, size, || sum.apply(&[target], &[target.as_span(), theirs]));
            Ok::<_, std::io::Error>([2.0 * sums, copies, 3.0 * sums / (2.0 * copies)])
        })?;
        let [sums, copies, share] = Median::of_each(&rounds);
        println!("{:>8} {size:>9} {} {} {}", data_type.to_string(), cell(sums), cell(copies), cell(share));
        rows.push(json!({
            "type": data_type.to_string(), "bytes": size, "sum_gb_s": sums.value, "sum_spread": sums.spread,
            "copy_gb_s": copies.value, "copy_spread": copies.spread, "of_copy": share.value, "of_copy_spread": share.spread,
        }));
    }
    Ok(rows)
}

/// GB/s of `count` calls with `size` bytes each.
fn rate(count: usize, size: usize, mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    for _ in 0..count {
        call();
    }
    (count * size) as f64 / start.elapsed().as_nanos() as f64
}

fn cell(median: Median) -> String {
    format!("{:>11.3} ({:>3.0}%)", median.value, 100.0 * median.spread)
}
