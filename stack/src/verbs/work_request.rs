use ferroce_wire::{FlushType, Qpn, RKey, Selectivity};

use crate::verbs::{Access, Ah, DeviceAttributes, Error, Feature, MAX_MESSAGE, Mr, Mw};

/// A scatter/gather element: part of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// The region.
    pub mr: Mr,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// An address in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// The peer's virtual address.
    pub addr: u64,
    /// The key that the peer sent with it.
    pub rkey: RKey,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The path.
    pub ah: Ah,
    /// The destination queue pair; [`Qpn::MULTICAST`] for a group.
    pub qpn: Qpn,
    /// That queue pair's Q_Key. With the highest bit set, the sender's own Q_Key is used.
    pub qkey: u32,
}

/// The operation of a send work request. [`Context::post_send`](crate::Context::post_send) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// SEND to the peer's next receive work request.
    Send,
    /// The same, with 4 bytes of immediate data in the peer's completion.
    SendWithImm(u32),
    /// RC: the same as `Send`, and a key of the peer is invalidated before its completion.
    SendWithInvalidate(RKey),
    /// UD: SEND to the destination's next receive work request, at most one packet long. A longer message completes with success
    /// and is not sent (C10-93.1.1).
    SendTo(Destination),
    /// The same, with 4 bytes of immediate data in the receiver's completion.
    SendToWithImm(Destination, u32),
    /// WRITE to the peer's memory; the peer's application is not notified.
    Write(RemoteAddress),
    /// The same, and it consumes a receive work request of the peer, whose completion has the immediate data.
    WriteWithImm(RemoteAddress, u32),
    /// RC: READ from the peer's memory.
    Read(RemoteAddress),
    /// Stores `swap` in 8 bytes of the peer if they hold `compare`; returns the old value, in host byte order.
    CompareSwap {
        /// A multiple of 8.
        remote: RemoteAddress,
        /// The expected value.
        compare: u64,
        /// The value to store.
        swap: u64,
    },
    /// Adds to 8 bytes of the peer; returns the old value, in host byte order.
    FetchAdd {
        /// A multiple of 8.
        remote: RemoteAddress,
        /// The value to add, modulo 2⁶⁴.
        add: u64,
    },
    /// Invalidates a local key after all earlier work requests are complete.
    LocalInvalidate(RKey),
    /// Binds a memory window to a range of a region for the peer of this queue pair, after all earlier work requests are
    /// complete. The key is drawn at that time: [`Context::remote_window`](crate::Context::remote_window) returns it after the
    /// completion.
    ///
    /// Window, region and queue pair must have one protection domain, the window must be unbound, and the region registered with
    /// [`MW_BIND`](Access::MW_BIND); if the peer may write, with [`LOCAL_WRITE`](Access::LOCAL_WRITE) too. Otherwise it completes
    /// with [`MwBindErr`](crate::WcStatus::MwBindErr).
    BindMw {
        /// The window.
        mw: Mw,
        /// The region.
        mr: Mr,
        /// Bytes from the region's start.
        offset: u64,
        /// Bytes, at least 1: to unbind a window, invalidate its key; an empty bind does not.
        length: u64,
        /// The rights of the peer: any of [`REMOTE_READ`](Access::REMOTE_READ), [`REMOTE_WRITE`](Access::REMOTE_WRITE),
        /// [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) and [`FLUSH_GLOBAL`](Access::FLUSH_GLOBAL), whether the region grants them or
        /// not. The peer may always invalidate the window.
        access: Access,
    },
    /// FLUSH: makes earlier writes to the peer's memory globally visible there, or persistent (IBA 1.5).
    Flush {
        /// The start of the range.
        remote: RemoteAddress,
        /// Bytes of the range, at most 2³¹.
        length: u32,
        /// The range, or the whole region of the key; then address and length are ignored.
        selectivity: Selectivity,
        /// Global visibility, persistence, or both.
        kind: FlushType,
    },
    /// ATOMIC WRITE: stores 8 bytes atomically at a multiple of 8 in the peer's memory (IBA 1.5).
    AtomicWrite(RemoteAddress),
}

