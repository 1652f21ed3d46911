//! The data that two ends exchange to connect their queue pairs, by a connection of their own: as text, as bytes, or through
//! serde (feature `serde`).

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ferroce_wire::{Gid, PathMtu, Psn, Qpn};

use crate::verbs::number::number;
use crate::verbs::{Error, MAX_RD_ATOMIC};

/// One end of a connection: [`Context::endpoint`](crate::Context::endpoint) returns it for a queue pair, and
/// [`Context::handshake`](crate::Context::handshake) takes both ends. Invalid values, such as QPN 1 or `rd_atomic` 129, can be
/// set and written, but are refused when text or bytes are parsed.
///
/// ```
/// # use ferroce::*;
/// let text = "192.0.2.1/qpn=0x000011/psn=0x123456/mtu=1024/rd_atomic=16";
/// let endpoint: Endpoint = text.parse()?;
/// assert_eq!((endpoint.qpn, endpoint.path_mtu), (Qpn::new(0x11), PathMtu::Mtu1024));
/// assert_eq!(endpoint.to_string(), text);
/// assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes())?, endpoint);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "String", try_from = "String"))]
#[must_use]
#[non_exhaustive]
pub struct Endpoint {
    /// Its address.
    pub gid: Gid,
    /// The queue pair.
    pub qpn: Qpn,
    /// The PSN of its first request.
    pub psn: Psn,
    /// The largest path MTU that it can use; the connection uses the smaller of both.
    pub path_mtu: PathMtu,
    /// READs and atomics that the peer may have outstanding there.
    pub rd_atomic: u8,
}

/// The first byte.
const VERSION: u8 = 1;

impl Endpoint {
    /// Bytes of [`to_bytes`](Endpoint::to_bytes).
    pub const LEN: usize = 28;

    /// An end with these values, a path MTU of 1024, and 16 READs and atomics.
    pub fn new(gid: Gid, qpn: Qpn, psn: Psn) -> Endpoint {
        Endpoint { gid, qpn, psn, path_mtu: PathMtu::Mtu1024, rd_atomic: 16 }
    }

    /// The largest path MTU that it can use; 1024 bytes by default.
    pub fn path_mtu(self, path_mtu: PathMtu) -> Self {
        Endpoint { path_mtu, ..self }
    }

    /// READs and atomics that the peer may have outstanding there, at most 128; 16 by default.
    pub fn rd_atomic(self, rd_atomic: u8) -> Self {
        Endpoint { rd_atomic, ..self }
    }

    /// 1; the path MTU's code of the verbs (1 is 256 bytes, 5 is 4096); `rd_atomic`; 0; QPN and PSN, 4 bytes each; the
    /// 16 bytes of the GID. Numbers are big-endian.
    pub fn to_bytes(&self) -> [u8; Endpoint::LEN] {
        let mut bytes = [0; Endpoint::LEN];
        bytes[..4].copy_from_slice(&[VERSION, self.path_mtu.code(), self.rd_atomic, 0]);
        bytes[4..8].copy_from_slice(&self.qpn.value().to_be_bytes());
        bytes[8..12].copy_from_slice(&self.psn.value().to_be_bytes());
        bytes[12..].copy_from_slice(&self.gid.0);
        bytes
    }

    /// The reverse of [`to_bytes`](Endpoint::to_bytes).
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the value and the valid ones.
    pub fn from_bytes(bytes: &[u8]) -> Result<Endpoint, Error> {
        let wrong = |value: &dyn fmt::Display, expected: &str| Error::invalid("endpoint", value, expected);
        let Ok(bytes) = <&[u8; Endpoint::LEN]>::try_from(bytes) else {
            return Err(wrong(&format_args!("{} bytes", bytes.len()), "28 bytes"));
        };
        let [version, mtu, rd_atomic, zero, rest @ ..] = bytes;
        if *version != VERSION {
            return Err(wrong(&format_args!("version {version} in byte 0"), "version 1"));
        }
        if *zero != 0 {
            return Err(wrong(&format_args!("{zero} in byte 3"), "0, which is reserved"));
        }
        let number = |at: usize| rest[at..at + 4].iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
        let Some(path_mtu) = PathMtu::from_code(*mtu) else {
            return Err(wrong(&format_args!("path MTU code {mtu}"), "1 to 5"));
        };
        let mut gid = [0; 16];
        gid.copy_from_slice(&rest[8..]);
        checked(Gid(gid), number(0), number(4), path_mtu, u32::from(*rd_atomic))
    }
}

