//! The messages between the two ends of a check.

use std::collections::HashSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ferroce::PKEY_DEFAULT;
use serde::{Deserialize, Serialize};

use crate::control_message;
use crate::failure::legible;

/// A message of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DoctorMessage {
    /// The client begins; the far end answers with its own.
    Hello(Hello),
    /// The client will send these probes. The answer is `Ready`.
    Expect(Vec<Probe>),
    /// The probes can be sent.
    Ready,
    /// The client has sent the probes. The answer is `Seen`.
    Collect,
    /// The probes that have arrived.
    Seen(Vec<Sighting>),
    /// The other direction: the far end is to send these probes. The answer is `Sent`, or first a `Challenge`.
    Send(Vec<Probe>),
    /// A packet with a random token was sent to the address that the client has named. The answer is `Proof` with the
    /// token, if the packet has arrived.
    Challenge,
    /// The token; `None` if the packet has not arrived.
    Proof(Option<u64>),
    /// The reason that the probes could not be sent, if any.
    Sent(Option<String>),
    /// The check ends, for this reason.
    Failed(String),
}

/// The description of one end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The source of its packets, and the destination of packets to it.
    pub address: IpAddr,
    /// The address at which the client reached the far end.
    pub to: IpAddr,
    /// All addresses of the device.
    pub addresses: Vec<IpAddr>,
    /// The interface of the device.
    pub interface: String,
    /// The largest IP packet that it sends.
    pub mtu: u32,
    /// The driver of the device.
    pub driver: String,
    /// A random number in all packets of this end.
    pub token: u64,
    /// The UDP source port of its packets.
    pub source_port: u16,
    /// A socket: the kernel removes the IP headers, so identification and flags are not seen.
    pub is_socket: bool,
    /// The P_Key of its work.
    #[serde(default = "default_pkey")]
    pub pkey: u16,
    /// The most rounds of probes per check, in both directions.
    #[serde(default = "rounds_unsaid")]
    pub rounds: u32,
    /// The destination queue pair number of packets to this end. No queue pair has it, but if processes share an
    /// address, the number selects the process that receives a packet.
    #[serde(default = "qpn_unsaid")]
    pub qpn: u32,
}

fn default_pkey() -> u16 {
    PKEY_DEFAULT.0
}

/// The default for versions without this field.
fn rounds_unsaid() -> u32 {
    4
}

/// The default for versions without this field: they do not share their address.
fn qpn_unsaid() -> u32 {
    *QPNS.end()
}

/// A probe to be sent; the rest of the packet follows from the [`Hello`]s of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The number of the probe.
    pub number: u16,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Bytes of the IP packet.
    pub length: u32,
}

/// The network headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Headers {
    /// The sender.
    pub source: IpAddr,
    /// The receiver.
    pub destination: IpAddr,
    /// The UDP source port.
    pub source_port: u16,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4: identification, and flags with the fragment offset. `None` if a socket hides them.
    pub ipv4: Option<(u16, u16)>,
}

/// A probe that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    /// The number of the probe.
    pub number: u16,
    /// The received headers.
    pub headers: Headers,
    /// The cause of a wrong ICRC, if it is wrong.
    pub icrc: Option<String>,
    /// The number of different copies that arrived.
    pub copies: u8,
    /// The number of duplicates.
    pub repeated: u8,
    /// The number of copies that arrived after one that was sent later.
    pub late: u8,
}

/// The most probes of one check.
const MAX_PROBES: usize = 64;
const MAX_ADDRESSES: usize = 256;
/// The length of a probe's IP packet.
const PROBE_LENGTHS: RangeInclusive<u32> = 64..=4200;
/// Queue pair numbers of probes. An engine draws its queue pair numbers from the whole range; one that has this number
/// drops and counts a probe.
pub(super) const QPNS: RangeInclusive<u32> = 0x00ff_ff00..=0x00ff_fffe;

