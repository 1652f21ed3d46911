//! The ICRC of whole packets, in bytes per second, compared with the plain CRC-32 of as many bytes; and CRC-32 by each
//! method that this processor supports, in nanoseconds: `cargo bench -p ferroce-benches --bench icrc -- crc32`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use ferroce::driver::Crc32;
use ferroce::wire::{NetworkHeader, icrc};
use ferroce_benches::state;

fn icrc(c: &mut Criterion) {
    let mut group = c.benchmark_group("icrc");
    for payload in [8usize, 64, 256, 1024, 4096] {
        let packet = vec![0x45u8; 20 + 8 + 12 + payload];
        group.throughput(Throughput::Bytes(packet.len() as u64));
        group.bench_with_input(BenchmarkId::new("ipv4", payload), &packet, |b, packet| {
            b.iter(|| icrc::compute(NetworkHeader::Ipv4, black_box(packet)));
        });
        group.bench_with_input(BenchmarkId::new("crc32-alone", payload), &packet, |b, packet| {
            b.iter(|| crc32(black_box(packet)));
        });
    }
    group.finish();
}

/// The upper bound: the checksum without masked headers.
fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// Each method with each size; related ones follow each other.
fn levels(c: &mut Criterion) {
    const LARGEST: usize = 4096;
    // At the same offset from a cache line as the payload in a frame's buffer; the copy at another offset in its page.
    let (source, mut copy) = (vec![0x45u8; 42 + LARGEST], vec![0u8; 2048 + LARGEST]);
    let mask = [0x11; 64];
    let mut group = c.benchmark_group("crc32");
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(300));
    for len in [16, 36, 72, 256, 1024, LARGEST] {
        let data = &source[42..][..len];
        group.throughput(Throughput::Bytes(len as u64));
        for crc in Crc32::all() {
            let name = |what| BenchmarkId::new(format!("{what}/{}", crc.name()), len);
            group.bench_function(name("update"), |b| {
                b.iter(|| black_box(crc).update(black_box(!0), black_box(data)));
            });
            group.bench_function(name("update_masked"), |b| {
                b.iter(|| black_box(crc).update_masked(black_box(!0), black_box(&mask), black_box(data)));
            });
            group.bench_function(name("copy"), |b| {
                let to = &mut copy[2048..][..len];
                b.iter(|| black_box(crc).copy(black_box(!0), black_box(data), black_box(to)));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, icrc, levels);

fn main() {
    state::around_criterion(|| {
        benches();
        Criterion::default().configure_from_args().final_summary();
    });
}
