//! Counters, and their export.

use ferroce_driver::Stats;
use ferroce_wire::Qpn;

use super::Software;
use super::engine::Engine;
use crate::telemetry::counters::Counters;
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::Metrics;
use crate::verbs::{Error, QpState, ReactionState};

impl Software {
    pub(crate) fn driver_stats(&self) -> Stats {
        self.driver.stats()
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.engine.shared.counters
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let Engine { qps, shared, port, .. } = &self.engine;
        let capabilities = self.driver.capabilities();
        let mut metrics = Metrics::new(capabilities.driver, &capabilities.interface);
        metrics.push_counters(&shared.counters);
        metrics.push_driver(&self.driver.stats());
        let resources = [
            ("pd", self.pds.usage()),
            ("mr", shared.mrs.slab.usage()),
            ("mw", shared.mrs.windows.usage()),
            ("cq", shared.cqs.usage()),
            ("srq", shared.srqs.usage()),
            ("ah", shared.ahs.usage()),
            ("qp", qps.usage()),
            ("connection", self.engine.connections()),
        ];
        let mut by_state = [0; QpState::ALL_BUT_RESET.len() + 1];
        qps.iter().for_each(|qp| by_state[qp.state as usize] += 1);
        let states = [QpState::Reset].into_iter().chain(QpState::ALL_BUT_RESET);
        metrics.push_objects(&resources, states.map(|state| (state.name(), by_state[state as usize])));
        let peers = qps.iter().filter_map(|qp| Some((qp.address.as_ref()?.gid, qp.path_mtu()?)));
        metrics.push_port(port, peers);
        if let (slot, 2..) = capabilities.comm_ids {
            metrics.push_gauge("port_slot", "Slot of the context among those of its address.", slot.into());
        }
        self.push_reactions(&mut metrics);
        metrics.push_program(&self.program_counters);
        metrics
    }

    /// The queue pairs with congestion control: their number, and the slowest of those below the line rate.
    fn push_reactions(&self, metrics: &mut Metrics) {
        /// The most rows of the table.
        const SHOWN: usize = 16;
        let Engine { qps, shared, .. } = &self.engine;
        let mut slowed: Vec<(Qpn, ReactionState)> =
            qps.iter().filter_map(|qp| Some((qp.qpn, qp.reaction.as_ref()?.state(shared.now)))).collect();
        if slowed.is_empty() {
            return;
        }
        let all = slowed.len();
        slowed.retain(|(_, state)| state.rate < state.highest);
        let counts = [("line", all - slowed.len()), ("slowed", slowed.len())];
        let counts = counts.map(|(rate, count)| (rate, count as u64));
        metrics.push_gauges("rp_qps", "Queue pairs with congestion control, by their rate.", "rate", counts);
        slowed.sort_unstable_by_key(|(_, state)| state.rate);
        slowed.truncate(SHOWN);
        type Value = fn(&ReactionState) -> u64;
        let gauges: [(_, _, Value); 5] = [
            ("rp_rate", "Current rate in bit/s, of the slowest queue pairs.", |state| state.rate),
            ("rp_target_rate", "Rate in bit/s that a queue pair recovers to.", |state| state.target),
            ("rp_alpha", "Estimate of the congestion, in 1/1024.", |state| (state.alpha * 1024.0) as u64),
            ("rp_timer_stage", "Expirations of the rate timer since the last cut.", |state| {
                state.timer_stage.into()
            }),
            ("rp_byte_stage", "Expirations of the byte counter since the last cut.", |state| {
                state.byte_stage.into()
            }),
        ];
        for (name, help, value) in gauges {
            let values = slowed.iter().map(|(qpn, state)| (qpn.to_string(), value(state)));
            metrics.push_gauges(name, help, "qpn", values);
        }
    }

    pub(crate) fn export(&mut self) -> Result<(), Error> {
        self.exporter = Some(Exporter::open(&self.driver.capabilities().interface)?);
        Ok(())
    }
}
