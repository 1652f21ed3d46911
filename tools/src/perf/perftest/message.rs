//! The TCP messages of perftest's programs, as bytes. They contain neither length nor type; both ends know which
//! message is next.

use std::fmt;

use ferroce::{Gid, PathMtu, Psn, Qpn};

/// Bytes of a [`Version`].
pub const VERSION: usize = 16;
/// Bytes of a number among the [`SystemData`].
pub const NUMBER: usize = 4;
/// Bytes of a path MTU.
pub const PATH_MTU: usize = 2;
/// Bytes of a [`PerftestDestination`].
pub const DESTINATION: usize = 108;
/// Bytes of each of the five numbers of a [`BandwidthReport`].
pub const REPORTED: usize = 8;

/// A version of perftest, in hundredths: its numbers are fractions, so 5.5 comes after 5.33.
///
/// The messages of an end depend on the version that the other end has announced. ferroce announces 6.27: 6.28
/// introduced a message that is a C structure of libibverbs, which perftest omits for older peers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u16);

impl Version {
    /// The announced version.
    pub const OURS: Version = Version(627);
    /// Before it, the messages were different.
    const OLDEST: Version = Version(550);
    const NEWEST: Version = Version(699);
    /// From this version on, addresses are exchanged once more when the queue pairs are connected.
    const REPEATS_ADDRESSES: Version = Version(570);

    /// Whether a message that starts like this may be a version.
    pub fn may_start(bytes: &[u8]) -> bool {
        matches!(bytes, [major, b'.', minor, ..] if major.is_ascii_digit() && minor.is_ascii_digit())
    }

