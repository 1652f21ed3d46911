//! Queue pairs and shared receive queues.

use std::ffi::c_int;
use std::io;
use std::mem::zeroed;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{Qp, QpAttr, QpCap, QpInitAttr, SRQ_LIMIT, Srq, SrqAttr, SrqInitAttr, mask};
use super::completion::CompletionQueue;
use super::device::Device;
use super::memory::{Address, ProtectionDomain};
use super::work::{Linked, PostRefused, ReceiveRequest, SendRequest, link, post};
use crate::Error;

/// The parameters of a new queue pair.
#[derive(Debug)]
pub struct QueuePairConfig<'a> {
    /// `enum ibv_qp_type`: 2 is RC, 3 UC, 4 UD.
    pub kind: u32,
    /// The completion queue of sends.
    pub send_cq: &'a CompletionQueue,
    /// The completion queue of receives.
    pub recv_cq: &'a CompletionQueue,
    /// The source of receive WRs, if shared.
    pub srq: Option<&'a SharedReceiveQueue>,
    /// The least limits: outstanding sends and receives, SGEs of each, and bytes of inline data.
    pub max_send_wr: u32,
    /// See `max_send_wr`.
    pub max_recv_wr: u32,
    /// See `max_send_wr`.
    pub max_send_sge: u32,
    /// See `max_send_wr`.
    pub max_recv_sge: u32,
    /// See `max_send_wr`.
    pub max_inline_data: u32,
    /// Whether every send generates a completion.
    pub signal_all: bool,
}

/// A queue pair. It is destroyed when it is dropped.
#[derive(Debug)]
pub struct QueuePair {
    qp: NonNull<Qp>,
    domain: ProtectionDomain,
    is_datagram: bool,
    _queues: [CompletionQueue; 2],
    _srq: Option<SharedReceiveQueue>,
    /// Its multicast groups: the kernel does not destroy a queue pair that is attached to one.
    groups: Mutex<Vec<[u8; 16]>>,
}

// SAFETY: libibverbs and its providers may be called by any thread, for any object. The pointer is only passed to them.
unsafe impl Send for QueuePair {}

/// The attributes to modify; `None` leaves one unchanged. The numbers are those of the verbs.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the verbs' names")]
pub struct QueuePairChange {
    pub state: Option<u32>,
    pub current_state: Option<u32>,
    pub access: Option<u32>,
    pub pkey_index: Option<u16>,
    pub port: Option<u8>,
    pub qkey: Option<u32>,
    pub address: Option<Address>,
    pub path_mtu: Option<u32>,
    pub dest_qpn: Option<u32>,
    pub rq_psn: Option<u32>,
    pub sq_psn: Option<u32>,
    pub max_rd_atomic: Option<u8>,
    pub max_dest_rd_atomic: Option<u8>,
    pub min_rnr_timer: Option<u8>,
    pub timeout: Option<u8>,
    pub retry_count: Option<u8>,
    pub rnr_retry: Option<u8>,
    /// Requests an event when the send queue is drained.
    pub sqd_event: bool,
}

/// Each attribute: its name here, its name in `struct ibv_qp_attr`, and its bit.
macro_rules! attributes {
    ($each:ident) => {
        $each! {
            state => qp_state, STATE;
            current_state => cur_qp_state, CUR_STATE;
            access => qp_access_flags, ACCESS_FLAGS;
            pkey_index => pkey_index, PKEY_INDEX;
            port => port_num, PORT;
            qkey => qkey, QKEY;
            path_mtu => path_mtu, PATH_MTU;
            dest_qpn => dest_qp_num, DEST_QPN;
            rq_psn => rq_psn, RQ_PSN;
            sq_psn => sq_psn, SQ_PSN;
            max_rd_atomic => max_rd_atomic, MAX_QP_RD_ATOMIC;
            max_dest_rd_atomic => max_dest_rd_atomic, MAX_DEST_RD_ATOMIC;
            min_rnr_timer => min_rnr_timer, MIN_RNR_TIMER;
            timeout => timeout, TIMEOUT;
            retry_count => retry_cnt, RETRY_CNT;
            rnr_retry => rnr_retry, RNR_RETRY;
        }
    };
}

