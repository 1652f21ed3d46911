//! Two ends on the two devices of a stub.

use std::fmt::{self, Write};
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ferroce_driver::rnic::{
    Address, Completion, CompletionChannel, CompletionQueue, Device, Piece, ProtectionDomain, QueuePair,
    QueuePairChange, QueuePairConfig, ReceiveRequest, Region, Remote, SendData, SendOperation, SendRequest,
    SharedReceiveQueue, Verbs, access,
};
use ferroce_driver::{Error, Memory};
use ferroce_driver_test_support::rnic_stub::Stub;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

pub(crate) const RC: u32 = 2;
pub(crate) const UC: u32 = 3;
pub(crate) const UD: u32 = 4;

/// `enum ibv_qp_state`
pub(crate) const RESET: u32 = 0;
pub(crate) const INIT: u32 = 1;
pub(crate) const RTR: u32 = 2;
pub(crate) const RTS: u32 = 3;
pub(crate) const SQD: u32 = 4;
pub(crate) const SQE: u32 = 5;
pub(crate) const ERR: u32 = 6;

/// All rights except for binding.
pub(crate) const REMOTE: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// The address of the regions' memory for work requests.
pub(crate) const IOVA: u64 = 0x10_0000;
pub(crate) const LEN: usize = 8192;

/// A queue pair with all objects that it needs.
pub(crate) struct End {
    pub(crate) qp: QueuePair,
    pub(crate) srq: Option<SharedReceiveQueue>,
    pub(crate) region: Region,
    pub(crate) sends: CompletionQueue,
    pub(crate) receives: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    pub(crate) domain: ProtectionDomain,
    pub(crate) device: Device,
    pub(crate) gid: [u8; 16],
}

/// The properties of an end.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) kind: u32,
    pub(crate) capacity: u32,
    pub(crate) with_srq: bool,
    pub(crate) signal_all: bool,
    pub(crate) access: u32,
}

impl Kind {
    pub(crate) fn of(kind: u32) -> Kind {
        let access = REMOTE | access::MW_BIND;
        Kind { kind, capacity: 16, with_srq: false, signal_all: false, access }
    }
}

pub(crate) fn ipv4(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]
}

pub(crate) fn address(gid: [u8; 16]) -> Address {
    Address {
        gid,
        sgid_index: 1,
        flow_label: 0xabcde,
        hop_limit: 64,
        traffic_class: 0x68,
        service_level: 3,
        port: 1,
    }
}

impl End {
    /// On device `stub0` or `stub1`, in state RESET.
    pub(crate) fn new(stub: &Stub, number: u8, kind: Kind) -> End {
        let device = Verbs::load_from(stub.path()).unwrap().open(&format!("stub{number}")).unwrap();
        device.set_nonblocking().unwrap();
        let domain = ProtectionDomain::new(&device).unwrap();
        let channel = CompletionChannel::new(&device).unwrap();
        let sends = CompletionQueue::new(64, &channel, 100 + usize::from(number)).unwrap();
        let receives = CompletionQueue::new(64, &channel, 200 + usize::from(number)).unwrap();
        let srq = kind.with_srq.then(|| SharedReceiveQueue::new(&domain, kind.capacity, 4).unwrap());
        let config = config(kind, &sends, &receives, srq.as_ref());
        let qp = QueuePair::new(&domain, &config).unwrap();
        let memory = Memory::shared(LEN).unwrap();
        let region = Region::new(&domain, memory, kind.access, IOVA).unwrap();
        End { qp, srq, region, sends, receives, channel, domain, device, gid: ipv4(2 + number) }
    }

