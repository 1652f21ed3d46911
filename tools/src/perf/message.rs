//! What the ends of a measurement tell each other: JSON, after its length as a big-endian `u32` of at
//! most 64 KiB.

use std::net::Ipv6Addr;

use ferroce::PKEY_DEFAULT;
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::failure::parse_message;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
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
    Verified(Tally),
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

/// What came of a lap at the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Bytes that were compared and right.
    pub verified: u64,
    /// The client's messages that have not come.
    pub lost: u64,
    /// What the server has sent on each queue pair, where both ends do, and the nanoseconds that it took.
    pub sent: Vec<u64>,
    pub nanoseconds: u64,
}

/// One end's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Bytes of a message.
    pub size: u32,
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
}

fn default_pkey() -> u16 {
    PKEY_DEFAULT.0
}

const MAX_LENGTH: usize = 64 << 10;
/// Bytes of a message's length.
pub const LENGTH: usize = 4;

impl Message {
    /// How many bytes a message is long, with its length, of which `bytes` are the start.
    pub fn whole(bytes: &[u8]) -> Result<usize, String> {
        let Some(length) = bytes.first_chunk() else { return Ok(LENGTH) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_LENGTH {
            return Err(format!("a control message of {length} bytes; at most {MAX_LENGTH}"));
        }
        Ok(LENGTH + length)
    }

    /// Reads a message, its length left out.
    pub fn from_body(body: &[u8]) -> Result<Message, String> {
        parse_message(body)
    }

    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let body = serde_json::to_vec(self).map_err(|error| format!("control message: {error}"))?;
        let mut bytes = (body.len() as u32).to_be_bytes().to_vec();
        bytes.extend(body);
        Ok(bytes)
    }
}

/// Bytes that have come and are no whole message yet.
#[derive(Default)]
pub struct Incoming(Vec<u8>);

impl Incoming {
    pub fn extend(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The oldest message, once all of it is there.
    pub fn next(&mut self) -> Result<Option<Message>, String> {
        let whole = Message::whole(&self.0)?;
        let Some(body) = self.0.get(LENGTH..whole) else { return Ok(None) };
        let message = Message::from_body(body)?;
        self.0.drain(..whole);
        Ok(Some(message))
    }
}
