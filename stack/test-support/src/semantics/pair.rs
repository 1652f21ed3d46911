//! Two contexts, and the objects that a case has created on them.

use std::error::Error;
use std::time::{Duration, Instant};

use ferroce::*;

use super::Outcome;

/// The time limit for the kernel to resolve a next hop.
const RESOLVE: Duration = Duration::from_secs(20);
/// The time without an event after which none is expected.
const SILENCE: Duration = Duration::from_millis(40);

/// The VLAN of the cases that use one.
pub const VLAN: u16 = 7;

/// One context, and the objects on it.
pub struct End {
    /// The context.
    pub context: Context,
    /// The protection domain of everything.
    pub pd: Pd,
    /// The completion queue of all work.
    pub cq: Cq,
    sgid_index: usize,
    clock: Clock,
    qps: Vec<Qp>,
    mrs: Vec<Mr>,
    mws: Vec<Mw>,
    srqs: Vec<Srq>,
    cqs: Vec<Cq>,
    ahs: Vec<Ah>,
}

/// Two contexts that can communicate.
pub struct Pair {
    /// The requester and the responder.
    pub ends: [End; 2],
    pub(super) patience: Duration,
    /// The GID indices of IPv6 addresses by which they reach each other.
    ipv6: Option<[usize; 2]>,
    /// The same for addresses in [`VLAN`].
    vlan: Option<[usize; 2]>,
}

/// The local right of regions, and all remote ones that every backend supports.
pub(super) const ALL: [Access; 4] =
    [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];

impl End {
    fn new(mut context: Context, sgid_index: usize) -> Result<End, ferroce::Error> {
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(256)?;
        let (clock, none) = (Clock::start(), Vec::new);
        Ok(End {
            context,
            pd,
            cq,
            sgid_index,
            clock,
            qps: Vec::new(),
            mrs: none(),
            mws: Vec::new(),
            srqs: Vec::new(),
            cqs: Vec::new(),
            ahs: Vec::new(),
        })
    }

    /// The GID of its packets.
    pub fn gid(&self) -> Gid {
        self.context.port().gids[self.sgid_index].gid
    }

    /// The index of that GID.
    pub fn sgid_index(&self) -> usize {
        self.sgid_index
    }

    /// A region of `len` bytes: 1, 2, 3, ...
    pub fn region(&mut self, len: usize, access: &[Access]) -> Result<Mr, Box<dyn Error>> {
        let bytes: Vec<u8> = (1..=len).map(|n| n as u8).collect();
        self.region_of(&bytes, access)
    }

    /// A zeroed region.
    pub fn zeros(&mut self, len: usize, access: &[Access]) -> Result<Mr, Box<dyn Error>> {
        self.region_of(&vec![0; len], access)
    }

    fn region_of(&mut self, bytes: &[u8], access: &[Access]) -> Result<Mr, Box<dyn Error>> {
        let access = access.iter().fold(Access::NONE, |all, one| all | *one);
        let mr = self.context.register(self.pd, Memory::copy_of(bytes)?, access)?;
        self.mrs.push(mr);
        Ok(mr)
    }

