//! The TCP connection to a program of perftest.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::message::{DESTINATION, PerftestDestination};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::perf::pattern::Origin;
use crate::perf::session::{Beside, Session};
use crate::tcp::Link;

/// A connection on which both ends take turns; the client begins.
pub(in crate::perf) struct PerftestExchange {
    link: Link,
    /// Received bytes that have not been processed.
    incoming: Vec<u8>,
    /// How the next message is waited for, if it is. Otherwise an unread message must not keep the session from
    /// noticing that the other end is gone.
    awaited: Option<Wait>,
}

/// More than any end sends before it gets an answer: a peer that sends more is not perftest.
const MAX_WAITING: usize = 1024;
/// The longest wait for the next message before the measurement. perftest's programs sleep and set up their memory
/// meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest wait for the rest of a message.
const WORD: Duration = Duration::from_secs(10);

/// A message ahead of its turn means that its sender has finished, if no packet has arrived for this long.
const EARLY: Duration = Duration::from_millis(500);
/// The longest time without packets and messages during a measurement.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// How long to wait for the other end's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// For a fixed time.
    Patiently,
    /// For as long as the other end's measurement takes.
    Measurement,
}

impl PerftestExchange {
    /// `read` was already read from the stream.
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
    /// Sends `ours` and receives as many bytes, in turn.
    pub(super) fn swap<const LENGTH: usize>(
        &mut self,
        ours: [u8; LENGTH],
        wait: Wait,
    ) -> Result<[u8; LENGTH], Failure> {
        let take = |incoming: &[u8]| Ok(incoming.first_chunk().map(|theirs| (*theirs, LENGTH)));
        self.converse(&ours, wait, take)
    }

    /// Sends the address of a queue pair and receives one of the other end.
    pub(super) fn swap_destination(
        &mut self,
        ours: PerftestDestination,
        wait: Wait,
    ) -> Result<PerftestDestination, Failure> {
        self.converse(&ours.to_message(), wait, |incoming| {
            Ok(PerftestDestination::from_start(incoming)?.map(|theirs| (theirs, DESTINATION)))
        })
    }

    /// Receives the address of a queue pair of the other end; the answer is sent later.
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

    /// Polls until `take` returns a value and its length from the received bytes.
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
