//! The messages on a channel.
//!
//! | message | verb | immediate |
//! |---|---|---|
//! | header, and up to `eager_bytes` of elements | WRITE with immediate into the peer's ring | where in the ring |
//! | a chunk that is combined | WRITE with immediate into the peer's staging memory | where in it |
//! | a chunk that lands | WRITE with immediate to its place | |
//! | credit | empty WRITE with immediate | how many messages this rank has taken, ever |
//!
//! All messages except credits are numbered, in the immediate, because messages of several rails arrive in any order. Fewer
//! than 128 are outstanding between two ranks, so eight bits are enough.
//!
//! A header contains how long its sender has been in the call, so ranks can determine who started later without a common
//! clock.
//!
//! Integers are big-endian; elements are in the byte order of the machine, which all ranks share.

use std::fmt;
use std::time::Duration;

use ferroce::RKey;
use ferroce::driver::reduction::DataType;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::operation::{Kind, Reduction};
use crate::ports::{Keys, MAX_RAILS};
use crate::schedule::Algorithm;

/// A call of a rank: the values that both ends of a channel must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// The number among the operations of all ranks; those of two ranks are counted separately, and have the highest bit
    /// set.
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    pub(crate) data_type: DataType,
    /// [`Reduction::number`].
    pub(crate) reduction: u8,
    pub(crate) algorithm: Algorithm,
    pub(crate) root: u16,
    pub(crate) count: Count,
}

/// The number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// In total, or in each block.
    Each(u64),
    /// Blocks that differ: a hash of their lengths.
    Differ(u64),
}

/// The purpose of a ring message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Purpose {
    /// Elements follow.
    Elements = 1,
    /// Chunks follow, outside the ring.
    Call = 2,
    /// A [`Grant`] follows.
    Grant = 3,
}

/// The header of every message in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    call: U32,
    /// The number of messages that this rank has taken from the peer so far.
    pub(crate) taken: U32,
    count: U64,
    root: U16,
    kind: u8,
    data_type: u8,
    reduction: u8,
    algorithm: u8,
    purpose: u8,
    differ: u8,
    /// [`Age`], in microseconds.
    age: U32,
    idle: U32,
}

/// When a rank started a call, as durations: a peer learns which of the two started later, without a common clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Age {
    /// The time from the start of the call until the message was sent.
    pub(crate) age: Duration,
    /// How long the rank had been in no call before. A rank that was in another call until then is not considered late.
    pub(crate) idle: Duration,
}

/// The destinations of a peer's chunks. A region has one address, and a key for each rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Grant {
    /// For chunks that are not combined, from the base of the schedule on.
    pub(crate) output: U64,
    /// For chunks that are combined, in this and in later operations; length 0 if there is no such memory.
    pub(crate) staging: U64,
    pub(crate) staging_bytes: U32,
    reserved: U32,
    output_keys: [U32; MAX_RAILS],
    staging_keys: [U32; MAX_RAILS],
}

/// Memory of a peer: its address, and its key for each rail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) address: u64,
    pub(crate) keys: Keys,
}

impl Grant {
    /// The destination of chunks that are not combined.
    pub(crate) fn output(&self) -> Remote {
        Remote { address: self.output.get(), keys: self.output_keys.map(|key| RKey::new(key.get())) }
    }

    pub(crate) fn set_output(&mut self, output: &Remote) {
        self.output.set(output.address);
        self.output_keys = output.keys.map(|key| U32::new(key.value()));
    }

    /// The destination of chunks that are combined, and its length in bytes.
    pub(crate) fn staging(&self) -> (Remote, u32) {
        let keys = self.staging_keys.map(|key| RKey::new(key.get()));
        (Remote { address: self.staging.get(), keys }, self.staging_bytes.get())
    }