impl QueuePairChange {
    fn raw(&self) -> (QpAttr, c_int) {
        let (mut raw, mut bits) = (QpAttr::default(), 0);
        macro_rules! set {
            ($($own:ident => $raw:ident, $bit:ident;)*) => {
                $(if let Some(value) = self.$own {
                    raw.$raw = value;
                    bits |= mask::$bit;
                })*
            };
        }
        attributes!(set);
        if let Some(address) = self.address {
            raw.ah_attr = address.raw();
            bits |= mask::AV;
        }
        if self.sqd_event {
            raw.en_sqd_async_notify = 1;
            bits |= mask::EN_SQD_ASYNC_NOTIFY;
        }
        (raw, bits)
    }

    pub(super) fn from_raw(raw: &QpAttr, bits: c_int) -> QueuePairChange {
        let mut change = QueuePairChange::default();
        macro_rules! set {
            ($($own:ident => $raw:ident, $bit:ident;)*) => {
                $(change.$own = (bits & mask::$bit != 0).then_some(raw.$raw);)*
            };
        }
        attributes!(set);
        change.address = (bits & mask::AV != 0).then(|| Address::from_raw(&raw.ah_attr));
        change
    }
}

/// The queried attributes of a queue pair. The numbers are those of the verbs.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the verbs' names")]
pub struct QueuePairState {
    pub state: u32,
    pub sq_draining: bool,
    pub access: u32,
    pub pkey_index: u16,
    pub qkey: u32,
    pub address: Address,
    pub path_mtu: u32,
    pub dest_qpn: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
}

/// `IBV_QPT_UD`
const UD: u32 = 4;
/// `IBV_QPT_RC`, `IBV_QPT_UC`, `IBV_QPT_UD`
const KINDS: [u32; 3] = [2, 3, UD];

