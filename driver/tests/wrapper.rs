//! Wrappers of drivers, sinks and sources forward every call.
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::pcap::Recorder;
use ferroce_driver::{
    Armed, Capabilities, EitherSource, Error, FilteredSink, FilteredSource, FrameSink, FrameSource, Gathered,
    Memory, Nanos, NextHop, PacketDriver, Payload, Placed, Refusal, Room, RxFrame, Sent, Stats, TAIL_MAX,
    Wrapper,
};

type Calls = Arc<Mutex<Vec<&'static str>>>;

/// Records every call. It announces each frame, and gathers.
struct Noted {
    calls: Calls,
    capabilities: Capabilities,
}

impl Noted {
    fn new() -> (Noted, Calls) {
        let calls = Calls::default();
        let capabilities =
            Capabilities::new("noted", "noted0", [2, 0, 0, 0, 0, 1], 1500).addresses(vec![PEER]);
        (Noted { calls: calls.clone(), capabilities }, calls)
    }

    fn note(&self, name: &'static str) {
        self.calls.lock().unwrap().push(name);
    }
}

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const FRAME: [u8; 60] = [7; 60];

#[deny(clippy::missing_trait_methods)]
impl PacketDriver for Noted {
    fn capabilities(&self) -> &Capabilities {
        self.note("capabilities");
        &self.capabilities
    }
    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.note("rx_burst");
        sink.announce(&FRAME);
        sink.take(RxFrame::borrowed(&FRAME));
        Ok(1)
    }
    fn tx_burst(&mut self, _: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        self.note("tx_burst");
        let (mut buffer, mut tail) = ([0; 1518], [0; TAIL_MAX]);
        source.gather(&mut buffer, &mut tail);
        source.payload();
        source.write(&mut buffer);
        source.renumber(&mut buffer, 9);
        Ok(2)
    }
    fn keeps(&self) -> usize {
        self.note("keeps");
        5
    }
    fn wait(&mut self, _: Duration) -> Result<(), Error> {
        self.note("wait");
        Ok(())
    }
    fn waker(&self) -> Option<Waker> {
        self.note("waker");
        Some(Waker::noop().clone())
    }
    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        self.note("arm");
        Ok(Armed { fd: None, longest: Duration::ZERO })
    }
    fn disarm(&mut self) {
        self.note("disarm");
    }
    fn resolve(&mut self, _: IpAddr) -> Result<NextHop, Error> {
        self.note("resolve");
        Ok(NextHop::Found([2, 0, 0, 0, 0, 2]))
    }
    fn resolve_in_vlan(&mut self, vlan: u16, _: IpAddr) -> Result<NextHop, Error> {
        self.note("resolve_in_vlan");
        Ok(NextHop::Found([2, 0, 0, 0, 0, vlan as u8]))
    }
    fn resolve_blocking(&mut self, _: IpAddr, _: Duration) -> Result<[u8; 6], Error> {
        self.note("resolve_blocking");
        Ok([2, 0, 0, 0, 0, 3])
    }
    fn next_refusal(&mut self) -> Option<Refusal> {
        self.note("next_refusal");
        None
    }
    fn admit(&mut self, _: IpAddr) -> Result<(), Error> {
        self.note("admit");
        Ok(())
    }
    fn join(&mut self, _: IpAddr) -> Result<(), Error> {
        self.note("join");
        Ok(())
    }
    fn leave(&mut self, _: IpAddr) -> Result<(), Error> {
        self.note("leave");
        Ok(())
    }
    fn listen(&mut self, service: u64) -> Result<(), Error> {
        assert_eq!(service, 7);
        self.note("listen");
        Ok(())
    }
    fn unlisten(&mut self, service: u64) {
        assert_eq!(service, 7);
        self.note("unlisten");
    }
    fn line_rate(&self) -> Option<u64> {
        self.note("line_rate");
        Some(9)
    }
    fn stats(&self) -> Stats {
        self.note("stats");
        let mut stats = Stats::default();
        stats.rx_frames = 3;
        stats
    }
}

/// Overrides nothing.
struct Plain<D>(D);

impl<D: PacketDriver> Wrapper for Plain<D> {
    type Inner = D;
    fn inner(&self) -> &D {
        &self.0
    }
    fn inner_mut(&mut self) -> &mut D {
        &mut self.0
    }
}