impl DoctorMessage {
    /// The bytes of the message, with their [length](control_message::length).
    ///
    /// # Errors
    /// The message is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        control_message::to_bytes(self)
    }

    /// Parses a message without its length prefix. Texts are truncated, and control characters are replaced.
    ///
    /// # Errors
    /// It is not a message, or a list is longer than a check needs.
    pub fn parse(body: &[u8]) -> Result<DoctorMessage, String> {
        let mut message = control_message::parse(body)?;
        match &mut message {
            DoctorMessage::Expect(probes) | DoctorMessage::Send(probes) => {
                check_count("probes", probes.len(), MAX_PROBES)?;
                check_probes(probes)?;
            }
            DoctorMessage::Seen(sightings) => {
                check_count("sightings", sightings.len(), MAX_PROBES)?;
                sightings.iter_mut().filter_map(|sighting| sighting.icrc.as_mut()).for_each(make_legible);
            }
            DoctorMessage::Hello(hello) => {
                check_count("addresses", hello.addresses.len(), MAX_ADDRESSES)?;
                if !QPNS.contains(&hello.qpn) {
                    let (least, most) = (QPNS.start(), QPNS.end());
                    return Err(format!(
                        "probes to queue pair {:#x}: must be {least:#x} to {most:#x}",
                        hello.qpn
                    ));
                }
                [&mut hello.interface, &mut hello.driver].into_iter().for_each(make_legible);
            }
            DoctorMessage::Sent(Some(text)) | DoctorMessage::Failed(text) => make_legible(text),
            _ => {}
        }
        Ok(message)
    }
}

fn check_count(kind: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        return Err(format!("a control message with {count} {kind}: must be at most {most}"));
    }
    Ok(())
}

fn check_probes(probes: &[Probe]) -> Result<(), String> {
    let mut numbers = HashSet::new();
    for Probe { number, length, .. } in probes {
        if !PROBE_LENGTHS.contains(length) {
            let (least, most) = (PROBE_LENGTHS.start(), PROBE_LENGTHS.end());
            return Err(format!("a probe of {length} bytes: must be {least} to {most}"));
        }
        if !numbers.insert(number) {
            return Err(format!("two probes with the number {number}"));
        }
    }
    Ok(())
}

fn make_legible(text: &mut String) {
    *text = legible(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_written() {
        let probes = vec![Probe { number: 3, traffic_class: 0x6a, length: 1088 }];
        for message in
            [DoctorMessage::Ready, DoctorMessage::Expect(probes), DoctorMessage::Sent(Some("why".into()))]
        {
            let bytes = message.to_bytes().expect("short");
            assert_eq!(DoctorMessage::parse(&bytes[control_message::LENGTH..]), Ok(message));
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let probe = Probe { number: 0, traffic_class: 0, length: 100 };
        for (probes, reason) in [
            (vec![probe; MAX_PROBES + 1], "65 probes: must be at most 64"),
            (vec![Probe { length: 4201, ..probe }], "4201 bytes: must be 64 to 4200"),
            (vec![probe; 2], "the number 0"),
        ] {
            let bytes = DoctorMessage::Send(probes).to_bytes().expect("short enough");
            assert!(DoctorMessage::parse(&bytes[4..]).is_err_and(|error| error.contains(reason)), "{reason}");
        }
        let hello = Hello { qpn: 0x11, ..crate::doctor::probe::tests::hello("10.0.0.1", true) };
        let bytes = DoctorMessage::Hello(hello).to_bytes().expect("short enough");
        let refused = DoctorMessage::parse(&bytes[4..]).expect_err("a queue pair's");
        assert_eq!(refused, "probes to queue pair 0x11: must be 0xffff00 to 0xfffffe");
        let nonsense = DoctorMessage::parse(&[0xff; 5000]).expect_err("no JSON");
        assert!(nonsense.len() < 1000, "{nonsense}");
        let unknown = format!("{{\"\\u001b]0;pwned\\u0007\\u202e{}\":1}}", "A".repeat(60_000));
        let unknown = DoctorMessage::parse(unknown.as_bytes()).expect_err("no message");
        assert!(unknown.len() < 2000 && !unknown.contains(['\x1b', '\x07', '\u{202e}']), "{unknown:?}");
        let bytes = DoctorMessage::Failed("\x1b[2J".repeat(5000)).to_bytes().expect("short enough");
        let Ok(DoctorMessage::Failed(text)) = DoctorMessage::parse(&bytes[4..]) else { panic!("a text") };
        assert!(text.starts_with("\u{fffd}[2J\u{fffd}[2J") && text.chars().count() < 1100, "{text}");
        assert!(DoctorMessage::parse(b"{\"Collect\":1}").is_err());
        assert!(DoctorMessage::parse(&[0xff; 10]).is_err());
    }
}
