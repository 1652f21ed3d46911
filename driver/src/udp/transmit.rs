//! Sending packets: packets of one size to one address are sent in one send, which the kernel divides into segments
//! late.
//!
//! The packets of a send have the same size, except the last one, which may be shorter, and have the same address, TOS
//! and TTL. A send has at most 64 packets and 64 KiB. The headers of each packet are written over the end of the packet
//! before it, and these bytes are restored afterwards, so a send is one contiguous piece of memory. A send takes
//! several microseconds regardless of its contents. So a send that could still grow is held back, and small packets to
//! many queue pairs are sent together. The first packet of a long WRITE is longer than the others by its RETH, so each
//! message needs at least two sends (docs/decisions/13-trains.md).
//!
//! A single packet is sent by `sendto` and received by `recvmsg`. These take the kernel less time than `sendmmsg` and
//! `recvmmsg`: about 5 % of the round trip.
//!
//! No error that the kernel reports for a packet ends the context: no route, too large for the path, refused by a
//! firewall. The packets are counted as `tx_dropped`, the reason is logged once, and the engine retransmits.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use tracing::warn;

use super::control::Control;
use super::header::{self, Key, LEN_V4, LEN_V6};
use super::{DEFAULT_HOP_LIMIT, DEFAULT_TOS, TRIES_MAX};
use crate::memory::AnonymousMapping;
use crate::{FrameSource, Nanos, Stats};

/// Sends in one system call.
const GROUPS: usize = 16;
/// Bytes written before they are sent, except those of the last send, which may still grow. This fits into a core's
/// cache. Half of it was about 5 % slower with messages of 64 KiB, and twice as much no faster.
const STAGE: usize = 192 << 10;
/// The kernel's original UDP_MAX_SEGMENTS.
const SEGMENTS_MAX: usize = 64;
/// The length of the ICRC, the end of a packet.
const ICRC_LEN: usize = 4;
/// The longest UDP datagram, over IPv4 and IPv6.
const DATAGRAM_MAX: usize = 65535 - LEN_V6;

/// Packets that are written and not yet sent.
#[derive(Debug)]
pub(super) struct Transmitter {
    memory: AnonymousMapping,
    /// The end of the written bytes.
    end: usize,
    header_len: usize,
    max_frame: usize,
    /// The interface, for addresses that are unique only there.
    scope: u32,
    /// Whether the kernel divides a send into segments.
    pub(super) segmentation: bool,
    groups: Vec<Group>,
    /// The number of groups already sent.
    done: usize,
}

/// Packets of one send.
#[derive(Clone, Copy, Debug)]
struct Group {
    key: Key,
    start: usize,
    len: usize,
    /// Bytes of each packet except the last.
    segment: usize,
    segments: usize,
}

/// A send that the kernel refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: io::Error,
    pub(super) peer: IpAddr,
    /// Bytes of the largest packet.
    pub(super) packet: usize,
}

impl Transmitter {
    pub(super) fn new(
        own: IpAddr,
        scope: u32,
        max_frame: usize,
        segmentation: bool,
    ) -> io::Result<Transmitter> {
        Ok(Transmitter {
            memory: AnonymousMapping::zeroed(STAGE + DATAGRAM_MAX + max_frame)?,
            end: header::len(own),
            header_len: header::len(own),
            max_frame,
            scope,
            segmentation,
            groups: Vec::with_capacity(GROUPS),
            done: 0,
        })
    }

