//! Fills the messages of a lap, and checks those that were received.

use super::{Beside, QpLane, Regions, Session};
use crate::failure::Failure;
use crate::perf::pattern::{Origin, Pattern};
use crate::perf::plan::Operation;

impl<C: Beside> Session<C> {
    /// Prepares a lap of `messages` on each queue pair: fills and clears memory, and posts receive WRs.
    pub(in crate::perf) fn prepare(&mut self, lap: u64, messages: &[u64]) -> Result<(), Failure> {
        let Regions { source, source_layout, sink, .. } = self.regions()?;
        let context = &mut self.end.context;
        if self.plan.operation != Operation::Atomic {
            let sink_len = context.remote(sink)?.length;
            let zeros = vec![0; CHUNK.min(sink_len as usize)];
            for start in (0..sink_len).step_by(CHUNK) {
                let length = (sink_len - start).min(CHUNK as u64) as usize;
                context.write(sink, start, &zeros[..length])?;
            }
        }
        if context.remote(source)?.length >= source_layout.region_len() {
            let mut bytes = Vec::new();
            for (lane, count) in messages.iter().enumerate() {
                for message in 0..(*count).min(source_layout.slots) {
                    let range = source_layout.range(lane, message);
                    bytes.resize(range.len(), 0);
                    Pattern::new(self.role, lap, lane, message).fill(&mut bytes);
                    context.write(source, range.start as u64, &bytes)?;
                }
            }
        }
        self.begin(messages)
    }

    /// Ends a lap: compares the received messages with the expected ones. Returns the number of compared bytes.
    pub(in crate::perf) fn verify(&mut self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let verified = self.compare(lap, messages)?;
        for (lane, count) in self.lanes.iter_mut().zip(messages) {
            lane.counted += count;
        }
        Ok(verified)
    }

    fn compare(&self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        if !self.plan.check || self.end.context.remote(sink)?.length < sink_layout.region_len() {
            return Ok(0);
        }
        let mut bytes = Vec::new();
        let from = if self.role == Origin::Client { Origin::Server } else { Origin::Client };
        let mut verified = 0;
        for (lane, count) in messages.iter().enumerate() {
            if self.plan.operation == Operation::Atomic {
                verified += self.verify_atomics(lane, *count)?;
                continue;
            }
            for message in 0..*count {
                let range = sink_layout.range(lane, message);
                // The last byte was compared on arrival.
                bytes.resize(range.len() - usize::from(self.plan.doorbell()), 0);
                self.end.context.read(sink, range.start as u64, &mut bytes)?;
                Pattern::new(from, lap, lane, message).verify(&bytes).map_err(|wrong| {
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

    /// The server compares its counter with the result of `count` operations, the client each value returned: each
    /// operation was executed once, in order.
    fn verify_atomics(&self, lane: usize, count: u64) -> Result<u64, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let QpLane { qpn, counted, .. } = self.lanes[lane];
        let value = |message| {
            let range = sink_layout.range(lane, message);
            self.end.context.load_u64(sink, range.start as u64)
        };
        let wrong = |what: String, found: u64, expected: u64| {
            Err(Failure::run(format!("wrong value: {what} of QP {qpn} is {found} instead of {expected}")))
        };
        if self.role == Origin::Server {
            let (found, expected) = (value(0)?, counted + count);
            return if found == expected { Ok(8) } else { wrong("the counter".into(), found, expected) };
        }
        for message in 0..count {
            let (found, expected) = (value(message)?, counted + message);
            if found != expected {
                return wrong(format!("the original of atomic {message}"), found, expected);
            }
        }
        Ok(8 * count)
    }
}

/// Bytes that are cleared at a time.
const CHUNK: usize = 1 << 16;
