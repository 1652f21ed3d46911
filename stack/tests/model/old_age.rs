//! One connection that lives until its message numbers have wrapped: 2^24 messages. No random schedule is that long.

use crate::model::Verdict;
use crate::schedule::{Iova, Length, Life, Link, Plan, Service, Setup, Size, Verb, Work};
use crate::tally::Tally;
use crate::world::World;

/// A little more than the number of message numbers.
const MESSAGES: u32 = (1 << 24) + (1 << 16);
/// Work requests of the send queue.
const DEPTH: u32 = 256;

pub(crate) fn run(seed: u64) -> Verdict<Tally> {
    let link = Link {
        loss: 1,
        duplicate: 1,
        reorder: 1,
        corrupt: 1,
        reorder_by: 16,
        delay_ns: 0,
        jitter_ns: 0,
        gigabits: 0,
    };
    let life = Life {
        mtu_shift: 8,
        psn: [0xff_fff0; 2],
        selective_repeat: false,
        rd_atomic: 16,
        rnr_timer: 1,
        rnr_retry: 7,
        iova: Iova::Zero,
        linger_us: 0,
    };
    let plan = Plan {
        service: Service::Rc,
        size: Size::Small,
        depth: DEPTH,
        signal_all: false,
        own_cq: None,
        srq: false,
        on_device: [false; 2],
        lives: vec![life],
    };
    let setup = Setup {
        seed,
        ipv6: false,
        link,
        frames: 4096,
        windows: [512; 2],
        reorder_packets: [0; 2],
        copies_late_us: 0,
        staging: (1 << 16, 128),
        connections: vec![plan],
    };
    let mut world = World::new(&setup)?;
    let mut posted = 0;
    while world.connections[0].model.requests(0).messages() < u64::from(MESSAGES) {
        world.post_receives(0, 1, 16)?;
        for _ in world.connections[0].model.requests(0).outstanding()..DEPTH as usize {
            posted += 1;
            world.post(0, 0, &work(posted))?;
        }
        world.turn(None)?;
    }
    world.finish()
}

/// Mostly WRITEs with few or no bytes, which are the cheapest messages.
fn work(number: u32) -> Work {
    let (verb, length) = match number % 32 {
        0 => (Verb::Read, Length::Bytes(40)),
        8 => (Verb::FetchAdd, Length::Bytes(0)),
        16 => (Verb::SendWithImm, Length::Bytes(20)),
        24 => (Verb::Write, Length::Bytes(30)),
        _ => (Verb::Write, Length::Bytes(0)),
    };
    Work {
        verb,
        length,
        place: number.wrapping_mul(0x9e37_79b9),
        pieces: 1,
        window: false,
        inline: true,
        signaled: number.is_multiple_of(16),
        fence: false,
        solicited: false,
        lazy: number % 16 < 8,
    }
}
