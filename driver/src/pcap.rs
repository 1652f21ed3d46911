//! Captures: a recorder that wraps any driver, and a reader.

mod reader;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{
    Capabilities, Error, FilteredSink, FilteredSource, FrameSink, FrameSource, Layer, Nanos, PacketDriver,
    Sent,
};
pub use reader::{LinkType, Reader, Record};

/// A driver that writes the frames of another one to a pcapng file.
///
/// Each frame is stamped with the wall clock at the first burst plus the engine's time since, to the nanosecond, and marked as
/// inbound or outbound. The file is written by the thread that drives the port, through a buffer that is flushed each second of
/// the engine's time and on drop. If it can't be written any more, this is logged once as an error, later frames are
/// [counted](Recorder::unrecorded), the [`Recording`] has the reason, and traffic continues.
pub struct Recorder<D> {
    driver: D,
    capture: Capture,
    /// For frames in several segments.
    scratch: Vec<u8>,
}

/// The state of a capture. It outlives the recorder, whose last frames are written when that is dropped.
#[derive(Clone, Debug, Default)]
pub struct Recording(Arc<OnceLock<String>>);

impl Recording {
    /// The file and why it could no longer be written; `None` if the file is complete so far.
    pub fn failure(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}

impl<D: PacketDriver> Recorder<D> {
    /// Creates or replaces the file `path`, and records `driver` into it.
    ///
    /// # Errors
    /// [`Error::Capture`] if the file can't be written, [`Error::Invalid`] if the driver's frames
    /// have no Ethernet header.
    pub fn create(driver: D, path: impl AsRef<Path>) -> Result<Recorder<D>, Error> {
        let path = path.as_ref();
        let capabilities = driver.capabilities();
        if capabilities.layer != Layer::Ethernet {
            return Err(Error::Invalid {
                parameter: "pcap",
                value: path.display().to_string(),
                expected: match (capabilities.driver, &capabilities.interface) {
                    ("shm", _) => {
                        "a driver of Ethernet frames, such as af_xdp or loopback: packets through shared \
                        memory are on no interface"
                            .to_owned()
                    }
                    (driver, interface) => format!(
                        "a driver of Ethernet frames, such as af_xdp; {driver} on '{interface}' has none, so record its \
                         packets with `tcpdump -i {interface} -w FILE udp port 4791` (with ,shm=off after the device, \
                         to record those to this host too)"
                    ),
                },
            });
        }
        let capture = Capture::create(path, &Interface::of(capabilities))?;
        let scratch = Vec::with_capacity(capabilities.max_frame);
        Ok(Recorder { driver, capture, scratch })
    }

    /// The state of the capture, which outlives the recorder.
    pub fn recording(&self) -> Recording {
        self.capture.recording.clone()
    }

    /// Frames that passed since the file could no longer be written. What the buffer held at that
    /// time may be missing too.
    pub fn unrecorded(&self) -> u64 {
        self.capture.unrecorded
    }
}

impl<D: PacketDriver> crate::Wrapper for Recorder<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        &self.driver
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let capture = &mut self.capture;
        capture.tick(now);
        let record = |frame: &[u8]| {
            capture.record(now, Direction::Inbound, frame);
            true
        };
        self.driver.rx_burst(now, &mut FilteredSink::new(sink, record))
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let Recorder { capture, scratch, .. } = self;
        capture.tick(now);
        let record = |frame: Sent<'_>| {
            capture.record(now, Direction::Outbound, frame.bytes(scratch));
            true
        };
        self.driver.tx_burst(now, &mut FilteredSource::new(source, record))
    }
}

/// Writes frames to a pcapng file with the caller's (virtual) times, counted from 1970.
///
/// If the file can't be written any more, this is logged once as an error, and the [`Recording`] has the reason.
pub struct Writer(Capture);

impl Writer {
    /// Creates or replaces the file `path`. `interface` and `description` are written to it.
    ///
    /// # Errors
    /// [`Error::Capture`] if the file can't be written.
    pub fn create(path: impl AsRef<Path>, interface: &str, description: &str) -> Result<Writer, Error> {
        let interface = Interface { name: interface, description: description.to_owned(), mac: None };
        let mut capture = Capture::create(path.as_ref(), &interface)?;
        capture.start = Some((Nanos::ZERO, Duration::ZERO));
        Ok(Writer(capture))
    }

    /// Writes an Ethernet frame that was sent (`outbound`) or received at `now`.
    pub fn write(&mut self, now: Nanos, outbound: bool, frame: &[u8]) {
        self.0.record(now, if outbound { Direction::Outbound } else { Direction::Inbound }, frame);
    }

    /// The state of the file, which outlives the writer.
    pub fn recording(&self) -> Recording {
        self.0.recording.clone()
    }
}

const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
const BUFFER: usize = 1 << 18;

/// The low two bits of the option epb_flags.
#[derive(Clone, Copy)]
enum Direction {
    Inbound = 1,
    Outbound = 2,
}

/// The captured interface, as described in the file.
struct Interface<'a> {
    name: &'a str,
    description: String,
    mac: Option<[u8; 6]>,
}

impl Interface<'_> {
    fn of(capabilities: &Capabilities) -> Interface<'_> {
        let description = format!("{}: {}", capabilities.driver, capabilities.description);
        Interface { name: &capabilities.interface, description, mac: Some(capabilities.mac) }
    }
}

