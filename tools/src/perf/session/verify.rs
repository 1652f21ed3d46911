//! What is put into the messages of a lap, and what must have come of them.

use super::{Beside, QpLane, Regions, Session};
use crate::failure::Failure;
use crate::perf::pattern::{Origin, Pattern};
use crate::perf::plan::Operation;

impl<C: Beside> Session<C> {
    /// Gets ready for a lap of so many messages on each queue pair: memory filled and cleared,
    /// receives posted.
    pub(in crate::perf) fn prepare(&mut self, lap: u64, messages: &[u64]) -> Result<(), Failure> {
        let Regions { source, source_layout, sink, .. } = self.regions()?;
        let atomic = self.plan.operation == Operation::Atomic;
        if !atomic {
            self.end.context.bytes_mut(sink)?.fill(0);
        }
        let bytes = self.end.context.bytes_mut(source)?;
        if bytes.len() as u64 >= source_layout.region_len() {
            for (lane, count) in messages.iter().enumerate() {
                for message in 0..(*count).min(source_layout.slots) {
                    let range = source_layout.range(lane, message);
                    Pattern::new(self.role, lap, lane, message).fill(&mut bytes[range]);
                }
            }
        }
        self.begin(messages)
    }

    /// Ends a lap: compares what has arrived with what must be there. Returns how many bytes were.
    pub(in crate::perf) fn verify(&mut self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let verified = self.compare(lap, messages)?;
        for (lane, count) in self.lanes.iter_mut().zip(messages) {
            lane.counted += count;
        }
        Ok(verified)
    }

    fn compare(&self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let bytes = self.end.context.bytes(sink)?;
        if !self.plan.check || (bytes.len() as u64) < sink_layout.region_len() {
            return Ok(0);
        }
        let from = if self.role == Origin::Client { Origin::Server } else { Origin::Client };
        let mut verified = 0;
        for (lane, count) in messages.iter().enumerate() {
            if self.plan.operation == Operation::Atomic {
                verified += self.verify_atomics(lane, *count, bytes)?;
                continue;
            }
            for message in 0..*count {
                let bytes = &bytes[sink_layout.range(lane, message)];
                // The doorbell was compared when it rang.
                let bytes = &bytes[..bytes.len() - usize::from(self.plan.doorbell())];
                Pattern::new(from, lap, lane, message).verify(bytes).map_err(|wrong| {
                    Failure::run(format!(
                        "wrong data: byte {} of message {message} (lap {lap}, QP {}) is {:#04x} instead of {:#04x}",
                        wrong.at, self.lanes[lane].qpn, wrong.found, wrong.expected
                    ))
                })?;
                verified += bytes.len() as u64;
            }
        }
        Ok(verified)
    }

    /// The server finds its counter where `count` operations bring it, the client each value that
    /// it had before: each was done once, in order.
    fn verify_atomics(&self, lane: usize, count: u64, bytes: &[u8]) -> Result<u64, Failure> {
        let Regions { sink_layout, .. } = self.regions()?;
        let QpLane { qpn, counted, .. } = self.lanes[lane];
        let value = |range: std::ops::Range<usize>| {
            bytes[range].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
        };
        let wrong = |what: String, found: u64, expected: u64| {
            Err(Failure::run(format!("wrong value: {what} of QP {qpn} is {found} instead of {expected}")))
        };
        if self.role == Origin::Server {
            let (found, expected) = (value(sink_layout.range(lane, 0)), counted + count);
            return if found == expected { Ok(8) } else { wrong("the counter".into(), found, expected) };
        }
        for message in 0..count {
            let (found, expected) = (value(sink_layout.range(lane, message)), counted + message);
            if found != expected {
                return wrong(format!("the original of atomic {message}"), found, expected);
            }
        }
        Ok(8 * count)
    }
}