    /// The bytes of a region.
    pub fn bytes(&self, mr: Mr, range: std::ops::Range<u64>) -> Result<Vec<u8>, ferroce::Error> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.context.read(mr, range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// A queue pair, with changes to the usual configuration.
    pub fn qp(
        &mut self,
        qp_type: QpType,
        change: impl FnOnce(QpConfig) -> QpConfig,
    ) -> Result<Qp, ferroce::Error> {
        let config = QpConfig::new(qp_type, self.pd, self.cq).max_send_wr(16).max_recv_wr(16);
        let qp = self.context.create_qp(&change(config))?;
        self.qps.push(qp);
        Ok(qp)
    }

    /// A shared receive queue for 16.
    pub fn srq(&mut self) -> Result<Srq, ferroce::Error> {
        let srq = self.context.create_srq(&SrqConfig::new(self.pd).max_wr(16))?;
        self.srqs.push(srq);
        Ok(srq)
    }

    /// A memory window.
    pub fn window(&mut self) -> Result<Mw, ferroce::Error> {
        let mw = self.context.alloc_mw(self.pd)?;
        self.mws.push(mw);
        Ok(mw)
    }

    /// One more completion queue.
    pub fn cq(&mut self, capacity: u32) -> Result<Cq, ferroce::Error> {
        let cq = self.context.create_cq(capacity)?;
        self.cqs.push(cq);
        Ok(cq)
    }

    /// Registers a completion queue that was created otherwise for cleanup.
    pub fn keep_cq(&mut self, cq: Cq) {
        self.cqs.push(cq);
    }

    /// An address handle.
    pub fn ah(&mut self, address: &AddressVector) -> Result<Ah, ferroce::Error> {
        let ah = self.context.create_ah_blocking(self.pd, address, RESOLVE)?;
        self.ahs.push(ah);
        Ok(ah)
    }

    /// The case destroys the queue pair itself.
    pub fn release_qp(&mut self, qp: Qp) {
        self.qps.retain(|own| *own != qp);
    }

    /// The case deregisters the region itself.
    pub fn release_mr(&mut self, mr: Mr) {
        self.mrs.retain(|own| *own != mr);
    }

    /// Posts a signaled send of these bytes of a region.
    pub fn send(&mut self, qp: Qp, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<(), ferroce::Error> {
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(sges), flags: SendFlags::SIGNALED };
        self.context.post_send(qp, &wr)
    }

    /// Posts a receive.
    pub fn receive(&mut self, qp: Qp, wr_id: u64, sges: &[Sge]) -> Result<(), ferroce::Error> {
        self.context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges })
    }

    /// Polls once.
    ///
    /// # Errors
    /// Those of the poll.
    pub fn poll(&mut self) -> Result<(), ferroce::Error> {
        let now = self.clock.catch_up_with(self.context.now());
        self.context.poll(now).map(drop)
    }

    fn clear(&mut self) -> Result<(), ferroce::Error> {
        let context = &mut self.context;
        self.qps.drain(..).try_for_each(|qp| context.destroy_qp(qp))?;
        self.ahs.drain(..).try_for_each(|ah| context.destroy_ah(ah))?;
        self.mws.drain(..).try_for_each(|mw| context.dealloc_mw(mw))?;
        self.srqs.drain(..).try_for_each(|srq| context.destroy_srq(srq))?;
        self.mrs.drain(..).try_for_each(|mr| context.deregister(mr).map(drop))?;
        self.cqs.drain(..).try_for_each(|cq| context.destroy_cq(cq))?;
        while context.poll_cq(self.cq)?.is_some() || context.next_event().is_some() {}
        while context.next_cm_event().is_some() {}
        Ok(())
    }

    fn abandon(&mut self) {
        let _: Result<(), _> = self.qps.drain(..).try_for_each(|qp| self.context.destroy_qp(qp));
        let _ = self.clear();
    }
}

impl Pair {
    /// From contexts that can communicate by the first addresses of one kind that both have without a VLAN.
    ///
    /// # Errors
    /// They have none, or no free objects.
    pub fn new([a, b]: [Context; 2]) -> Result<Pair, Box<dyn Error>> {
        let fits = |entry: &&GidEntry| !entry.roce_v1 && !entry.gid.is_link_local();
        let alike = |entry: &GidEntry, vlan: Option<u16>| {
            let is_alike =
                |other: &GidEntry| other.vlan == vlan && other.gid.is_ipv6() == entry.gid.is_ipv6();
            b.port().gids.iter().position(|other| fits(&other) && is_alike(other))
        };
        let rows = |vlan: Option<u16>| {
            let own = a.port().gids.iter().enumerate().filter(|(_, entry)| fits(entry) && entry.vlan == vlan);
            own.filter_map(|(index, entry)| Some([index, alike(entry, vlan)?])).collect::<Vec<_>>()
        };
        let (plain, vlan) = (rows(None), rows(Some(VLAN)).first().copied());
        let [here, there] = *plain.first().ok_or("the two have no addresses of one kind")?;
        let ipv6 = plain.into_iter().find(|[index, _]| a.port().gids[*index].gid.is_ipv6());
        Ok(Pair { ends: [End::new(a, here)?, End::new(b, there)?], patience: super::LONG, ipv6, vlan })
    }

    /// Whether they can communicate by IPv6.
    pub fn has_ipv6(&self) -> bool {
        self.ipv6.is_some()
    }

    /// Whether they can communicate in [`VLAN`].
    pub fn has_vlan(&self) -> bool {
        self.vlan.is_some()
    }

    /// Runs a case from IPv6 addresses to IPv6 addresses.
    pub(super) fn over_ipv6(&mut self, case: impl FnOnce(&mut Pair) -> Outcome) -> Outcome {
        self.over(self.ipv6.ok_or("the two have no IPv6 addresses")?, case)
    }

