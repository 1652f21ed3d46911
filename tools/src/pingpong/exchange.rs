//! The exchange of addresses over TCP, as in `ibv_rc_pingpong`.
//!
//! Each end sends one message, a [`Destination`]. The server answers when its queue pair is connected; the client ends
//! with `done` and a NUL, and both ends close.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use ferroce::Gid;

use super::destination::{Destination, MESSAGE};
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail, quote};
use crate::tcp::read_exact;
use crate::visitors::Heard;

/// Bytes of a client's first message.
pub(super) const FIRST: usize = MESSAGE;
const DONE: &[u8; 5] = b"done\0";
/// The time limit of the exchange.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends the address to the peer.
pub(super) fn send(stream: &mut TcpStream, destination: Destination) -> Result<(), Failure> {
    stream.write_all(&destination.to_message()).or_fail(|| "sending the address of this end".into())
}

/// Parses a client's first message, its address.
pub(super) fn judge(_: &mut TcpStream, said: &[u8]) -> Result<Heard<Destination>, Failure> {
    let Some(message) = said.first_chunk() else { return Ok(Heard::Needs(MESSAGE)) };
    parse(message).map(Heard::Client)
}

/// Receives the server's answer.
pub(super) fn receive(stream: &mut TcpStream, interrupt: &Interrupt) -> Result<Destination, Failure> {
    let mut message = [0; MESSAGE];
    read_exact(stream, &mut message, PATIENCE, interrupt).map_err(|failure| match failure {
        Failure::Run(reason) => Failure::Run(format!(
            "{reason}; ibv_srq_pingpong, which is not supported, would wait for more queue pairs"
        )),
        other => other,
    })?;
    parse(&message)
}

fn parse(message: &[u8; MESSAGE]) -> Result<Destination, Failure> {
    let destination = Destination::from_message(message).ok_or_else(|| {
        Failure::run(format!(
            "the peer sent {}: must be LID:QPN:PSN:GID, as ibv_rc_pingpong sends it",
            quote(message)
        ))
    })?;
    if destination.gid == Gid::default() {
        return Err(Failure::run("the peer sent no GID, which RoCE needs: start it with -g INDEX"));
    }
    Ok(destination)
}

/// Sends the client's last message.
pub(super) fn send_done(stream: &mut TcpStream) -> Result<(), Failure> {
    stream.write_all(DONE).or_fail(|| "sending 'done' to the server".into())
}

/// Waits for the client's last message.
pub(super) fn receive_done(stream: &mut TcpStream, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut done = [0; DONE.len()];
    read_exact(stream, &mut done, PATIENCE, interrupt)?;
    if &done == b"0000:" {
        return Err(Failure::run(
            "the client sends several queue pairs: it is ibv_srq_pingpong, which is not supported; use \
             ibv_rc_pingpong there",
        ));
    }
    if &done != DONE {
        return Err(Failure::run(format!("the client ended with {} instead of 'done'", quote(&done))));
    }
    Ok(())
}