/// A pcapng file being written (draft-ietf-opsawg-pcapng), little-endian.
struct Capture {
    file: BufWriter<Box<dyn Write + Send>>,
    path: String,
    /// The engine's time and the wall clock's at the first burst.
    start: Option<(Nanos, Duration)>,
    flushed: Nanos,
    /// Holds the reason once writing has failed.
    recording: Recording,
    unrecorded: u64,
}

impl Capture {
    /// Creates or replaces the file `path`.
    fn create(path: &Path, of: &Interface<'_>) -> Result<Capture, Error> {
        let failed =
            |error: io::Error| Error::Capture { path: path.display().to_string(), reason: error.to_string() };
        let file = File::create(path).map_err(failed)?;
        Capture::start(Box::new(file), path.display().to_string(), of).map_err(failed)
    }

    fn start(file: Box<dyn Write + Send>, path: String, of: &Interface<'_>) -> Result<Capture, io::Error> {
        let mut file = BufWriter::with_capacity(BUFFER, file);
        let mut section = Vec::new();
        section.extend(BYTE_ORDER_MAGIC.to_le_bytes());
        section.extend(1u16.to_le_bytes());
        section.extend(0u16.to_le_bytes());
        section.extend(u64::MAX.to_le_bytes()); // length of the section: unknown
        option(&mut section, SHB_USERAPPL, concat!("ferroce ", env!("CARGO_PKG_VERSION")).as_bytes());
        option(&mut section, OPT_ENDOFOPT, &[]);
        write_block(&mut file, SECTION_HEADER, &[&section])?;

        let mut interface = Vec::new();
        interface.extend(LINKTYPE_ETHERNET.to_le_bytes());
        interface.extend([0; 2]);
        interface.extend(0u32.to_le_bytes()); // snapshot length: no limit
        option(&mut interface, IF_NAME, of.name.as_bytes());
        option(&mut interface, IF_DESCRIPTION, of.description.as_bytes());
        if let Some(mac) = &of.mac {
            option(&mut interface, IF_MACADDR, mac);
        }
        option(&mut interface, IF_TSRESOL, &[9]);
        option(&mut interface, OPT_ENDOFOPT, &[]);
        write_block(&mut file, INTERFACE_DESCRIPTION, &[&interface])?;
        file.flush()?;
        let recording = Recording::default();
        Ok(Capture { file, path, start: None, flushed: Nanos::ZERO, recording, unrecorded: 0 })
    }

    fn record(&mut self, now: Nanos, direction: Direction, frame: &[u8]) {
        if self.recording.failure().is_some() {
            self.unrecorded += 1;
            return;
        }
        let stamp = self.wall(now).as_nanos() as u64;
        let len = (frame.len() as u32).to_le_bytes();
        let mut header = [0; 20]; // interface 0 first
        header[4..8].copy_from_slice(&((stamp >> 32) as u32).to_le_bytes());
        header[8..12].copy_from_slice(&(stamp as u32).to_le_bytes());
        header[12..16].copy_from_slice(&len);
        header[16..20].copy_from_slice(&len);
        let mut options = [0; 12]; // opt_endofopt last
        options[..2].copy_from_slice(&EPB_FLAGS.to_le_bytes());
        options[2] = 4;
        options[4] = direction as u8;
        let padding = &[0; 3][..padding(frame.len())];
        let result = write_block(&mut self.file, ENHANCED_PACKET, &[&header, frame, padding, &options]);
        if let Err(error) = result {
            self.unrecorded += 1;
            self.give_up(&error);
        }
    }

    /// Flushes the file if a second has passed.
    fn tick(&mut self, now: Nanos) {
        if now.since(self.flushed) >= FLUSH_INTERVAL {
            self.flushed = now;
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.recording.failure().is_none()
            && let Err(error) = self.file.flush()
        {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        let failure = self.recording.0.get_or_init(|| format!("capture '{}': {error}", self.path));
        tracing::error!("{failure}; the recording ends, traffic continues");
    }

    fn wall(&mut self, now: Nanos) -> Duration {
        let (start, wall) = *self.start.get_or_insert_with(|| {
            // With a clock before 1970, time stamps begin at 1970.
            (now, SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
        });
        wall + now.since(start)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.flush();
    }
}

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;
const OPT_ENDOFOPT: u16 = 0;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_DESCRIPTION: u16 = 3;
const IF_MACADDR: u16 = 6;
const IF_TSRESOL: u16 = 9;
const IF_TSOFFSET: u16 = 14;
const EPB_FLAGS: u16 = 2;

/// Writes a block whose body is `parts`, which together end on a multiple of 4.
fn write_block(file: &mut impl Write, kind: u32, parts: &[&[u8]]) -> Result<(), io::Error> {
    let total = (12 + parts.iter().map(|part| part.len()).sum::<usize>()) as u32;
    file.write_all(&kind.to_le_bytes())?;
    file.write_all(&total.to_le_bytes())?;
    for part in parts {
        file.write_all(part)?;
    }
    file.write_all(&total.to_le_bytes())
}

fn option(block: &mut Vec<u8>, code: u16, value: &[u8]) {
    // An option holds 65535 bytes; names and descriptions are truncated to this.
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    block.extend(code.to_le_bytes());
    block.extend((value.len() as u16).to_le_bytes());
    block.extend(value);
    block.extend(&[0; 3][..padding(value.len())]);
}

/// Bytes from `len` to the next multiple of 4.
fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

#[cfg(test)]
mod tests;