/// Refuses invalid values.
fn checked(gid: Gid, qpn: u32, psn: u32, path_mtu: PathMtu, rd_atomic: u32) -> Result<Endpoint, Error> {
    let wrong = |value: String, expected: String| Err(Error::invalid("endpoint", value, expected));
    if !(2..0x00ff_ffff).contains(&qpn) {
        return wrong(format!("QPN {qpn:#x}"), "0x2 to 0xfffffe".into());
    }
    if psn > 0x00ff_ffff {
        return wrong(format!("PSN {psn:#x}"), "24 bits, at most 0xffffff".into());
    }
    let Some(rd_atomic) = u8::try_from(rd_atomic).ok().filter(|depth| *depth <= MAX_RD_ATOMIC) else {
        return wrong(format!("rd_atomic {rd_atomic}"), format!("0 to {MAX_RD_ATOMIC}"));
    };
    let is_one = match gid.to_ip() {
        IpAddr::V4(address) => !address.is_unspecified() && !address.is_broadcast(),
        IpAddr::V6(address) => !address.is_unspecified(),
    };
    if gid.is_multicast() || !is_one {
        return wrong(format!("GID {gid}"), "the address of one host".into());
    }
    Ok(Endpoint { gid, qpn: Qpn::new(qpn), psn: Psn::new(psn), path_mtu, rd_atomic })
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Endpoint { gid, qpn, psn, path_mtu, rd_atomic } = self;
        let (address, qpn, psn) = (gid.to_ip(), qpn.value(), psn.value());
        let mtu = path_mtu.bytes();
        write!(f, "{address}/qpn={qpn:#08x}/psn={psn:#08x}/mtu={mtu}/rd_atomic={rd_atomic}")
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Endpoint, Error> {
        const SHAPE: &str = "ADDRESS/qpn=N/psn=N/mtu=N/rd_atomic=N";
        let mut parts = text.split('/');
        let address: Option<IpAddr> = parts.next().and_then(|address| address.parse().ok());
        let Some(gid) = address.map(Gid::from) else { return Err(Error::invalid("endpoint", text, SHAPE)) };
        let numbers = fields(parts, ["qpn", "psn", "mtu", "rd_atomic"]);
        let Some([qpn, psn, mtu, rd_atomic]) = numbers else {
            return Err(Error::invalid("endpoint", text, SHAPE));
        };
        // No value has more than 32 bits.
        let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let Ok(path_mtu) = PathMtu::try_from(number(mtu)) else {
            return Err(Error::invalid(
                "endpoint",
                format_args!("mtu={mtu}"),
                "256, 512, 1024, 2048 or 4096",
            ));
        };
        checked(gid, number(qpn), number(psn), path_mtu, number(rd_atomic))
    }
}

/// The numbers of `name=number`, of each of these names once and in this order; decimal, or hexadecimal behind `0x`.
pub(super) fn fields<'a, const N: usize>(
    mut parts: impl Iterator<Item = &'a str>,
    names: [&str; N],
) -> Option<[u64; N]> {
    let mut values = [0; N];
    for (value, name) in values.iter_mut().zip(names) {
        *value = number(parts.next()?.strip_prefix(name)?.strip_prefix('=')?)?;
    }
    parts.next().is_none().then_some(values)
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> String {
        endpoint.to_string()
    }
}

impl TryFrom<String> for Endpoint {
    type Error = Error;

