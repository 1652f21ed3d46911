//! Every operation, in place or not, with every algorithm, of all lengths at which the behaviour changes, compared with
//! plain loops.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;
mod product;

use ferroce_collectives::{Algorithm, Buffer, Communicator, DataType, Operation, Reduction, SharedMemory};
use group::{LIMIT, join_again, run};
use product::{CHUNK, check_all, counts, room, small};

fn every_operation(size: u32) {
    run(size, small(), None, LIMIT, move |mut ranks, all| {
        let (buffer, private) = (ranks.allocate(room()).unwrap(), ranks.allocate_private(room()).unwrap());
        check_all(&mut ranks, all, buffer, None, 0);
        for (nth, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            // Ranks 0 and 1 on one host, 2 and 3 on the next, 4 alone.
            let host = u128::from(all.rank() / 2) + 1;
            let by_it = match algorithm {
                // All on one host, which is required rather than determined.
                Algorithm::Mapped => small().shared_memory(SharedMemory::Required),
                _ => small().host(host).shared_memory(SharedMemory::Off),
            };
            let by_it = join_again(&mut ranks, all, &by_it.algorithm(algorithm), false);
            if algorithm == Algorithm::Hierarchical && ![1, 4].contains(&size) {
                let why = if size == 2 { "all ranks are on one host" } else { "different numbers of ranks" };
                let refused = by_it.unwrap_err().to_string();
                assert!(refused.contains("algorithm = hierarchical: ") && refused.contains(why), "{refused}");
                continue;
            }
            let by_it = by_it.unwrap();
            // Memory that others can map, and memory that they can't.
            let buffer = if all.rank() % 2 == 0 { buffer } else { private };
            check_all(&mut ranks, by_it, buffer, Some(algorithm), nth * 1000);
            ranks.leave(by_it).unwrap();
        }
        ranks.finish().unwrap();
    });
}

#[test]
fn every_operation_of_one_rank() {
    every_operation(1);
}

#[test]
fn every_operation_of_two_ranks() {
    every_operation(2);
}

#[test]
fn every_operation_of_three_ranks() {
    every_operation(3);
}

#[test]
fn every_operation_of_four_ranks() {
    every_operation(4);
}

#[test]
fn every_operation_of_five_ranks() {
    every_operation(5);
}

/// Each rank sends to all others and receives from all, as one request.
#[test]
fn messages_in_both_directions_in_one_request() {
    for size in [2, 3] {
        run(size, small(), None, LIMIT, move |mut ranks, all| {
            let rank = all.rank();
            let longest = 3 * CHUNK + 5;
            let room = longest.next_multiple_of(8) as u64;
            let [from, to] = [(); 2].map(|()| ranks.allocate(room as usize * size as usize).unwrap());
            let value =
                |from: u32, to: u32, call: usize, i: usize| (i * 3 + call) as u8 ^ (from * 16 + to) as u8;
            for (call, count) in counts(DataType::U8).into_iter().enumerate() {
                let mut operations = Vec::new();
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let at = u64::from(peer) * room;
                    let bytes: Vec<u8> = (0..count).map(|i| value(rank, peer, call, i)).collect();
                    ranks.write(from, at, &bytes).unwrap();
                    operations.push(Operation::receive(to.at(at), count, DataType::U8, peer));
                    operations.push(Operation::send(from.at(at), count, DataType::U8, peer));
                }
                if rank % 2 == 1 {
                    operations.reverse();
                }
                let request = ranks.start_all(all, &operations).unwrap();
                ranks.wait(request).unwrap();
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let mut got = vec![0; count];
                    ranks.read(to, u64::from(peer) * room, &mut got).unwrap();
                    let expected: Vec<u8> = (0..count).map(|i| value(peer, rank, call, i)).collect();
                    assert!(got == expected, "rank {rank} of {size}, from {peer}, {count} bytes");
                }
            }
            ranks.finish().unwrap();
        });
    }
}

/// Messages from each rank to the next one, among operations of all ranks.
#[test]
fn a_chain_of_messages_among_operations_of_all() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let rank = all.rank();
        let buffer = ranks.allocate(CHUNK * 8).unwrap();
        for call in 0..20_usize {
            let count = [1, 600, 2000][call % 3];
            if rank > 0 {
                ranks.run(all, &Operation::receive(buffer, count, DataType::I32, rank - 1)).unwrap();
            } else {
                ranks.write(buffer, 0, &(call as i32).to_ne_bytes().repeat(count)).unwrap();
            }
            if rank < 2 {
                ranks.run(all, &Operation::send(buffer, count, DataType::I32, rank + 1)).unwrap();
            }
            ranks
                .run(all, &Operation::all_reduce(buffer, buffer, count, DataType::I32, Reduction::Sum))
                .unwrap();
            let mut got = vec![0; count * 4];
            ranks.read(buffer, 0, &mut got).unwrap();
            assert_eq!(got, (3 * call as i32).to_ne_bytes().repeat(count), "rank {rank}, call {call}");
        }
        ranks.finish().unwrap();
    });
}

