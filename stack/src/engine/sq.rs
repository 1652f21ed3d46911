use ferroce_driver::{Span, prefetch};
use ferroce_wire::Psn;

use crate::engine::kind::Kind;
use crate::engine::mr::{Granted, MemoryRegions};
use crate::engine::rq::total_length;
use crate::verbs::{
    Data, Error, Feature, MAX_MESSAGE, Mr, SendFlags, SendOp, SendWorkRequest, Sge, WcOpcode,
};

/// A send work request in the queue. Its payload is not kept: a retransmission reads memory again.
#[derive(Clone, Copy)]
pub(crate) struct Wqe {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) kind: &'static Kind,
    pub(crate) flags: SendFlags,
    /// Bytes of the message.
    pub(crate) length: u32,
    sges: u8,
    inline: bool,
    /// Its first packet has a PSN; the two fields below are valid.
    pub(crate) started: bool,
    pub(crate) first_psn: Psn,
    /// The PSNs that it occupies: its packets, or for a READ those of the response.
    pub(crate) packets: u32,
}

/// A work request that was removed from the queue.
pub(crate) struct Ended {
    pub(crate) wr_id: u64,
    pub(crate) opcode: WcOpcode,
    pub(crate) length: u32,
    pub(crate) signaled: bool,
    pub(crate) is_read_or_atomic: bool,
}

impl Wqe {
    /// The PSN after its last; only valid once it is started.
    pub(crate) fn end_psn(&self) -> Psn {
        self.first_psn + self.packets
    }
}

/// Posted send work requests, by running number: `head` is the oldest incomplete one, `tail` the next to be posted. The
/// depth is a power of two.
pub(crate) struct SendQueue {
    wqes: Box<[Wqe]>,
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    max_sge: u32,
    max_inline: u32,
    head: u32,
    tail: u32,
}

impl SendQueue {
    pub(crate) fn new(depth: u32, max_sge: u8, max_inline: u32, filler: Mr) -> SendQueue {
        let depth = depth.next_power_of_two() as usize;
        let idle = Wqe {
            wr_id: 0,
            op: SendOp::Send,
            kind: SendOp::Send.kind(),
            flags: SendFlags::default(),
            length: 0,
            sges: 0,
            inline: false,
            started: false,
            first_psn: Psn::default(),
            packets: 0,
        };
        SendQueue {
            wqes: vec![idle; depth].into_boxed_slice(),
            sges: vec![Sge { mr: filler, offset: 0, length: 0 }; depth * usize::from(max_sge)]
                .into_boxed_slice(),
            inline: vec![0; depth * max_inline as usize].into_boxed_slice(),
            max_sge: max_sge.into(),
            max_inline,
            head: 0,
            tail: 0,
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.wqes.len() as u32
    }

    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }

    /// Prefetches the work request `number` and its first SGE, if it is posted. It is not read, which would wait for it.
    pub(crate) fn prefetch(&self, number: u32) {
        if number != self.tail {
            prefetch(self.wqe(number));
            self.sges.get(self.index(number) * self.max_sge as usize).into_iter().for_each(prefetch);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    pub(crate) fn wqe(&self, number: u32) -> &Wqe {
        &self.wqes[self.index(number)]
    }

    pub(crate) fn wqe_mut(&mut self, number: u32) -> &mut Wqe {
        let index = self.index(number);
        &mut self.wqes[index]
    }

    /// The oldest incomplete one.
    pub(crate) fn front(&self) -> Option<&Wqe> {
        if self.is_empty() { None } else { Some(self.wqe(self.head)) }
    }

    #[inline(always)]
    pub(crate) fn sges(&self, number: u32) -> &[Sge] {
        self.sges_of(number, self.wqe(number))
    }

    /// The same if the work request is known.
    #[inline(always)]
    fn sges_of(&self, number: u32, wqe: &Wqe) -> &[Sge] {
        &self.sges[self.index(number) * self.max_sge as usize..][..usize::from(wqe.sges)]
    }

    /// The `len` bytes of the message `number` from byte `skip` on, if they are in one piece of host memory, as most are.
    #[inline(always)]
    pub(crate) fn piece<'a>(
        &'a self,
        number: u32,
        skip: u32,
        len: u32,
        mrs: &'a MemoryRegions,
    ) -> Option<Span<'a>> {
        let wqe = self.wqe(number);
        if wqe.inline {
            let start = self.index(number) * self.max_inline as usize + skip as usize;
            return self.inline.get(start..start + len as usize).map(Span::from);
        }
        let [sge] = self.sges_of(number, wqe) else { return None };
        mrs.piece(sge, skip, len)
    }

