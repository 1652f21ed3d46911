//! The ICRC of whole packets, in bytes a second, beside the bare CRC-32 of as many bytes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ferroce::wire::{NetworkHeader, icrc};

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

/// The ceiling: the checksum without the masking of headers.
fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

criterion_group!(benches, icrc);
criterion_main!(benches);
