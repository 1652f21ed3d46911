//! The baseline: the same ring all-reduce over the kernel's TCP.
//!
//! It uses the same ring, chunks and reduction as `ferroce_collectives`, in the same memory. Each rank has one
//! connection to the next rank and one from the previous rank. TCP gets its best conditions: TCP_NODELAY, non-blocking
//! sockets, and a thread that sleeps in poll(2) when neither connection can make progress. Chunks of the all-gather are
//! read into their final place. Nothing waits for an acknowledgement of the other end, since the kernel has a copy.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferroce_collectives::{DataType, Options, ReduceOp};
use ferroce_driver::reduction::reduce;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::chunks::Chunks;

/// A rank in the ring.
pub(super) struct TcpRing {
    rank: usize,
    size: usize,
    left: TcpStream,
    right: TcpStream,
    /// Bytes of a chunk, the unit of the pipeline.
    chunk: usize,
    /// Receive buffer of chunks that are reduced.
    staging: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("TCP baseline: {what}: {source}")]
    Os { what: &'static str, source: io::Error },
    #[error("TCP baseline: the previous rank has closed its connection")]
    Closed,
    #[error("TCP baseline: no data transferred for {} s", PATIENCE.as_secs())]
    Stalled,
    #[error("told to stop")]
    Stopped,
}

/// The longest time that a rank waits for its neighbours.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the stop flag is checked.
const TICK: Duration = Duration::from_millis(50);

/// A rank that listens for the previous rank.
pub(super) struct Listening(TcpListener);

impl Listening {
    /// On a port that the kernel chooses.
    pub(super) fn at(address: IpAddr) -> Result<Listening, Error> {
        let listener = TcpListener::bind((address, 0)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        Ok(Listening(listener.map_err(failed("listening"))?))
    }

    pub(super) fn address(&self) -> Result<SocketAddr, Error> {
        self.0.local_addr().map_err(failed("listening"))
    }

    /// Connects to the next rank, which already listens at `right`.
    pub(super) fn connect(self, right: SocketAddr) -> Result<Connected, Error> {
        let right = TcpStream::connect_timeout(&right, PATIENCE).map_err(failed("connecting"))?;
        Ok(Connected { listener: self.0, right })
    }
}

/// A rank that is connected to the next one, and waits for the connection of the previous one.
pub(super) struct Connected {
    listener: TcpListener,
    right: TcpStream,
}

impl Connected {
    /// The source address, by which the next rank recognizes the connection.
    pub(super) fn source(&self) -> Result<SocketAddr, Error> {
        self.right.local_addr().map_err(failed("connecting"))
    }

