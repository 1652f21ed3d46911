//! The input of a run, as plain data: conditions, and a list of operations. An operation refers to objects by small numbers
//! that are resolved when it is executed, and an operation that is not possible then does nothing, so that any part of a
//! list is a schedule too.

use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) setup: Setup,
    pub(crate) operations: Vec<Operation>,
}

/// The conditions.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The seed of the network's random choices.
    pub(crate) seed: u64,
    pub ipv6: bool,
    pub(crate) link: Link,
    /// The most frames of each port in flight.
    pub(crate) frames: usize,
    /// Packets in flight for a queue pair of each end.
    pub(crate) windows: [u32; 2],
    /// The number of early packets that each end can hold.
    pub(crate) reorder_packets: [u16; 2],
    /// The longest time until a copy of a GPU lands.
    pub(crate) copies_late_us: u64,
    /// Bytes of a chunk between packets and a GPU's memory, and the number of chunks.
    pub(crate) staging: (u32, u16),
    pub(crate) connections: Vec<Plan>,
}

/// Probabilities are in thousandths.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) loss: u16,
    pub(crate) duplicate: u16,
    pub(crate) reorder: u16,
    pub(crate) corrupt: u16,
    pub(crate) reorder_by: usize,
    pub(crate) delay_ns: u64,
    pub(crate) jitter_ns: u64,
    /// 0 is no limit.
    pub(crate) gigabits: u64,
}

/// A connection, or a pair of queue pairs for datagrams.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) service: Service,
    pub(crate) size: Size,
    /// Work requests of a send queue.
    pub(crate) depth: u32,
    pub(crate) signal_all: bool,
    /// It has a completion queue of its own with this many places, instead of the shared one.
    pub(crate) own_cq: Option<u32>,
    /// It takes its receives from the queue that all such connections of an end share.
    pub(crate) srq: bool,
    /// The ends at which its memory is a GPU's.
    pub(crate) on_device: [bool; 2],
    /// The parameters of its lives, one after the other, repeatedly.
    pub(crate) lives: Vec<Life>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    Rc,
    Uc,
    Ud,
}

/// The lengths of messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    Small,
    Medium,
    Large,
}

#[derive(Clone, Debug)]
pub(crate) struct Life {
    /// The path MTU is 2 to the power of this.
    pub(crate) mtu_shift: u8,
    pub(crate) psn: [u32; 2],
    pub(crate) selective_repeat: bool,
    pub(crate) rd_atomic: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) rnr_retry: u8,
    /// The start of the memory of each end for the other.
    pub(crate) iova: Iova,
    /// How long after the first failure both ends are ended.
    pub(crate) linger_us: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Iova {
    Zero,
    Page(u32),
    /// It ends at the last address.
    Top,
}

/// One end of one connection.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub(crate) connection: u8,
    pub(crate) end: u8,
}

impl fmt::Debug for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.connection, self.end)
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Post(At, Work),
    /// Posts receives.
    Receive(At, u8),
    /// Turns of the engine. The application of the `busy` end takes no completions meanwhile.
    Turn {
        count: u8,
        busy: Option<u8>,
    },
    Drain(At),
    Resume(At),
    /// Requests an event when few shared receives are left.
    ArmSrq {
        end: u8,
        limit: u8,
    },
    /// The application stops polling its shared CQ until the requested event arrives.
    Sleep {
        end: u8,
        solicited: bool,
    },
    Wake {
        end: u8,
    },
    Accident(At, Accident),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Accident {
    /// The application moves the queue pair to ERR.
    Error,
    Reset,
    Destroy,
    /// It withdraws the memory that its peer reads and writes.
    Withdraw,
    /// It closes a window that its peer may be using.
    CloseWindow,
    /// It posts invalid work.
    Refused(Refused),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    WriteWithBadKey,
    WritePastTheEnd,
    WritePastTheWindow,
    ReadPastTheEnd,
    ReadWithRevokedKey,
    ReadThroughClosedWindow,
    AtomicAtOddAddress,
    InvalidateBadKey,
    SendTooLong,
    FlushPastTheEnd,
    BindTwice,
    BadResult,
    BadSource,
    BadReceive,
}