/// Requests end in any order, each with its own result.
#[test]
fn several_requests_are_outstanding() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let count = 3 * CHUNK / 4 + 5;
        let buffers: Vec<Buffer> = (0..12).map(|_| ranks.allocate(count * 4).unwrap()).collect();
        for round in 0..5_i32 {
            let mut requests = Vec::new();
            for (nth, buffer) in buffers.iter().enumerate() {
                let count = if nth % 2 == 0 { count } else { 7 };
                let value = (round + nth as i32) * 10 + all.rank() as i32;
                ranks.write(*buffer, 0, &value.to_ne_bytes().repeat(count)).unwrap();
                let operation = match nth % 3 {
                    0 => Operation::all_reduce(*buffer, *buffer, count, DataType::I32, Reduction::Sum),
                    1 => Operation::broadcast(*buffer, *buffer, count, DataType::I32, 1),
                    _ => Operation::reduce(*buffer, *buffer, count, DataType::I32, Reduction::Max, 2),
                };
                requests.push(ranks.start(all, &operation).unwrap());
            }
            let barrier = ranks.start(all, &Operation::barrier()).unwrap();
            // Each rank tests them in another order.
            requests.rotate_left(4 * all.rank() as usize);
            while !ranks.test(requests[0]).unwrap() {}
            assert!(ranks.test(requests[0]).is_err(), "a request that has ended");
            requests.into_iter().skip(1).rev().for_each(|request| ranks.wait(request).unwrap());
            ranks.wait(barrier).unwrap();
            for (nth, buffer) in buffers.iter().enumerate() {
                let count = if nth % 2 == 0 { count } else { 7 };
                let start = (round + nth as i32) * 10;
                let due = match nth % 3 {
                    0 => 3 * start + 3,
                    1 => start + 1,
                    _ => start + all.rank() as i32,
                };
                let mut got = vec![0; count * 4];
                ranks.read(*buffer, 0, &mut got).unwrap();
                assert!(got == due.to_ne_bytes().repeat(count), "rank {}, request {nth}", all.rank());
            }
        }
        ranks.finish().unwrap();
    });
}

/// The communicators have different orders of ranks, and outstanding operations of both.
#[test]
fn two_communicators_on_one_context() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let reversed = join_again(&mut ranks, all, &small(), true).unwrap();
        assert_eq!((reversed.rank(), reversed.size()), (2 - all.rank(), 3));
        let count = CHUNK / 4 + 1;
        let [a, b] = [(); 2].map(|()| ranks.allocate(3 * count * 4).unwrap());
        for round in 0..10 {
            for (communicator, buffer) in [(all, a), (reversed, b)] {
                let own = (communicator.rank() as i32 + round).to_ne_bytes().repeat(count);
                ranks.write(buffer, u64::from(communicator.rank()) * 4 * count as u64, &own).unwrap();
            }
            let gather = |communicator: Communicator, buffer: Buffer| {
                let own = buffer.at(u64::from(communicator.rank()) * 4 * count as u64);
                (communicator, Operation::all_gather(own, buffer, count, DataType::I32))
            };
            let mut calls = [gather(all, a), gather(reversed, b)];
            // Between communicators there is no required order of calls.
            calls.rotate_left((all.rank() as usize + round as usize) % 2);
            let requests = calls.map(|(communicator, call)| ranks.start(communicator, &call).unwrap());
            requests.into_iter().rev().for_each(|request| ranks.wait(request).unwrap());
            for buffer in [a, b] {
                let mut got = vec![0; 3 * count * 4];
                ranks.read(buffer, 0, &mut got).unwrap();
                let due: Vec<u8> =
                    (0..3).flat_map(|r: i32| (r + round).to_ne_bytes().repeat(count)).collect();
                assert!(got == due, "rank {}, round {round}", all.rank());
            }
        }
        ranks.leave(all).unwrap();
        ranks.run(reversed, &Operation::barrier()).unwrap();
        assert!(ranks.run(all, &Operation::barrier()).is_err(), "a communicator that was left");
        ranks.finish().unwrap();
    });
}
