//! The kernel's connection manager (rdma_cm) through librdmacm, which is loaded on demand.
//!
//! Queue pairs are created and modified elsewhere: an identifier here never has one, so librdmacm modifies none. The
//! caller passes the number of its queue pair, and modifies it with the attributes from [`ConnectionId::change_to`].

use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use libloading::Library;

use super::abi::QpAttr;
use super::cm_abi::{
    CONNECT_REQUEST, ConnParam, OPTION_ACK_TIMEOUT, OPTION_ID, OPTION_TOS, PS_TCP, PS_UDP, RawChannel,
    RawEvent, RawId, Storage,
};
use super::device::{Device, nothing_yet, set_nonblocking};
use super::functions::functions;
use super::memory::Address;
use super::queue_pair::QueuePairChange;
use super::remedy;
use crate::Error;

/// The library's name, which its ABI has kept.
const NAME: &str = "librdmacm.so.1";

functions! {
    /// The functions of librdmacm.
    "rdma-core 33";
    create_event_channel, "rdma_create_event_channel": fn() -> *mut RawChannel;
    destroy_event_channel, "rdma_destroy_event_channel": fn(*mut RawChannel);
    create_id, "rdma_create_id": fn(*mut RawChannel, *mut *mut RawId, *mut c_void, c_uint) -> c_int;
    destroy_id, "rdma_destroy_id": fn(*mut RawId) -> c_int;
    bind_addr, "rdma_bind_addr": fn(*mut RawId, *mut Storage) -> c_int;
    resolve_addr, "rdma_resolve_addr": fn(*mut RawId, *mut Storage, *mut Storage, c_int) -> c_int;
    resolve_route, "rdma_resolve_route": fn(*mut RawId, c_int) -> c_int;
    connect, "rdma_connect": fn(*mut RawId, *mut ConnParam) -> c_int;
    listen, "rdma_listen": fn(*mut RawId, c_int) -> c_int;
    accept, "rdma_accept": fn(*mut RawId, *mut ConnParam) -> c_int;
    reject, "rdma_reject": fn(*mut RawId, *const c_void, u8) -> c_int;
    establish, "rdma_establish": fn(*mut RawId) -> c_int;
    disconnect, "rdma_disconnect": fn(*mut RawId) -> c_int;
    notify, "rdma_notify": fn(*mut RawId, c_uint) -> c_int;
    get_cm_event, "rdma_get_cm_event": fn(*mut RawChannel, *mut *mut RawEvent) -> c_int;
    ack_cm_event, "rdma_ack_cm_event": fn(*mut RawEvent) -> c_int;
    init_qp_attr, "rdma_init_qp_attr": fn(*mut RawId, *mut QpAttr, *mut c_int) -> c_int;
    set_option, "rdma_set_option": fn(*mut RawId, c_int, c_int, *mut c_void, usize) -> c_int;
}

/// The loaded librdmacm.
#[derive(Clone, Debug)]
pub struct CmFunctions(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    functions: Functions,
    /// Contains the functions.
    _library: Library,
}

impl CmFunctions {
    /// Loads the library.
    ///
    /// # Errors
    /// [`Error::NoRdmaCm`] if it is absent, or older than rdma-core 33.
    pub fn load() -> Result<CmFunctions, Error> {
        CmFunctions::load_from(NAME)
    }

    /// Loads a library by its path instead of the system's.
    ///
    /// # Errors
    /// As [`load`](CmFunctions::load).
    pub fn load_from(path: impl AsRef<OsStr>) -> Result<CmFunctions, Error> {
        let path = path.as_ref();
        let absent = |reason: String| Error::NoRdmaCm { library: path.display().to_string(), reason };
        // SAFETY: the constructors of librdmacm have no preconditions. Its destructors do not run before `Loaded` is
        // dropped, after all objects created by it.
        let library = unsafe { Library::new(path) }
            .map_err(|error| absent(remedy::of_library(&error, "librdmacm1")))?;
        let functions = Functions::find(&library).map_err(absent)?;
        Ok(CmFunctions(Arc::new(Loaded { functions, _library: library })))
    }
}

