//! Communicators of the contexts, from the flight recorders of their processes, including processes that hang.

use std::fmt::{self, Write};

use ferroce::{Metrics, is_unprintable};
use ferroce_collectives::flight::{PeerRecord, RecordedCommunicator, Recording};

use crate::quantity::nanos;

/// Metrics of each communicator in use, by rank, in Prometheus' text format.
pub(super) fn metrics(recordings: &[Recording]) -> Vec<Metrics> {
    let parts = recordings.iter().flat_map(|recording| {
        let in_use = recording.communicators.iter().filter(|own| !own.has_left);
        in_use.map(move |own| Part { recording, own })
    });
    // This parses what was just formatted.
    parts.filter_map(|part| Metrics::parse(&part.to_string()).ok()).collect()
}

struct Part<'a> {
    recording: &'a Recording,
    own: &'a RecordedCommunicator,
}

type Pick = fn(&PeerRecord) -> u64;

/// The metrics for each peer rank.
const OF_PEERS: [(&str, &str, Pick); 7] = [
    ("sent_bytes", "Bytes of elements sent to the peer.", |peer| peer.sent_bytes),
    ("received_bytes", "Bytes of elements received from the peer.", |peer| peer.received_bytes),
    ("chunk_bytes", "Bytes of elements sent to the peer in chunks.", |peer| peer.chunk_bytes),
    ("sending_ns", "Time in which chunks to the peer were outstanding.", |peer| nanos(peer.sending)),
    ("waited_ns", "Time spent waiting for data from the peer.", |peer| nanos(peer.waited)),
    ("late", "Operations that the peer was the last to begin, significantly late.", |peer| peer.late),
    ("late_ns", "Time by which the peer began these operations later than this rank.", |peer| {
        nanos(peer.late_by)
    }),
];

impl fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Part { recording, own } = self;
        let device = escape(&recording.device);
        let labels = format!(
            "device=\"{device}\",driver=\"collectives\",pid=\"{}\",communicator=\"{:016x}\",rank=\"{}\",size=\"{}\"",
            recording.process, own.id, own.rank, own.size
        );
        let operations = own.forgotten + own.operations.len() as u64;
        let counters = [("operations", "Operations so far.", operations)];
        let gauges = [
            ("under_way", "Operations that have not ended.", own.under_way().count() as u64),
            ("failed", "1 if the communicator has failed.", own.failure.is_some().into()),
            (
                "since_poll_ns",
                "Time since the last poll.",
                nanos(recording.taken.saturating_sub(recording.polled)),
            ),
        ];
        for (name, help, value) in counters {
            writeln!(
                f,
                "# HELP ferroce_collective_{name}_total {help}\n# TYPE ferroce_collective_{name}_total counter"
            )?;
            writeln!(f, "ferroce_collective_{name}_total{{{labels}}} {value}")?;
        }
        for (name, help, value) in gauges {
            writeln!(f, "# HELP ferroce_collective_{name} {help}\n# TYPE ferroce_collective_{name} gauge")?;
            writeln!(f, "ferroce_collective_{name}{{{labels}}} {value}")?;
        }
        let linked: Vec<&PeerRecord> = own.peers.iter().filter(|peer| peer.qp > 0).collect();
        if !linked.is_empty() {
            writeln!(
                f,
                "# HELP ferroce_collective_qp Number of the queue pair to the peer.\n# TYPE ferroce_collective_qp gauge"
            )?;
        }
        for peer in linked {
            writeln!(f, "ferroce_collective_qp{{{labels},peer=\"{}\"}} {}", peer.peer, peer.qp)?;
        }
        for (name, help, pick) in OF_PEERS {
            let peers = own.peers.iter().filter(|peer| pick(peer) > 0);
            let mut rows = String::new();
            for peer in peers {
                writeln!(
                    rows,
                    "ferroce_collective_{name}_total{{{labels},peer=\"{}\"}} {}",
                    peer.peer,
                    pick(peer)
                )?;
            }
            if !rows.is_empty() {
                writeln!(
                    f,
                    "# HELP ferroce_collective_{name}_total {help}\n# TYPE ferroce_collective_{name}_total counter"
                )?;
                f.write_str(&rows)?;
            }
        }
        Ok(())
    }
}

/// Escapes a label's value.
fn escape(text: &str) -> String {
    text.replace(is_unprintable, "\u{fffd}").replace('\\', "\\\\").replace('"', "\\\"")
}
