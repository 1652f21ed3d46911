//! The responders' packets, as they enter the network.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferroce::driver::sim::{SimNetwork, Verdict};

use crate::model::Response;

/// A response: its destination end and queue pair, and its contents.
pub(crate) type Tapped = (usize, u32, Response);

/// Those that were sent since the last call.
#[derive(Clone, Default)]
pub(crate) struct Tap(Arc<Mutex<Vec<Tapped>>>);

impl Tap {
    /// Records all responses from now on. The end is the last byte of the address, minus one.
    pub(crate) fn on(network: &SimNetwork) -> Tap {
        const IPV6: [u8; 2] = [0x86, 0xdd];
        let tap = Tap::default();
        let noting = tap.clone();
        network.set_filter(Box::new(move |frame| {
            let (address, bth) = if frame[12..14] == IPV6 { (53, 62) } else { (33, 42) };
            let opcode = frame[bth];
            // READ Response First, Last, Only; Acknowledge; Atomic Acknowledge: with an AETH.
            if matches!(opcode, 0x0d | 0x0f..=0x12) {
                let low = |at: usize| u32::from_be_bytes([0, frame[at + 1], frame[at + 2], frame[at + 3]]);
                let response = Response {
                    is_acknowledge: opcode == 0x11,
                    syndrome: frame[bth + 12],
                    psn: low(bth + 8),
                    msn: low(bth + 12),
                };
                noting.lock().push((usize::from(frame[address]) - 1, low(bth + 4), response));
            }
            Verdict::Pass
        }));
        tap
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Tapped>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
