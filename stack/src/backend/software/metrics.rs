//! What is counted, and showing it to others.

use ferroce_driver::Stats;

use super::Software;
use super::engine::Engine;
use crate::telemetry::counters::Counters;
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::Metrics;
use crate::verbs::{Error, QpState};

impl Software {
    pub(crate) fn driver_stats(&self) -> Stats {
        self.driver.stats()
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.engine.shared.counters
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let Engine { qps, shared, .. } = &self.engine;
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
        let in_use = resources.map(|(kind, (used, _))| (kind, used as u64));
        metrics.push_gauges("resource_in_use", "Objects that exist.", "resource", in_use);
        let limits = resources.map(|(kind, (_, capacity))| (kind, capacity as u64));
        metrics.push_gauges("resource_limit", "Objects that can exist.", "resource", limits);
        let mut by_state = [0; QpState::ALL_BUT_RESET.len() + 1];
        qps.iter().for_each(|qp| by_state[qp.state as usize] += 1);
        let states = [QpState::Reset].into_iter().chain(QpState::ALL_BUT_RESET);
        let states = states.map(|state| (state.name(), by_state[state as usize]));
        metrics.push_gauges("qps", "Queue pairs by state.", "state", states);
        metrics
    }

    pub(crate) fn export(&mut self) -> Result<(), Error> {
        self.exporter = Some(Exporter::open(&self.driver.capabilities().interface)?);
        Ok(())
    }
}