    pub(crate) fn set_staging(&mut self, staging: &Remote, bytes: u32) {
        self.staging.set(staging.address);
        self.staging_keys = staging.keys.map(|key| U32::new(key.value()));
        self.staging_bytes.set(bytes);
    }
}

impl Header {
    pub(crate) const BYTES: usize = size_of::<Header>();

    pub(crate) fn new(call: &Call, purpose: Purpose, taken: u32) -> Header {
        let (count, differ) = match call.count {
            Count::Each(count) => (count, 0),
            Count::Differ(hash) => (hash, 1),
        };
        Header {
            call: U32::new(call.number),
            taken: U32::new(taken),
            count: U64::new(count),
            root: U16::new(call.root),
            kind: call.kind as u8,
            data_type: call.data_type as u8,
            reduction: call.reduction,
            algorithm: call.algorithm as u8,
            purpose: purpose as u8,
            differ,
            age: U32::new(0),
            idle: U32::new(0),
        }
    }

    /// The same for a call that started at that time.
    pub(crate) fn of_age(self, Age { age, idle }: Age) -> Header {
        let micros = |time: Duration| U32::new(u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
        Header { age: micros(age), idle: micros(idle), ..self }
    }

    /// When the call started.
    pub(crate) fn age(&self) -> Age {
        let [age, idle] = [self.age, self.idle].map(|micros| Duration::from_micros(micros.get().into()));
        Age { age, idle }
    }

    /// Parses it; the error is the name of the invalid field.
    pub(crate) fn parse(&self) -> Result<(Call, Purpose), &'static str> {
        let purpose = match self.purpose {
            1 => Purpose::Elements,
            2 => Purpose::Call,
            3 => Purpose::Grant,
            _ => return Err("purpose"),
        };
        let call = Call {
            number: self.call.get(),
            kind: Kind::from_number(self.kind).ok_or("operation")?,
            data_type: DataType::ALL.into_iter().find(|t| *t as u8 == self.data_type).ok_or("data type")?,
            reduction: Some(self.reduction).filter(|number| *number <= 6).ok_or("reduction")?,
            algorithm: Algorithm::from_number(self.algorithm.into()).ok_or("algorithm")?,
            root: self.root.get(),
            count: match self.differ {
                0 => Count::Each(self.count.get()),
                1 => Count::Differ(self.count.get()),
                _ => return Err("form of the count"),
            },
        };
        Ok((call, purpose))
    }
}

impl Call {
    /// The highest bit of a number: an operation of two ranks.
    pub(crate) const OF_TWO: u32 = 1 << 31;
    /// The second highest bit: an operation of the communicator itself, which no program has called.
    pub(crate) const OWN: u32 = 1 << 30;
}

/// As in errors: `call 3, all_reduce of 1000 f32 (sum) by ring`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { number, kind, data_type, reduction, algorithm, root, count } = self;
        match kind {
            Kind::Send | Kind::Receive => {
                write!(f, "message {} of send and receive", number & !Call::OF_TWO)?
            }
            _ if number & Call::OWN != 0 => write!(f, "the communicator's own {kind}")?,
            _ => write!(f, "call {number}, {kind}")?,
        }
        match count {
            _ if *kind == Kind::Barrier => {}
            Count::Each(count) => write!(f, " of {count} {data_type}")?,
            // Each rank knows only its own counts.
            Count::Differ(_) if *kind == Kind::AllToAll => write!(f, "_v of {data_type}")?,
            Count::Differ(hash) => write!(f, " of {data_type} in blocks with the hash {hash:016x}")?,
        }
        if *reduction != 0 {
            write!(f, " ({})", Reduction::name(*reduction))?;
        }
        if kind.has_root() {
            write!(f, ", root {root}")?;
        }
        if *algorithm != Algorithm::Direct {
            write!(f, ", by {algorithm}")?;
        }
        Ok(())
    }
}

/// The immediate of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Immediate {
    /// The number of a message, modulo 256, and its place.
    Message(u8, Place),
    /// The number of messages taken by the peer, modulo 2³⁰.
    Credit(u32),
}