/// The names of a trait's methods, from its source.
fn methods(source: &str, name: &str) -> BTreeSet<String> {
    let start = source.find(&format!("pub trait {name}")).expect("the trait is in this file");
    let body = &source[start..start + source[start..].find("\n}").expect("it ends")];
    let names = body.lines().filter_map(|line| line.strip_prefix("    fn ")?.split('(').next());
    names.map(str::to_owned).collect()
}

/// Makes each call of a driver once.
fn call_everything(driver: &mut dyn PacketDriver, sink: &mut dyn FrameSink, source: &mut dyn FrameSource) {
    assert_eq!(driver.capabilities().driver, "noted");
    assert_eq!(driver.rx_burst(Nanos(1), sink).unwrap(), 1);
    assert_eq!(driver.tx_burst(Nanos(1), source).unwrap(), 2);
    assert_eq!(driver.keeps(), 5);
    driver.wait(Duration::ZERO).unwrap();
    assert!(driver.waker().is_some());
    assert!(driver.arm().unwrap().fd.is_none());
    driver.disarm();
    assert_eq!(driver.resolve(PEER).unwrap(), NextHop::Found([2, 0, 0, 0, 0, 2]));
    assert_eq!(driver.resolve_in_vlan(7, PEER).unwrap(), NextHop::Found([2, 0, 0, 0, 0, 7]));
    assert_eq!(driver.resolve_blocking(PEER, Duration::ZERO).unwrap(), [2, 0, 0, 0, 0, 3]);
    assert!(driver.next_refusal().is_none());
    driver.join(PEER).unwrap();
    driver.admit(PEER).unwrap();
    driver.leave(PEER).unwrap();
    driver.listen(7).unwrap();
    driver.unlisten(7);
    assert_eq!(driver.stats().rx_frames, 3);
    assert_eq!(driver.line_rate(), Some(9));
}

/// A sink and a source that record every call.
struct Ends(Vec<&'static str>, Memory, Cell<usize>);

impl Default for Ends {
    fn default() -> Ends {
        Ends(Vec::new(), Memory::copy_of(&[7; 16]).unwrap(), Cell::new(0))
    }
}

#[deny(clippy::missing_trait_methods)]
impl FrameSink for Ends {
    fn announce(&mut self, frame: &[u8]) {
        assert_eq!(frame, FRAME);
        self.0.push("announce");
    }
    fn take(&mut self, frame: RxFrame<'_>) {
        assert_eq!(frame.bytes(), FRAME);
        self.0.push("take");
    }
}

#[deny(clippy::missing_trait_methods)]
impl FrameSource for Ends {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.0.push("write");
        buffer[..60].copy_from_slice(&FRAME);
        Some(60)
    }
    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        self.0.push("gather");
        head[..40].fill(7);
        tail[..4].fill(7);
        Some(Gathered { head: 40, tail: 4 })
    }
    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        self.0.push("place");
        head[..40].fill(7);
        tail[..4].fill(7);
        room.place(&[10, 0, 0, 2], 5, 16)?.to.copy_from([7; 16].as_slice().into());
        Some(Gathered { head: 40, tail: 4 })
    }
    fn payload(&self) -> Option<Payload<'_>> {
        self.2.set(self.2.get() + 1);
        self.1.payload(0, 16)
    }
    fn renumber(&mut self, _: &mut [u8], identification: u16) {
        assert_eq!(identification, 9);
        self.0.push("renumber");
    }
}

/// A place for a payload.
struct Scratch([u8; 16]);

impl Room for Scratch {
    fn place(&mut self, destination: &[u8], qpn: u32, payload: usize) -> Option<Placed<'_>> {
        assert_eq!((destination, qpn, payload), (&[10, 0, 0, 2][..], 5, 16));
        Some(Placed { to: self.0.as_mut_slice().into(), icrc: true })
    }
}

#[test]
fn a_wrapper_that_overrides_nothing_forwards_everything() {
    let expected = methods(include_str!("../src/lib.rs"), "PacketDriver");
    assert!(expected.contains("join") && expected.len() >= 9, "{expected:?}");
    let (noted, calls) = Noted::new();
    let boxed: Box<dyn PacketDriver> = Box::new(Plain(Box::new(Plain(noted))));
    let mut wrapped = Plain(boxed);
    call_everything(&mut wrapped, &mut Ends::default(), &mut Ends::default());
    let calls = calls.lock().unwrap();
    let seen: BTreeSet<String> = calls.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(seen, expected, "the list in wrapper.rs, or this test, lacks a method");
    assert_eq!(calls.len(), expected.len(), "each once: {calls:?}");
}

