use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use super::{
    BYTE_ORDER_MAGIC, ENHANCED_PACKET, IF_TSOFFSET, IF_TSRESOL, INTERFACE_DESCRIPTION, OPT_ENDOFOPT, PACKET,
    SECTION_HEADER, SIMPLE_PACKET, padding,
};
use crate::Error;

/// Reads a pcap file (either byte order, micro- or nanoseconds) or a pcapng file, one record at a time, with at most one in
/// memory.
pub struct Reader {
    input: BufReader<Box<dyn Read + Send>>,
    path: String,
    format: Format,
    /// Bytes read so far.
    offset: u64,
    buffer: Vec<u8>,
    ended: bool,
}

/// One captured packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record<'a> {
    /// Nanoseconds since 1970; 0 if the file has no time for it (pcapng's simple packets).
    pub timestamp: u64,
    /// The type of the header at the start of `captured`.
    pub link_type: LinkType,
    /// The captured bytes.
    pub captured: &'a [u8],
    /// The packet's length on the wire, in bytes.
    pub original_len: u32,
}

/// The type of the first header of a capture's packets (the registry at tcpdump.org/linktypes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkType {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header, distinguished by its first four bits.
    RawIp,
    /// Linux "cooked" header, 16 bytes.
    LinuxCooked,
    /// Linux "cooked" header version 2, 20 bytes.
    LinuxCooked2,
    /// Another type, by its number.
    Other(u16),
}

impl Reader {
    /// Opens a capture and reads its first header.
    ///
    /// # Errors
    /// [`Error::Capture`] if the file can't be read or is not a capture.
    pub fn open(path: impl AsRef<Path>) -> Result<Reader, Error> {
        let path = path.as_ref().display().to_string();
        match File::open(&path) {
            Ok(file) => Reader::new(Box::new(file), path),
            Err(error) => Err(Error::Capture { path, reason: error.to_string() }),
        }
    }

    /// The next packet, or `None` at the end of the file.
    ///
    /// # Errors
    /// [`Error::Capture`] if the file is damaged or truncated from here on. No further record follows it.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, Error> {
        if self.ended {
            return Ok(None);
        }
        match self.advance() {
            Ok(Some(Found { timestamp, link_type, original_len, start, end })) => {
                Ok(Some(Record { timestamp, link_type, captured: &self.buffer[start..end], original_len }))
            }
            Ok(None) => {
                self.ended = true;
                Ok(None)
            }
            Err(reason) => {
                self.ended = true;
                Err(Error::Capture { path: self.path.clone(), reason })
            }
        }
    }

    /// Reads a capture from `input`, such as a pipe, starting with its first header. Errors name it `path`.
    ///
    /// # Errors
    /// [`Error::Capture`] if it can't be read or is not a capture.
    pub fn new(input: Box<dyn Read + Send>, path: String) -> Result<Reader, Error> {
        let mut reader = Reader {
            input: BufReader::with_capacity(1 << 16, input),
            path,
            format: Format::PcapNg { order: Order::Little, interfaces: Vec::new() },
            offset: 0,
            buffer: Vec::new(),
            ended: false,
        };
        match reader.read_header() {
            Ok(()) => Ok(reader),
            Err(reason) => Err(Error::Capture { path: reader.path, reason }),
        }
    }
}

/// The longest packet accepted, libpcap's own limit.
const MAX_PACKET: u32 = 262_144;
/// The longest block accepted, Wireshark's own limit.
const MAX_BLOCK: u32 = 16 << 20;
/// The most interfaces accepted in a section: a small compressed file can have any number of them.
const MAX_INTERFACES: usize = 1 << 16;

#[derive(Clone, Copy)]
enum Order {
    Little,
    Big,
}

enum Format {
    Pcap { order: Order, nanos_per_unit: u64, link_type: LinkType },
    PcapNg { order: Order, interfaces: Vec<InterfaceDescription> },
}

#[derive(Clone, Copy)]
struct InterfaceDescription {
    link_type: LinkType,
    snaplen: u32,
    /// if_tsresol: a negative power of 10, or of 2 if the top bit is set.
    resolution: u8,
    /// Seconds to add to each timestamp.
    offset: i64,
}

