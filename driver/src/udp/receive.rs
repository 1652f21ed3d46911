//! Receiving datagrams: several in one call, each with many segments if the kernel has aggregated them. A single
//! datagram is received by `recvmsg`, which takes the kernel less time than `recvmmsg` (see `transmit.rs`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::control::{Control, number};
use super::header::Template;
use crate::kept::Copies;
use crate::memory::AnonymousMapping;
use crate::{FrameSink, Icrc, RxFrame, Stats};

/// Datagrams in a call. With their buffers they fit into a core's cache.
const BURST: usize = 8;
/// Space before each buffer, for the headers of the first segment.
const HEADROOM: usize = 64;
/// The longest datagram that the kernel delivers.
const DATAGRAM_MAX: usize = 1 << 16;
const SLOT: usize = HEADROOM + DATAGRAM_MAX;

/// Buffers for received datagrams.
#[derive(Debug)]
pub(super) struct Receiver {
    memory: AnonymousMapping,
    names: [libc::sockaddr_in6; BURST],
    controls: [Control; BURST],
    datagrams: [Datagram; BURST],
    pub(super) copies: Copies,
    /// Datagrams requested in one call. Each requested datagram that has not arrived costs a check of the socket, so
    /// the number is 1 until several have been waiting.
    wanted: usize,
}

/// A datagram of a burst.
#[derive(Clone, Copy, Debug)]
struct Datagram {
    template: Template,
    len: usize,
    /// Bytes of a segment. The last one may be shorter.
    segment: usize,
}

impl Receiver {
    pub(super) fn new() -> io::Result<Receiver> {
        let nobody = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let template = Template::new(nobody, nobody.ip(), 0, 0);
        Ok(Receiver {
            memory: AnonymousMapping::zeroed(BURST * SLOT)?,
            // SAFETY: a `sockaddr_in6` is plain old data, for which zeros are valid.
            names: unsafe { std::mem::zeroed() },
            controls: [Control::empty(); BURST],
            datagrams: [Datagram { template, len: 0, segment: 0 }; BURST],
            copies: Copies::default(),
            wanted: 1,
        })
    }

    /// Passes a burst of packets for `own` to `sink`. Returns their number.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        own: IpAddr,
        sink: &mut dyn FrameSink,
        stats: &mut Stats,
    ) -> io::Result<usize> {
        let count = self.fetch(socket, own, stats)?;
        let before = stats.rx_frames;
        for (slot, datagram) in self.memory.chunks_exact_mut(SLOT).zip(&self.datagrams[..count]) {
            let mut offset = 0;
            let mut number = 0;
            while offset < datagram.len {
                // Overwrites the end of the previous segment, which the sink has taken.
                let frame = datagram.write(slot, offset, number);
                stats.rx_frames += 1;
                stats.rx_bytes += frame.len() as u64;
                sink.take(RxFrame::new(frame, &mut self.copies).with_icrc(Icrc::Guessed));
                offset += datagram.segment;
                number = number.wrapping_add(1);
            }
        }
        Ok((stats.rx_frames - before) as usize)
    }

    /// Fills `datagrams`. Returns their number.
    fn fetch(&mut self, socket: BorrowedFd<'_>, own: IpAddr, stats: &mut Stats) -> io::Result<usize> {
        let wanted = self.wanted;
        self.wanted = 1;
        let count = if wanted == 1 {
            self.fetch_one(socket, own, stats)?
        } else {
            self.fetch_several(socket, own, stats, wanted)?
        };
        self.wanted = if count == wanted { BURST.min(2 * wanted) } else { count.max(1) };
        Ok(count)
    }

    /// The common case while waiting. It takes the kernel less time than receiving several.
    fn fetch_one(&mut self, socket: BorrowedFd<'_>, own: IpAddr, stats: &mut Stats) -> io::Result<usize> {
        let mut place = place(&mut self.memory[HEADROOM..SLOT]);
        let mut header = header(&mut self.names[0], &mut place, &mut self.controls[0]);
        // SAFETY: the header points to a name, a buffer and a control buffer with their lengths, all of which outlive
        // the call.
        let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        self.note(0, own, &header, len, stats);
        Ok(1)
    }

    fn fetch_several(
        &mut self,
        socket: BorrowedFd<'_>,
        own: IpAddr,
        stats: &mut Stats,
        wanted: usize,
    ) -> io::Result<usize> {
        // SAFETY: both are plain old data, for which zeros are valid.
        let (mut headers, mut places) =
            unsafe { std::mem::zeroed::<([libc::mmsghdr; BURST], [libc::iovec; BURST])>() };
        let slots = self.memory.chunks_exact_mut(SLOT).zip(&mut places);
        let beside = self.names.iter_mut().zip(&mut self.controls);
        for ((into, (slot, iovec)), (name, control)) in headers[..wanted].iter_mut().zip(slots).zip(beside) {
            *iovec = place(&mut slot[HEADROOM..]);
            into.msg_hdr = header(name, iovec, control);
        }
        // SAFETY: each header points to its own name, buffer and control buffer with their lengths, all of which
        // outlive the call. There are at least `wanted` headers.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                wanted as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for (i, header) in headers[..count].iter().enumerate() {
            self.note(i, own, &header.msg_hdr, header.msg_len as usize, stats);
        }
        Ok(count)
    }

    /// Records the kernel's report of the datagram at `i`.
    fn note(&mut self, i: usize, own: IpAddr, header: &libc::msghdr, len: usize, stats: &mut Stats) {
        let cut = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        let datagram = source(&self.names[i])
            .filter(|_| !cut)
            .map(|source| Datagram::new(source, own, len, &self.controls[i], header.msg_controllen));
        stats.rx_dropped += u64::from(datagram.is_none());
        match datagram {
            Some(datagram) => self.datagrams[i] = datagram,
            None => self.datagrams[i].len = 0,
        }
    }
}

