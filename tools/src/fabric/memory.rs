//! The buffer memory of the switches of a fabric.

use std::fmt;

use ferroce_driver::sim::fabric::{Node, Threshold};

use super::allreduce::AllreduceSection;
use super::host::{PIECE, PIECES};
use super::plan::Plan;
use crate::failure::Failure;
use crate::quantity::Bytes;

/// Of the switch with the most memory, and of all hosts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Ports of that switch.
    ports: u64,
    /// Headroom of its ports for the class of the data: least, most and total; 0 without PFC.
    headroom: (u64, u64, u64),
    /// The headroom that a link needs so that nothing is dropped after a pause; the maximum over its links.
    pub(crate) needed: Bytes,
    /// The longest possible queue of one of its ports.
    pub(crate) queue: Bytes,
    /// The most unacknowledged data of all hosts together.
    pub(crate) under_way: Bytes,
    /// The most unacknowledged data of a queue pair, and the most that it posts.
    pub(crate) window: Bytes,
    pub(crate) posted: Bytes,
}

impl Memory {
    pub(crate) fn of(plan: &Plan, allreduce: Option<&AllreduceSection>) -> Result<Memory, Failure> {
        let built = plan.topology.build(plan.seed, plan.fabric)?;
        let mut headrooms = vec![Vec::new(); built.switches.len()];
        for port in built.fabric.ports() {
            if let (Node::Switch(switch), _) = built.fabric.owner(port) {
                headrooms[switch.number()].push(built.fabric.headroom(port, 0).1);
            }
        }
        let (mut most, mut queue) = ((0, (0, 0, 0)), 0);
        for (switch, headrooms) in plan.topology.switches.iter().zip(headrooms) {
            let ports = headrooms.len() as u64;
            let pool = switch.buffer.pool;
            // The longest queue holds the packets from all other ports.
            let others = ports.saturating_sub(1);
            let shared = |threshold: Threshold, ports: u64| match threshold {
                // They share the pool until this fraction of the free part is used.
                Threshold::Dynamic(alpha) => {
                    let all = alpha * ports as f64;
                    (pool as f64 * all / (1.0 + all)) as u64
                }
                Threshold::Static(bytes) => bytes.saturating_mul(ports).min(pool),
                _ => pool,
            };
            let of_ports = match switch.pfc {
                Some(_) => {
                    let least = headrooms.iter().copied().min().unwrap_or(0);
                    let all: u64 = headrooms.iter().sum();
                    queue = queue.max(shared(switch.buffer.threshold, others) + all - least);
                    (least, headrooms.iter().copied().max().unwrap_or(0), all)
                }
                None => {
                    queue = queue.max(shared(switch.buffer.lossy_threshold, 1));
                    (0, 0, 0)
                }
            };
            most = most.max((ports, of_ports));
        }
        let mut topology = plan.topology.clone();
        topology.switches.iter_mut().for_each(|switch| switch.buffer.headroom = None);
        let built = topology.build(plan.seed, plan.fabric)?;
        let is_of_switch = |port| matches!(built.fabric.owner(port), (Node::Switch(_), _));
        let ports = built.fabric.ports().filter(|port| is_of_switch(*port));
        let needed = ports.map(|port| built.fabric.headroom(port, 0).1).max().unwrap_or(0);
        let transport = &plan.transport;
        let window = u64::from(transport.window) * u64::from(transport.path_mtu.bytes());
        let (flows, posted) = match allreduce {
            // Each rank has a flow to each other rank on each rail.
            Some(allreduce) => {
                let ranks = allreduce.size(plan.topology.hosts.len()) as u64;
                (allreduce.rails as u64 * ranks * (ranks - 1), window)
            }
            None => (plan.flows.len() as u64, u64::from(PIECE) * u64::from(PIECES)),
        };
        // Including headers.
        let of_flow = window.min(posted) / 10 * 11;
        Ok(Memory {
            ports: most.0,
            headroom: most.1,
            needed: Bytes(needed),
            queue: whole_kilobytes(queue),
            under_way: whole_kilobytes(of_flow * flows),
            window: Bytes(window),
            posted: Bytes(posted),
        })
    }
}

/// Rounded up, so that no queue reaches this value.
fn whole_kilobytes(bytes: u64) -> Bytes {
    Bytes(bytes.next_multiple_of(1000))
}

impl fmt::Display for Memory {
    /// The shared memory, and the memory besides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Memory { ports, headroom: (least, most, all), .. } = *self;
        write!(f, " shared by {ports} ports")?;
        match all {
            0 => Ok(()),
            _ if least == most => write!(f, ", headroom {least} bytes each, {all} in all, in addition"),
            _ => write!(f, ", headroom {least} to {most} bytes each, {all} in all, in addition"),
        }
    }
}
