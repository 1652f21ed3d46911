//! The queue pairs that the user declares to be connected (`--pair`), and checks of them.

use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;

use ferroce::Qpn;
use ferroce::wire::Service;

use super::packet::Seen;
use super::pairing::{Flow, Pairing};
use crate::failure::Failure;

/// Pairs the queue pairs of each pair, wherever two hosts send to both of them.
pub(super) fn tie(pairing: &mut Pairing, packets: &[Rc<Seen>], pairs: &[(Qpn, Qpn)]) -> Result<(), Failure> {
    if pairs.is_empty() {
        return Ok(());
    }
    let is_connected =
        |packet: &&Rc<Seen>| packet.icrc_is_right && matches!(packet.service(), Service::Rc | Service::Uc);
    let flow = |packet: &Rc<Seen>| {
        (packet.network.source, packet.network.destination, packet.bth.dest_qpn(), packet.service())
    };
    let flows: HashSet<Flow> = packets.iter().filter(is_connected).map(flow).collect();
    if flows.is_empty() {
        // An empty capture is reported elsewhere.
        return Ok(());
    }
    for (number, (a, b)) in pairs.iter().enumerate() {
        let there = flows.iter().filter(|(_, _, to, _)| to == b);
        let ways: Vec<(&Flow, Flow)> = there
            .map(|flow| (flow, (flow.1, flow.0, *a, flow.3)))
            .filter(|(_, back)| flows.contains(back))
            .collect();
        // A capture may have one direction only.
        let is_one_way = |(source, destination, to, _): &Flow| {
            (to == a || to == b) && !flows.iter().any(|flow| (flow.1, flow.0) == (*source, *destination))
        };
        if ways.is_empty() && flows.iter().any(is_one_way) {
            continue;
        }
        if ways.is_empty() {
            return Err(Failure::usage(format!(
                "--pair {a}:{b}: no two hosts send to these queue pairs of each other; packets go to {}",
                known(&flows)
            )));
        }
        let fits = |(there, back): &(&Flow, Flow)| {
            let partners = (pairing.partner(there), pairing.partner(back));
            match partners {
                (None, None) => true,
                (Some(of_there), Some(of_back)) => of_there.qpn == *a && of_back.qpn == *b,
                _ => false,
            }
        };
        let fitting: Vec<(&Flow, Flow)> = ways.into_iter().filter(fits).collect();
        if fitting.is_empty() {
            let before = pairs[..number].iter().find(|(c, d)| [c, d].iter().any(|q| [a, b].contains(q)));
            let before = before.map_or("another --pair".to_owned(), |(c, d)| format!("--pair {c}:{d}"));
            return Err(Failure::usage(format!(
                "--pair {a}:{b} contradicts {before}: a queue pair of a connection has one partner"
            )));
        }
        for (there, _) in fitting {
            pairing.tie((there.0, *a), (there.1, *b), there.3);
        }
    }
    Ok(())
}

/// The destination queue pairs in the capture, as text.
fn known(flows: &HashSet<Flow>) -> String {
    const MOST: usize = 16;
    let numbers: BTreeSet<u32> = flows.iter().map(|(_, _, to, _)| to.value()).collect();
    if numbers.is_empty() {
        return "no queue pair of a connection".into();
    }
    let shown: Vec<String> = numbers.iter().take(MOST).map(|number| Qpn::new(*number).to_string()).collect();
    let more = numbers.len() - shown.len();
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", shown.join(", "))
}
