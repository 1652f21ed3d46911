//! Ranks as threads, on a switch inside the process.

#![allow(dead_code, reason = "each test program uses some of it")]

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ferroce::driver::gpu;
use ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce::driver::{self, Error as DriverError};
use ferroce::driver::{FilteredSource, FrameSource, Sent};
use ferroce::{Config, Context, Device, Nanos, PacketDriver};
use ferroce_collectives::{
    Bootstrap, Buffer, Card, Collectives, Communicator, DataType, Error, Operation, Options, ReduceOp,
};

/// The time limit of each test.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Options for tests: a lost peer is detected in 1 s, and chunks are small, so that there are many.
pub(crate) fn options() -> Options {
    Options::default()
        .chunk_bytes(16 << 10)
        .eager_bytes(1 << 10)
        .ack_timeout(Duration::from_millis(130))
        .probe_interval(Duration::from_millis(100))
        .stall_timeout(Duration::from_secs(30))
}

/// Runs `body` as every rank of `size`, and returns the results by rank. Fails the test after `limit`.
pub(crate) fn run<T, F>(size: u32, options: Options, loss: Option<u64>, limit: Duration, body: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Collectives, Communicator) -> T + Send + Sync + Clone + 'static,
{
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let open = |rank: u32| {
        let port = switch.port(&[[10, 0, 0, rank as u8 + 1].into()]);
        let driver: Box<dyn PacketDriver> = match loss {
            Some(every) => Box::new(Lossy { inner: Box::new(port), every, left: every }),
            None => Box::new(port),
        };
        driver.into()
    };
    run_on(size, options, limit, open, body)
}

/// As [`run`], each rank with the GPU that `gpu` opens for it.
pub(crate) fn run_with_gpus<T, F>(
    size: u32,
    options: Options,
    limit: Duration,
    gpu: impl Fn(u32) -> Option<Arc<dyn gpu::Device>>,
    body: F,
) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Collectives, Communicator) -> T + Send + Sync + Clone + 'static,
{
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let open = |rank: u32| {
        let port: Box<dyn PacketDriver> = Box::new(switch.port(&[[10, 0, 0, rank as u8 + 1].into()]));
        (port.into(), gpu(rank))
    };
    run_ranks(size, options, limit, open, body)
}

/// As [`run`], each rank on the device that `open` opens for it.
pub(crate) fn run_on<T, F>(
    size: u32,
    options: Options,
    limit: Duration,
    open: impl Fn(u32) -> Device,
    body: F,
) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Collectives, Communicator) -> T + Send + Sync + Clone + 'static,
{
    run_ranks(size, options, limit, |rank| (open(rank), None), body)
}

/// As [`run`], each rank on the device and with the GPU that `open` opens for it.
pub(crate) fn run_ranks<T, F>(
    size: u32,
    options: Options,
    limit: Duration,
    open: impl Fn(u32) -> (Device, Option<Arc<dyn gpu::Device>>),
    body: F,
) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Collectives, Communicator) -> T + Send + Sync + Clone + 'static,
{
    let (sender, receiver) = mpsc::channel();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let master = listener.local_addr().unwrap();
    let mut listener = Some(listener);
    for rank in 0..size {
        let (device, gpu) = open(rank);
        let mut bootstrap = Bootstrap::new(rank, size, master).unwrap();
        if let Some(listener) = listener.take() {
            bootstrap = bootstrap.listener(listener);
        }
        let (sender, body) = (sender.clone(), body.clone());
        thread::spawn(move || {
            let context = Context::open(device, &Config::default()).unwrap();
            let mut ranks = match gpu {
                Some(gpu) => Collectives::on_device(context, gpu),
                None => Collectives::new(context),
            }
            .unwrap();
            let all = ranks.join(bootstrap, &options).unwrap();
            // The receiver no longer exists if another rank has failed the test.
            let _ = sender.send((rank, body(ranks, all)));
        });
    }
    drop(sender);
    let mut results: Vec<(u32, T)> = Vec::new();
    for _ in 0..size {
        match receiver.recv_timeout(limit) {
            Ok(result) => results.push(result),
            Err(error) => {
                let there: Vec<u32> = results.iter().map(|(rank, _)| *rank).collect();
                panic!("{error} ({limit:?}); of {size} ranks there have ended: {there:?}");
            }
        }
    }
    results.sort_by_key(|(rank, _)| *rank);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Drops every n-th frame that is sent.
struct Lossy {
    inner: Box<dyn PacketDriver>,
    every: u64,
    left: u64,
}

impl driver::Wrapper for Lossy {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, DriverError> {
        let Lossy { inner, every, left } = self;
        let passes = |_: Sent<'_>| {
            *left -= 1;
            if *left > 0 {
                return true;
            }
            *left = *every;
            false
        };
        (**inner).tx_burst(now, &mut FilteredSource::new(source, passes))
    }
}