    /// Accepts the connection from `left`, the source address of the previous rank. Other connections are closed.
    pub(super) fn join(
        self,
        rank: u32,
        size: u32,
        left: SocketAddr,
        stop: &AtomicBool,
    ) -> Result<TcpRing, Error> {
        let Connected { listener, right } = self;
        let mut watch = Watch::new(stop);
        let left = loop {
            match listener.accept() {
                Ok((stream, from)) if from == left => break stream,
                Err(error) if !is_temporary(&error) => return Err(failed("accepting")(error)),
                _ => watch.wait(&mut [PollFd::new(&listener, PollFlags::IN)])?,
            }
        };
        for stream in [&left, &right] {
            let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            prepared.map_err(failed("preparing a connection"))?;
        }
        let chunk = Options::default().chunk_bytes as usize;
        Ok(TcpRing { rank: rank as usize, size: size as usize, left, right, chunk, staging: vec![0; chunk] })
    }
}

impl TcpRing {
    /// Replaces the elements, on every rank, by their sums over all ranks. The result has the same bits as that of
    /// `Algorithm::Ring`.
    pub(super) fn all_reduce(&mut self, memory: &mut [u8], stop: &AtomicBool) -> Result<(), Error> {
        const DATA_TYPE: DataType = DataType::F32;
        let element = DATA_TYPE.size();
        let TcpRing { rank, size, .. } = *self;
        let chunks = Chunks { rank, size, count: memory.len() / element, chunk: self.chunk / element };
        let bytes_of = |elements: Range<usize>| elements.start * element..elements.end * element;
        let (mut sends, mut receives) = (chunks.sends().peekable(), chunks.receives());
        let (mut sent, mut received) = (0, 0);
        // The unsent rest of the chunk being sent, and the missing rest of the chunk being received.
        let (mut outgoing, mut incoming) = (0..0, None);
        let mut watch = Watch::new(stop);
        loop {
            let mut moved = false;
            while !outgoing.is_empty() || sent < chunks.head_start() + received {
                if outgoing.is_empty() {
                    let Some(chunk) = sends.next() else { break };
                    outgoing = bytes_of(chunk.elements);
                    sent += 1;
                }
                match self.right.write(&memory[outgoing.clone()]) {
                    Ok(written) => outgoing.start += written,
                    Err(error) if is_temporary(&error) => break,
                    Err(error) => return Err(failed("sending")(error)),
                }
                moved = true;
            }
            if incoming.is_none() {
                incoming = receives.next().map(|chunk| (chunk.is_reduced, bytes_of(chunk.elements), 0));
            }
            if let Some((is_reduced, place, filled)) = &mut incoming {
                let room = match *is_reduced {
                    true => &mut self.staging[..place.len()],
                    false => &mut memory[place.clone()],
                };
                match self.left.read(&mut room[*filled..]) {
                    Ok(0) => return Err(Error::Closed),
                    Ok(came) => {
                        *filled += came;
                        moved = true;
                    }
                    Err(error) if is_temporary(&error) => {}
                    Err(error) => return Err(failed("receiving")(error)),
                }
                if *filled == place.len() {
                    if *is_reduced {
                        reduce(
                            DATA_TYPE,
                            ReduceOp::Sum,
                            &mut memory[place.clone()],
                            &self.staging[..*filled],
                        );
                    }
                    received += 1;
                    incoming = None;
                }
            } else if outgoing.is_empty() && sends.peek().is_none() {
                return Ok(());
            }
            if moved {
                watch.has_moved();
                continue;
            }
            let reading = incoming.as_ref().map(|_| PollFd::new(&self.left, PollFlags::IN));
            let writing = (!outgoing.is_empty()).then(|| PollFd::new(&self.right, PollFlags::OUT));
            let mut waiting: Vec<PollFd<'_>> = reading.into_iter().chain(writing).collect();
            watch.wait(&mut waiting)?;
        }
    }
}

/// Waits for sockets until told to stop, or until no data has moved for too long.
struct Watch<'a> {
    stop: &'a AtomicBool,
    last_move: Option<Instant>,
}

impl<'a> Watch<'a> {
    fn new(stop: &'a AtomicBool) -> Watch<'a> {
        Watch { stop, last_move: None }
    }

    fn has_moved(&mut self) {
        self.last_move = None;
    }

    fn wait(&mut self, sockets: &mut [PollFd<'_>]) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        if self.last_move.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(Error::Stalled);
        }
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as _ };
        match poll(sockets, Some(&tick)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(failed("waiting")(error.into())),
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Os { what, source }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Connections of other programs are closed.
    #[test]
    fn other_connections_are_closed() {
        let stop = AtomicBool::new(false);
        let ranks = [(); 2].map(|()| Listening::at([127, 0, 0, 1].into()).unwrap());
        let addresses = ranks.each_ref().map(|rank| rank.address().unwrap());
        let _strangers = addresses.map(|address| TcpStream::connect(address).unwrap());
        let [a, b] = ranks;
        let (a, b) = (a.connect(addresses[1]).unwrap(), b.connect(addresses[0]).unwrap());
        let (from_a, from_b) = (a.source().unwrap(), b.source().unwrap());
        let sum = |rank: Connected, number: u32, left: SocketAddr, value: f32| {
            let mut memory = [value.to_ne_bytes(); 8];
            let mut ring = rank.join(number, 2, left, &stop).unwrap();
            ring.all_reduce(memory.as_flattened_mut(), &stop).unwrap();
            memory.map(f32::from_ne_bytes)
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| sum(b, 1, from_a, 2.0));
            assert_eq!(sum(a, 0, from_b, 1.0), [3.0; 8]);
            assert_eq!(other.join().unwrap(), [3.0; 8]);
        });
    }
}
