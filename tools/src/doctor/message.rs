//! What the two ends of a check tell each other: JSON, after its length as a big-endian `u32` of at most
//! 64 KiB.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The one who asks begins; the other one answers with its own.
    Hello(Hello),
    /// Packets will come. The answer is `Ready`.
    Expect(Vec<Probe>),
    Ready,
    /// They have been sent. The answer is `Seen`.
    Collect,
    Seen(Vec<Sighting>),
    /// The other way: send these. The answer is `Sent`.
    Send(Vec<Probe>),
    /// What kept them from being sent, if anything did.
    Sent(Option<String>),
    /// The end of it, and why.
    Failed(String),
}

/// One end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Its packets' source, and what is sent to.
    pub(super) address: IpAddr,
    /// The address that the one who asks reached the other one by.
    pub(super) to: IpAddr,
    /// All that the device has.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) interface: String,
    /// The largest IP packet that it sends.
    pub(super) mtu: u32,
    pub(super) driver: String,
    /// In all packets of this end, and in no others.
    pub(super) token: u64,
    /// Their UDP source port.
    pub(super) source_port: u16,
    /// The kernel keeps the IP headers for itself: what became of identification and flags is not seen.
    pub(super) is_socket: bool,
}

/// A packet to be sent; the rest of it follows from the ends' [`Hello`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Probe {
    /// Which of all.
    pub(super) number: u16,
    /// DSCP and ECN.
    pub(super) traffic_class: u8,
    /// Bytes of the IP packet.
    pub(super) length: u32,
}

/// What stands in a packet's network headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Headers {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) source_port: u16,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    /// IPv4: identification, and flags with the fragment offset. `None` where a socket hides them.
    pub(super) ipv4: Option<(u16, u16)>,
}

/// A probe that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sighting {
    pub(super) number: u16,
    pub(super) headers: Headers,
    /// Why the ICRC is wrong, if it is.
    pub(super) icrc: Option<String>,
    /// How often it came.
    pub(super) copies: u8,
}

const MAX_LENGTH: u32 = 64 << 10;
/// Probes of one check.
const MAX_PROBES: usize = 64;
const MAX_ADDRESSES: usize = 256;

/// The length of the message behind these bytes.
pub(super) fn length(prefix: [u8; 4]) -> Result<usize, String> {
    match u32::from_be_bytes(prefix) {
        length @ 1..=MAX_LENGTH => Ok(length as usize),
        length => Err(format!("a control message of {length} bytes; 1 to {MAX_LENGTH} are right")),
    }
}

impl Message {
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let body = serde_json::to_vec(self).map_err(|error| format!("control message: {error}"))?;
        let prefix = (body.len() as u32).to_be_bytes();
        length(prefix)?;
        Ok([&prefix[..], &body].concat())
    }

    /// Reads what is behind the length.
    pub(super) fn parse(body: &[u8]) -> Result<Message, String> {
        let message = serde_json::from_slice(body)
            .map_err(|error| format!("control message '{}': {error}", body.escape_ascii()))?;
        let (kind, count, most) = match &message {
            Message::Expect(probes) | Message::Send(probes) => ("probes", probes.len(), MAX_PROBES),
            Message::Seen(sightings) => ("sightings", sightings.len(), MAX_PROBES),
            Message::Hello(hello) => ("addresses", hello.addresses.len(), MAX_ADDRESSES),
            _ => return Ok(message),
        };
        if count > most {
            return Err(format!("a control message with {count} {kind}; at most {most}"));
        }
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_written() {
        let probes = vec![Probe { number: 3, traffic_class: 0x6a, length: 1088 }];
        for message in [Message::Ready, Message::Expect(probes), Message::Sent(Some("why".into()))] {
            let bytes = message.to_bytes().expect("short");
            let (prefix, body) = bytes.split_first_chunk().expect("a length");
            assert_eq!(length(*prefix), Ok(body.len()));
            assert_eq!(Message::parse(body), Ok(message));
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        assert!(length([0, 1, 0, 1]).is_err_and(|error| error.contains("65537")));
        assert!(length([0; 4]).is_err() && length([0xff; 4]).is_err());
        let probes = vec![Probe { number: 0, traffic_class: 0, length: 100 }; MAX_PROBES + 1];
        let bytes = Message::Send(probes).to_bytes().expect("short enough");
        assert!(Message::parse(&bytes[4..]).is_err_and(|error| error.contains("probes")));
        assert!(Message::parse(b"{\"Collect\":1}").is_err());
        assert!(Message::parse(&[0xff; 10]).is_err());
    }
}
