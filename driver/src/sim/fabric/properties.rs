//! Invariants of any fabric: random shapes, settings and traffic. `FERROCE_SEED=N` repeats one case.

use std::time::Duration;

use super::*;
use crate::sim::random::Random;
use crate::sim::{EcnConfig, LinkConfig};
use crate::{NextHop, PacketDriver};

const CASES: u64 = 60;

fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize]
}

fn random_switch(random: &mut Random) -> SwitchConfig {
    let threshold = match random.below(3) {
        0 => Threshold::Static(10_000 + random.below(200_000)),
        _ => Threshold::Dynamic(pick(random, &[0.0625, 0.125, 1.0, 8.0])),
    };
    let mut buffer = BufferConfig::default()
        .pool(100_000 + random.below(2_000_000))
        .threshold(threshold)
        .lossy_threshold(Threshold::Dynamic(pick(random, &[0.25, 1.0, 4.0])))
        .resume_offset(random.below(20_000));
    if random.chance(0.3) {
        buffer = buffer.headroom(random.below(60_000));
    }
    let kmin = random.below(100_000);
    let ecn = EcnConfig::new(kmin, kmin + 1 + random.below(200_000), 0.5);
    let pfc = PfcConfig::default().quanta(pick(random, &[10, 500, u16::MAX]));
    let watchdog = random.chance(0.2).then(|| Duration::from_micros(50 + random.below(500)));
    let mut scheduling = [Scheduling::Strict; CLASSES];
    for class in &mut scheduling[..6] {
        *class = Scheduling::Weighted(1 + random.below(5) as u16);
    }
    SwitchConfig::default()
        .buffer(buffer)
        .ecn(ecn)
        .marking(pick(random, &[Marking::Enqueue, Marking::Dequeue]))
        .pfc(random.chance(0.7).then_some(pfc.watchdog(watchdog)))
        .reaction(Duration::from_nanos(random.below(2000)))
        .scheduling(scheduling)
}

fn random_topology(random: &mut Random) -> Topology {
    let mut link = LinkConfig::default()
        .rate(pick(random, &[1, 10, 25, 100, 400]) * 1_000_000_000)
        .delay(Duration::from_nanos(random.below(5000)));
    if random.chance(0.3) {
        link = link.loss(0.01).duplicate(0.01).corrupt(0.01).reorder(0.02).jitter(Duration::from_nanos(500));
    }
    let uplink = link.clone().rate(pick(random, &[10, 40, 200]) * 1_000_000_000);
    let switch = random_switch(random);
    match random.below(4) {
        0 => Topology::star(2 + random.below(8) as usize, &link, switch),
        1 => Topology::dumbbell(
            1 + random.below(4) as usize,
            1 + random.below(4) as usize,
            &link,
            &uplink,
            switch,
        ),
        2 => Topology::leaf_spine(
            2,
            1 + random.below(4) as usize,
            1 + random.below(3) as usize,
            &link,
            &uplink,
            switch,
        )
        .unwrap(),
        _ => Topology::fat_tree(4, &link, switch).unwrap(),
    }
}

/// Runs one case; returns its results to compare.
fn run(seed: u64) -> (u64, FabricCounters) {
    let mut random = Random::new(seed);
    let topology = random_topology(&mut random);
    let config = FabricConfig::default().mtu(9000).convergence(Duration::from_micros(random.below(300)));
    let Built { fabric, hosts, switches, links } = topology.build(seed, config).unwrap();
    let mut ports: Vec<HostPort> = hosts.iter().map(|host| fabric.open(*host).unwrap()).collect();
    let count = ports.len() as u64;
    if random.chance(0.4) {
        let link = links[random.below(links.len() as u64) as usize];
        fabric.set_link(link, false, Nanos(100_000 + random.below(500_000)));
        fabric.set_link(link, true, Nanos(700_000 + random.below(500_000)));
    }
    if random.chance(0.2) {
        let switch = switches[random.below(switches.len() as u64) as usize];
        fabric.set_switch(switch, false, Nanos(200_000 + random.below(500_000)));
        fabric.set_switch(switch, true, Nanos(800_000));
    }
    let pools: Vec<u64> = topology.switches.iter().map(|switch| switch.buffer.pool).collect();
    let check = |fabric: &Fabric| {
        let counters = fabric.counters();
        let counted = counters.delivered + counters.dropped() + counters.under_way;
        assert_eq!(counters.sent + counters.duplicated, counted, "each frame is counted once: {counters:?}");
        for (switch, pool) in switches.iter().zip(&pools) {
            assert!(fabric.pool_used(*switch) <= *pool, "the pool of {switch:?} is exceeded");
        }
        for port in fabric.ports() {
            for class in 0..8 {
                let (taken, most) = fabric.headroom(port, class);
                assert!(taken <= most, "{taken} of {most} bytes of headroom at {port:?}");
            }
        }
    };
    let mut received = 0;
    for now in (0..1_500_000).step_by(5000) {
        for (from, port) in ports.iter_mut().enumerate() {
            let to = pick(&mut random, &[0, random_host(count, from)]);
            let Ok(NextHop::Found(mac)) = port.resolve(address(to)) else { panic!("no host {to}") };
            let (mut left, dscp) = (random.below(6), pick(&mut random, &[0, 26, 26, 48]));
            let len = pick(&mut random, &[60, 1000, 4000, 9000]);
            let mut source = |buffer: &mut [u8]| {
                left = left.checked_sub(1)?;
                buffer[..len].fill(0);
                buffer[..6].copy_from_slice(&mac);
                buffer[12..16].copy_from_slice(&[8, 0, 0x45, dscp << 2 | 2]);
                buffer[33] = to as u8;
                Some(len)
            };
            port.tx_burst(Nanos(now), &mut source).unwrap();
            received += port.rx_burst(Nanos(now), &mut |_: &[u8]| ()).unwrap() as u64;
        }
        check(&fabric);
    }
    // All frames leave the network, and all memory is released.
    for now in (1_500_000..200_000_000).step_by(1_000_000) {
        for port in &mut ports {
            while received < u64::MAX {
                let count = port.rx_burst(Nanos(now), &mut |_: &[u8]| ()).unwrap() as u64;
                received += count;
                if count == 0 {
                    break;
                }
            }
        }
    }
    check(&fabric);
    let counters = fabric.counters();
    assert_eq!((counters.under_way, counters.delivered), (0, received), "{counters:?}");
    assert!(switches.iter().all(|switch| fabric.pool_used(*switch) == 0), "memory stays taken");
    assert!(fabric.ports().all(|port| (0..8).all(|class| fabric.headroom(port, class).0 == 0)));
    (fabric.trace_hash(), counters)
}

fn random_host(count: u64, from: usize) -> usize {
    (from * 7 + 3) % count as usize
}

#[test]
fn frames_are_counted_once_and_no_memory_is_exceeded() {
    let only: Option<u64> = std::env::var("FERROCE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = only.map_or(1..CASES + 1, |seed| seed..seed + 1);
    for seed in seeds {
        println!("FERROCE_SEED={seed} cargo test -p ferroce-driver --lib properties");
        let first = run(seed);
        assert_eq!(first, run(seed), "the same seed is the same run");
    }
}