    /// `len` bytes at an offset of the region.
    pub(crate) fn piece(&self, offset: u64, length: u32) -> Piece {
        self.region.piece(offset, length)
    }

    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { addr: IOVA + offset, rkey: self.region.rkey() }
    }

    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.read(offset, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn receive(&self, wr_id: u64, pieces: &[Piece]) {
        let requests = &mut [ReceiveRequest::new(wr_id, pieces)];
        match &self.srq {
            Some(srq) => srq.post_receives(requests).unwrap(),
            None => self.qp.post_receives(requests).unwrap(),
        }
    }

    /// Signaled, with SGEs of the region. Returns the identifier.
    pub(crate) fn post(&self, operation: SendOperation<'_>, pieces: &[Piece]) -> u64 {
        self.post_flagged(operation, SendData::Pieces(pieces), SendRequest::SIGNALED)
    }

    pub(crate) fn post_flagged(&self, operation: SendOperation<'_>, data: SendData<'_>, flags: u32) -> u64 {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let wr_id = NEXT.fetch_add(1, Ordering::Relaxed) as u64;
        self.qp.post_send(&mut SendRequest::new(wr_id, operation, data, flags)).unwrap();
        wr_id
    }

    /// All completions of sends.
    pub(crate) fn sent(&self) -> Vec<Completion> {
        polled(&self.sends)
    }

    /// All completions of receives.
    pub(crate) fn received(&self) -> Vec<Completion> {
        polled(&self.receives)
    }

    /// Executes one send, and returns its completion.
    pub(crate) fn carry_out(&self, operation: SendOperation<'_>, pieces: &[Piece]) -> Completion {
        let wr_id = self.post(operation, pieces);
        let sent = self.sent();
        assert_eq!(sent.len(), 1, "{operation:?}: {sent:?}");
        assert_eq!((sent[0].wr_id, sent[0].qp_num), (wr_id, self.qp.qpn()), "{operation:?}");
        sent[0]
    }

    /// All asynchronous events.
    pub(crate) fn events(&self) -> Vec<(u32, u64)> {
        let next = || self.device.event().unwrap().map(|event| (event.kind, event.element));
        std::iter::from_fn(next).collect()
    }

    pub(crate) fn state(&self) -> u32 {
        self.qp.query().unwrap().state
    }

    pub(crate) fn move_to(&self, state: u32) {
        self.qp.modify(&QueuePairChange { state: Some(state), ..QueuePairChange::default() }).unwrap();
    }

    /// To INIT.
    pub(crate) fn init(&self, kind: u32) {
        let (qkey, access) = if kind == UD { (Some(0x1234), None) } else { (None, Some(REMOTE)) };
        let (pkey_index, port) = (Some(0), Some(1));
        let change = QueuePairChange {
            state: Some(INIT),
            access,
            qkey,
            pkey_index,
            port,
            ..QueuePairChange::default()
        };
        self.qp.modify(&change).unwrap();
    }

    /// From INIT to RTR, for a peer.
    pub(crate) fn receives_from(&self, kind: u32, gid: [u8; 16], qpn: u32) {
        let mut change = QueuePairChange { state: Some(RTR), ..QueuePairChange::default() };
        if kind != UD {
            change.address = Some(address(gid));
            (change.path_mtu, change.dest_qpn, change.rq_psn) = (Some(3), Some(qpn), Some(7));
        }
        if kind == RC {
            (change.max_dest_rd_atomic, change.min_rnr_timer) = (Some(4), Some(12));
        }
        self.qp.modify(&change).unwrap();
    }

    /// From RTR to RTS.
    pub(crate) fn sends(&self, kind: u32, rnr_retry: u8) {
        let mut change = QueuePairChange { state: Some(RTS), sq_psn: Some(9), ..QueuePairChange::default() };
        if kind == RC {
            (change.timeout, change.retry_count) = (Some(14), Some(7));
            (change.rnr_retry, change.max_rd_atomic) = (Some(rnr_retry), Some(4));
        }
        self.qp.modify(&change).unwrap();
    }

    pub(crate) fn connect(&self, kind: u32, peer: &End) {
        self.init(kind);
        self.receives_from(kind, peer.gid, peer.qp.qpn());
        self.sends(kind, 7);
    }
}

pub(crate) fn config<'a>(
    kind: Kind,
    sends: &'a CompletionQueue,
    receives: &'a CompletionQueue,
    srq: Option<&'a SharedReceiveQueue>,
) -> QueuePairConfig<'a> {
    QueuePairConfig {
        kind: kind.kind,
        send_cq: sends,
        recv_cq: receives,
        srq,
        max_send_wr: kind.capacity,
        max_recv_wr: kind.capacity,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 64,
        signal_all: kind.signal_all,
    }
}

pub(crate) fn polled(queue: &CompletionQueue) -> Vec<Completion> {
    let mut all = Vec::new();
    loop {
        let mut room = [Completion::EMPTY; 5];
        let count = queue.poll(&mut room).unwrap();
        all.extend_from_slice(&room[..count]);
        if count == 0 {
            return all;
        }
    }
}

/// Two ends that are connected to each other.
pub(crate) fn pair(stub: &Stub, kind: Kind) -> (End, End) {
    let (a, b) = (End::new(stub, 0, kind), End::new(stub, 1, kind));
    a.connect(kind.kind, &b);
    b.connect(kind.kind, &a);
    (a, b)
}

pub(crate) fn good() -> Option<Stub> {
    Stub::build(&["NOTHING_WRONG"])
}

/// The error number of a failed call.
pub(crate) fn errno(error: &Error) -> i32 {
    match error {
        Error::Verbs { source, .. } => source.raw_os_error().unwrap_or(0),
        other => panic!("{other}"),
    }
}

/// The warnings logged meanwhile.
pub(crate) fn warnings(of: impl FnOnce()) -> Vec<String> {
    let heard = Heard(Arc::default());
    tracing::subscriber::with_default(heard.clone(), of);
    let mut heard = heard.0.lock().unwrap();
    mem::take(&mut *heard)
}

#[derive(Clone)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Subscriber for Heard {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if *event.metadata().level() == Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}
