//! Control messages between any two ranks, by which they connect, ping, abort, and agree on which ranks are gone
//! (`shrink.rs`).
//!
//! They are datagrams of an unreliable queue pair, so they need no connection and reach a rank whose connections have
//! failed. A rank that needs an answer repeats its message.

use std::collections::HashMap;

use ferroce::{
    Access, AddressVector, Ah, Context, Cq, Data, Destination, Gid, Mr, Pd, Qp, QpConfig, Qpn,
    ReceiveWorkRequest, SendFlags, SendOp, SendWorkRequest, Sge, Transition, WcStatus,
};
use tracing::debug;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Error;
use crate::channel::Link;
use crate::channel::message::Header;
use crate::memory::{allocate, deregister, register, when_free};
use crate::shrink::{Ranks, Word};

/// A message from one rank to another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The sender's end of the channel between both.
    Hello {
        link: Link,
        /// The [`Link::epoch`] of the receiver's queue pair that the sender knows, and from which it is ready to receive;
        /// or 0.
        heard: u32,
        /// The sender knows that the receiver is ready: no answer is needed.
        is_open: bool,
    },
    /// The sender's queue pair on a rail has failed.
    Left(Left),
    /// Asks whether the receiver is alive, and for its operation with this number.
    Ping { call: u32 },
    /// The answer: the number of operations of all ranks that the sender has called, and the one with the number.
    Pong { calls: u32, call: Option<Header> },
    /// The communicator has failed.
    Abort { origin: u32, lost: Option<u32>, reason: String },
    /// The sender knows about the failure.
    Aborted,
    /// Wakes the receiver, which sleeps: the sender has published something in the memory that both have mapped.
    Wake,
    /// The lost ranks: the sender's vote, the decision, or the confirmation that the sender knows it.
    Shrink(Word),
}

/// How many messages were received on a failed queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) rail: u32,
    /// The connected queue pairs of the sender and of the receiver, by [`Link::epoch`].
    pub(crate) own: u32,
    pub(crate) theirs: u32,
    /// The number of messages received from the receiver: it sends the others again.
    pub(crate) received: u32,
    /// The sender has the same data from the receiver: no answer is needed.
    pub(crate) is_answer: bool,
}

/// A message with its communicator and sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) communicator: u64,
    pub(crate) from: u32,
    pub(crate) message: Message,
}

/// A rank's control queue pair, as known to others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mailbox {
    pub(crate) ah: Ah,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: u32,
}

/// The queue pair of this process.
pub(crate) struct Control {
    qp: Qp,
    cq: Cq,
    memory: Mr,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: u32,
    /// Cached address handles.
    addresses: HashMap<(Gid, usize, u8), Ah>,
    under_way: u32,
    /// Whether messages were sent since the last query.
    has_sent: bool,
}