/// A record whose bytes are `buffer[start..end]`.
struct Found {
    timestamp: u64,
    link_type: LinkType,
    original_len: u32,
    start: usize,
    end: usize,
}

impl LinkType {
    fn from_number(number: u16) -> LinkType {
        match number {
            1 => LinkType::Ethernet,
            // LINKTYPE_RAW, the values of DLT_RAW on two kinds of system, LINKTYPE_IPV4, LINKTYPE_IPV6.
            101 | 12 | 14 | 228 | 229 => LinkType::RawIp,
            113 => LinkType::LinuxCooked,
            276 => LinkType::LinuxCooked2,
            other => LinkType::Other(other),
        }
    }
}

impl Order {
    fn u16(self, bytes: &[u8], at: usize) -> u16 {
        let bytes = [bytes[at], bytes[at + 1]];
        match self {
            Order::Little => u16::from_le_bytes(bytes),
            Order::Big => u16::from_be_bytes(bytes),
        }
    }

    fn u32(self, bytes: &[u8], at: usize) -> u32 {
        let bytes = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        match self {
            Order::Little => u32::from_le_bytes(bytes),
            Order::Big => u32::from_be_bytes(bytes),
        }
    }

    /// The two halves of a pcapng timestamp. The high one is first in either byte order.
    fn stamp(self, bytes: &[u8], at: usize) -> u64 {
        u64::from(self.u32(bytes, at)) << 32 | u64::from(self.u32(bytes, at + 4))
    }
}

impl Reader {
    fn read_header(&mut self) -> Result<(), String> {
        let got = self.fill(4)?;
        if got < 4 {
            return Err(format!("{got} bytes are not a capture"));
        }
        let magic = Order::Little.u32(&self.buffer, 0);
        let (order, nanos_per_unit) = match magic {
            SECTION_HEADER => {
                let length = self.word("section header")?;
                return self.section(length, 0);
            }
            0xa1b2_c3d4 => (Order::Little, 1000),
            0xd4c3_b2a1 => (Order::Big, 1000),
            0xa1b2_3c4d => (Order::Little, 1),
            0x4d3c_b2a1 => (Order::Big, 1),
            _ => return Err(unknown(magic.to_le_bytes())),
        };
        self.need(20, "file header", 0)?;
        let major = order.u16(&self.buffer, 0);
        if major != 2 {
            return Err(format!("pcap version {major}; version 2 can be read"));
        }
        // The upper half of the word has flags about an FCS.
        let link_type = LinkType::from_number(order.u32(&self.buffer, 16) as u16);
        self.format = Format::Pcap { order, nanos_per_unit, link_type };
        Ok(())
    }

    fn advance(&mut self) -> Result<Option<Found>, String> {
        match self.format {
            Format::Pcap { order, nanos_per_unit, link_type } => {
                self.record(order, nanos_per_unit, link_type)
            }
            Format::PcapNg { .. } => loop {
                let start = self.offset;
                let got = self.fill(8)?;
                if got == 0 {
                    return Ok(None);
                }
                if got < 8 {
                    return Err(truncated("block", start, 8, got));
                }
                if let Some(found) = self.block(start)? {
                    return Ok(Some(found));
                }
            },
        }
    }

    /// A record of a pcap file.
    fn record(
        &mut self,
        order: Order,
        nanos_per_unit: u64,
        link_type: LinkType,
    ) -> Result<Option<Found>, String> {
        let start = self.offset;
        let got = self.fill(16)?;
        if got == 0 {
            return Ok(None);
        }
        if got < 16 {
            return Err(truncated("record", start, 16, got));
        }
        let [seconds, fraction, length, original_len] = [0, 4, 8, 12].map(|at| order.u32(&self.buffer, at));
        if length > MAX_PACKET {
            return Err(format!("the record at byte {start} claims {length} bytes, over {MAX_PACKET}"));
        }
        let timestamp = u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * nanos_per_unit;
        self.need(length as usize, "record", start)?;
        Ok(Some(Found { timestamp, link_type, original_len, start: 0, end: length as usize }))
    }