/// The buffer for a datagram.
pub(super) fn place(room: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }
}

/// A header that points to all of these. It may be used as long as they are not moved.
fn header(name: &mut libc::sockaddr_in6, place: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: plain old data, for which zeros are valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = (&raw mut *name).cast();
    header.msg_namelen = size_of::<libc::sockaddr_in6>() as u32;
    header.msg_iov = &raw mut *place;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control.bytes).cast();
    header.msg_controllen = Control::CAPACITY;
    header
}

impl Datagram {
    fn new(source: SocketAddr, own: IpAddr, len: usize, control: &Control, control_len: usize) -> Datagram {
        let (mut tos, mut hop_limit, mut segment) = (0, 0, len);
        for (level, kind, data) in control.messages(control_len) {
            let Some(value) = number(data) else { continue };
            match (level, kind) {
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    tos = value as u8
                }
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    hop_limit = value as u8;
                }
                (libc::SOL_UDP, libc::UDP_GRO) if value > 0 => segment = value as usize,
                _ => {}
            }
        }
        Datagram { template: Template::new(source, own, tos, hop_limit), len, segment }
    }

    /// Writes the headers of the segment at `offset`. Returns the whole packet.
    fn write<'a>(&self, slot: &'a mut [u8], offset: usize, number: u16) -> &'a [u8] {
        let end = (offset + self.segment).min(self.len);
        // A length that the IP header can't express is longer than any packet of a queue pair.
        let end = end.min(offset + usize::from(u16::MAX) - self.template.len());
        let frame = &mut slot[HEADROOM + offset - self.template.len()..HEADROOM + end];
        self.template.write(frame, number);
        frame
    }
}

pub(super) fn source(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    match i32::from(name.sin6_family) {
        libc::AF_INET => {
            // The address in an IPv4 name is at the position of the flow label in an IPv6 name.
            let address = Ipv4Addr::from(name.sin6_flowinfo.to_ne_bytes());
            Some((address, u16::from_be(name.sin6_port)).into())
        }
        libc::AF_INET6 => {
            let address = Ipv6Addr::from(name.sin6_addr.s6_addr);
            Some((address, u16::from_be(name.sin6_port)).into())
        }
        _ => None,
    }
}