/// A message in wire format.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Frame {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    flags: u8,
    length: u8,
    communicator: U64,
    from: U32,
    /// Depends on the kind. HELLO: the queue pair number and the PSN; LEFT: the rail, and the number of messages received;
    /// PING and PONG: the number of calls; ABORT: the rank that failed first, and the lost one.
    first: U32,
    second: U32,
    body: [u8; BODY],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloBody {
    ring: U64,
    ring_key: U32,
    ring_bytes: U32,
    depth: U32,
    path_mtu: U32,
    epoch: U32,
    heard: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct LeftBody {
    own: U32,
    theirs: U32,
}

const MAGIC: [u8; 4] = *b"frcl";
const VERSION: u8 = 2;
/// A frame fits into the smallest path MTU, which is 256 bytes.
pub(crate) const BODY: usize = 224;
const HELLO: u8 = 1;
const PING: u8 = 2;
const PONG: u8 = 3;
const ABORT: u8 = 4;
const ABORTED: u8 = 5;
const VOTE: u8 = 6;
const DECISION: u8 = 7;
const KNOWN: u8 = 8;
const WAKE: u8 = 9;
const LEFT: u8 = 10;
const IS_OPEN: u8 = 1;
const IS_ANSWER: u8 = 1;
const NOBODY: u32 = u32::MAX;

/// Posted receives, and the most outstanding sends. A message that arrives without a posted receive is lost, and is sent
/// again.
const RECEIVES: u32 = 256;
const SENDS: u32 = 128;
/// Space for a GRH before each message.
const GRH: usize = 40;
const SLOT: usize = GRH + size_of::<Frame>();

impl Control {
    pub(crate) fn new(context: &mut Context, pd: Pd) -> Result<Control, Error> {
        let cq = context.create_cq(RECEIVES + SENDS)?;
        let config = QpConfig::ud(pd, cq)
            .max_send_wr(SENDS)
            .max_recv_wr(RECEIVES)
            .max_send_sge(1)
            .max_recv_sge(1)
            .max_inline_data(size_of::<Frame>() as u32)
            .signal_all(true);
        let qp = context.create_qp(&config)?;
        let memory = allocate(None, RECEIVES as usize * SLOT)?;
        let memory = register(context, pd, memory, Access::LOCAL_WRITE)?;
        let [high, low] = [(); 2].map(|()| context.random_psn().value());
        // A Q_Key with the highest bit set would mean the sender's own.
        let qkey = (high << 8 ^ low) & 0x7fff_ffff;
        context.start_datagrams(qp, qkey)?;
        let qpn = context.query_qp(qp)?.qpn;
        let addresses = HashMap::new();
        let control = Control { qp, cq, memory, qpn, qkey, addresses, under_way: 0, has_sent: false };
        for slot in 0..RECEIVES {
            control.post_receive(context, slot.into())?;
        }
        Ok(control)
    }

    pub(crate) fn destroy(
        self,
        context: &mut Context,
        mut now: impl FnMut() -> ferroce::Nanos,
    ) -> Result<(), Error> {
        for ah in self.addresses.into_values() {
            when_free(context, &mut now, |context| context.destroy_ah(ah))?;
        }
        context.destroy_qp(self.qp)?;
        context.destroy_cq(self.cq)?;
        deregister(context, now, self.memory).map(drop)
    }

    /// The address handle of a port, for its address, the index of the local GID table entry, and the traffic class. All
    /// communicators share them.
    pub(crate) fn address(
        &mut self,
        context: &mut Context,
        pd: Pd,
        to: (Gid, usize, u8),
    ) -> Result<Ah, ferroce::Error> {
        if let Some(ah) = self.addresses.get(&to) {
            return Ok(*ah);
        }
        let (gid, gid_index, traffic_class) = to;
        let ah = context.create_ah(pd, &AddressVector::new(gid, gid_index).traffic_class(traffic_class))?;
        self.addresses.insert(to, ah);
        Ok(ah)
    }

    /// Sends a message, unless too many are outstanding: messages may be lost in any case.
    pub(crate) fn send(
        &mut self,
        context: &mut Context,
        to: Mailbox,
        envelope: &Envelope,
    ) -> Result<(), Error> {
        if self.under_way >= SENDS {
            return Ok(());
        }
        let frame = envelope.frame();
        let op = SendOp::SendTo(Destination { ah: to.ah, qpn: to.qpn, qkey: to.qkey });
        let data = Data::Inline(frame.as_bytes());
        let wr = SendWorkRequest { wr_id: SENT, op, data, flags: SendFlags::SIGNALED };
        context.post_send(self.qp, &wr)?;
        self.under_way += 1;
        self.has_sent = true;
        Ok(())
    }

    /// Whether messages were sent since the last [`take_sent`](Control::take_sent).
    pub(crate) fn has_sent(&self) -> bool {
        self.has_sent
    }

    /// Whether messages were sent since the last call; the next poll sends them.
    pub(crate) fn take_sent(&mut self) -> bool {
        std::mem::take(&mut self.has_sent)
    }

    /// The next message received. Invalid messages are dropped.
    pub(crate) fn next(&mut self, context: &mut Context) -> Result<Option<Envelope>, Error> {
        while let Some(wc) = context.poll_cq(self.cq)? {
            if wc.wr_id == SENT {
                self.under_way -= 1;
                if wc.status != WcStatus::Success && wc.status != WcStatus::WrFlushErr {
                    // A rank that can't be reached must not delay messages to others.
                    if let Err(error) = context.modify_qp(self.qp, Transition::Resume) {
                        debug!(%error, "control messages after one that failed");
                    }
                }
                continue;
            }
            let mut frame = Frame::new_zeroed();
            let is_whole = wc.status == WcStatus::Success && wc.byte_len as usize == SLOT;
            if is_whole {
                let at = wc.wr_id * SLOT as u64 + GRH as u64;
                context.read(self.memory, at, frame.as_mut_bytes())?;
            }
            self.post_receive(context, wc.wr_id)?;
            if let Some(envelope) = is_whole.then(|| Envelope::parse(&frame)).flatten() {
                return Ok(Some(envelope));
            }
        }
        Ok(None)
    }

    fn post_receive(&self, context: &mut Context, slot: u64) -> Result<(), Error> {
        let sge = Sge { mr: self.memory, offset: slot * SLOT as u64, length: SLOT as u32 };
        Ok(context.post_recv(self.qp, &ReceiveWorkRequest { wr_id: slot, sges: &[sge] })?)
    }
}

/// The work request ID of sends. Those of receives are slots of the memory.
const SENT: u64 = u64::MAX;

impl Envelope {
    fn frame(&self) -> Frame {
        let mut frame = Frame {
            magic: MAGIC,
            version: VERSION,
            kind: 0,
            flags: 0,
            length: 0,
            communicator: U64::new(self.communicator),
            from: U32::new(self.from),
            first: U32::new(0),
            second: U32::new(0),
            body: [0; BODY],
        };
        let body = match &self.message {
            Message::Hello { link, heard, is_open } => {
                frame.kind = HELLO;
                frame.flags = if *is_open { IS_OPEN } else { 0 };
                (frame.first, frame.second) = (U32::new(link.qpn), U32::new(link.psn));
                let body = HelloBody {
                    ring: U64::new(link.ring),
                    ring_key: U32::new(link.ring_key),
                    ring_bytes: U32::new(link.ring_bytes),
                    depth: U32::new(link.depth),
                    path_mtu: U32::new(link.path_mtu),
                    epoch: U32::new(link.epoch),
                    heard: U32::new(*heard),
                };
                body.as_bytes().to_vec()
            }
            Message::Left(Left { rail, own, theirs, received, is_answer }) => {
                frame.kind = LEFT;
                frame.flags = if *is_answer { IS_ANSWER } else { 0 };
                (frame.first, frame.second) = (U32::new(*rail), U32::new(*received));
                LeftBody { own: U32::new(*own), theirs: U32::new(*theirs) }.as_bytes().to_vec()
            }
            Message::Ping { call } => {
                frame.kind = PING;
                frame.first = U32::new(*call);
                Vec::new()
            }
            Message::Pong { calls, call } => {
                frame.kind = PONG;
                frame.first = U32::new(*calls);
                call.as_ref().map(|header| header.as_bytes().to_vec()).unwrap_or_default()
            }
            Message::Abort { origin, lost, reason } => {
                frame.kind = ABORT;
                (frame.first, frame.second) = (U32::new(*origin), U32::new(lost.unwrap_or(NOBODY)));
                let end = (0..=reason.len().min(BODY)).rev().find(|end| reason.is_char_boundary(*end));
                reason.as_bytes()[..end.unwrap_or(0)].to_vec()
            }
            Message::Aborted => {
                frame.kind = ABORTED;
                Vec::new()
            }
            Message::Wake => {
                frame.kind = WAKE;
                Vec::new()
            }
            Message::Shrink(Word::Vote(ranks)) => {
                frame.kind = VOTE;
                ranks.as_bytes().to_vec()
            }
            Message::Shrink(Word::Decision(ranks)) => {
                frame.kind = DECISION;
                ranks.as_bytes().to_vec()
            }
            Message::Shrink(Word::Known) => {
                frame.kind = KNOWN;
                Vec::new()
            }
        };
        frame.length = body.len() as u8;
        frame.body[..body.len()].copy_from_slice(&body);
        frame
    }

    fn parse(frame: &Frame) -> Option<Envelope> {
        if frame.magic != MAGIC || frame.version != VERSION {
            return None;
        }
        let body = frame.body.get(..usize::from(frame.length))?;
        let (first, second) = (frame.first.get(), frame.second.get());
        let message = match frame.kind {
            HELLO => {
                let body = HelloBody::ref_from_bytes(body).ok()?;
                let link = Link {
                    qpn: first,
                    psn: second,
                    path_mtu: body.path_mtu.get(),
                    ring: body.ring.get(),
                    ring_key: body.ring_key.get(),
                    ring_bytes: body.ring_bytes.get(),
                    depth: body.depth.get(),
                    epoch: body.epoch.get(),
                };
                Message::Hello { link, heard: body.heard.get(), is_open: frame.flags & IS_OPEN != 0 }
            }
            LEFT => {
                let body = LeftBody::ref_from_bytes(body).ok()?;
                let (own, theirs) = (body.own.get(), body.theirs.get());
                let is_answer = frame.flags & IS_ANSWER != 0;
                Message::Left(Left { rail: first, own, theirs, received: second, is_answer })
            }
            PING => Message::Ping { call: first },
            PONG if body.is_empty() => Message::Pong { calls: first, call: None },
            PONG => Message::Pong { calls: first, call: Some(Header::read_from_bytes(body).ok()?) },
            ABORT => {
                // Text from the network is made printable.
                let reason = String::from_utf8_lossy(body).replace(ferroce::is_unprintable, "\u{fffd}");
                Message::Abort { origin: first, lost: Some(second).filter(|rank| *rank != NOBODY), reason }
            }
            ABORTED => Message::Aborted,
            WAKE => Message::Wake,
            VOTE => Message::Shrink(Word::Vote(Ranks::from_bytes(body))),
            DECISION => Message::Shrink(Word::Decision(Ranks::from_bytes(body))),
            KNOWN => Message::Shrink(Word::Known),
            _ => return None,
        };
        Some(Envelope { communicator: frame.communicator.get(), from: frame.from.get(), message })
    }
}

/// Parses bytes from the network as a message, and checks that it is written the same again.
#[cfg(fuzzing)]
pub fn parse(bytes: &[u8]) {
    let Ok((frame, _)) = Frame::read_from_prefix(bytes) else { return };
    let Some(envelope) = Envelope::parse(&frame) else { return };
    let again = Envelope::parse(&envelope.frame()).expect("it was one before");
    match (&again.message, &envelope.message) {
        // Text that was not UTF-8 is longer after conversion, and may be truncated.
        (Message::Abort { reason: cut, .. }, Message::Abort { reason, .. }) => {
            assert!(reason.starts_with(cut))
        }
        _ => assert_eq!(again, envelope),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::message::{Call, Count, Purpose};
    use crate::operation::Kind;
    use crate::schedule::Algorithm;
    use ferroce::driver::reduction::DataType;

    #[test]
    fn messages_parse_back() {
        let link = Link {
            qpn: 1,
            psn: 2,
            path_mtu: 4096,
            ring: 1 << 40,
            ring_key: 3,
            ring_bytes: 4,
            depth: 5,
            epoch: 6,
        };
        let call = Call {
            number: 9,
            kind: Kind::AllGather,
            data_type: DataType::F32,
            reduction: 0,
            algorithm: Algorithm::Ring,
            root: 0,
            count: Count::Each(5),
        };
        for message in [
            Message::Hello { link, heard: 8, is_open: false },
            Message::Hello { link, heard: 0, is_open: true },
            Message::Left(Left { rail: 1, own: 2, theirs: 3, received: 1 << 30, is_answer: true }),
            Message::Left(Left { rail: 0, own: 1, theirs: 1, received: 0, is_answer: false }),
            Message::Ping { call: 7 },
            Message::Pong { calls: 7, call: None },
            Message::Pong { calls: 9, call: Some(Header::new(&call, Purpose::Call, 0)) },
            Message::Abort { origin: 3, lost: None, reason: "why".to_owned() },
            Message::Abort { origin: 3, lost: Some(0), reason: String::new() },
            Message::Aborted,
            Message::Wake,
            Message::Shrink(Word::Vote(Ranks::from_bytes(&[1, 4]))),
            Message::Shrink(Word::Decision(Ranks::from_bytes(&[0]))),
            Message::Shrink(Word::Known),
        ] {
            let envelope = Envelope { communicator: u64::MAX - 1, from: 77, message };
            assert_eq!(Envelope::parse(&envelope.frame()), Some(envelope));
        }
    }

    #[test]
    fn a_long_reason_is_truncated_between_characters() {
        let reason = "ü".repeat(BODY);
        let message = Message::Abort { origin: 0, lost: None, reason };
        let frame = Envelope { communicator: 1, from: 0, message }.frame();
        let Some(Envelope { message: Message::Abort { reason, .. }, .. }) = Envelope::parse(&frame) else {
            panic!("an abort")
        };
        assert_eq!(reason, "ü".repeat(BODY / 2));
    }

    #[test]
    fn invalid_messages_are_dropped() {
        let good = Envelope { communicator: 1, from: 0, message: Message::Aborted }.frame();
        for spoil in [
            |frame: &mut Frame| frame.magic[0] = 0,
            |frame: &mut Frame| frame.version = VERSION + 1,
            |frame: &mut Frame| frame.kind = 99,
            |frame: &mut Frame| frame.length = 255,
            |frame: &mut Frame| (frame.kind, frame.length) = (HELLO, 3),
        ] {
            let mut bad = good;
            spoil(&mut bad);
            assert_eq!(Envelope::parse(&bad), None);
        }
    }
}