/// Another communicator of the ranks of `all`, in the same or in reverse order.
pub(crate) fn join_again(
    ranks: &mut Collectives,
    all: Communicator,
    options: &Options,
    is_reversed: bool,
) -> Result<Communicator, Error> {
    let (size, mut rank) = (all.size() as usize, all.rank());
    let card = ranks.card(options).unwrap();
    let table = ranks.allocate(size * Card::LEN).unwrap();
    let at = u64::from(rank) * Card::LEN as u64;
    ranks.write(table, at, &card.to_bytes()).unwrap();
    ranks.run(all, &Operation::all_gather(table.at(at), table, Card::LEN, DataType::U8)).unwrap();
    let mut cards = vec![[0; Card::LEN]; size];
    ranks.read(table, 0, cards.as_flattened_mut()).unwrap();
    ranks.deregister(table).unwrap();
    let mut cards: Vec<Card> = cards.iter().map(Card::from_bytes).collect();
    if is_reversed {
        cards.reverse();
        rank = all.size() - 1 - rank;
    }
    ranks.join_with(rank, &cards, options)
}

/// The elements of a rank in a call: small integers, whose sums are exact in f32 in any order.
pub(crate) fn element(rank: u32, call: usize, index: usize) -> i32 {
    let mixed = (index as u32 ^ rank << 20 ^ (call as u32) << 26).wrapping_mul(0x9e37_79b1);
    (mixed >> 16) as i32 - 0x8000
}

/// Fills the first bytes of a buffer.
pub(crate) fn fill(ranks: &mut Collectives, buffer: Buffer, elements: impl Iterator<Item = [u8; 4]>) {
    let bytes: Vec<u8> = elements.flatten().collect();
    ranks.write(buffer, 0, &bytes).unwrap();
}

/// Replaces elements by their sums over all ranks.
pub(crate) fn sum(
    ranks: &mut Collectives,
    all: Communicator,
    buffer: Buffer,
    count: usize,
    data_type: DataType,
) -> Result<(), Error> {
    ranks.run(all, &Operation::all_reduce(buffer, buffer, count, data_type, ReduceOp::Sum))
}

/// The bytes of an element with this value.
type Encode = fn(i32) -> [u8; 4];

/// All-reduces `counts` elements one after the other, in two types, and checks every element, and the one after the last.
pub(crate) fn check_sums(ranks: &mut Collectives, all: Communicator, counts: &[usize]) {
    let (rank, size) = (all.rank(), all.size());
    let longest = counts.iter().max().unwrap() + 1;
    let buffer = ranks.allocate(longest * 4).unwrap();
    for (call, &count) in counts.iter().enumerate() {
        let types: [(DataType, Encode); 2] =
            [(DataType::F32, |value| (value as f32).to_ne_bytes()), (DataType::I32, i32::to_ne_bytes)];
        for (data_type, encode) in types {
            fill(ranks, buffer, (0..=count).map(|i| encode(element(rank, call, i))));
            sum(ranks, all, buffer, count, data_type).unwrap();
            let mut bytes = vec![0; (count + 1) * 4];
            ranks.read(buffer, 0, &mut bytes).unwrap();
            for (index, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
                let expected = match index {
                    _ if index == count => element(rank, call, index),
                    _ => (0..size).map(|other| element(other, call, index)).sum(),
                };
                assert_eq!(
                    *got,
                    encode(expected),
                    "rank {rank} of {size}, {data_type}, element {index} of {count}"
                );
            }
        }
    }
    ranks.deregister(buffer).unwrap();
}
