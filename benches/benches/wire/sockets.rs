//! The kernel's TCP and UDP on the same link, spinning where ferroce spins.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use ferroce::Memory;
use hdrhistogram::Histogram;

use crate::case::{Case, RoundTrip, Seen};
use crate::end::{Outcome, Stage, Watch};
use crate::memory::{fill, verify};
use crate::raw::Meter;

/// Bytes of a ping.
const PING: usize = 64;

pub(crate) fn tcp(stage: &mut Stage<'_>) -> Outcome<String> {
    for (n, case) in stage.job.cases.iter().enumerate() {
        let mut stream = connect(stage)?;
        stream.set_nodelay(true)?;
        stage.record(|stage| match *case {
            Case::TcpRate { write } if stage.starts() => send_stream(stage, &mut stream, write, n as u64),
            Case::TcpRate { write } => receive_stream(stage, &mut stream, write, n as u64),
            _ => {
                stream.set_nonblocking(true)?;
                let (mut reader, mut writer) = (stream.try_clone()?, stream.try_clone()?);
                round_trips(stage, |bytes| reader.read(bytes), |bytes| writer.write_all(bytes))
            }
        })?;
    }
    Ok("the kernel's TCP, TCP_NODELAY".to_owned())
}

pub(crate) fn udp(stage: &mut Stage<'_>) -> Outcome<String> {
    let [own, other] = stage.job.addresses;
    let socket = UdpSocket::bind((own, 0))?;
    let port: u16 = stage.peer.exchange(&socket.local_addr()?.port())?;
    socket.connect((other, port))?;
    for case in &stage.job.cases {
        stage.record(|stage| match *case {
            Case::UdpRate { datagram } if stage.starts() => send_datagrams(stage, &socket, datagram),
            Case::UdpRate { .. } => receive_datagrams(stage, &socket),
            _ => {
                socket.set_nonblocking(true)?;
                let send = |bytes: &[u8]| socket.send(bytes).map(|_| ());
                let seen = round_trips(stage, |bytes| socket.recv(bytes), send)?;
                socket.set_nonblocking(false)?;
                Ok(seen)
            }
        })?;
    }
    Ok("the kernel's UDP, a system call a datagram".to_owned())
}

fn connect(stage: &mut Stage<'_>) -> Outcome<TcpStream> {
    let [own, other] = stage.job.addresses;
    if stage.starts() {
        let port: u16 = stage.peer.hear()?;
        return Ok(TcpStream::connect_timeout(&SocketAddr::new(other, port), Duration::from_secs(5))?);
    }
    let listener = TcpListener::bind((own, 0))?;
    stage.peer.tell(&listener.local_addr()?.port())?;
    Ok(listener.accept()?.0)
}

fn send_stream(stage: &mut Stage<'_>, stream: &mut TcpStream, write: usize, seed: u64) -> Outcome<Seen> {
    let mut memory = Memory::zeroed(Stage::footprint(write) / write * write)?;
    let memory = memory.bytes_mut()?;
    fill(memory, seed);
    stage.peer.meet()?;
    let (start, time) = (Instant::now(), stage.warm_up() + stage.time());
    let mut sent = 0u64;
    'time: loop {
        for message in memory.chunks(write) {
            if start.elapsed() >= time {
                break 'time;
            }
            stream.write_all(message)?;
            sent += 1;
        }
    }
    // The end of the stream ends the receiver.
    stream.shutdown(std::net::Shutdown::Write)?;
    stage.peer.hear::<()>()?;
    Ok(Seen { handled: sent, ..Seen::default() })
}

fn receive_stream(stage: &mut Stage<'_>, stream: &mut TcpStream, write: usize, seed: u64) -> Outcome<Seen> {
    let mut memory = Memory::zeroed(Stage::footprint(write) / write * write)?;
    let memory = memory.bytes_mut()?;
    stage.peer.meet()?;
    let mut meter = Meter::new(stage.warm_up());
    let (mut bytes, mut at) = (0u64, 0);
    loop {
        let came = stream.read(&mut memory[at..])?;
        if came == 0 {
            break;
        }
        bytes += came as u64;
        at = if at + came == memory.len() { 0 } else { at + came };
        meter.count(bytes);
    }
    stage.peer.tell(&())?;
    verify(memory, seed, 0..memory.len().min(bytes as usize))?;
    let (counted, nanos) = meter.result();
    let handled = bytes / write as u64;
    Ok(Seen { messages: counted / write as u64, nanos, handled, ..Seen::default() })
}

fn send_datagrams(stage: &mut Stage<'_>, socket: &UdpSocket, length: usize) -> Outcome<Seen> {
    let mut memory = Memory::zeroed(length)?;
    let memory = memory.bytes_mut()?;
    fill(memory, 1);
    let (start, time) = (Instant::now(), stage.warm_up() + stage.time());
    let mut sent = 0u64;
    while start.elapsed() < time {
        match socket.send(memory) {
            Ok(_) => sent += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    stage.peer.tell(&sent)?;
    stage.peer.hear::<()>()?;
    Ok(Seen { handled: sent, ..Seen::default() })
}

fn receive_datagrams(stage: &mut Stage<'_>, socket: &UdpSocket) -> Outcome<Seen> {
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    let mut memory = Memory::zeroed(1 << 16)?;
    let memory = memory.bytes_mut()?;
    let mut meter = Meter::new(stage.warm_up());
    let (mut got, mut sent) = (0u64, None::<u64>);
    let watch = Watch::new();
    loop {
        match socket.recv(memory) {
            Ok(_) => {
                got += 1;
                meter.count(got);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                sent = match sent {
                    None => stage.peer.heard()?,
                    sent => sent,
                };
                if sent.is_some() {
                    break;
                }
                watch.check()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    stage.peer.tell(&())?;
    let (messages, nanos) = meter.result();
    let lost = sent.unwrap_or_default().saturating_sub(got);
    Ok(Seen { messages, nanos, handled: got, lost, ..Seen::default() })
}

/// Pings or pongs over non-blocking sockets.
fn round_trips(
    stage: &mut Stage<'_>,
    mut receive: impl FnMut(&mut [u8]) -> std::io::Result<usize>,
    mut send: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> Outcome<Seen> {
    let mut ping = [7; PING];
    let mut times = Histogram::<u64>::new(3)?;
    let (mut watch, mut count) = (Watch::new(), 0u64);
    let (start, warm_up, starts) = (Instant::now(), stage.warm_up(), stage.starts());
    stage.peer.meet()?;
    loop {
        let sent = Instant::now();
        if starts {
            let is_over = start.elapsed() > warm_up + stage.time();
            if is_over && times.len() >= RoundTrip::LEAST {
                break;
            }
            send(&ping)?;
        }
        let mut filled = 0;
        while filled < PING {
            match receive(&mut ping[filled..]) {
                // The end of a stream.
                Ok(0) if !starts => {
                    stage.peer.hear::<()>()?;
                    return Ok(Seen { handled: count, ..Seen::default() });
                }
                Ok(0) => return Err("the other end has closed".into()),
                Ok(came) => filled += came,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if watch.due() {
                        if !starts && stage.peer.heard::<()>()?.is_some() {
                            return Ok(Seen { handled: count, ..Seen::default() });
                        }
                        watch.check()?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        count += 1;
        if starts {
            if start.elapsed() > warm_up {
                times.record(sent.elapsed().as_nanos() as u64)?;
            }
        } else {
            send(&ping)?;
        }
    }
    stage.peer.tell(&())?;
    Ok(Seen { handled: count, round_trip: Some(RoundTrip::of(&times)), ..Seen::default() })
}
