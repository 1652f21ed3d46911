use ferroce_wire::{FlushType, Qpn, RKey, Selectivity};

use crate::verbs::{Access, Ah, DeviceAttributes, Error, Feature, MAX_MESSAGE, Mr, Mw};

/// A piece of local memory: part of a registered region.
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
    /// The key that the peer gave out with it.
    pub rkey: RKey,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The way there.
    pub ah: Ah,
    /// The queue pair there; [`Qpn::MULTICAST`] for a group.
    pub qpn: Qpn,
    /// That queue pair's Q_Key. With the highest bit set it stands for the sender's own Q_Key.
    pub qkey: u32,
}

/// What a send work request does. [`Context::post_send`](crate::Context::post_send) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// Into the peer's next receive work request.
    Send,
    /// The same, with 4 bytes that the peer finds in its completion.
    SendWithImm(u32),
    /// RC: the same as `Send`, and the peer's key is invalid before its completion.
    SendWithInvalidate(RKey),
    /// UD: into the next receive work request there, at most one packet long. A longer one completes
    /// with success and is not sent (C10-93.1.1).
    SendTo(Destination),
    /// The same, with 4 bytes that the receiver finds in its completion.
    SendToWithImm(Destination, u32),
    /// Into the peer's memory; the peer's application does not notice.
    Write(RemoteAddress),
    /// The same, and it takes a receive work request of the peer, which finds the immediate in its
    /// completion.
    WriteWithImm(RemoteAddress, u32),
    /// RC: from the peer's memory.
    Read(RemoteAddress),
    /// Stores `swap` in 8 bytes of the peer if they hold `compare`; the old value comes back, in
    /// host byte order.
    CompareSwap {
        /// A multiple of 8.
        remote: RemoteAddress,
        /// What must be there.
        compare: u64,
        /// What to store.
        swap: u64,
    },
    /// Adds to 8 bytes of the peer; the old value comes back, in host byte order.
    FetchAdd {
        /// A multiple of 8.
        remote: RemoteAddress,
        /// What to add, modulo 2⁶⁴.
        add: u64,
    },
    /// Revokes a key of one's own, once all earlier work requests are done.
    LocalInvalidate(RKey),
    /// Opens a range of a region to the peer of this queue pair, through a memory window, once all
    /// earlier work requests are done. The key is drawn then, so
    /// [`Context::remote_window`](crate::Context::remote_window) tells it after the completion.
    ///
    /// Window, region and queue pair must be of one protection domain, the window unbound, and the
    /// region registered with [`MW_BIND`](Access::MW_BIND); if the peer may write, with
    /// [`LOCAL_WRITE`](Access::LOCAL_WRITE) too. Otherwise it ends as
    /// [`MwBindErr`](crate::WcStatus::MwBindErr).
    BindMw {
        /// The window.
        mw: Mw,
        /// The region.
        mr: Mr,
        /// Bytes from the region's start.
        offset: u64,
        /// Bytes, at least 1: a window is closed by invalidating its key, not by an empty bind.
        length: u64,
        /// What the peer may do: any of [`REMOTE_READ`](Access::REMOTE_READ),
        /// [`REMOTE_WRITE`](Access::REMOTE_WRITE), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) and
        /// [`FLUSH_GLOBAL`](Access::FLUSH_GLOBAL), whether the region grants it or not. It may
        /// always invalidate the window.
        access: Access,
    },
    /// Makes what was written before in the peer's memory visible to every reader there, or
    /// persistent (IBA 1.6).
    Flush {
        /// Where the range starts.
        remote: RemoteAddress,
        /// Bytes of the range, at most 2³¹.
        length: u32,
        /// The range, or the whole region of the key; address and length mean nothing then.
        selectivity: Selectivity,
        /// How far; at least one of the two.
        kind: FlushType,
    },
    /// Stores 8 bytes at a multiple of 8 in the peer's memory, all at once (IBA 1.6).
    AtomicWrite(RemoteAddress),
}

/// Every slot of every send queue holds one.
const _: () = assert!(size_of::<SendOp>() <= 40);

impl SendOp {
    /// Whether the device has the operation, and what it says of itself makes sense.
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
    /// Copied when posted: the caller may reuse the bytes at once. SEND, WRITE and ATOMIC WRITE
    /// only.
    Inline(&'a [u8]),
}

/// How a send work request is treated.
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
    /// Asks for a solicited event at the peer.
    pub solicited: bool,
    /// Asks for no ACK of its own: see [`lazy_ack`](SendFlags::lazy_ack).
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

    /// Asks for a solicited event at the peer.
    pub const fn solicited(self, solicited: bool) -> Self {
        SendFlags { solicited, ..self }
    }

    /// RC with go-back-N: asks for no ACK of its own, which saves a packet where messages go both ways. It completes with a later
    /// request that asks; one of 16 packets in a row does, and each where much is in flight to the destination. Where none follows in a quarter of the
    /// [ACK timeout](crate::ReadyToSend::ack_timeout), its last packet is sent once more and asks; the peer counts a duplicate. What
    /// waits until all before it is done, such as a local operation or [`Drain`](crate::Transition::Drain), waits as long, and a
    /// peer that is gone is noticed so much later. Without a timeout it asks at once, as do queue pairs with selective repeat and
    /// RNICs, to which this says nothing.
    pub const fn lazy_ack(self, lazy_ack: bool) -> Self {
        SendFlags { lazy_ack, ..self }
    }
}

/// Work for a send queue. It is written as a literal: what it can do grows in [`SendOp`], [`Data`] and [`SendFlags`].
#[derive(Clone, Copy, Debug)]
pub struct SendWorkRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// The local memory.
    pub data: Data<'a>,
    /// How.
    pub flags: SendFlags,
}

/// A buffer for an incoming message. [`Context::post_recv`](crate::Context::post_recv) has an example.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWorkRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Filled in order.
    pub sges: &'a [Sge],
}