/// A channel for the events of identifiers. Clones share it.
#[derive(Clone, Debug)]
pub struct EventChannel(Arc<Channel>);

#[derive(Debug)]
struct Channel {
    functions: CmFunctions,
    device: Device,
    channel: NonNull<RawChannel>,
}

// SAFETY: librdmacm may be called by any thread, for any object. The pointer is only passed to it.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

/// An event of an identifier.
#[derive(Debug)]
pub struct ConnectionEvent {
    /// Its kind, a number of `enum rdma_cm_event_type`.
    pub kind: u32,
    /// 0, a negative error number, or the peer's reason if positive.
    pub status: i32,
    /// The tag of the identifier; for a request, that of the listener.
    pub tag: u64,
    /// The new identifier of a request.
    pub request: Option<ConnectionId>,
    /// The peer's private data.
    pub private_data: Vec<u8>,
    /// The terms that the peer requests or has accepted, for a connection.
    pub terms: ConnectionTerms,
    /// The peer, for a datagram service.
    pub peer: Option<Peer>,
}

/// The limits for READs and atomics, and for retries, from the local point of view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionTerms {
    /// Outstanding READs and atomics of the peer, as responder.
    pub responder_resources: u8,
    /// Outstanding READs and atomics, as requester.
    pub initiator_depth: u8,
    /// Retries after timeouts, of the requester.
    pub retry_count: u8,
    /// Retries after RNR NAKs.
    pub rnr_retry: u8,
}

/// A queue pair for datagrams, and the path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The path.
    pub address: Address,
    /// The queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// The parameters of a request, or of its acceptance.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionRequest<'a> {
    /// The local queue pair.
    pub qpn: u32,
    /// Whether its receives are taken from a shared receive queue.
    pub has_srq: bool,
    /// See [`ConnectionTerms`].
    pub terms: ConnectionTerms,
    /// At most 255 bytes. The kernel refuses more than the message has room for.
    pub private_data: &'a [u8],
}

impl EventChannel {
    /// Creates a channel for connections over a device. [`event`](EventChannel::event) does not wait.
    ///
    /// # Errors
    /// [`Error::Verbs`], also without rdma_ucm in the kernel.
    pub fn new(functions: &CmFunctions, device: &Device) -> Result<EventChannel, Error> {
        // SAFETY: it has no arguments.
        let channel = unsafe { (functions.0.functions.create_event_channel)() };
        let channel = device.object("rdma_create_event_channel", channel);
        let channel = channel.map_err(|error| error.remedied(|_| remedy::of_rdma_cm()))?;
        let this =
            EventChannel(Arc::new(Channel { functions: functions.clone(), device: device.clone(), channel }));
        set_nonblocking(this.fd()?)
            .map_err(|source| device.error("fcntl of a channel of rdma_cm", source))?;
        Ok(this)
    }

    fn functions(&self) -> &Functions {
        &self.0.functions.0.functions
    }