#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) verb: Verb,
    pub(crate) length: Length,
    /// Determines the source and the destination of its data.
    pub(crate) place: u32,
    pub(crate) pieces: u8,
    /// Through a memory window, if one is bound.
    pub(crate) window: bool,
    pub(crate) inline: bool,
    pub(crate) signaled: bool,
    pub(crate) fence: bool,
    pub(crate) solicited: bool,
    pub(crate) lazy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    Send,
    SendWithImm,
    SendWithInvalidate,
    Write,
    WriteWithImm,
    Read,
    /// Whether the comparison is true.
    CompareSwap(bool),
    FetchAdd,
    AtomicWrite,
    Flush,
    LocalInvalidate,
    BindWindow,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Length {
    Bytes(u8),
    /// This many full packets, and this many more bytes.
    Packets(u8, i8),
    /// A fraction of the longest message, in 65535ths.
    Part(u16),
}

pub(crate) fn schedules() -> impl Strategy<Value = Schedule> {
    // Some schedules are without accidents, so that connections live long.
    let operations =
        prop_oneof![vec(operation(0), 0..1500), vec(operation(2), 0..1200), vec(operation(40), 0..800)];
    (setup(), operations).prop_map(|(setup, operations)| Schedule { setup, operations })
}

fn setup() -> impl Strategy<Value = Setup> {
    let seed = any::<u64>().no_shrink();
    let frames = select(vec![4096usize, 64, 5, 2, 1]);
    let window = || select(vec![512u32, 64, 17, 5, 3, 2, 1]);
    let reorder = || select(vec![1024u16, 40, 3, 0]);
    let connections = vec(plan(), 1..=5);
    let sizes = ([window(), window()], [reorder(), reorder()]);
    let device =
        (select(vec![0u64, 20, 200, 10_000]), select(vec![(1 << 16, 128), (1 << 17, 8), (1 << 16, 4)]));
    (seed, any::<bool>(), link(), frames, sizes, device, connections).prop_map(
        |(seed, ipv6, link, frames, (windows, reorder_packets), (copies_late_us, staging), connections)| {
            Setup { seed, ipv6, link, frames, windows, reorder_packets, copies_late_us, staging, connections }
        },
    )
}

fn link() -> impl Strategy<Value = Link> {
    let rate = || select(vec![0u16, 2, 10, 30]);
    let gigabits = select(vec![0u64, 100, 10]);
    (rate(), rate(), rate(), rate(), 1usize..=64, 0u64..20_000, 0u64..5_000, gigabits).prop_map(
        |(loss, duplicate, reorder, corrupt, reorder_by, delay_ns, jitter_ns, gigabits)| Link {
            loss,
            duplicate,
            reorder,
            corrupt,
            reorder_by,
            delay_ns,
            jitter_ns,
            gigabits,
        },
    )
}

fn plan() -> impl Strategy<Value = Plan> {
    let service = prop_oneof![8 => Just(Service::Rc), 1 => Just(Service::Uc), 1 => Just(Service::Ud)];
    let size = prop_oneof![5 => Just(Size::Small), 3 => Just(Size::Medium), 1 => Just(Size::Large)];
    let depth = select(vec![32u32, 16, 4, 1]);
    let own_cq = prop_oneof![4 => Just(None), 1 => (1u32..80).prop_map(Some)];
    let srq = prop::bool::weighted(0.4);
    let on_device = [prop::bool::weighted(0.3), prop::bool::weighted(0.3)];
    (service, size, depth, prop::bool::weighted(0.1), own_cq, srq, on_device, vec(life(), 1..=3)).prop_map(
        |(service, size, depth, signal_all, own_cq, srq, on_device, lives)| {
            let small = matches!(size, Size::Small) || service == Service::Ud;
            Plan {
                service,
                size: if small { Size::Small } else { size },
                depth,
                signal_all,
                own_cq,
                srq: srq && small && service != Service::Uc,
                on_device,
                lives,
            }
        },
    )
}

fn life() -> impl Strategy<Value = Life> {
    // Near the wrap, or anywhere.
    let psn = || prop_oneof![(1u32 << 24) - 100..1 << 24, 0u32..1 << 24];
    let iova = prop_oneof![Just(Iova::Zero), any::<u32>().prop_map(Iova::Page), Just(Iova::Top)];
    let rnr_retry = prop_oneof![4 => Just(7u8), 1 => 1u8..7];
    let rd_atomic = select(vec![128u8, 16, 4, 2, 1]);
    // Usually long enough for them to detect it themselves.
    let linger_us = select(vec![1_000_000u64, 1_000_000, 1_000_000, 200, 0]);
    let selective_repeat = any::<bool>();
    (8u8..=12, [psn(), psn()], selective_repeat, rd_atomic, 1u8..=13, rnr_retry, iova, linger_us).prop_map(
        |(mtu_shift, psn, selective_repeat, rd_atomic, rnr_timer, rnr_retry, iova, linger_us)| Life {
            mtu_shift,
            psn,
            selective_repeat,
            rd_atomic,
            rnr_timer,
            rnr_retry,
            iova,
            linger_us,
        },
    )
}

