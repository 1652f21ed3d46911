//! The NIC of each GPU.

use ferroce::driver::topology::{Distance, Nic, NicState, PciAddress, Topology};

use super::{MAX_RANKS, Rail, Rank, gigabits, remoteness};

/// NICs with less than this fraction of the fastest one's rate are for management.
const LEAST_PART: u64 = 4;

/// One for each GPU, with its NIC; without GPUs one for each NIC.
pub(super) fn ranks(host: &Topology) -> Vec<Rank> {
    let usable = usable(host);
    let gpus: Vec<PciAddress> = host.gpus().map(|gpu| gpu.address).take(MAX_RANKS).collect();
    if gpus.is_empty() {
        return usable
            .into_iter()
            .take(MAX_RANKS)
            .filter_map(|nic| Some(of_nic(nic, host.nics.get(nic)?)))
            .collect();
    }
    // Sets of nearest NICs are nested or disjoint, like the PCI tree: GPUs with the fewest choices are assigned first.
    let mut nearest: Vec<(usize, Vec<usize>, Distance)> = gpus
        .iter()
        .enumerate()
        .map(|(number, gpu)| {
            let (nics, distance) = nearest(host, *gpu, &usable);
            (number, nics, distance)
        })
        .collect();
    nearest.sort_by_key(|(number, nics, _)| (nics.len(), *number));
    let mut loads = vec![0_usize; host.nics.len()];
    let mut ranks: Vec<(usize, Rank)> = Vec::new();
    for (number, nics, distance) in nearest {
        let chosen = nics.iter().copied().min_by_key(|nic| (loads.get(*nic).copied(), *nic));
        let reason = match chosen {
            None => "no NIC serves".to_owned(),
            Some(_) => reason(host, &nics, distance),
        };
        if let Some(load) = chosen.and_then(|nic| loads.get_mut(nic)) {
            *load += 1;
        }
        let gpu = gpus.get(number).copied();
        ranks.push((number, Rank { name: format!("GPU {number}"), gpu, nic: chosen, distance, reason }));
    }
    ranks.sort_by_key(|(number, _)| *number);
    ranks.into_iter().map(|(_, rank)| rank).collect()
}

fn of_nic(at: usize, nic: &Nic) -> Rank {
    Rank {
        name: nic.name().to_owned(),
        gpu: None,
        nic: Some(at),
        distance: Distance::Pix,
        reason: "no GPU is here, so each NIC is a rank".to_owned(),
    }
}

fn reason(host: &Topology, nics: &[usize], distance: Distance) -> String {
    let names: Vec<&str> = nics.iter().filter_map(|nic| Some(host.nics.get(*nic)?.name())).collect();
    match &names[..] {
        [_] => format!("no other is as near: {}", distance.meaning()),
        _ => format!("{} are as near: {}; GPUs are spread over them", names.join(", "), distance.meaning()),
    }
}

/// The NICs nearest to a GPU, and their distance.
fn nearest(host: &Topology, gpu: PciAddress, usable: &[usize]) -> (Vec<usize>, Distance) {
    let far = |nic: usize| {
        let place = host.nics.get(nic).and_then(|nic| nic.pci);
        place.map_or((Distance::Unknown, 0), |place| remoteness(host, gpu, place))
    };
    let least = usable.iter().map(|nic| far(*nic)).min();
    let nics = usable.iter().copied().filter(|nic| Some(far(*nic)) == least).collect();
    (nics, least.map_or(Distance::Unknown, |(distance, _)| distance))
}

/// The NICs that count, by their positions in the list of all.
pub(super) fn usable(host: &Topology) -> Vec<usize> {
    let serves = |nic: &Nic| is_candidate(host, nic) && !nic.is_infiniband && nic.state != NicState::Down;
    let serving: Vec<(usize, &Nic)> = host.nics.iter().enumerate().filter(|(_, nic)| serves(nic)).collect();
    let fastest = serving.iter().filter_map(|(_, nic)| nic.rate).max();
    // NICs without a known rate count if no rate is known.
    let is_fast = |nic: &Nic| match (nic.rate, fastest) {
        (Some(rate), Some(fastest)) => rate >= fastest / LEAST_PART,
        (rate, fastest) => rate == fastest,
    };
    serving.into_iter().filter(|(_, nic)| is_fast(nic)).map(|(at, _)| at).collect()
}

/// Whether it is hardware, or has an RNIC, such as rdma_rxe on a virtual interface.
pub(super) fn is_candidate(host: &Topology, nic: &Nic) -> bool {
    let physical = nic.pci.and_then(|at| host.device(at)?.physical);
    let is_second = physical.is_some_and(|physical| host.nics.iter().any(|nic| nic.pci == Some(physical)));
    (nic.pci.is_some() || !nic.rnics.is_empty()) && !is_second
}

/// The NICs that ranks use, with the reason.
pub(super) fn rails(host: &Topology, ranks: &[Rank]) -> (Vec<Rail>, String) {
    let mut rails: Vec<Rail> = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let Some(nic) = rank.nic else { continue };
        match rails.iter_mut().find(|rail| rail.nic == nic) {
            Some(rail) => rail.ranks.push(number),
            None => {
                let rate = host.nics.get(nic).and_then(|nic| nic.rate);
                rails.push(Rail { nic, ranks: vec![number], rate });
            }
        }
    }
    rails.sort_by_key(|rail| rail.nic);
    let rates: Vec<u64> = rails.iter().filter_map(|rail| rail.rate).collect();
    let speed = match (rates.iter().min(), rates.iter().max()) {
        _ if rates.len() < rails.len() => "not all drivers report their rates".to_owned(),
        (Some(least), Some(most)) if least == most => format!("all have {}", gigabits(*least)),
        (Some(least), Some(most)) => format!("they have {} to {}", gigabits(*least), gigabits(*most)),
        _ => String::new(),
    };
    let reason = match rails.len() {
        0 => "no NIC is used".to_owned(),
        1 => format!("one NIC is used; {speed}"),
        count => format!("{count} NICs are used, in the order of their PCI addresses; {speed}"),
    };
    (rails, reason)
}