    /// A block of a pcapng file, whose type and length are in the buffer.
    fn block(&mut self, start: u64) -> Result<Option<Found>, String> {
        let Format::PcapNg { order, .. } = self.format else { return Ok(None) };
        let kind = order.u32(&self.buffer, 0);
        if kind == SECTION_HEADER {
            let length = Order::Little.u32(&self.buffer, 4);
            self.section(length, start)?;
            return Ok(None);
        }
        let length = order.u32(&self.buffer, 4);
        let body = self.body(order, length, 8, start)?;
        match kind {
            INTERFACE_DESCRIPTION => {
                let interface = interface(order, &self.buffer[..body])
                    .ok_or_else(|| format!("the interface description at byte {start} is damaged"))?;
                if let Format::PcapNg { interfaces, .. } = &mut self.format {
                    if interfaces.len() == MAX_INTERFACES {
                        return Err(format!(
                            "the section has more than {MAX_INTERFACES} interfaces at byte {start}"
                        ));
                    }
                    interfaces.push(interface);
                }
                Ok(None)
            }
            ENHANCED_PACKET | PACKET | SIMPLE_PACKET => self.packet(order, kind, body, start).map(Some),
            _ => Ok(None),
        }
    }

    fn packet(&self, order: Order, kind: u32, body: usize, start: u64) -> Result<Found, String> {
        let bytes = &self.buffer[..body];
        let header = if kind == SIMPLE_PACKET { 4 } else { 20 };
        if body < header {
            return Err(format!("the packet at byte {start} has {body} bytes, too few for its header"));
        }
        let number = match kind {
            ENHANCED_PACKET => order.u32(bytes, 0),
            PACKET => u32::from(order.u16(bytes, 0)),
            _ => 0,
        };
        let Format::PcapNg { interfaces, .. } = &self.format else {
            return Err(format!("the packet at byte {start} is not in a section"));
        };
        let interface = interfaces.get(number as usize).ok_or_else(|| {
            format!("the packet at byte {start} names interface {number}, of {}", interfaces.len())
        })?;
        let (timestamp, length, original_len) = if kind == SIMPLE_PACKET {
            let original_len = order.u32(bytes, 0);
            let limit = if interface.snaplen == 0 { u32::MAX } else { interface.snaplen };
            (0, original_len.min(limit), original_len)
        } else {
            (interface.nanos(order.stamp(bytes, 4)), order.u32(bytes, 12), order.u32(bytes, 16))
        };
        let room = body - header;
        if length as usize > room {
            return Err(format!(
                "the packet at byte {start} claims {length} bytes, and its block has {room}"
            ));
        }
        let end = header + length as usize;
        Ok(Found { timestamp, link_type: interface.link_type, original_len, start: header, end })
    }

    /// Starts a section, whose type and `length` (read as little-endian) are known.
    fn section(&mut self, length: u32, start: u64) -> Result<(), String> {
        self.need(4, "section header", start)?;
        let order = match Order::Little.u32(&self.buffer, 0) {
            BYTE_ORDER_MAGIC => Order::Little,
            magic if magic.swap_bytes() == BYTE_ORDER_MAGIC => Order::Big,
            magic => return Err(format!("the section at byte {start} has byte-order magic {magic:#010x}")),
        };
        let length = match order {
            Order::Little => length,
            Order::Big => length.swap_bytes(),
        };
        let body = self.body(order, length, 12, start)?;
        if body < 12 {
            return Err(format!("the section header at byte {start} is too short"));
        }
        let major = order.u16(&self.buffer, 0);
        if major != 1 {
            return Err(format!("the section at byte {start} is of pcapng version {major}; 1 can be read"));
        }
        self.format = Format::PcapNg { order, interfaces: Vec::new() };
        Ok(())
    }

    /// Reads the rest of a block of `length` bytes, after `head` bytes, and returns its length without the length field at
    /// the end.
    fn body(&mut self, order: Order, length: u32, head: u32, start: u64) -> Result<usize, String> {
        if length < head + 4 || !length.is_multiple_of(4) || length > MAX_BLOCK {
            return Err(format!(
                "the block at byte {start} has length {length}: must be {} to {MAX_BLOCK}, a multiple of 4",
                head + 4
            ));
        }
        let rest = (length - head) as usize;
        self.need(rest, "block", start)?;
        let body = rest - 4;
        let again = order.u32(&self.buffer, body);
        if again != length {
            return Err(format!(
                "the block at byte {start} has length {length} and ends with length {again}"
            ));
        }
        Ok(body)
    }

