use zerocopy::FromZeros;

use crate::{Aeth, AtomicAckEth, AtomicEth, Deth, Extension, Feth, FrameBuilder, Ieth, ImmDt, Packet, Reth};

/// The headers of a packet between BTH and payload, as values.
///
/// [`Packet::extensions`] returns those of a frame, [`FrameBuilder::put_extensions`] writes them into one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Extensions {
    /// DETH, on UD packets.
    pub deth: Option<Deth>,
    /// RETH, on the first packet of a WRITE, on READ requests, FLUSH and ATOMIC WRITE.
    pub reth: Option<Reth>,
    /// AtomicETH, on atomics.
    pub atomic_eth: Option<AtomicEth>,
    /// AETH, on responses other than READ Middle.
    pub aeth: Option<Aeth>,
    /// AtomicAckETH, on Atomic Acknowledge.
    pub atomic_ack_eth: Option<AtomicAckEth>,
    /// Immediate data.
    pub immdt: Option<ImmDt>,
    /// IETH, on SEND with invalidate.
    pub ieth: Option<Ieth>,
    /// FETH, on FLUSH.
    pub feth: Option<Feth>,
}

impl Extensions {
    /// The headers of a packet.
    pub(crate) fn of(packet: &Packet<'_>) -> Extensions {
        Extensions {
            deth: packet.deth().copied(),
            reth: packet.reth().copied(),
            atomic_eth: packet.atomic_eth().copied(),
            aeth: packet.aeth().copied(),
            atomic_ack_eth: packet.atomic_ack_eth().copied(),
            immdt: packet.immdt().copied(),
            ieth: packet.ieth().copied(),
            feth: packet.feth().copied(),
        }
    }

    /// Removes a header, for a packet that a recorder has truncated before it.
    pub fn remove(&mut self, extension: Extension) {
        match extension {
            Extension::Deth => self.deth = None,
            Extension::Reth => self.reth = None,
            Extension::AtomicEth => self.atomic_eth = None,
            Extension::Aeth => self.aeth = None,
            Extension::AtomicAckEth => self.atomic_ack_eth = None,
            Extension::ImmDt => self.immdt = None,
            Extension::Ieth => self.ieth = None,
            Extension::Feth => self.feth = None,
        }
    }

    /// Appends a header to a frame; zeros if it is missing.
    pub(crate) fn put(&self, extension: Extension, frame: &mut FrameBuilder<'_>) {
        match extension {
            Extension::Deth => frame.put(&self.deth.unwrap_or_else(Deth::new_zeroed)),
            Extension::Reth => frame.put(&self.reth.unwrap_or_else(Reth::new_zeroed)),
            Extension::AtomicEth => frame.put(&self.atomic_eth.unwrap_or_else(AtomicEth::new_zeroed)),
            Extension::Aeth => frame.put(&self.aeth.unwrap_or_else(Aeth::new_zeroed)),
            Extension::AtomicAckEth => {
                frame.put(&self.atomic_ack_eth.unwrap_or_else(AtomicAckEth::new_zeroed));
            }
            Extension::ImmDt => frame.put(&self.immdt.unwrap_or_else(ImmDt::new_zeroed)),
            Extension::Ieth => frame.put(&self.ieth.unwrap_or_else(Ieth::new_zeroed)),
            Extension::Feth => frame.put(&self.feth.unwrap_or_else(Feth::new_zeroed)),
        }
    }
}