    /// Readable when there are events.
    ///
    /// # Errors
    /// [`Error::Verbs`] if it has no descriptor.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        // SAFETY: the channel exists.
        let fd = unsafe { (*self.0.channel.as_ptr()).fd };
        if fd < 0 {
            let source = io::Error::other(format!("fd = {fd}"));
            return Err(self.0.device.error("rdma_create_event_channel", source));
        }
        // SAFETY: the descriptor is the channel's until it is destroyed, which `self` outlives.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Takes an event, if there is one.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn event(&self) -> Result<Option<ConnectionEvent>, Error> {
        let mut raw = null_mut();
        // SAFETY: the channel exists.
        let returned = unsafe { (self.functions().get_cm_event)(self.0.channel.as_ptr(), &mut raw) };
        let Some(event) = NonNull::new(raw).filter(|_| returned == 0) else {
            let source = match returned {
                0 => io::Error::other("it returned 0 and a null pointer"),
                _ => io::Error::last_os_error(),
            };
            return nothing_yet(source).map_err(|source| self.0.device.error("rdma_get_cm_event", source));
        };
        // SAFETY: the event exists until it is acknowledged, and so do the memory that it points to and its
        // identifiers, because none of them can be destroyed before.
        let taken = unsafe { self.take(event.as_ref()) };
        // SAFETY: the event was returned by `rdma_get_cm_event` and is acknowledged once.
        let returned = unsafe { (self.functions().ack_cm_event)(event.as_ptr()) };
        if returned != 0 {
            self.0.device.warn("rdma_ack_cm_event", io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(Some(taken))
    }

    /// # Safety
    /// The event must not be acknowledged yet.
    unsafe fn take(&self, event: &RawEvent) -> ConnectionEvent {
        let is_request = event.event == CONNECT_REQUEST;
        let of = if is_request { event.listen_id } else { event.id };
        // SAFETY: the caller's contract. Without an identifier the tag is one that no identifier has.
        let tag = unsafe { of.as_ref() }.map_or(u64::MAX, |id| id.context.addr() as u64);
        // SAFETY: as above.
        let is_datagram = unsafe { event.id.as_ref() }.is_some_and(|id| id.port_space == PS_UDP);
        // SAFETY: both members of the union begin with the pointer and the length of the private data.
        let conn = unsafe { event.param.conn };
        let private_data = if conn.private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: the caller's contract. The private data has this length.
            unsafe {
                std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
            }
            .to_vec()
        };
        let request = if is_request { NonNull::new(event.id) } else { None };
        let mut taken = ConnectionEvent {
            kind: event.event,
            status: event.status,
            tag,
            request: request.map(|id| ConnectionId { id, channel: self.clone() }),
            private_data,
            terms: ConnectionTerms::default(),
            peer: None,
        };
        if is_datagram {
            // SAFETY: events of datagram services have this member of the union.
            let ud = unsafe { event.param.ud };
            let address = Address::from_raw(&ud.ah_attr);
            taken.peer = Some(Peer { address, qpn: ud.qp_num, qkey: ud.qkey });
        } else {
            taken.terms = ConnectionTerms {
                responder_resources: conn.responder_resources,
                initiator_depth: conn.initiator_depth,
                retry_count: conn.retry_count,
                rnr_retry: conn.rnr_retry_count,
            };
        }
        taken
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: it was created by `rdma_create_event_channel`, its identifiers were destroyed because each has a
        // reference to it, and it is destroyed once.
        unsafe { (self.functions.0.functions.destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// A connection, a query for a datagram service, or a listener for requests: `struct rdma_cm_id`. The kernel ends it
/// when it is dropped.
#[derive(Debug)]
pub struct ConnectionId {
    id: NonNull<RawId>,
    channel: EventChannel,
}

// SAFETY: as `Channel`.
unsafe impl Send for ConnectionId {}

impl ConnectionId {
    /// Creates an identifier whose events have `tag`.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(channel: &EventChannel, tag: u64, is_datagram: bool) -> Result<ConnectionId, Error> {
        let mut id = null_mut();
        let space = if is_datagram { PS_UDP } else { PS_TCP };
        let create = channel.functions().create_id;
        // SAFETY: the channel exists. The tag is never dereferenced.
        let returned = unsafe { create(channel.0.channel.as_ptr(), &mut id, tag_pointer(tag), space) };
        let source = io::Error::last_os_error();
        match NonNull::new(id) {
            Some(id) if returned == 0 => Ok(ConnectionId { id, channel: channel.clone() }),
            _ => Err(channel.0.device.error("rdma_create_id", source)),
        }
    }

    /// Sets the tag of an identifier from a request.
    pub fn set_tag(&mut self, tag: u64) {
        // SAFETY: the identifier exists, and its context belongs to the application.
        unsafe { (*self.id.as_ptr()).context = tag_pointer(tag) };
    }

    fn check(&self, call: &'static str, returned: c_int) -> Result<(), Error> {
        match returned {
            0 => Ok(()),
            _ => Err(self.channel.0.device.error(call, io::Error::last_os_error())),
        }
    }

    fn functions(&self) -> &Functions {
        self.channel.functions()
    }

    /// Accepts requests to an address, which must be one of this host. `scope` is the interface of a link-local
    /// address.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn listen(&self, address: SocketAddr, scope: u32, backlog: u32) -> Result<(), Error> {
        let mut own = storage(address, scope);
        // SAFETY: the identifier and the address exist.
        self.check("rdma_bind_addr", unsafe { (self.functions().bind_addr)(self.id.as_ptr(), &mut own) })?;
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: the identifier exists.
        self.check("rdma_listen", unsafe { (self.functions().listen)(self.id.as_ptr(), backlog) })
    }

    /// Starts the resolution of the path from `source` to a peer. Event 0 or 1 reports its end.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn resolve_address(
        &self,
        source: IpAddr,
        peer: SocketAddr,
        scope: u32,
        timeout_ms: u32,
    ) -> Result<(), Error> {
        let (mut from, mut to) = (storage(SocketAddr::new(source, 0), scope), storage(peer, scope));
        let timeout = c_int::try_from(timeout_ms).unwrap_or(c_int::MAX);
        let resolve = self.functions().resolve_addr;
        // SAFETY: the identifier and the addresses exist.
        let returned = unsafe { resolve(self.id.as_ptr(), &mut from, &mut to, timeout) };
        let checked = self.check("rdma_resolve_addr", returned);
        checked.map_err(|error| error.remedied(|_| format!("the peer is {peer}, and this end {source}")))
    }

    /// The next step of the resolution. Event 2 or 3 reports its end.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn resolve_route(&self, timeout_ms: u32) -> Result<(), Error> {
        let timeout = c_int::try_from(timeout_ms).unwrap_or(c_int::MAX);
        // SAFETY: the identifier exists.
        let returned = unsafe { (self.functions().resolve_route)(self.id.as_ptr(), timeout) };
        self.check("rdma_resolve_route", returned)
    }

