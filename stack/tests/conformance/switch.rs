//! A switch between two engines in virtual time: a log of frames, and losses.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::driver::sim::{LinkConfig, Verdict};
use ferroce::{Nanos, RemoteAddress};

use crate::packet::{Got, IP};
use crate::pair::{End, Pair};

/// The requester and the responder of a pair.
pub(crate) const REQUESTER: usize = 0;
pub(crate) const RESPONDER: usize = 1;

/// A frame on the link, and its fate.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) from: usize,
    pub(crate) lost: bool,
    pub(crate) got: Got,
}

/// The log of the switch between the two.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    /// Logs each frame of `pair` from now on, and loses those for which `loses` returns true.
    pub(crate) fn of(pair: &Pair, mut loses: impl FnMut(usize, &Got) -> bool + Send + 'static) -> Log {
        let log = Log::default();
        let (seen, clock) = (log.clone(), Arc::clone(&pair.clock));
        pair.network.set_filter(Box::new(move |frame| {
            let got = Got::parse(Nanos(clock.load(Ordering::Relaxed)), frame.to_vec());
            // The last byte of the source address: 10.0.0.1 or 10.0.0.2.
            let from = usize::from(got.frame[IP + 15]) - 1;
            let lost = loses(from, &got);
            seen.0.lock().unwrap().push(Seen { from, lost, got });
            if lost { Verdict::Drop } else { Verdict::Pass }
        }));
        log
    }

    pub(crate) fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// How far `a` is after `b`.
pub(crate) fn distance(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

pub(crate) fn link(delay: Duration) -> LinkConfig {
    LinkConfig::default().delay(delay)
}

pub(crate) fn remote(end: &End) -> RemoteAddress {
    let remote = end.context.remote(end.mr).unwrap();
    RemoteAddress { addr: remote.addr, rkey: remote.rkey }
}

pub(crate) fn take_completions(end: &mut End) -> u64 {
    let mut taken = 0;
    while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
        assert_eq!(wc.status, Success, "{wc:?}\n{}", end.context.counters());
        taken += 1;
    }
    taken
}

/// Posts `count` messages with `post`, two at a time, and runs until all are complete.
pub(crate) fn run(pair: &mut Pair, count: u64, mut post: impl FnMut(&mut [End; 2], u64)) {
    let (mut posted, mut completed) = (0, 0);
    while completed < count {
        while posted < count && posted < completed + 2 {
            post(&mut pair.ends, posted);
            posted += 1;
        }
        let going = pair.step();
        take_completions(&mut pair.ends[RESPONDER]);
        let taken = take_completions(&mut pair.ends[REQUESTER]);
        completed += taken;
        assert!(going || taken > 0, "stuck: {completed} of {count}");
    }
    while pair.step() {}
}
