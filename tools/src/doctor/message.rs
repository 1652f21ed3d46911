//! The messages of the two ends of a check.

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
    /// The one who asks begins; the other one answers with its own.
    Hello(Hello),
    /// Packets will come. The answer is `Ready`.
    Expect(Vec<Probe>),
    /// They are looked for.
    Ready,
    /// They have been sent. The answer is `Seen`.
    Collect,
    /// Those that have arrived.
    Seen(Vec<Sighting>),
    /// The other way: send these. The answer is `Sent`, or first a `Challenge`.
    Send(Vec<Probe>),
    /// A packet with a random token was sent to the address that the one who asks has named. The answer is
    /// `Proof`: the token, if the packet has come.
    Challenge,
    /// The token; `None` if the packet has not come.
    Proof(Option<u64>),
    /// What kept them from being sent, if anything did.
    Sent(Option<String>),
    /// The end of it, and why.
    Failed(String),
}

/// One end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its packets' source, and what is sent to.
    pub address: IpAddr,
    /// The address that the one who asks reached the other one by.
    pub to: IpAddr,
    /// All that the device has.
    pub addresses: Vec<IpAddr>,
    /// The interface of the device.
    pub interface: String,
    /// The largest IP packet that it sends.
    pub mtu: u32,
    /// The driver of the device.
    pub driver: String,
    /// In all packets of this end, and in no others.
    pub token: u64,
    /// Their UDP source port.
    pub source_port: u16,
    /// The kernel keeps the IP headers for itself: what became of identification and flags is not seen.
    pub is_socket: bool,
    /// The partition that its work is in.
    #[serde(default = "default_pkey")]
    pub pkey: u16,
    /// Rounds of probes that it has for a check, there and back.
    #[serde(default = "rounds_unsaid")]
    pub rounds: u32,
    /// The queue pair number that packets to this end go to: of no queue pair, but where processes share an address it is by
    /// its number that a packet comes to one of them.
    #[serde(default = "qpn_unsaid")]
    pub qpn: u32,
}

fn default_pkey() -> u16 {
    PKEY_DEFAULT.0
}

/// Of versions that do not say it.
fn rounds_unsaid() -> u32 {
    4
}

/// Of versions that do not say it: they do not share their address.
fn qpn_unsaid() -> u32 {
    *QPNS.end()
}

/// A packet to be sent; the rest of it follows from the ends' [`Hello`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Which of all.
    pub number: u16,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Bytes of the IP packet.
    pub length: u32,
}

/// What stands in a packet's network headers.
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
    /// IPv4: identification, and flags with the fragment offset. `None` where a socket hides them.
    pub ipv4: Option<(u16, u16)>,
}

/// A probe that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    /// Which of all.
    pub number: u16,
    /// With which headers.
    pub headers: Headers,
    /// Why the ICRC is wrong, if it is.
    pub icrc: Option<String>,
    /// How many of those that were sent came.
    pub copies: u8,
    /// How many came once more.
    pub repeated: u8,
    /// How many came behind one that was sent after them.
    pub late: u8,
}

/// Probes of one check.
const MAX_PROBES: usize = 64;
const MAX_ADDRESSES: usize = 256;
/// Bytes of a probe's IP packet.
const PROBE_LENGTHS: RangeInclusive<u32> = 64..=4200;
/// Probes' queue pair numbers. An engine draws its own from all there are, and one that has it drops and counts a probe.
pub(super) const QPNS: RangeInclusive<u32> = 0x00ff_ff00..=0x00ff_fffe;

impl DoctorMessage {
    /// Its bytes, with their [length](control_message::length).
    ///
    /// # Errors
    /// It is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        control_message::to_bytes(self)
    }

    /// Reads what is behind the length. Texts are cut, and nothing in them moves a terminal.
    ///
    /// # Errors
    /// It is no message, or has more of something than a check needs.
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
            (vec![probe; MAX_PROBES + 1], "65 probes; at most 64"),
            (vec![Probe { length: 4201, ..probe }], "4201 bytes; 64 to 4200"),
            (vec![probe; 2], "the number 0"),
        ] {
            let bytes = DoctorMessage::Send(probes).to_bytes().expect("short enough");
            assert!(DoctorMessage::parse(&bytes[4..]).is_err_and(|error| error.contains(reason)), "{reason}");
        }
        let hello = Hello { qpn: 0x11, ..crate::doctor::probe::tests::hello("10.0.0.1", true) };
        let bytes = DoctorMessage::Hello(hello).to_bytes().expect("short enough");
        let refused = DoctorMessage::parse(&bytes[4..]).expect_err("a queue pair's");
        assert_eq!(refused, "probes to queue pair 0x11; 0xffff00 to 0xfffffe are right");
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
