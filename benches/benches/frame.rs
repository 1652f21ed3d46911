//! Building and parsing one frame: headers, copy, ICRC.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use ferroce::wire::*;
use ferroce_benches::{path, state};

fn emit(buffer: &mut [u8], path: &PathHeader, payload: &[u8]) -> usize {
    let bth = Bth::new(Opcode::RC_WRITE_ONLY, Qpn::new(17), Psn::new(1));
    let Some(mut frame) = FrameBuilder::start(buffer, path, bth, payload.len()) else { return 0 };
    frame.put(&Reth::new(0, RKey::new(1), payload.len() as u32));
    frame.payload().copy_from_slice(payload);
    frame.finish()
}

fn frame(c: &mut Criterion) {
    let mut group = c.benchmark_group("frame");
    for payload in [8usize, 64, 1024, 4096] {
        let (path, data, mut buffer) = (path(), vec![7u8; payload], vec![0u8; 4300]);
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("emit", payload), |b| {
            b.iter(|| emit(&mut buffer, &path, black_box(&data)));
        });
        let length = emit(&mut buffer, &path, &data);
        group.bench_function(BenchmarkId::new("parse", payload), |b| {
            b.iter(|| Packet::parse(black_box(&buffer[..length])).is_ok());
        });
        group.bench_function(BenchmarkId::new("parse-without-icrc", payload), |b| {
            b.iter(|| Packet::decode(black_box(&buffer[..length])).is_ok());
        });
    }
    group.finish();
}

criterion_group!(benches, frame);

fn main() {
    state::around_criterion(|| {
        benches();
        Criterion::default().configure_from_args().final_summary();
    });
}
