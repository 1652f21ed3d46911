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
    /// Client: the parameters. The server answers `Ready`.
    Plan(Plan),
    /// Client: its queue pairs for messages of one size. The server answers with its own.
    Connect(Offer),
    /// Client: the number of messages on each queue pair in the next lap. The server answers `Ready` when its memory is
    /// filled and its receive WRs are posted.
    Lap {
        /// The number of the lap.
        number: u64,
        /// The number of messages on each queue pair.
        messages: Vec<u64>,
    },
    /// Server: the client may continue.
    Ready,
    /// Client: the results of the lap. The server answers `Verified`.
    LapDone {
        /// The number of sent messages on each queue pair.
        messages: Vec<u64>,
    },
    /// Server: its results.
    Verified(Tally),
    /// Client: it has closed its queue pairs. The server answers `Closed`.
    Close,
    /// Server: it has closed its queue pairs.
    Closed,
    /// Client: the measurement is complete.
    Finish,
    /// A heartbeat.
    Alive,
    /// The measurement ends, for this reason.
    Failed {
        /// As text.
        reason: String,
    },
}

/// The server's results of a lap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Bytes that were compared and are correct.
    pub verified: u64,
    /// The client's messages that have not arrived.
    pub lost: u64,
    /// Messages that the server has sent on each queue pair, if both ends send.
    pub sent: Vec<u64>,
    /// The time for which the server sent, if it did.
    pub nanoseconds: u64,
}

/// One end's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Bytes of a message.
    pub size: u32,
    /// Its GID.
    pub gid: Ipv6Addr,
    /// QPN and first PSN of each queue pair.
    pub qps: Vec<(u32, u32)>,
    /// Address, rkey and length of the memory that the other end may access.
    pub memory: (u64, u32, u64),
    /// From the client: the path MTU that it requires, if any. From the server: the chosen one.
    pub path_mtu: Option<u32>,
    /// The largest path MTU of its interface.
    pub largest_path_mtu: u32,
    /// Selective repeat, which is used if both offers have it.
    pub selective_repeat: bool,
    /// The P_Key of its packets. Versions without this field use the default one.
    #[serde(default = "default_pkey")]
    pub pkey: u16,
    /// The shared-memory switch that the end has joined (`shm:NAME`), if any.
    #[serde(default)]
    pub switch: Option<String>,
}

fn default_pkey() -> u16 {
    PKEY_DEFAULT.0
}

impl PerfMessage {
    /// The number of bytes of a message with its length prefix; `bytes` are its start.
    ///
    /// # Errors
    /// The length is invalid.
    pub fn whole(bytes: &[u8]) -> Result<usize, String> {
        let Some(length) = bytes.first_chunk() else { return Ok(LENGTH) };
        Ok(LENGTH + control_message::length(*length)?)
    }

    /// Parses a message without its length prefix.
    ///
    /// # Errors
    /// It is not a valid message.
    pub fn from_body(body: &[u8]) -> Result<PerfMessage, String> {
        control_message::parse(body)
    }

    /// The bytes of the message, with their [length](control_message::length).
    ///
    /// # Errors
    /// The message is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        control_message::to_bytes(self)
    }
}

/// Received bytes that are not yet a complete message.
#[derive(Default)]
pub struct Incoming(Vec<u8>);

impl Incoming {
    /// Appends received bytes.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The oldest message, once it is complete.
    ///
    /// # Errors
    /// The bytes are not a valid message.
    pub fn pop(&mut self) -> Result<Option<PerfMessage>, String> {
        let whole = PerfMessage::whole(&self.0)?;
        let Some(body) = self.0.get(LENGTH..whole) else { return Ok(None) };
        let message = PerfMessage::from_body(body)?;
        self.0.drain(..whole);
        Ok(Some(message))
    }
}