    /// The place of the same bytes, if a port may send them in place: in one piece of registered memory.
    pub(crate) fn apart(&self, number: u32, skip: u32, len: u32, mrs: &MemoryRegions) -> Option<Granted> {
        let [sge] = self.sges(number) else { return None };
        let piece = Granted::of_sge(sge, skip, len)?;
        mrs.payload(piece).map(|_| piece)
    }

    /// Posts a work request of at most `max_length` bytes.
    #[inline]
    pub(crate) fn post(
        &mut self,
        wr: &SendWorkRequest<'_>,
        kind: &'static Kind,
        max_length: u32,
        mrs: &mut MemoryRegions,
    ) -> Result<(), Error> {
        if self.tail.wrapping_sub(self.head) == self.depth() {
            return Err(Error::QueueFull { queue: "send", depth: self.depth() });
        }
        let index = self.index(self.tail);
        let (length, sges, inline) = match wr.data {
            Data::Inline(bytes) => {
                check_inline(kind, bytes, self.max_inline)?;
                self.inline[index * self.max_inline as usize..][..bytes.len()].copy_from_slice(bytes);
                (bytes.len() as u32, 0, true)
            }
            Data::Sges(sges) => {
                let length = total_length(sges, self.max_sge as usize)?;
                check_length(kind, length, max_length)?;
                if kind.is_atomic && mrs.has_device(sges) {
                    return Err(Error::Unsupported(Feature::AtomicsOfDevice));
                }
                mrs.pin(sges)?;
                // Avoids a call for the most common case of one piece.
                let room = &mut self.sges[index * self.max_sge as usize..][..sges.len()];
                room.iter_mut().zip(sges).for_each(|(to, from)| *to = *from);
                (length, sges.len() as u8, false)
            }
        };
        self.wqes[index] = Wqe {
            wr_id: wr.wr_id,
            op: wr.op,
            kind,
            flags: wr.flags,
            length,
            sges,
            inline,
            started: false,
            first_psn: Psn::default(),
            packets: 0,
        };
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Removes the oldest and unpins its memory.
    #[inline(always)]
    pub(crate) fn pop(&mut self, mrs: &mut MemoryRegions) -> Option<Ended> {
        let wqe = self.front()?;
        let ended = Ended {
            wr_id: wqe.wr_id,
            opcode: wqe.kind.wc_opcode,
            length: wqe.length,
            signaled: wqe.flags.signaled,
            is_read_or_atomic: wqe.kind.is_read_or_atomic,
        };
        mrs.unpin(self.sges(self.head));
        self.head = self.head.wrapping_add(1);
        Some(ended)
    }

    fn index(&self, number: u32) -> usize {
        number as usize & (self.wqes.len() - 1)
    }
}

/// Whether an operation can have these bytes inline.
#[inline]
pub(crate) fn check_inline(kind: &Kind, bytes: &[u8], max_inline: u32) -> Result<(), Error> {
    let is_free = kind.has_payload && kind.length.is_none();
    if is_free && bytes.len() <= max_inline as usize {
        Ok(())
    } else {
        check_inline_of(kind, bytes, max_inline)
    }
}

fn check_inline_of(kind: &Kind, bytes: &[u8], max_inline: u32) -> Result<(), Error> {
    if bytes.len() > max_inline as usize {
        let expected = format!("at most {max_inline} bytes, as the QP was created");
        return Err(Error::invalid("inline data", bytes.len(), expected));
    }
    if !kind.has_payload {
        let expected = "Data::Sges; only SEND, WRITE and ATOMIC WRITE can have inline data";
        return Err(Error::invalid("data", format_args!("Inline for {:?}", kind.wc_opcode), expected));
    }
    check_length(kind, bytes.len() as u32, MAX_MESSAGE)
}

#[inline]
pub(crate) fn check_length(kind: &Kind, length: u32, max_length: u32) -> Result<(), Error> {
    let (least, most) = kind.length.map_or((0, max_length), |length| (length, length));
    if (least..=most).contains(&length) {
        return Ok(());
    }
    let expected = match least == most {
        true => format!("{least} bytes, as this operation has"),
        false => format!("{least} to {most} bytes for this operation and path MTU"),
    };
    Err(Error::invalid("length", length, expected))
}