/// One operation; `accidents` in a thousand are accidents.
fn operation(accidents: u32) -> impl Strategy<Value = Operation> {
    let busy = prop_oneof![4 => Just(None), 1 => (0u8..2).prop_map(Some)];
    prop_oneof![
        500 => (at(), work()).prop_map(|(at, work)| Operation::Post(at, work)),
        200 => (at(), 1u8..=6).prop_map(|(at, count)| Operation::Receive(at, count)),
        260 => (1u8..=16, busy).prop_map(|(count, busy)| Operation::Turn { count, busy }),
        5 => at().prop_map(Operation::Drain),
        15 => at().prop_map(Operation::Resume),
        10 => (0u8..2, 0u8..=32).prop_map(|(end, limit)| Operation::ArmSrq { end, limit }),
        10 => (0u8..2, any::<bool>()).prop_map(|(end, solicited)| Operation::Sleep { end, solicited }),
        10 => (0u8..2).prop_map(|end| Operation::Wake { end }),
        accidents => (at(), accident()).prop_map(|(at, accident)| Operation::Accident(at, accident)),
    ]
}

fn at() -> impl Strategy<Value = At> {
    (0u8..5, 0u8..2).prop_map(|(connection, end)| At { connection, end })
}

fn accident() -> impl Strategy<Value = Accident> {
    let refused = select(vec![
        Refused::WriteWithBadKey,
        Refused::WritePastTheEnd,
        // Often there is no window.
        Refused::WritePastTheWindow,
        Refused::WritePastTheWindow,
        Refused::ReadPastTheEnd,
        Refused::ReadWithRevokedKey,
        Refused::ReadThroughClosedWindow,
        Refused::AtomicAtOddAddress,
        Refused::InvalidateBadKey,
        Refused::SendTooLong,
        Refused::FlushPastTheEnd,
        Refused::BindTwice,
        Refused::BindTwice,
        Refused::BadResult,
        Refused::BadSource,
        Refused::BadReceive,
    ]);
    prop_oneof![
        1 => Just(Accident::Error),
        1 => Just(Accident::Reset),
        1 => Just(Accident::Destroy),
        2 => Just(Accident::Withdraw),
        1 => Just(Accident::CloseWindow),
        9 => refused.prop_map(Accident::Refused),
    ]
}

fn work() -> impl Strategy<Value = Work> {
    let verb = select(vec![
        Verb::Send,
        Verb::Send,
        Verb::SendWithImm,
        Verb::SendWithInvalidate,
        Verb::Write,
        Verb::Write,
        Verb::WriteWithImm,
        Verb::Read,
        Verb::Read,
        Verb::CompareSwap(true),
        Verb::CompareSwap(false),
        Verb::FetchAdd,
        Verb::AtomicWrite,
        Verb::Flush,
        Verb::LocalInvalidate,
        // The first in a life binds, and the others do nothing.
        Verb::BindWindow,
        Verb::BindWindow,
        Verb::BindWindow,
    ]);
    let length = prop_oneof![
        1 => Just(Length::Bytes(0)),
        1 => any::<u8>().prop_map(Length::Bytes),
        3 => (0u8..6, -3i8..4).prop_map(|(packets, more)| Length::Packets(packets, more)),
        2 => any::<u16>().prop_map(Length::Part),
    ];
    let flag = |probability| prop::bool::weighted(probability);
    let flags = (flag(0.5), flag(0.5), flag(0.5), flag(0.1), flag(0.3), flag(0.3));
    (verb, length, any::<u32>(), 1u8..=4, flags).prop_map(
        |(verb, length, place, pieces, (window, inline, signaled, fence, solicited, lazy))| Work {
            verb,
            length,
            place,
            pieces,
            window,
            inline,
            signaled,
            fence,
            solicited,
            lazy,
        },
    )
}

impl Plan {
    /// Whether some of its memory is a GPU's.
    pub(crate) fn has_device(&self) -> bool {
        self.on_device.contains(&true)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:#?}", self.setup)?;
        for operation in &self.operations {
            writeln!(f, "{operation:?}")?;
        }
        Ok(())
    }
}