    /// The device that it was resolved to, or that received the request, and its port. `None` before.
    pub fn device(&self) -> Option<(String, u8)> {
        // SAFETY: the identifier exists.
        let raw = unsafe { self.id.as_ref() };
        let context = NonNull::new(raw.verbs)?;
        // SAFETY: the context is open as long as librdmacm is loaded.
        let device = unsafe { context.as_ref() }.device;
        Some((self.channel.0.device.name_of(NonNull::new(device)?), raw.port))
    }

    /// Sets the traffic class of the connection's packets.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn set_traffic_class(&self, traffic_class: u8) -> Result<(), Error> {
        self.set("rdma_set_option of the traffic class", OPTION_TOS, traffic_class)
    }

    /// Sets the ACK timeout, 4.096 µs · 2^`timeout`.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn set_ack_timeout(&self, timeout: u8) -> Result<(), Error> {
        self.set("rdma_set_option of the ACK timeout", OPTION_ACK_TIMEOUT, timeout)
    }

    fn set(&self, call: &'static str, option: c_int, mut value: u8) -> Result<(), Error> {
        let (set, value) = (self.functions().set_option, (&raw mut value).cast());
        // SAFETY: the identifier exists, and the option has one byte.
        self.check(call, unsafe { set(self.id.as_ptr(), OPTION_ID, option, value, 1) })
    }

    /// Requests the connection.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn connect(&self, request: &ConnectionRequest<'_>) -> Result<(), Error> {
        let mut raw = self.param("rdma_connect", request)?;
        // SAFETY: the identifier exists, and the private data outlives the call.
        self.check("rdma_connect", unsafe { (self.functions().connect)(self.id.as_ptr(), &mut raw) })
    }

    /// Accepts the connection.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn accept(&self, request: &ConnectionRequest<'_>) -> Result<(), Error> {
        let mut raw = self.param("rdma_accept", request)?;
        // SAFETY: as in `connect`.
        self.check("rdma_accept", unsafe { (self.functions().accept)(self.id.as_ptr(), &mut raw) })
    }

    fn param(&self, call: &'static str, request: &ConnectionRequest<'_>) -> Result<ConnParam, Error> {
        let ConnectionRequest { qpn, has_srq, terms, private_data } = request;
        let private_data_len = u8::try_from(private_data.len()).map_err(|_| {
            let source = io::Error::other(format!("{} bytes of private data", private_data.len()));
            self.channel.0.device.error(call, source)
        })?;
        Ok(ConnParam {
            private_data: if private_data.is_empty() { null() } else { private_data.as_ptr().cast() },
            private_data_len,
            responder_resources: terms.responder_resources,
            initiator_depth: terms.initiator_depth,
            flow_control: 1,
            retry_count: terms.retry_count,
            rnr_retry_count: terms.rnr_retry,
            srq: (*has_srq).into(),
            qp_num: *qpn,
        })
    }

    /// Rejects the connection.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        let length = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        let data = if length == 0 { null() } else { private_data.as_ptr().cast() };
        // SAFETY: the identifier exists, and the data has at least `length` bytes.
        self.check("rdma_reject", unsafe { (self.functions().reject)(self.id.as_ptr(), data, length) })
    }

    /// Notifies the peer, after its acceptance, that the queue pair is ready.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn establish(&self) -> Result<(), Error> {
        // SAFETY: the identifier exists.
        self.check("rdma_establish", unsafe { (self.functions().establish)(self.id.as_ptr()) })
    }

    /// Ends the connection, or confirms its end.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn disconnect(&self) -> Result<(), Error> {
        // SAFETY: the identifier exists.
        self.check("rdma_disconnect", unsafe { (self.functions().disconnect)(self.id.as_ptr()) })
    }

    /// Reports that packets of the connection have arrived before the peer's ready-to-use message.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn notify_established(&self) -> Result<(), Error> {
        const COMM_EST: c_uint = 4;
        // SAFETY: the identifier exists.
        self.check("rdma_notify", unsafe { (self.functions().notify)(self.id.as_ptr(), COMM_EST) })
    }

    /// The attributes that modify a queue pair to a state (3 is RTR, 4 RTS) for the connection.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn change_to(&self, state: u32) -> Result<QueuePairChange, Error> {
        let mut raw = QpAttr { qp_state: state, ..QpAttr::default() };
        let mut bits = 0;
        let init = self.functions().init_qp_attr;
        // SAFETY: the identifier exists, and the attributes have the size that the ABI fixes.
        self.check("rdma_init_qp_attr", unsafe { init(self.id.as_ptr(), &mut raw, &mut bits) })?;
        Ok(QueuePairChange::from_raw(&raw, bits))
    }

    /// The local address and port.
    pub fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier exists.
        address_of(unsafe { &(*self.id.as_ptr()).source })
    }

    /// The peer's address and port.
    pub fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier exists.
        address_of(unsafe { &(*self.id.as_ptr()).destination })
    }
}

