//! The verbs peer in the guest (`tools/interop/guest/peer.py`), with JSON lines over TCP.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::guest::{GUEST, Guest};

const PORT: u16 = 18600;
/// Python takes three seconds to start in the guest.
const START: Duration = Duration::from_secs(60);
/// The longest command: a poll that waits.
const PATIENCE: Duration = Duration::from_secs(90);

/// A connection to the peer. Objects that it created there are destroyed with it.
pub(crate) struct Peer {
    stream: TcpStream,
    received: Vec<u8>,
}

impl Peer {
    /// Starts the program in the guest. It serves one [`Peer`] after the other, until the guest ends.
    pub(crate) fn start(guest: &Guest) {
        guest.start("python3 /peer.py >/tmp/peer.log 2>&1 &").succeed();
    }

    /// Connects, from inside the guest's network namespace.
    pub(crate) fn connect(guest: &Guest) -> Peer {
        let start = Instant::now();
        let stream = loop {
            match TcpStream::connect((GUEST[0], PORT)) {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > START => {
                    let log = guest.start("cat /tmp/peer.log").succeed();
                    panic!("no verbs peer in the guest: {error}\n{log}");
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        };
        stream.set_nodelay(true).expect("a TCP socket");
        Peer { stream, received: Vec::new() }
    }

    /// Sends a command and returns the answer, or the error. `turn` is called while waiting.
    pub(crate) fn ask(&mut self, command: &Value, mut turn: impl FnMut()) -> Result<Value, String> {
        self.stream.set_nonblocking(false).expect("a socket");
        self.stream.write_all(format!("{command}\n").as_bytes()).expect("the peer listens");
        self.stream.set_nonblocking(true).expect("a socket");
        let start = Instant::now();
        let line = loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                break self.received.drain(..=end).collect::<Vec<u8>>();
            }
            let mut some = [0; 16384];
            match self.stream.read(&mut some) {
                Ok(0) => panic!("the peer went away at {command}"),
                Ok(count) => self.received.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => turn(),
                Err(error) => panic!("{command}: {error}"),
            }
            assert!(start.elapsed() < PATIENCE, "no answer to {command}");
        };
        let answer: Value = serde_json::from_slice(&line).expect("a line of JSON");
        if answer["ok"] == true { Ok(answer) } else { Err(answer["error"].to_string()) }
    }
}