    /// Whether packets are written that the kernel has not taken.
    pub(super) fn is_pending(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Takes packets from `source`. Returns their number, and whether there may be more.
    pub(super) fn fill(&mut self, source: &mut dyn FrameSource, stats: &mut Stats) -> (usize, bool) {
        let mut taken = 0;
        while self.has_room() {
            let written = match self.header_len {
                LEN_V4 => self.write::<{ LEN_V4 - ICRC_LEN }>(source, stats),
                _ => self.write::<{ LEN_V6 - ICRC_LEN }>(source, stats),
            };
            match written {
                Some(was_taken) => taken += usize::from(was_taken),
                None => return (taken, false),
            }
        }
        (taken, true)
    }

    /// Writes one packet. Its headers overwrite the end of the packet before it, `N` bytes and its ICRC, which are
    /// restored afterwards, so a send is contiguous. The ICRC is read as it was written: a wider read would stall until
    /// the store has reached the cache. Returns whether the packet is to be sent, or `None` if there was none.
    #[inline]
    fn write<const N: usize>(&mut self, source: &mut dyn FrameSource, stats: &mut Stats) -> Option<bool> {
        let header_len = N + ICRC_LEN;
        let start = self.end - header_len;
        let covered: [u8; N] = *self.memory[start..].first_chunk()?;
        let icrc: [u8; ICRC_LEN] = *self.memory[start + N..].first_chunk()?;
        let written = source.write(&mut self.memory[start..]).map(|len| {
            let packet = self.memory.get(start..start + len).filter(|_| len <= self.max_frame);
            let key = packet.and_then(|packet| Key::of(packet, header_len));
            match key {
                Some(key) => self.append(key, len, source),
                None => stats.tx_dropped += 1,
            }
            key.is_some()
        });
        self.memory[start..start + N].copy_from_slice(&covered);
        self.memory[start + N..start + header_len].copy_from_slice(&icrc);
        written
    }

    /// Whether another packet may be written. A send costs the same regardless of its contents, so while there is room,
    /// a send that could still grow is not ended.
    fn has_room(&self) -> bool {
        let grows = self.segmentation && self.groups.last().is_some_and(|group| !group.is_full());
        self.end + self.max_frame <= self.memory.len()
            && self.groups.len() < GROUPS
            && (grows || self.end < STAGE && self.groups.len() + usize::from(self.segmentation) < GROUPS)
    }

    /// Appends the packet of `len` bytes after the written ones.
    #[inline(always)]
    fn append(&mut self, key: Key, len: usize, source: &mut dyn FrameSource) {
        let start = self.end - self.header_len;
        let segment = len - self.header_len;
        // A host on this machine without a listener answers segments that were sent at once with a single ICMP message,
        // which quotes the first one. An answer may be expected for each MAD, so each is sent separately.
        let joins = |group: &&mut Group| self.segmentation && !key.is_mad() && group.admits(key, segment);
        match self.groups.last_mut().filter(joins) {
            Some(group) => {
                if self.header_len == LEN_V4 {
                    // The kernel numbers the segments from the first one's 0.
                    source.renumber(&mut self.memory[start..start + len], group.segments as u16);
                }
                group.segments += 1;
                group.len += segment;
            }
            None => self.groups.push(Group { key, start: self.end, len: segment, segment, segments: 1 }),
        }
        self.end += segment;
    }

    /// Sends the written packets. Packets that the kernel refuses are dropped and reported to `refused`. If it only has
    /// no room, they are kept and the result is `false`. MADs have a socket of their own, and are dropped if it has no
    /// room: their senders retransmit them. A socket also refuses a packet while it has ICMP reports of others. `hear`
    /// takes these, and returns whether there were any.
    pub(super) fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        for_mads: BorrowedFd<'_>,
        mut hear: impl FnMut(BorrowedFd<'_>) -> bool,
        stats: &mut Stats,
        mut refused: impl FnMut(&Refused),
    ) -> bool {
        let mut tries = 0;
        while self.done < self.groups.len() {
            let is_mad = self.groups[self.done].key.is_mad();
            let socket = if is_mad { for_mads } else { socket };
            match self.send(socket, is_mad) {
                Ok(sent) => {
                    for group in &self.groups[self.done..self.done + sent] {
                        stats.tx_frames += group.segments as u64;
                        stats.tx_bytes += (group.len + group.segments * self.header_len) as u64;
                    }
                    self.done += sent;
                    tries = 0;
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) if is_mad => {
                        stats.tx_dropped += self.groups[self.done].segments as u64;
                        self.done += 1;
                    }
                    Some(libc::EAGAIN) => return false,
                    Some(libc::EINTR) => {}
                    _ if hear(socket) && tries < TRIES_MAX => tries += 1,
                    code => {
                        let group = &self.groups[self.done];
                        stats.tx_dropped += group.segments as u64;
                        if code == Some(libc::EIO) && group.segments > 1 {
                            // Before Linux 6.11 this needs checksums by the device.
                            self.segmentation = false;
                        }
                        let packet = group.segment + self.header_len;
                        refused(&Refused { error, peer: self.peer(group), packet });
                        self.done += 1;
                        tries = 0;
                    }
                },
            }
        }
        self.groups.clear();
        self.done = 0;
        self.end = self.header_len;
        true
    }