impl QueuePair {
    /// Creates a queue pair in a protection domain. Its queues must be of the same [`Device`].
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(domain: &ProtectionDomain, config: &QueuePairConfig<'_>) -> Result<QueuePair, Error> {
        let device = domain.device();
        let others = [config.send_cq.device(), config.recv_cq.device()];
        let srq_device = config.srq.map(|srq| srq.0.domain.device());
        if others.into_iter().chain(srq_device).any(|other| other.context() != device.context()) {
            // The provider and the kernel would use other objects with the same numbers.
            let source = io::Error::other("its queues are of another device that is open");
            return Err(device.error("ibv_create_qp", source));
        }
        if !KINDS.contains(&config.kind) {
            // Other types need fields of work requests that are not written here.
            return Err(device.error("ibv_create_qp", io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let mut attributes = QpInitAttr {
            qp_context: null_mut(),
            send_cq: config.send_cq.as_ptr(),
            recv_cq: config.recv_cq.as_ptr(),
            srq: config.srq.map_or(null_mut(), SharedReceiveQueue::as_ptr),
            cap: QpCap {
                max_send_wr: config.max_send_wr,
                max_recv_wr: config.max_recv_wr,
                max_send_sge: config.max_send_sge,
                max_recv_sge: config.max_recv_sge,
                max_inline_data: config.max_inline_data,
            },
            qp_type: config.kind,
            sq_sig_all: config.signal_all.into(),
        };
        // SAFETY: protection domain and queues exist, and the attributes have the size that the ABI defines.
        let qp = unsafe { (device.functions().create_qp)(domain.as_ptr(), &mut attributes) };
        Ok(QueuePair {
            qp: device.object("ibv_create_qp", qp).map_err(|error| error.remedied(|_| wanted(config)))?,
            domain: domain.clone(),
            is_datagram: config.kind == UD,
            _queues: [config.send_cq.clone(), config.recv_cq.clone()],
            _srq: config.srq.cloned(),
            groups: Mutex::new(Vec::new()),
        })
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        // SAFETY: the queue pair exists.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    /// Its identifier in asynchronous events.
    pub fn id(&self) -> u64 {
        self.qp.as_ptr().addr() as u64
    }

    fn device(&self) -> &Device {
        self.domain.device()
    }

    /// Modifies it. The kernel may resolve the next hop of a new address, which can take seconds.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn modify(&self, change: &QueuePairChange) -> Result<(), Error> {
        let (mut raw, mask) = change.raw();
        // SAFETY: the queue pair exists, and the attributes have the size that the ABI defines.
        let returned = unsafe { (self.device().functions().modify_qp)(self.qp.as_ptr(), &mut raw, mask) };
        self.device().check("ibv_modify_qp", returned)
    }

    /// Queries its attributes.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn query(&self) -> Result<QueuePairState, Error> {
        let mut raw = QpAttr::default();
        // SAFETY: it consists of numbers and pointers, so all bytes zero are valid.
        let mut init: QpInitAttr = unsafe { zeroed() };
        let query = self.device().functions().query_qp;
        // SAFETY: the queue pair exists, and both structures have the sizes that the ABI defines.
        let returned = unsafe { query(self.qp.as_ptr(), &mut raw, mask::ALL, &mut init) };
        self.device().check("ibv_query_qp", returned)?;
        Ok(QueuePairState {
            state: raw.qp_state,
            sq_draining: raw.sq_draining != 0,
            access: raw.qp_access_flags,
            pkey_index: raw.pkey_index,
            qkey: raw.qkey,
            address: Address::from_raw(&raw.ah_attr),
            path_mtu: raw.path_mtu,
            dest_qpn: raw.dest_qp_num,
            rq_psn: raw.rq_psn,
            sq_psn: raw.sq_psn,
            max_rd_atomic: raw.max_rd_atomic,
            max_dest_rd_atomic: raw.max_dest_rd_atomic,
            min_rnr_timer: raw.min_rnr_timer,
            timeout: raw.timeout,
            retry_count: raw.retry_cnt,
            rnr_retry: raw.rnr_retry,
        })
    }

    /// Posts one send work request.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    #[inline(always)]
    pub fn post_send(&self, request: &mut SendRequest<'_>) -> Result<(), Error> {
        self.post_sends(std::slice::from_mut(request)).map_err(|refused| refused.error)
    }

    /// Posts send work requests as one list.
    ///
    /// # Errors
    /// At the first work request that the provider refuses.
    #[inline(always)]
    pub fn post_sends(&self, requests: &mut [SendRequest<'_>]) -> Result<(), PostRefused> {
        let (device, call) = (self.device(), "ibv_post_send");
        let Some(function) = device.ops().post_send else {
            return Err(PostRefused { posted: 0, error: device.lacks(call) });
        };
        let (count, mut first, mut named) = (requests.len(), null_mut(), 0);
        for request in requests.iter_mut().rev() {
            named |= request.named_of.addr();
            first = request.link(first);
        }
        if self.is_datagram || named != 0 {
            self.check(call, requests)?;
            // The requests were borrowed since, so earlier pointers must not be used for writing.
            first = link(requests);
        }
        // SAFETY: the queue pair and the list exist. A datagram has a destination. The SGEs name registered memory, or
        // memory for which the card finds no key. Inline data, address handles, windows and regions outlive the
        // requests, and inline data is read before the call ends.
        post::<SendRequest<'_>>(device, call, first, count, |bad| unsafe {
            function(self.qp.as_ptr(), first, bad)
        })
    }

    /// Checks the objects named in the requests, because a provider does not.
    fn check(&self, call: &'static str, requests: &[SendRequest<'_>]) -> Result<(), PostRefused> {
        let context = self.device().context().cast_const();
        for (at, request) in requests.iter().enumerate() {
            let wrong = if self.is_datagram && !request.has_target() {
                // The provider would read the destination from the fields of another operation.
                "has no destination, which each send of a datagram queue pair has"
            } else if !request.named_of.is_null() && request.named_of != context {
                // The provider would use another device's object as its own.
                "names an address handle, a window or a region of another device"
            } else {
                continue;
            };
            let source = io::Error::other(format!("request {at} {wrong}"));
            return Err(PostRefused { posted: 0, error: self.device().error(call, source) });
        }
        Ok(())
    }

    /// Posts receive WRs as one list.
    ///
    /// # Errors
    /// At the first that the provider refuses.
    #[inline(always)]
    pub fn post_receives(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        let (device, call) = (self.device(), "ibv_post_recv");
        let Some(function) = device.ops().post_recv else {
            return Err(PostRefused { posted: 0, error: device.lacks(call) });
        };
        let (count, first) = (requests.len(), link(requests));
        // SAFETY: as in `post_sends`.
        post::<ReceiveRequest<'_>>(device, call, first, count, |bad| unsafe {
            function(self.qp.as_ptr(), first, bad)
        })
    }

    /// Attaches it to a multicast group, until it is detached or dropped.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn attach(&self, group: &[u8; 16]) -> Result<(), Error> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the queue pair exists, and the GID is valid.
        let returned = unsafe { (self.device().functions().attach_mcast)(self.qp.as_ptr(), group, 0) };
        self.device().check("ibv_attach_mcast", returned)?;
        if !groups.contains(group) {
            groups.push(*group);
        }
        Ok(())
    }

    /// Detaches it.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn detach(&self, group: &[u8; 16]) -> Result<(), Error> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        self.device().check("ibv_detach_mcast", self.leave(group))?;
        groups.retain(|other| other != group);
        Ok(())
    }

    fn leave(&self, group: &[u8; 16]) -> c_int {
        // SAFETY: the queue pair exists, and the GID is valid.
        unsafe { (self.device().functions().detach_mcast)(self.qp.as_ptr(), group, 0) }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let device = self.device();
        for group in &*self.groups.lock().unwrap_or_else(PoisonError::into_inner) {
            device.warn("ibv_detach_mcast", self.leave(group));
        }
        // SAFETY: it was created by `ibv_create_qp`, its events are acknowledged, and it is destroyed once.
        device.warn("ibv_destroy_qp", unsafe { (device.functions().destroy_qp)(self.qp.as_ptr()) });
    }
}

