//! Opening and setting up the socket.
//!
//! Busy polling has no effect on a veth (Linux 6.18, copy mode): the socket's receive call returns without polling the
//! device, even with interrupts deferred.

use std::io;
use std::os::fd::RawFd;
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;
use xsk_rs::config::{BindFlags, LibxdpFlags, QueueSize, SocketConfig};
use xsk_rs::{CompQueue, FillQueue, RxQueue, Socket, TxQueue};

use super::frames::Frames;
use super::{BURST, Layout, os_cause, os_error};
use crate::Error;
use crate::holder::Holder;
use crate::netlink::{Interface, XdpMode};

/// A socket that was just closed still has its queue for some milliseconds.
const BIND_PATIENCE: Duration = Duration::from_secs(1);
const BIND_RETRY: Duration = Duration::from_millis(5);
/// The kernel counts frames in flight with all their overhead, so its default would throttle the sender.
const SEND_BUFFER: i32 = 8 << 20;

/// The rings of a bound socket.
pub(super) struct Bound {
    pub(super) tx: TxQueue,
    pub(super) rx: RxQueue,
    pub(super) fill: FillQueue,
    pub(super) completion: CompQueue,
    /// The reason if it is not zero-copy.
    pub(super) why_copy: Option<String>,
}

/// Binds the socket to its queue: first with zero-copy, then with copies.
pub(super) fn bind(
    queue: u32,
    layout: &Layout,
    interface: &Interface,
    frames: &Frames,
    mode: XdpMode,
) -> Result<Bound, Error> {
    const WHAT: &str = "binding the AF_XDP socket";
    let os = |source| os_error(WHAT, &interface.name, source);
    let mut why_copy = None;
    let made = if mode == XdpMode::Native {
        match bind_patiently(queue, layout, interface, frames, BindFlags::XDP_ZEROCOPY) {
            Err(Error::Os { source, .. }) => {
                why_copy = Some(format!("zero-copy refused: {source}"));
                bind_patiently(queue, layout, interface, frames, BindFlags::XDP_COPY)
            }
            other => other,
        }
    } else {
        why_copy = Some("generic XDP has no zero-copy".to_owned());
        bind_patiently(queue, layout, interface, frames, BindFlags::XDP_COPY)
    };
    let (tx, rx, rings) = made?;
    let Some((fill, completion)) = rings else {
        return Err(os(io::Error::other("libxdp gave no fill and completion rings")));
    };
    Ok(Bound { tx, rx, fill, completion, why_copy })
}

type Rings = (TxQueue, RxQueue, Option<(FillQueue, CompQueue)>);

/// The usual cause if frames are longer than a chunk.
fn no_multi_buffer(interface: &Interface, source: &io::Error) -> io::Error {
    io::Error::other(format!(
        "{source}; an MTU of {} needs frames of several buffers, which Linux has since 6.6 and not in every driver: set the \
         MTU of {} to 3400 or less",
        interface.mtu, interface.name
    ))
}

/// Binds, and waits for a queue that may soon be free.
fn bind_patiently(
    queue: u32,
    layout: &Layout,
    interface: &Interface,
    frames: &Frames,
    copy: BindFlags,
) -> Result<Rings, Error> {
    let os = |source| os_error("binding the AF_XDP socket", &interface.name, source);
    let bad_size = |e: xsk_rs::config::QueueSizeError| os(io::Error::other(e.to_string()));
    let mut flags = BindFlags::XDP_USE_NEED_WAKEUP | copy;
    if layout.multi_buffer() {
        flags |= BindFlags::XDP_USE_SG;
    }
    let socket = SocketConfig::builder()
        .rx_queue_size(QueueSize::new(layout.rx_chunks).map_err(bad_size)?)
        .tx_queue_size(QueueSize::new(layout.tx_ring).map_err(bad_size)?)
        .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
        .bind_flags(flags)
        .build();
    let name = interface.name.parse().map_err(|_| os(io::Error::other("the name has a NUL in it")))?;
    let deadline = Instant::now() + BIND_PATIENCE;
    loop {
        // SAFETY: libxdp loads no program, so sockets may share the UMEM.
        match unsafe { Socket::new(socket, &frames.umem, &name, queue) } {
            Ok(rings) => return Ok(rings),
            Err(error) => {
                let source = os_cause(&error);
                match source.raw_os_error() {
                    Some(libc::EBUSY) => {}
                    Some(libc::EINVAL) if layout.multi_buffer() && copy.contains(BindFlags::XDP_COPY) => {
                        return Err(os(no_multi_buffer(interface, &source)));
                    }
                    _ => return Err(os(source)),
                }
            }
        }
        if Instant::now() > deadline {
            let holders = Holder::of_af_xdp(interface);
            return Err(Error::QueueBusy { interface: interface.name.clone(), queue, holders });
        }
        thread::sleep(BIND_RETRY);
    }
}

pub(super) fn enlarge_send_buffer(fd: RawFd, interface: &Interface) {
    if set_option(fd, libc::SO_SNDBUFFORCE, SEND_BUFFER).is_err()
        && let Err(e) = set_option(fd, libc::SO_SNDBUF, SEND_BUFFER)
    {
        warn!(interface = interface.name, "the send buffer keeps its size, which throttles: {e}");
    }
}

pub(super) fn prefer_busy_poll(fd: RawFd, time: Duration) -> io::Result<()> {
    set_option(fd, libc::SO_PREFER_BUSY_POLL, 1)?;
    set_option(fd, libc::SO_BUSY_POLL, i32::try_from(time.as_micros()).unwrap_or(i32::MAX))?;
    set_option(fd, libc::SO_BUSY_POLL_BUDGET, BURST as i32)
}

fn set_option(fd: RawFd, option: i32, value: i32) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: pointer and length describe `value`, which outlives the call.
    match unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The pending error of a socket; 0 if none.
pub(super) fn socket_error(fd: RawFd) -> io::Result<i32> {
    let mut code = 0i32;
    let mut len = size_of_val(&code) as libc::socklen_t;
    // SAFETY: pointer and length describe `code`, which outlives the call.
    match unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut code).cast(), &raw mut len)
    } {
        0 => Ok(code),
        _ => Err(io::Error::last_os_error()),
    }
}