    /// As sent: `6.27`, padded with zeros.
    pub fn to_message(self) -> [u8; VERSION] {
        let mut message = [0; VERSION];
        let text = self.to_string();
        message[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    /// Parses `5.5` or `6.06`, padded with zeros.
    ///
    /// # Errors
    /// It is not a version, or an unsupported one.
    pub fn from_message(message: &[u8; VERSION]) -> Result<Version, String> {
        let digit = |byte: &u8| byte.is_ascii_digit().then(|| u16::from(byte - b'0'));
        let text = message.split(|byte| *byte == 0).next().unwrap_or_default();
        let hundredths = match text {
            [major, b'.', tenths] => {
                digit(major).zip(digit(tenths)).map(|(major, tenths)| 100 * major + 10 * tenths)
            }
            [major, b'.', tenths, rest] => digit(major)
                .zip(digit(tenths))
                .zip(digit(rest))
                .map(|((major, tenths), rest)| 100 * major + 10 * tenths + rest),
            _ => None,
        };
        let filled = message[text.len()..].iter().all(|byte| *byte == 0);
        let version = hundredths.filter(|_| filled).map(Version).ok_or_else(|| {
            format!("'{}' in place of perftest's version, as 6.06 and zeros", message.escape_ascii())
        })?;
        if version < Version::OLDEST || version > Version::NEWEST {
            return Err(format!("perftest {version}: must be {} to {}", Version::OLDEST, Version::NEWEST));
        }
        Ok(version)
    }

    /// Whether this version exchanges addresses once more when the queue pairs are connected.
    pub fn repeats_addresses(self) -> bool {
        self >= Version::REPEATS_ADDRESSES
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Both ends use the larger value of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemData {
    /// Bytes of the other end's memory that small messages use in turn: its page.
    pub cycle_buffer: u32,
    /// The alignment of messages in it.
    pub cache_line: u32,
}

impl SystemData {
    /// The values that ferroce sends.
    pub const OURS: SystemData = SystemData { cycle_buffer: 4096, cache_line: 64 };
    const MOST: SystemData = SystemData { cycle_buffer: 1 << 20, cache_line: 4096 };

    /// The numbers, one message each.
    pub fn to_messages(self) -> [[u8; NUMBER]; 2] {
        [self.cycle_buffer.to_be_bytes(), self.cache_line.to_be_bytes()]
    }

    /// Parses the numbers.
    ///
    /// # Errors
    /// The invalid number.
    pub fn from_messages(messages: [[u8; NUMBER]; 2]) -> Result<SystemData, String> {
        let [cycle_buffer, cache_line] = messages.map(u32::from_be_bytes);
        let most = SystemData::MOST;
        let limits = [("page", cycle_buffer, most.cycle_buffer), ("cache line", cache_line, most.cache_line)];
        for (what, bytes, most) in limits {
            if bytes == 0 || bytes > most {
                return Err(format!("perftest's {what} of {bytes} bytes: must be 1 to {most}"));
            }
        }
        Ok(SystemData { cycle_buffer, cache_line })
    }

    /// The larger value of each.
    pub fn larger(self, other: SystemData) -> SystemData {
        SystemData {
            cycle_buffer: self.cycle_buffer.max(other.cycle_buffer),
            cache_line: self.cache_line.max(other.cache_line),
        }
    }
}

/// The path MTU's number in the verbs API, as a digit.
pub fn path_mtu_to_message(path_mtu: PathMtu) -> [u8; PATH_MTU] {
    let number = (path_mtu.bytes() / 128).ilog2() as u8;
    [b'0' + number, 0]
}

/// Parses the digit.
///
/// # Errors
/// It is not a digit, or not that of a path MTU.
pub fn path_mtu_from_message(message: [u8; PATH_MTU]) -> Result<PathMtu, String> {
    let number = match message {
        [digit @ b'1'..=b'5', 0] => digit - b'0',
        _ => {
            return Err(format!(
                "'{}' in place of perftest's path MTU, '1\\x00' (256) to '5\\x00' (4096)",
                message.escape_ascii()
            ));
        }
    };
    PathMtu::try_from(128 << number).map_err(|error| error.to_string())
}

/// A queue pair and its memory. To synchronize, both ends send it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerftestDestination {
    /// 0 on Ethernet.
    pub lid: u16,
    /// READs and atomics that this end accepts at a time.
    pub outstanding: u16,
    /// The queue pair.
    pub qpn: Qpn,
    /// The PSN of its first packet.
    pub psn: Psn,
    /// The key of the memory.
    pub rkey: u32,
    /// Its address.
    pub addr: u64,
    /// The GID of the port.
    pub gid: Gid,
    /// The shared receive queue, if the queue pair has one.
    pub srqn: u32,
}

impl PerftestDestination {
    /// Where the GID starts.
    const GID: usize = 50;
    /// Length of the message of an end without a GID.
    const WITHOUT_GID: usize = 59;

    /// As sent.
    pub fn to_message(self) -> [u8; DESTINATION] {
        let PerftestDestination { lid, outstanding, qpn, psn, rkey, addr, gid, srqn } = self;
        let gid: String = gid.0.iter().map(|byte| format!("{byte:02x}:")).collect();
        let (qpn, psn) = (qpn.value(), psn.value());
        let text = format!(
            "{lid:04x}:{outstanding:04x}:{qpn:06x}:{psn:06x}:{rkey:08x}:{addr:016x}:{gid}{srqn:08x}:"
        );
        let mut message = [0; DESTINATION];
        message[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    /// Parses the start of `bytes`; `None` if the message is not complete.
    ///
    /// # Errors
    /// It is invalid, or the other end uses an unsupported option; says how to correct that.
    pub fn from_start(bytes: &[u8]) -> Result<Option<PerftestDestination>, String> {
        let Some(start) = bytes.first_chunk::<{ PerftestDestination::WITHOUT_GID }>() else {
            return Ok(None);
        };
        // The messages of other configurations are shorter or longer, so one end would wait, or bytes would be left
        // over.
        if start[PerftestDestination::WITHOUT_GID - 1] == 0 {
            return Err("perftest has no GID; start it with -x INDEX".into());
        }
        if start[PerftestDestination::GID..].iter().all(u8::is_ascii_hexdigit) {
            return Err(
                "perftest was started with --data_validation, which only perftest supports; start it without"
                    .into(),
            );
        }
        let Some(message) = bytes.first_chunk() else { return Ok(None) };
        PerftestDestination::from_message(message).map(Some)
    }

    fn from_message(message: &[u8; DESTINATION]) -> Result<PerftestDestination, String> {
        let refuse = || {
            format!(
                "'{}' in place of perftest's LID:READs:QPN:PSN:R_Key:address:GID:SRQN:",
                message.escape_ascii()
            )
        };
        let mut fields = Fields(message);
        let mut read = || {
            let lid = fields.hex(4)?;
            let outstanding = fields.hex(4)?;
            let (qpn, psn) = (fields.hex(6)?, fields.hex(6)?);
            let rkey = fields.hex(8)?;
            let addr = fields.hex(16)?;
            let mut gid = [0; 16];
            for byte in &mut gid {
                *byte = fields.hex(2)? as u8;
            }
            let srqn = fields.hex(8)?;
            (fields.0 == [0]).then_some(PerftestDestination {
                lid: lid as u16,
                outstanding: outstanding as u16,
                qpn: Qpn::new(qpn as u32),
                psn: Psn::new(psn as u32),
                rkey: rkey as u32,
                addr,
                gid: Gid(gid),
                srqn: srqn as u32,
            })
        };
        read().ok_or_else(refuse)
    }
}

/// Hexadecimal numbers of known lengths, with a colon after each.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn hex(&mut self, digits: usize) -> Option<u64> {
        let (field, rest) = self.0.split_at_checked(digits)?;
        // from_str_radix would also accept a sign.
        let text = std::str::from_utf8(field).ok().filter(|_| field.iter().all(u8::is_ascii_hexdigit))?;
        let (b':', rest) = rest.split_first()? else { return None };
        self.0 = rest;
        u64::from_str_radix(text, 16).ok()
    }
}

/// The client's results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BandwidthReport {
    /// Bytes of a message.
    pub size: u64,
    /// The number of messages.
    pub messages: u64,
    /// In MiB/s, or Gb/s if the client uses that unit; 0 if it was not measured.
    pub peak: f64,
    /// In the same unit.
    pub average: f64,
    /// Millions of messages per second.
    pub rate: f64,
}

impl BandwidthReport {
    /// The numbers, one message each.
    pub fn to_messages(self) -> [[u8; REPORTED]; 5] {
        let BandwidthReport { size, messages, peak, average, rate } = self;
        let [peak, average, rate] = [peak, average, rate].map(f64::to_be_bytes);
        [size.to_be_bytes(), messages.to_be_bytes(), peak, average, rate]
    }

    /// Parses the numbers.
    pub fn from_messages(numbers: [[u8; REPORTED]; 5]) -> BandwidthReport {
        let [size, messages, peak, average, rate] = numbers;
        let [peak, average, rate] = [peak, average, rate].map(f64::from_be_bytes);
        let [size, messages] = [size, messages].map(u64::from_be_bytes);
        BandwidthReport { size, messages, peak, average, rate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pads a version with zeros.
    fn version(text: &[u8]) -> Result<Version, String> {
        let mut message = [0; VERSION];
        message[..text.len()].copy_from_slice(text);
        Version::from_message(&message)
    }

    #[test]
    fn versions_are_fractions() {
        assert_eq!(version(b"6.06"), Ok(Version(606)));
        assert_eq!(version(b"5.5"), Ok(Version(550)));
        assert_eq!(version(b"5.60"), version(b"5.6"));
        assert!(version(b"5.5").expect("known") < version(b"5.96").expect("known"));
        assert!(!version(b"5.60").expect("known").repeats_addresses());
        assert!(version(b"5.70").expect("known").repeats_addresses());
        assert_eq!(&Version::OURS.to_message(), b"6.27\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(Version::from_message(&Version::OURS.to_message()), Ok(Version::OURS));
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        for (text, named) in [(&b"5.33"[..], "5.33"), (b"5.4", "5.40"), (b"4.5", "4.50"), (b"7.00", "7.00")] {
            let refusal = version(text).expect_err("unknown");
            assert!(refusal.contains(named) && refusal.contains("5.50"), "{refusal}");
        }
        for garbage in [&b""[..], b"6", b"6.", b"6.006", b"a.bc", b"6.06\0x", b"GET / HTTP/1.1\r\n"] {
            let refusal = version(garbage).expect_err("no version");
            assert!(refusal.contains(&garbage.escape_ascii().to_string()), "{refusal}");
        }
        assert!(Version::may_start(b"6.06\0\0\0\0") && Version::may_start(b"5.5"));
        assert!(!Version::may_start(b"frcperf\x02") && !Version::may_start(b"6."));
    }

    #[test]
    fn system_data_is_bounded() {
        let page = |bytes: u32| SystemData::from_messages([bytes.to_be_bytes(), 64u32.to_be_bytes()]);
        let theirs = page(65536).expect("a page of arm64");
        assert_eq!(theirs.larger(SystemData::OURS), SystemData { cycle_buffer: 65536, cache_line: 64 });
        assert_eq!(SystemData::from_messages(theirs.to_messages()), Ok(theirs));
        for bytes in [0, (1 << 20) + 1, u32::MAX] {
            assert!(page(bytes).is_err_and(|refusal| refusal.contains(&bytes.to_string())));
        }
        let lines = SystemData::from_messages([4096u32.to_be_bytes(), [0; 4]]);
        assert!(lines.is_err_and(|refusal| refusal.contains("cache line of 0")));
    }

    #[test]
    fn path_mtus_are_the_verbs_numbers() {
        for (digit, bytes) in [(b'1', 256), (b'2', 512), (b'3', 1024), (b'4', 2048), (b'5', 4096)] {
            let path_mtu = path_mtu_from_message([digit, 0]).expect("known");
            assert_eq!((path_mtu.bytes(), path_mtu_to_message(path_mtu)), (bytes, [digit, 0]));
        }
        for bad in [*b"0\0", *b"6\0", *b"55", [0, 0]] {
            assert!(path_mtu_from_message(bad).is_err(), "{bad:?}");
        }
    }

    const MESSAGE: &[u8; DESTINATION] = b"0000:0010:000011:b2f5a0:000004d2:00007f6b3c0d1000:\
        00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:0b:00000000:\0";

    #[test]
    fn a_destination_is_read_and_said_again() {
        let destination = PerftestDestination::from_start(MESSAGE).expect("right").expect("whole");
        let expected = PerftestDestination {
            lid: 0,
            outstanding: 16,
            qpn: Qpn::new(17),
            psn: Psn::new(0xb2f5a0),
            rkey: 1234,
            addr: 0x7f6b_3c0d_1000,
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 11]),
            srqn: 0,
        };
        assert_eq!(destination, expected);
        assert_eq!(&destination.to_message(), MESSAGE);
        for length in 0..DESTINATION {
            assert_eq!(PerftestDestination::from_start(&MESSAGE[..length]), Ok(None), "{length}");
        }
    }

    #[test]
    fn each_byte_of_a_destination_counts() {
        for at in 0..DESTINATION {
            // Neither a hexadecimal digit nor a colon nor NUL.
            for byte in *b"g+ \n" {
                let mut message = *MESSAGE;
                message[at] = byte;
                let refusal = PerftestDestination::from_start(&message).expect_err("garbage");
                assert!(refusal.contains(&message.escape_ascii().to_string()), "{at}: {refusal}");
            }
        }
    }

    #[test]
    fn other_shapes_are_refused_with_their_cure() {
        let short = b"0001:0001:000048:1a2b3c:00000123:0000000000401000:00000000\0";
        let refusal = PerftestDestination::from_start(short).expect_err("no GID");
        assert!(refusal.contains("-x"), "{refusal}");
        let long = b"0000:0010:000011:b2f5a0:000004d2:00007f6b3c0d1000:00007f6b3c0d2000:\
            00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:0b:00000000:\0";
        let refusal = PerftestDestination::from_start(long).expect_err("markers");
        assert!(refusal.contains("--data_validation"), "{refusal}");
    }

    #[test]
    fn reports_are_big_endian() {
        let report = BandwidthReport { size: 4096, messages: 100, peak: 0.0, average: 1.5, rate: 0.25 };
        let messages = report.to_messages();
        assert_eq!(messages[0], [0, 0, 0, 0, 0, 0, 0x10, 0]);
        assert_eq!(messages[3], [0x3f, 0xf8, 0, 0, 0, 0, 0, 0]);
        assert_eq!(BandwidthReport::from_messages(messages), report);
    }
}
