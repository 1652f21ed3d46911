//! The TCP connection to a program of perftest.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::message::{DESTINATION, PerftestDestination};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::perf::pattern::Origin;
use crate::perf::session::{Beside, Session};
use crate::tcp::Link;

/// A connection where either end speaks in its turn, the client first.
pub(in crate::perf) struct PerftestExchange {
    link: Link,
    /// What has come and nobody has taken yet.
    incoming: Vec<u8>,
    /// How its next word is waited for, if it is: only then does what has come keep an end from being noticed.
    awaited: Option<Wait>,
}

/// More than any end says before it is answered: one that says more is no perftest.
const MAX_WAITING: usize = 1024;
/// How long the other end may take for its next word before the measurement. perftest's own programs
/// sleep and set up their memory meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take for the rest of a word that it has begun.
const WORD: Duration = Duration::from_secs(10);

/// A word that comes before its time is one of an end that will send nothing more, after so long without a
/// packet.
const EARLY: Duration = Duration::from_millis(500);
/// During a measurement, for packets and words.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// How long to wait for the other end's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Until it must have come.
    Patiently,
    /// As long as the measurement takes there.
    Measurement,
}

impl PerftestExchange {
    /// With what has already been read from the stream.
    pub(in crate::perf) fn new(
        stream: TcpStream,
        read: &[u8],
        interrupt: &Interrupt,
    ) -> Result<PerftestExchange, Failure> {
        Ok(PerftestExchange { link: Link::new(stream, interrupt)?, incoming: read.to_vec(), awaited: None })
    }

    pub(super) fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

impl Beside for PerftestExchange {
    const HEARTBEATS: bool = false;
    const ADVICE: &'static str =
        "; see the output of perftest; both ends need the same -s, -n, -q, -a, -b and -c";
    const UNANSWERED: &'static str =
        "; perftest drops all packets if it was started with another -c (RC, UC or UD)";

    fn receive(&mut self) -> Result<(bool, bool), Failure> {
        let incoming = &mut self.incoming;
        self.link.receive(|bytes| {
            if incoming.len() + bytes.len() > MAX_WAITING {
                return Err(Failure::run(format!(
                    "the other end sent more than {MAX_WAITING} bytes that were not expected: it is not perftest"
                )));
            }
            incoming.extend_from_slice(bytes);
            Ok(())
        })
    }

    fn has_message(&self) -> bool {
        self.awaited.is_some() && !self.incoming.is_empty()
    }

    fn keep_alive(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn is_over(&self, quiet: Duration) -> bool {
        self.awaited.is_none() && !self.incoming.is_empty() && quiet > EARLY
    }

    fn stuck(&self, quiet: Duration) -> Option<String> {
        if self.awaited == Some(Wait::Patiently) {
            return None;
        }
        let what = if self.is_over(quiet) {
            "perftest has ended, and not all of its messages have arrived".to_owned()
        } else if quiet > LONGEST_SILENCE {
            format!("perftest has sent no packet and no message over TCP for {} s", LONGEST_SILENCE.as_secs())
        } else {
            return None;
        };
        Some(format!("{what}: both ends need the same program, -s, -n, -q, -a, -b and -c"))
    }
}

impl Session<PerftestExchange> {
    /// Says `ours` and hears as many bytes, in turn.
    pub(super) fn swap<const LENGTH: usize>(
        &mut self,
        ours: [u8; LENGTH],
        wait: Wait,
    ) -> Result<[u8; LENGTH], Failure> {
        let take = |incoming: &[u8]| Ok(incoming.first_chunk().map(|theirs| (*theirs, LENGTH)));
        self.converse(&ours, wait, take)
    }

    /// Says where a queue pair is, and hears of one of the other end.
    pub(super) fn swap_destination(
        &mut self,
        ours: PerftestDestination,
        wait: Wait,
    ) -> Result<PerftestDestination, Failure> {
        self.converse(&ours.to_message(), wait, |incoming| {
            Ok(PerftestDestination::from_start(incoming)?.map(|theirs| (theirs, DESTINATION)))
        })
    }

    /// Hears of a queue pair of the other end, which is not yet answered.
    pub(super) fn await_destination(&mut self) -> Result<PerftestDestination, Failure> {
        self.hear(Wait::Patiently, |incoming| {
            Ok(PerftestDestination::from_start(incoming)?.map(|theirs| (theirs, 0)))
        })
    }

    fn converse<T>(
        &mut self,
        ours: &[u8],
        wait: Wait,
        take: impl Fn(&[u8]) -> Result<Option<(T, usize)>, String>,
    ) -> Result<T, Failure> {
        if self.role == Origin::Client {
            self.control.link.send(ours)?;
        }
        let theirs = self.hear(wait, take)?;
        if self.role == Origin::Server {
            self.control.link.send(ours)?;
        }
        Ok(theirs)
    }

    /// Turns until the other end has said what `take` wants, which returns it and its bytes.
    fn hear<T>(
        &mut self,
        wait: Wait,
        take: impl Fn(&[u8]) -> Result<Option<(T, usize)>, String>,
    ) -> Result<T, Failure> {
        let mut late = (wait == Wait::Patiently).then(|| (Instant::now() + PATIENCE, PATIENCE));
        self.control.awaited = Some(wait);
        loop {
            let incoming = &mut self.control.incoming;
            if let Some((theirs, length)) = take(incoming).map_err(Failure::run)? {
                incoming.drain(..length);
                self.control.awaited = None;
                return Ok(theirs);
            }
            let have = incoming.len();
            if have > 0 && !self.control.is_open() {
                return Err(Failure::run(format!(
                    "the other end closed the connection in the middle of a message, after {have} bytes of it"
                )));
            }
            if have > 0 {
                late.get_or_insert_with(|| (Instant::now() + WORD, WORD));
            }
            if let Some((_, patience)) = late.filter(|(deadline, _)| Instant::now() > *deadline) {
                return Err(Failure::run(format!(
                    "perftest has sent {have} bytes of its next message within {} s",
                    patience.as_secs()
                )));
            }
            self.turn()?;
        }
    }
}
