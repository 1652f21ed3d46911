//! The messages of the control connection of a measurement.

use std::net::Ipv6Addr;

use ferroce::PKEY_DEFAULT;
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::control_message::{self, LENGTH};

/// A message of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PerfMessage {
    /// Client: what is to be measured. The server answers `Ready`.
    Plan(Plan),
    /// Client: queue pairs for messages of a size. The server answers with its own.
    Connect(Offer),
    /// Client: what comes next, a number of messages on each queue pair. The server answers
    /// `Ready` when its memory is filled and its receives are posted.
    Lap {
        /// Which lap of the measurement.
        number: u64,
        /// How many messages, for each queue pair.
        messages: Vec<u64>,
    },
    /// Server: go on.
    Ready,
    /// Client: what came of it. The server answers `Verified`.
    LapDone {
        /// How many messages were sent, for each queue pair.
        messages: Vec<u64>,
    },
    /// Server: what came of it there.
    Verified(Tally),
    /// Client: these queue pairs are done with. The server answers `Closed`.
    Close,
    /// Server: so are its own.
    Closed,
    /// Client: that was all.
    Finish,
    /// Nothing to say, but still there.
    Alive,
    /// The end of it, and why.
    Failed {
        /// For people.
        reason: String,
    },
}

/// What came of a lap at the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Bytes that were compared and right.
    pub verified: u64,
    /// The client's messages that have not come.
    pub lost: u64,
    /// What the server has sent on each queue pair, where both ends do.
    pub sent: Vec<u64>,
    /// How long the server sent, if it did.
    pub nanoseconds: u64,
}

/// One end's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Bytes of a message.
    pub size: u32,
    /// Its GID.
    pub gid: Ipv6Addr,
    /// QPN and first PSN of each.
    pub qps: Vec<(u32, u32)>,
    /// Address, key and length of the memory that the other end may reach.
    pub memory: (u64, u32, u64),
    /// The path MTU that this end insists on, from the server the one that is taken.
    pub path_mtu: Option<u32>,
    /// The largest that its interface allows.
    pub largest_path_mtu: u32,
    /// What is lost shall be repeated selectively: used if both offers say so.
    pub selective_repeat: bool,
    /// The P_Key that its packets carry. Versions that do not say it have one that most have.
    #[serde(default = "default_pkey")]
    pub pkey: u16,
    /// The switch in shared memory that it has joined (`shm:NAME`), if it has.
    #[serde(default)]
    pub switch: Option<String>,
}

fn default_pkey() -> u16 {
    PKEY_DEFAULT.0
}

impl PerfMessage {
    /// How many bytes a message is long, with its length, of which `bytes` are the start.
    ///
    /// # Errors
    /// Its length is not right.
    pub fn whole(bytes: &[u8]) -> Result<usize, String> {
        let Some(length) = bytes.first_chunk() else { return Ok(LENGTH) };
        Ok(LENGTH + control_message::length(*length)?)
    }

    /// Reads a message, its length left out.
    ///
    /// # Errors
    /// It is none.
    pub fn from_body(body: &[u8]) -> Result<PerfMessage, String> {
        control_message::parse(body)
    }

    /// Its bytes, with their [length](control_message::length).
    ///
    /// # Errors
    /// It is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        control_message::to_bytes(self)
    }
}

/// Bytes that have come and are no whole message yet.
#[derive(Default)]
pub struct Incoming(Vec<u8>);

impl Incoming {
    /// Appends what has come.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The oldest message, once all of it is there.
    ///
    /// # Errors
    /// What has come is none.
    pub fn pop(&mut self) -> Result<Option<PerfMessage>, String> {
        let whole = PerfMessage::whole(&self.0)?;
        let Some(body) = self.0.get(LENGTH..whole) else { return Ok(None) };
        let message = PerfMessage::from_body(body)?;
        self.0.drain(..whole);
        Ok(Some(message))
    }
}
