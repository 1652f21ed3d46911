//! A context's port and the peers of its queue pairs, as gauges: `ferroce doctor` reads them from a running context.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use ferroce_wire::{Gid, PathMtu};

use crate::telemetry::metrics::Metrics;
use crate::verbs::Port;

/// The most rows of each table.
const SHOWN: usize = 64;

impl Metrics {
    /// The port's MTU, its GIDs and P_Keys in the order of their tables, and the number of connected queue pairs per peer and per
    /// path MTU.
    pub(crate) fn push_port(&mut self, port: &Port, connected: impl Iterator<Item = (Gid, PathMtu)>) {
        self.push_gauge("port_mtu", "Largest IP packet of the port, in bytes.", port.mtu.into());
        let gids = port.gids.iter().take(SHOWN).map(|row| (row.gid.to_string(), 1));
        self.push_gauges("port_gid", "GIDs of the port: 1 for each.", "gid", gids);
        let pkeys = port.pkeys.iter().take(SHOWN).map(|(_, pkey)| (pkey.to_string(), 1));
        self.push_gauges("port_pkey", "P_Keys of the port: 1 for each.", "pkey", pkeys);
        let (mut by_peer, mut by_path_mtu) = (BTreeMap::<_, u64>::new(), BTreeMap::<_, u64>::new());
        for (Gid(peer), path_mtu) in connected {
            *by_peer.entry(peer).or_default() += 1;
            *by_path_mtu.entry(path_mtu).or_default() += 1;
        }
        let mut peers: Vec<_> = by_peer.into_iter().collect();
        peers.sort_by_key(|(_, qps)| Reverse(*qps));
        let peers = peers.into_iter().take(SHOWN).map(|(peer, qps)| (Gid(peer).to_string(), qps));
        self.push_gauges("peer_qps", "Connected queue pairs by peer.", "peer", peers);
        let path_mtus = by_path_mtu.into_iter().map(|(path_mtu, qps)| (path_mtu.bytes().to_string(), qps));
        self.push_gauges("path_mtu_qps", "Connected queue pairs by path MTU.", "path_mtu", path_mtus);
    }
}