impl Drop for ConnectionId {
    fn drop(&mut self) {
        // SAFETY: it was returned by `rdma_create_id` or with a request, its events are acknowledged, and it is
        // destroyed once.
        let returned = unsafe { (self.functions().destroy_id)(self.id.as_ptr()) };
        if returned != 0 {
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
            self.channel.0.device.warn("rdma_destroy_id", errno);
        }
    }
}

fn tag_pointer(tag: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(tag as usize)
}

/// `struct sockaddr_in` or `struct sockaddr_in6`.
fn storage(address: SocketAddr, scope: u32) -> Storage {
    let mut bytes = [0; 128];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes[4..8].copy_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes[8..24].copy_from_slice(&ip.octets());
            if ip.is_unicast_link_local() {
                bytes[24..28].copy_from_slice(&scope.to_ne_bytes());
            }
        }
    }
    Storage(bytes)
}

fn address_of(Storage(bytes): &Storage) -> Option<SocketAddr> {
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match c_int::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
        libc::AF_INET => {
            let octets: [u8; 4] = bytes[4..8].try_into().ok()?;
            Some(SocketAddr::new(Ipv4Addr::from(octets).into(), port))
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = bytes[8..24].try_into().ok()?;
            let address = SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, 0);
            Some(SocketAddr::new(address.ip().to_canonical(), port))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["192.0.2.7:7471", "[2001:db8::1]:1", "[fe80::1]:65535"] {
            let address = text.parse().ok();
            assert_eq!(address.and_then(|address| address_of(&storage(address, 3))), address);
        }
        let mapped = "[::ffff:192.0.2.7]:5".parse().map(|address| address_of(&storage(address, 0)));
        assert_eq!(mapped, Ok("192.0.2.7:5".parse().ok()));
        assert_eq!(address_of(&Storage([0; 128])), None);
    }
}
