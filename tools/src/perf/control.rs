//! The TCP connection beside a measurement: JSON messages, each after its length.
//!
//! Either end begins with eight bytes that name the protocol and its version. A message is a
//! big-endian `u32` of at most 64 KiB and that many bytes of JSON.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::read_exact;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// Client: what is to be measured. The server answers `Ready`.
    Plan(Plan),
    /// Client: queue pairs for messages of a size. The server answers with its own.
    Connect(Offer),
    /// Client: what comes next, a number of messages on each queue pair. The server answers
    /// `Ready` when its memory is filled and its receives are posted.
    Lap {
        number: u64,
        messages: Vec<u64>,
    },
    Ready,
    /// Client: what came of it. The server answers `Verified`.
    LapDone {
        messages: Vec<u64>,
    },
    /// Bytes that were compared and right.
    Verified {
        bytes: u64,
    },
    /// Client: these queue pairs are done with. The server answers `Closed`.
    Close,
    Closed,
    /// Client: that was all.
    Finish,
    /// Nothing to say, but still there.
    Alive,
    /// The end of it, and why.
    Failed {
        reason: String,
    },
}

/// One end's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Bytes of a message.
    pub(super) size: u32,
    pub(super) gid: Ipv6Addr,
    /// QPN and first PSN of each.
    pub(super) qps: Vec<(u32, u32)>,
    /// Address, key and length of the memory that the other end may reach.
    pub(super) memory: (u64, u32, u64),
    /// The path MTU that this end insists on, from the server the one that is taken.
    pub(super) path_mtu: Option<u32>,
    /// The largest that its interface allows.
    pub(super) largest_path_mtu: u32,
}

/// The protocol and its version.
const PREAMBLE: &[u8; 8] = b"frcperf\x01";
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_LENGTH: usize = 64 << 10;

/// The connection, which never blocks once it is made.
pub(super) struct Control {
    stream: TcpStream,
    bytes: Vec<u8>,
    messages: VecDeque<Message>,
    open: bool,
}

impl Control {
    /// Greets the other end.
    pub(super) fn new(mut stream: TcpStream, interrupt: &Interrupt) -> Result<Control, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let mut greeting = [0; PREAMBLE.len()];
        read_exact(&mut stream, &mut greeting, PATIENCE, interrupt)?;
        if &greeting != PREAMBLE {
            return Err(Failure::run(format!(
                "the other end greets with '{}' instead of '{}': it is not `ferroce perf`, or of another version",
                greeting.escape_ascii(),
                PREAMBLE.escape_ascii()
            )));
        }
        stream.set_nonblocking(true).or_fail(|| "control connection".into())?;
        Ok(Control { stream, bytes: Vec::new(), messages: VecDeque::new(), open: true })
    }

    /// Sends a message. If the other end is gone, [`receive`](Control::receive) will tell.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        let body =
            serde_json::to_vec(message).map_err(|error| Failure::run(format!("control message: {error}")))?;
        let mut bytes = (body.len() as u32).to_be_bytes().to_vec();
        bytes.extend(body);
        let deadline = Instant::now() + PATIENCE;
        let mut rest = &bytes[..];
        while !rest.is_empty() && self.open {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
        Ok(())
    }

    /// Takes what has arrived. Returns whether there was anything, and whether more may come.
    pub(super) fn receive(&mut self) -> Result<(bool, bool), Failure> {
        let mut chunk = [0; 4096];
        let mut any = false;
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.open = false,
                Ok(count) => {
                    self.bytes.extend(&chunk[..count]);
                    any = true;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.open = false,
            }
            break;
        }
        while let Some(message) = self.parse()? {
            match message {
                Message::Alive => {}
                Message::Failed { reason } => {
                    return Err(Failure::run(format!("the other end failed: {reason}")));
                }
                other => self.messages.push_back(other),
            }
        }
        Ok((any, self.open))
    }

    /// The oldest message that has arrived.
    pub(super) fn take(&mut self) -> Option<Message> {
        self.messages.pop_front()
    }

    pub(super) fn has_message(&self) -> bool {
        !self.messages.is_empty()
    }

    fn parse(&mut self) -> Result<Option<Message>, Failure> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_LENGTH {
            return Err(Failure::run(format!("a control message of {length} bytes; at most {MAX_LENGTH}")));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = serde_json::from_slice(body)
            .map_err(|error| Failure::run(format!("control message '{}': {error}", body.escape_ascii())))?;
        self.bytes.drain(..4 + length);
        Ok(Some(message))
    }
}