    fn try_from(text: String) -> Result<Endpoint, Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> Endpoint {
        let gid = Gid::from("fe80::1".parse::<IpAddr>().unwrap());
        Endpoint { path_mtu: PathMtu::Mtu4096, ..Endpoint::new(gid, Qpn::new(0x11), Psn::new(0xffffff)) }
    }

    #[test]
    fn text_and_bytes_parse_back() {
        let endpoint = endpoint();
        assert_eq!(endpoint.to_string(), "fe80::1/qpn=0x000011/psn=0xffffff/mtu=4096/rd_atomic=16");
        assert_eq!(endpoint.to_string().parse::<Endpoint>().unwrap(), endpoint);
        assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes()).unwrap(), endpoint);
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (text, said) in [
            ("", "endpoint = : ADDRESS/qpn=N"),
            ("host/qpn=1/psn=1/mtu=1024/rd_atomic=1", "ADDRESS/qpn=N"),
            ("192.0.2.1/qpn=0x11/psn=1/mtu=1024", "ADDRESS/qpn=N"),
            ("192.0.2.1/qpn=0x11/psn=1/mtu=1024/rd_atomic=1/more=1", "ADDRESS/qpn=N"),
            ("192.0.2.1/qpn=1/psn=1/mtu=1024/rd_atomic=1", "QPN 0x1: 0x2 to 0xfffffe"),
            ("192.0.2.1/qpn=0x100000011/psn=1/mtu=1024/rd_atomic=1", "QPN 0xffffffff"),
            ("192.0.2.1/qpn=0x11/psn=0x1000000/mtu=1024/rd_atomic=1", "PSN 0x1000000: 24 bits"),
            ("192.0.2.1/qpn=0x11/psn=1/mtu=1000/rd_atomic=1", "mtu=1000: 256, 512"),
            ("192.0.2.1/qpn=0x11/psn=1/mtu=1024/rd_atomic=129", "rd_atomic 129: 0 to 128"),
            ("192.0.2.1/qpn=+17/psn=1/mtu=1024/rd_atomic=1", "ADDRESS/qpn=N"),
            ("192.0.2.1/qpn=0x+11/psn=1/mtu=1024/rd_atomic=1", "ADDRESS/qpn=N"),
            ("192.0.2.1/qpn=0x/psn=1/mtu=1024/rd_atomic=1", "ADDRESS/qpn=N"),
            ("0.0.0.0/qpn=0x11/psn=1/mtu=1024/rd_atomic=1", "0.0.0.0: the address of one host"),
            ("::ffff:0.0.0.0/qpn=0x11/psn=1/mtu=1024/rd_atomic=1", "0.0.0.0: the address of one host"),
            (
                "255.255.255.255/qpn=0x11/psn=1/mtu=1024/rd_atomic=1",
                "255.255.255.255: the address of one host",
            ),
            ("::/qpn=0x11/psn=1/mtu=1024/rd_atomic=1", "::: the address of one host"),
            ("\u{1b}[2J", "endpoint = \\u{1b}[2J: ADDRESS/qpn=N"),
            ("239.1.1.1/qpn=0x11/psn=1/mtu=1024/rd_atomic=1", "239.1.1.1: the address of one host"),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let long = "9".repeat(10_000_000).parse::<Endpoint>().unwrap_err().to_string();
        assert!(long.len() < 300 && long.contains("999… (10000000 bytes): ADDRESS"), "{long}");
        for (at, value, said) in [
            (0, 2, "version 2 in byte 0: version 1"),
            (1, 6, "path MTU code 6: 1 to 5"),
            (3, 1, "1 in byte 3: 0"),
        ] {
            let mut bytes = endpoint().to_bytes();
            bytes[at] = value;
            let error = Endpoint::from_bytes(&bytes).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(Endpoint::from_bytes(&[1; 27]).unwrap_err().to_string().contains("27 bytes: 28 bytes"));
    }
}