/// The requested limits of a refused queue pair.
fn wanted(config: &QueuePairConfig<'_>) -> String {
    format!(
        "asked for {} sends of {} pieces and {} bytes inline, and {} receives of {} pieces; the card has less of one",
        config.max_send_wr,
        config.max_send_sge,
        config.max_inline_data,
        config.max_recv_wr,
        config.max_recv_sge
    )
}

/// A shared receive queue. Clones share it. It is destroyed with the last clone and the last queue pair that uses it.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue(Arc<Receives>);

#[derive(Debug)]
struct Receives {
    srq: NonNull<Srq>,
    domain: ProtectionDomain,
}

// SAFETY: as `QueuePair`.
unsafe impl Send for Receives {}
// SAFETY: as above.
unsafe impl Sync for Receives {}

impl SharedReceiveQueue {
    /// Creates a queue for at least `max_wr` receive WRs of `max_sge` SGEs.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(domain: &ProtectionDomain, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue, Error> {
        let device = domain.device();
        let attr = SrqAttr { max_wr, max_sge, srq_limit: 0 };
        let mut attributes = SrqInitAttr { srq_context: null_mut(), attr };
        // SAFETY: the protection domain exists, and the attributes have the size that the ABI defines.
        let srq = unsafe { (device.functions().create_srq)(domain.as_ptr(), &mut attributes) };
        let srq = device.object("ibv_create_srq", srq)?;
        Ok(SharedReceiveQueue(Arc::new(Receives { srq, domain: domain.clone() })))
    }

    /// Its identifier in asynchronous events.
    pub fn id(&self) -> u64 {
        self.as_ptr().addr() as u64
    }

    fn as_ptr(&self) -> *mut Srq {
        self.0.srq.as_ptr()
    }

    /// Requests an event when fewer than `limit` receive WRs are left; 0 disables it.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn set_limit(&self, limit: u32) -> Result<(), Error> {
        let device = self.0.domain.device();
        let mut attributes = SrqAttr { srq_limit: limit, ..SrqAttr::default() };
        // SAFETY: the queue exists, and the attributes have the size that the ABI defines.
        let returned = unsafe { (device.functions().modify_srq)(self.as_ptr(), &mut attributes, SRQ_LIMIT) };
        device.check("ibv_modify_srq", returned)
    }

    /// The current limit.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn limit(&self) -> Result<u32, Error> {
        let device = self.0.domain.device();
        let mut attributes = SrqAttr::default();
        // SAFETY: the queue exists, and the attributes have the size that the ABI defines.
        let returned = unsafe { (device.functions().query_srq)(self.as_ptr(), &mut attributes) };
        device.check("ibv_query_srq", returned).map(|()| attributes.srq_limit)
    }

    /// Posts receive WRs as one list.
    ///
    /// # Errors
    /// At the first that the provider refuses.
    #[inline(always)]
    pub fn post_receives(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        let (device, call) = (self.0.domain.device(), "ibv_post_srq_recv");
        let Some(function) = device.ops().post_srq_recv else {
            return Err(PostRefused { posted: 0, error: device.lacks(call) });
        };
        let (count, first) = (requests.len(), link(requests));
        // SAFETY: as in `QueuePair::post_sends`.
        post::<ReceiveRequest<'_>>(device, call, first, count, |bad| unsafe {
            function(self.as_ptr(), first, bad)
        })
    }
}

impl Drop for Receives {
    fn drop(&mut self) {
        let device = self.domain.device();
        // SAFETY: it was created by `ibv_create_srq`, its queue pairs were destroyed, its events are acknowledged, and
        // it is destroyed once.
        let returned: c_int = unsafe { (device.functions().destroy_srq)(self.srq.as_ptr()) };
        device.warn("ibv_destroy_srq", returned);
    }
}