/// Every slot of every send queue holds one.
const _: () = assert!(size_of::<SendOp>() <= 40);

impl SendOp {
    /// Whether the device supports the operation, and its arguments are valid.
    pub(crate) fn check(&self, device: &DeviceAttributes) -> Result<(), Error> {
        match *self {
            SendOp::Flush { .. } if !device.flush_global => Err(Error::Unsupported(Feature::Flush)),
            SendOp::AtomicWrite(_) if !device.atomic_write => Err(Error::Unsupported(Feature::AtomicWrite)),
            SendOp::Flush { kind, .. } if kind == FlushType::default() => {
                Err(Error::invalid("flush type", "none", "global visibility, persistence or both"))
            }
            SendOp::Flush { length, .. } if length > MAX_MESSAGE => {
                Err(Error::invalid("flush length", length, format!("at most {MAX_MESSAGE} bytes")))
            }
            _ => Ok(()),
        }
    }
}

/// The local side of a send work request.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Data<'a> {
    /// Gathered from (or, for READ and atomics, scattered to) registered memory.
    Sges(&'a [Sge]),
    /// Copied when posted: the caller may reuse the bytes immediately. SEND, WRITE and ATOMIC WRITE only.
    Inline(&'a [u8]),
}

/// Flags of a send work request.
///
/// ```
/// # use ferroce::*;
/// let flags = SendFlags::SIGNALED.fence(true);
/// assert!(flags.signaled && flags.fence && !flags.solicited);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct SendFlags {
    /// Completes with a work completion even when it succeeds.
    pub signaled: bool,
    /// Waits for all earlier READs, atomics, FLUSHes and ATOMIC WRITEs.
    pub fence: bool,
    /// Requests a solicited event at the peer.
    pub solicited: bool,
    /// Requests no ACK of its own: see [`lazy_ack`](SendFlags::lazy_ack).
    pub lazy_ack: bool,
}

impl SendFlags {
    /// Only [`signaled`](SendFlags::signaled).
    pub const SIGNALED: SendFlags =
        SendFlags { signaled: true, fence: false, solicited: false, lazy_ack: false };

    /// Completes with a work completion even when it succeeds.
    pub const fn signaled(self, signaled: bool) -> Self {
        SendFlags { signaled, ..self }
    }

    /// Waits for all earlier READs, atomics, FLUSHes and ATOMIC WRITEs.
    pub const fn fence(self, fence: bool) -> Self {
        SendFlags { fence, ..self }
    }

    /// Requests a solicited event at the peer.
    pub const fn solicited(self, solicited: bool) -> Self {
        SendFlags { solicited, ..self }
    }

    /// RC with go-back-N: requests no ACK of its own, which saves a packet if messages flow in both directions. It completes with
    /// a later request that does; one of 16 consecutive packets does, and each one while much is in flight to the destination. If
    /// none follows within a quarter of the [ACK timeout](crate::ReadyToSend::ack_timeout), its last packet is retransmitted with
    /// an ACK request; the peer counts a duplicate. Operations that wait for all earlier ones, such as a local operation or
    /// [`Drain`](crate::Transition::Drain), wait as long, and a dead peer is noticed that much later. Without a timeout the ACK
    /// is requested at once, also on queue pairs with selective repeat. RNICs ignore the flag.
    pub const fn lazy_ack(self, lazy_ack: bool) -> Self {
        SendFlags { lazy_ack, ..self }
    }
}

/// A send work request. It is written as a literal: extensions are added to [`SendOp`], [`Data`] and [`SendFlags`].
#[derive(Clone, Copy, Debug)]
pub struct SendWorkRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// The local memory.
    pub data: Data<'a>,
    /// The flags.
    pub flags: SendFlags,
}

/// A buffer for an incoming message. [`Context::post_recv`](crate::Context::post_recv) has an example.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWorkRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Filled in order.
    pub sges: &'a [Sge],
}