    /// Runs a case between addresses in a VLAN.
    pub(super) fn over_vlan(&mut self, case: impl FnOnce(&mut Pair) -> Outcome) -> Outcome {
        self.over(self.vlan.ok_or("the two have no VLAN")?, case)
    }

    fn over(&mut self, rows: [usize; 2], case: impl FnOnce(&mut Pair) -> Outcome) -> Outcome {
        let own = self.ends.each_ref().map(|end| end.sgid_index);
        let choose = |ends: &mut [End; 2], rows: [usize; 2]| {
            ends.iter_mut().zip(rows).for_each(|(end, row)| end.sgid_index = row);
        };
        choose(&mut self.ends, rows);
        let outcome = case(self);
        choose(&mut self.ends, own);
        outcome
    }

    /// Polls both once.
    ///
    /// # Errors
    /// Those of either poll.
    pub fn turn(&mut self) -> Result<(), ferroce::Error> {
        self.ends.iter_mut().try_for_each(End::poll)
    }

    /// Polls until there is a result.
    ///
    /// # Errors
    /// There is no result for a long time.
    pub fn until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Pair) -> Result<Option<T>, ferroce::Error>,
    ) -> Result<T, Box<dyn Error>> {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            if start.elapsed() > self.patience {
                return Err(format!("no {what} for {:?}", self.patience).into());
            }
            self.turn()?;
        }
    }

    /// The next completion of an end.
    ///
    /// # Errors
    /// There is none.
    pub fn completion(&mut self, end: usize) -> Result<WorkCompletion, Box<dyn Error>> {
        let what = format!("completion at end {end}");
        self.until(&what, |pair| {
            let End { context, cq, .. } = &mut pair.ends[end];
            context.poll_cq(*cq)
        })
    }

    /// The next completion of an end is this one.
    ///
    /// # Errors
    /// It is another one, or there is none.
    pub fn completes(
        &mut self,
        end: usize,
        wr_id: u64,
        status: WcStatus,
    ) -> Result<WorkCompletion, Box<dyn Error>> {
        let found = self.completion(end)?;
        if (found.wr_id, found.status) != (wr_id, status) {
            let (id, other) = (found.wr_id, found.status);
            return Err(
                format!("end {end}: {other:?} of {id} where {status:?} of {wr_id} was expected").into()
            );
        }
        Ok(found)
    }

    /// The next event of an object at an end.
    ///
    /// # Errors
    /// There is none.
    pub fn event(&mut self, end: usize, of: impl Into<EventSource>) -> Result<Event, Box<dyn Error>> {
        let (what, of) = (format!("event at end {end}"), of.into());
        self.until(&what, |pair| pair.ends[end].context.next_event_of(of))
    }

    /// No completion arrives for a while.
    ///
    /// # Errors
    /// One arrives.
    pub fn silence(&mut self) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < SILENCE {
            self.turn()?;
            for (number, End { context, cq, .. }) in self.ends.iter_mut().enumerate() {
                if let Some(wc) = context.poll_cq(*cq)? {
                    return Err(format!("end {number}: {wc:?} where nothing was expected").into());
                }
            }
        }
        Ok(())
    }

    /// Connected queue pairs, with changes to the usual configuration.
    ///
    /// # Errors
    /// Those of the verbs.
    pub fn connected(
        &mut self,
        qp_type: QpType,
        change: impl Fn(QpConfig) -> QpConfig,
    ) -> Result<[Qp; 2], Box<dyn Error>> {
        let [a, b] = &mut self.ends;
        let qps = [a.qp(qp_type, &change)?, b.qp(qp_type, &change)?];
        self.connect(qps)?;
        Ok(qps)
    }

    /// Connects queue pairs in RESET or INIT.
    ///
    /// # Errors
    /// Those of the verbs.
    pub fn connect(&mut self, qps: [Qp; 2]) -> Outcome {
        let [a, b] = &mut self.ends;
        let here = a.context.endpoint(qps[0], a.sgid_index)?;
        let there = b.context.endpoint(qps[1], b.sgid_index)?;
        a.context.handshake(qps[0], &here, &there)?;
        b.context.handshake(qps[1], &there, &here)?;
        Ok(())
    }

    /// Destroys the objects that the case has created.
    ///
    /// # Errors
    /// An object can't be destroyed.
    pub fn clear(&mut self) -> Outcome {
        Ok(self.ends.iter_mut().try_for_each(End::clear)?)
    }

    /// The same, after a failed case.
    pub fn abandon(&mut self) {
        self.ends.iter_mut().for_each(End::abandon);
    }
}