    fn word(&mut self, what: &str) -> Result<u32, String> {
        self.need(4, what, 0)?;
        Ok(Order::Little.u32(&self.buffer, 0))
    }

    /// Reads `count` bytes into the buffer, for the `what` that began at `start`.
    fn need(&mut self, count: usize, what: &str, start: u64) -> Result<(), String> {
        let before = (self.offset - start) as usize;
        let got = self.fill(count)?;
        if got < count { Err(truncated(what, start, before + count, before + got)) } else { Ok(()) }
    }

    /// Reads up to `count` bytes into the buffer, fewer only at the end of the file. The buffer grows with the bytes read,
    /// not with the value of a length field.
    fn fill(&mut self, count: usize) -> Result<usize, String> {
        self.buffer.clear();
        let result = (&mut self.input).take(count as u64).read_to_end(&mut self.buffer);
        let got = result.map_err(|error: io::Error| format!("at byte {}: {error}", self.offset))?;
        self.offset += got as u64;
        Ok(got)
    }
}

/// Why a file with this magic can't be read.
fn unknown(magic: [u8; 4]) -> String {
    let [a, b, c, d] = magic;
    let known = match magic {
        [0x1f, 0x8b, ..] => ": gzip",
        [0x28, 0xb5, 0x2f, 0xfd] => ": zstd",
        [0xfd, b'7', b'z', b'X'] => ": xz",
        [b'B', b'Z', b'h', _] => ": bzip2",
        [0x04, 0x22, 0x4d, 0x18] => ": lz4",
        [b'P', b'K', 3, 4] => ": zip",
        [b's', b'n', b'o', b'o'] => ": snoop",
        // Both byte orders of a format that some old Linux distributions had.
        [0x34, 0xcd, 0xb2, 0xa1] | [0xa1, 0xb2, 0xcd, 0x34] => ": modified pcap",
        _ => "",
    };
    format!(
        "starts with {a:02x} {b:02x} {c:02x} {d:02x}{known}; pcap (a1 b2 c3 d4 or a1 b2 3c 4d, in either byte order) \
         and pcapng (0a 0d 0d 0a) can be read"
    )
}

fn truncated(what: &str, start: u64, expected: usize, got: usize) -> String {
    format!("truncated: the {what} at byte {start} should have {expected} bytes, the file ends after {got}")
}

fn interface(order: Order, body: &[u8]) -> Option<InterfaceDescription> {
    if body.len() < 8 {
        return None;
    }
    let mut interface = InterfaceDescription {
        link_type: LinkType::from_number(order.u16(body, 0)),
        snaplen: order.u32(body, 4),
        resolution: 6,
        offset: 0,
    };
    let mut options = &body[8..];
    while options.len() >= 4 {
        let (code, length) = (order.u16(options, 0), usize::from(order.u16(options, 2)));
        let value = options.get(4..4 + length)?;
        match (code, length) {
            (OPT_ENDOFOPT, _) => break,
            (IF_TSRESOL, 1) => interface.resolution = value[0],
            (IF_TSOFFSET, 8) => {
                let value = value.try_into().ok()?;
                interface.offset = match order {
                    Order::Little => i64::from_le_bytes(value),
                    Order::Big => i64::from_be_bytes(value),
                };
            }
            (IF_TSRESOL | IF_TSOFFSET, _) => return None,
            _ => {}
        }
        options = options.get(4 + length + padding(length)..).unwrap_or_default();
    }
    Some(interface)
}

impl InterfaceDescription {
    /// Nanoseconds since 1970 of a timestamp in this interface's units, clamped to a `u64`.
    fn nanos(&self, stamp: u64) -> u64 {
        let stamp = u128::from(stamp);
        let power = u32::from(self.resolution & 0x7f);
        let nanos = if self.resolution & 0x80 != 0 {
            (stamp * 1_000_000_000) >> power
        } else if power <= 9 {
            stamp * 10u128.pow(9 - power)
        } else {
            10u128.checked_pow(power - 9).map_or(0, |divisor| stamp / divisor)
        };
        let nanos = nanos as i128 + i128::from(self.offset) * 1_000_000_000;
        nanos.clamp(0, i128::from(u64::MAX)) as u64
    }
}