#[test]
fn filters_forward_every_call_of_sinks_and_sources() {
    let mut names = methods(include_str!("../src/frame.rs"), "FrameSink");
    names.append(&mut methods(include_str!("../src/frame.rs"), "FrameSource"));
    let (mut noted, _) = Noted::new();
    let (mut sink, mut source, mut nothing) = (Ends::default(), Ends::default(), |_: &mut [u8]| None);
    noted.rx_burst(Nanos(1), &mut FilteredSink::new(&mut sink, |frame| frame == FRAME)).unwrap();
    let mut scratch = Vec::new();
    let mut filtered = FilteredSource::new(&mut source, |frame: Sent<'_>| {
        assert!(frame.head().len() >= 40);
        frame.bytes(&mut scratch) == FRAME
    });
    noted.tx_burst(Nanos(1), &mut EitherSource::new(&mut nothing, &mut filtered)).unwrap();
    // A filter needs a contiguous frame.
    let mut room = Scratch([0; 16]);
    let mut whole = EitherSource::new(&mut nothing, &mut filtered);
    assert_eq!(whole.place(&mut [0; 60], &mut [0; TAIL_MAX], &mut room).unwrap().head, 60);
    let mut placed = EitherSource::new(&mut nothing, &mut source);
    assert_eq!(placed.place(&mut [0; 60], &mut [0; TAIL_MAX], &mut room).unwrap().head, 40);
    assert_eq!(room.0, [7; 16]);
    // By the filter, which reads the frame, and by the port.
    assert_eq!(source.2.get(), 2);
    let seen = sink.0.iter().chain(&source.0).chain(&["payload"]);
    let seen: BTreeSet<String> = seen.map(|name| (*name).to_owned()).collect();
    assert_eq!(seen, names);
}

#[test]
fn filtered_frames_are_dropped_and_the_next_is_taken() {
    let (mut noted, _) = Noted::new();
    let mut sink = Ends::default();
    noted.rx_burst(Nanos(1), &mut FilteredSink::new(&mut sink, |_| false)).unwrap();
    assert_eq!(sink.0, ["announce"]);
    let (mut source, mut turn) = (Ends::default(), 0);
    let mut every_second = FilteredSource::new(&mut source, |_| {
        turn += 1;
        turn % 2 == 0
    });
    noted.tx_burst(Nanos(1), &mut every_second).unwrap();
    assert_eq!(source.0, ["gather", "gather", "write", "write", "renumber"]);
}

/// The first source has precedence, and renumbers its own frames.
#[test]
fn of_two_sources_the_first_has_precedence() {
    let (mut first, mut then, mut buffer) = (Ends::default(), Ends::default(), [0; 60]);
    let mut both = EitherSource::new(&mut first, &mut then);
    assert_eq!(both.write(&mut buffer), Some(60));
    both.renumber(&mut buffer, 9);
    assert_eq!((&first.0[..], then.0.len()), (&["write", "renumber"][..], 0));
    let mut nothing = |_: &mut [u8]| None;
    let mut both = EitherSource::new(&mut nothing, &mut then);
    assert_eq!(both.write(&mut buffer), Some(60));
    both.renumber(&mut buffer, 9);
    assert_eq!(then.0, ["write", "renumber"]);
}

/// A recorder changes no call, neither the announcements nor the pieces of a frame.
#[test]
fn a_recorder_forwards_everything() {
    let path = std::env::temp_dir().join(format!("ferroce-wrapper-{}.pcapng", std::process::id()));
    let (noted, calls) = Noted::new();
    let mut recorder = Recorder::create(noted, &path).unwrap();
    calls.lock().unwrap().clear();
    let (mut sink, mut source) = (Ends::default(), Ends::default());
    call_everything(&mut recorder, &mut sink, &mut source);
    assert_eq!(calls.lock().unwrap().len(), methods(include_str!("../src/lib.rs"), "PacketDriver").len());
    assert_eq!(sink.0, ["announce", "take"]);
    assert_eq!((&source.0[..], source.2.get()), (&["gather", "write", "renumber"][..], 2));
    drop(recorder);
    let capture = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    // The received frame, the frame in three pieces and the contiguous one.
    let whole = capture.windows(60).filter(|bytes| *bytes == FRAME).count();
    assert_eq!(whole, 3);
}