/// The place of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the ring, from this byte on.
    Ring(u32),
    /// In staging memory, from this byte on.
    Staging(u32),
    /// At its destination.
    Landed,
}

impl Immediate {
    /// Offsets are multiples of this.
    pub(crate) const UNIT: u32 = 64;
    /// Credits are counted modulo this plus 1.
    pub(crate) const MASK: u32 = (1 << 30) - 1;
    /// Bits of an offset, in units: more than the longest staging memory needs.
    const OFFSET: u32 = 22;

    pub(crate) fn value(self) -> u32 {
        match self {
            Immediate::Message(number, place) => {
                let (kind, offset) = match place {
                    Place::Ring(offset) => (0, offset),
                    Place::Staging(offset) => (1, offset),
                    Place::Landed => (2, 0),
                };
                (kind << 30) | (u32::from(number) << Immediate::OFFSET) | (offset / Immediate::UNIT)
            }
            Immediate::Credit(taken) => (3 << 30) | (taken & Immediate::MASK),
        }
    }

    pub(crate) fn parse(value: u32) -> Immediate {
        let number = (value >> Immediate::OFFSET) as u8;
        let offset = (value & ((1 << Immediate::OFFSET) - 1)) * Immediate::UNIT;
        match value >> 30 {
            0 => Immediate::Message(number, Place::Ring(offset)),
            1 => Immediate::Message(number, Place::Staging(offset)),
            2 => Immediate::Message(number, Place::Landed),
            _ => Immediate::Credit(value & Immediate::MASK),
        }
    }
}

/// The entry points of the fuzzer.
#[cfg(fuzzing)]
pub mod fuzzing {
    use super::*;

    /// Parses the header of a message in a ring.
    pub fn header(bytes: &[u8]) {
        let Ok((header, _)) = Header::read_from_prefix(bytes) else { return };
        let Ok((call, purpose)) = header.parse() else { return };
        let again = Header::new(&call, purpose, header.taken.get());
        assert_eq!(again.parse(), Ok((call, purpose)));
        assert!(!call.to_string().is_empty());
    }

    /// Parses the immediate of a message.
    pub fn immediate(bytes: &[u8]) {
        let Some(bytes) = bytes.first_chunk() else { return };
        let value = u32::from_be_bytes(*bytes);
        let again = Immediate::parse(value).value();
        // The place of a landed message is not parsed.
        assert!(again == value || value >> 30 == 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_immediates_parse_back() {
        let call = Call {
            number: 7,
            kind: Kind::Reduce,
            data_type: DataType::Bf16,
            reduction: Reduction::Average.number(),
            algorithm: Algorithm::Tree,
            root: 3,
            count: Count::Each(1 << 40),
        };
        for count in [call.count, Count::Differ(0x1234)] {
            let call = Call { count, ..call };
            assert_eq!(Header::new(&call, Purpose::Call, 9).parse(), Ok((call, Purpose::Call)));
        }
        assert_eq!(call.to_string(), "call 7, reduce of 1099511627776 bf16 (avg), root 3, by tree");
        let places = [Place::Ring(640), Place::Staging(1 << 27), Place::Landed];
        let messages = places.map(|place| Immediate::Message(200, place));
        for immediate in messages.into_iter().chain([Immediate::Credit(77)]) {
            assert_eq!(Immediate::parse(immediate.value()), immediate);
        }
        assert_eq!(Header::BYTES, 32);
    }

    #[test]
    fn errors_name_the_invalid_field() {
        let mut bytes = [0xff; Header::BYTES];
        assert_eq!(Header::read_from_bytes(&bytes).unwrap().parse(), Err("purpose"));
        bytes[22] = 1;
        assert_eq!(Header::read_from_bytes(&bytes).unwrap().parse(), Err("operation"));
    }
}