    /// Makes one system call, for groups of MADs or for other groups. Returns the number of groups sent.
    fn send(&self, socket: BorrowedFd<'_>, mads: bool) -> io::Result<usize> {
        let rest = &self.groups[self.done..];
        let alike = rest.iter().take_while(|group| group.key.is_mad() == mads).count();
        match &rest[..alike] {
            [group] => self.send_one(socket, group),
            groups => self.send_several(socket, groups),
        }
    }

    /// A single packet is urgent: without the arrays of `sendmmsg` the kernel needs less time.
    fn send_one(&self, socket: BorrowedFd<'_>, group: &Group) -> io::Result<usize> {
        let mut name = self.name(group);
        let mut control = Control::empty();
        let control_len = self.describe(group, &mut control);
        let bytes = &self.memory[group.start..group.start + group.len];
        let sent = if control_len == 0 {
            // SAFETY: both pointers are passed with the lengths of the memory they point to, which outlives the call.
            // The name is at least as long as stated.
            unsafe {
                libc::sendto(
                    socket.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    libc::MSG_DONTWAIT,
                    (&raw const name).cast(),
                    self.name_len(),
                )
            }
        } else {
            let mut place = place(bytes);
            let header = self.header(&mut name, &mut place, (&mut control, control_len));
            // SAFETY: the header points to a name, a buffer and a control buffer with their lengths, all of which
            // outlive the call.
            unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT) }
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) }
    }

    fn send_several(&self, socket: BorrowedFd<'_>, groups: &[Group]) -> io::Result<usize> {
        // SAFETY: all are plain old data, for which zeros are valid.
        let (mut headers, mut places, mut names) = unsafe {
            std::mem::zeroed::<([libc::mmsghdr; GROUPS], [libc::iovec; GROUPS], [libc::sockaddr_in6; GROUPS])>(
            )
        };
        let mut controls = [Control::empty(); GROUPS];
        for (i, group) in groups.iter().enumerate() {
            names[i] = self.name(group);
            places[i] = place(&self.memory[group.start..group.start + group.len]);
            let len = self.describe(group, &mut controls[i]);
            headers[i].msg_hdr = self.header(&mut names[i], &mut places[i], (&mut controls[i], len));
        }
        // SAFETY: each header points to its own name, buffer and control buffer with their lengths, all of which
        // outlive the call. There are at least as many headers as groups.
        let sent = unsafe {
            libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), groups.len() as u32, libc::MSG_DONTWAIT)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
    }

    /// A header that points to all of these. It may be used as long as they are not moved.
    fn header(
        &self,
        name: &mut libc::sockaddr_in6,
        place: &mut libc::iovec,
        (control, control_len): (&mut Control, usize),
    ) -> libc::msghdr {
        // SAFETY: plain old data, for which zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = (&raw mut *name).cast();
        header.msg_namelen = self.name_len();
        header.msg_iov = &raw mut *place;
        header.msg_iovlen = 1;
        if control_len > 0 {
            header.msg_control = (&raw mut control.bytes).cast();
            header.msg_controllen = control_len;
        }
        header
    }

    fn name_len(&self) -> libc::socklen_t {
        let len = if self.header_len == LEN_V4 {
            size_of::<libc::sockaddr_in>()
        } else {
            size_of::<libc::sockaddr_in6>()
        };
        len as libc::socklen_t
    }

    /// Writes the ancillary data. Returns its length.
    fn describe(&self, group: &Group, control: &mut Control) -> usize {
        let (level, tos, hop_limit) = if self.header_len == LEN_V4 {
            (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL)
        } else {
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT)
        };
        let mut len = 0;
        if group.segments > 1 {
            len = control.push(len, libc::SOL_UDP, libc::UDP_SEGMENT, &(group.segment as u16).to_ne_bytes());
        }
        if group.key.tos != DEFAULT_TOS {
            len = control.push(len, level, tos, &i32::from(group.key.tos).to_ne_bytes());
        }
        if group.key.hop_limit != DEFAULT_HOP_LIMIT {
            len = control.push(len, level, hop_limit, &i32::from(group.key.hop_limit).to_ne_bytes());
        }
        len
    }

    fn name(&self, group: &Group) -> libc::sockaddr_in6 {
        // SAFETY: plain old data, for which zeros are valid.
        let mut name: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
        name.sin6_port = group.key.port.to_be();
        match self.peer(group) {
            IpAddr::V4(address) => {
                name.sin6_family = libc::AF_INET as libc::sa_family_t;
                // The address in an IPv4 name is at the position of the flow label in an IPv6 name.
                name.sin6_flowinfo = u32::from_ne_bytes(address.octets());
            }
            IpAddr::V6(address) => {
                name.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                name.sin6_addr.s6_addr = address.octets();
                let is_local = address.is_unicast_link_local() || address.is_multicast();
                name.sin6_scope_id = if is_local { self.scope } else { 0 };
            }
        }
        name
    }

    fn peer(&self, group: &Group) -> IpAddr {
        let address = group.key.destination;
        if self.header_len == LEN_V4 {
            Ipv4Addr::from_bits(address as u32).into()
        } else {
            Ipv6Addr::from_bits(address).into()
        }
    }
}

/// A buffer to be sent. The kernel only reads it.
fn place(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

impl Group {
    /// Whether a packet may be the next segment: all have the same length, except a shorter last one.
    fn admits(&self, key: Key, len: usize) -> bool {
        self.key == key
            && self.segments < SEGMENTS_MAX
            && len <= self.segment
            && self.len == self.segments * self.segment
            && self.len + len <= DATAGRAM_MAX
    }

    /// Whether there is no room for another packet of the same length.
    fn is_full(&self) -> bool {
        !self.admits(self.key, self.segment)
    }
}

/// The last refused send in the log. Its rate is limited because any peer may cause such sends.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) last: Option<(Dropped, Nanos)>,
}

/// The kernel's reason, and the destination.
type Dropped = (Option<i32>, IpAddr);

impl Told {
    /// Whether to log this refusal: only if it differs from the last one, and at most once a second.
    pub(super) fn is_news(&mut self, refusal: Dropped, now: Nanos) -> bool {
        let is_news =
            self.last.is_none_or(|(last, at)| last != refusal && now.since(at) >= Duration::from_secs(1));
        if is_news {
            self.last = Some((refusal, now));
        }
        is_news
    }

    /// Logs why packets are dropped, if `is_news`.
    pub(super) fn tell(&mut self, refused: &Refused, interface: &str, now: Nanos) {
        let Refused { error, peer, packet } = refused;
        if !self.is_news((error.raw_os_error(), *peer), now) {
            return;
        }
        if error.raw_os_error() == Some(libc::EMSGSIZE) {
            warn!(
                "packets of {packet} bytes to {peer} are dropped: the path allows only smaller ones; use a smaller \
                 path MTU"
            );
        } else {
            warn!("packets to {peer} are dropped on '{interface}': {error}");
        }
    }
}
