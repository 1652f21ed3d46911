//! The queue pairs of a measurement, their memory, and the work requests posted to them.

use ferroce::{
    Access, AddressVector, Data, Destination, Memory, PathMtu, Psn, QpConfig, QpType, Qpn, RKey,
    ReceiveWorkRequest, RemoteAddress, RemoteMemory, SendFlags, SendOp, SendWorkRequest, Sge, Transition,
    UnreliablePath,
};

use super::{Beside, QpLane, RECEIVED, Regions, SENT, SENTINEL, Session};
use crate::endpoint::{Endpoint, Path};
use crate::failure::{Failure, OrFail};
use crate::perf::pattern::Origin;
use crate::perf::plan::{AtomicType, Layout, Operation, Plan, Service};

/// The Q_Key of both ends' datagrams, as in perftest.
const QKEY: u32 = 0x1111_1111;

impl<C: Beside> Session<C> {
    /// Registers memory with these layouts (`counters` is that of a server's counters of atomics) and creates the queue
    /// pairs. Returns the memory that the other end may access.
    pub(in crate::perf) fn create(
        &mut self,
        layout: Layout,
        counters: Layout,
    ) -> Result<RemoteMemory, Failure> {
        let Plan { operation, qps, tx_depth, rx_depth, .. } = self.plan;
        self.plan.check_size(layout.size)?;
        self.end.replace_cq(qps * (tx_depth.next_power_of_two() + rx_depth.next_power_of_two()))?;
        let regions = self.register(layout, counters)?;
        self.regions = Some(regions);
        let now = self.end.now();
        self.progress.restart(now, self.traffic());
        let qp_type = match self.plan.service {
            Service::Rc => QpType::Rc,
            Service::Uc => QpType::Uc,
            Service::Ud => QpType::Ud,
        };
        let config = QpConfig::new(qp_type, self.end.pd, self.end.cq)
            .max_send_wr(tx_depth)
            .max_recv_wr(rx_depth)
            .max_send_sge(1)
            .max_recv_sge(1);
        for lane in 0..u64::from(qps) {
            let qp = self.end.context.create_qp(&config)?;
            let init = match self.plan.service {
                Service::Rc | Service::Uc => Transition::Init { access: self.exposed_access() },
                Service::Ud => Transition::InitDatagram { qkey: QKEY },
            };
            self.end.context.modify_qp(qp, init)?;
            let qpn = self.end.context.query_qp(qp)?.qpn;
            if operation != Operation::Send {
                let wr_id = SENTINEL << 32 | lane;
                self.end.context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] })?;
            }
            let psn = self.end.context.random_psn();
            self.lanes.push(QpLane {
                qp,
                qpn,
                psn,
                remote: RemoteAddress { addr: 0, rkey: RKey::new(0) },
                to: None,
                posted: 0,
                completed: 0,
                expected: 0,
                receives: 0,
                received: 0,
                counted: 0,
            });
        }
        let exposed = if operation == Operation::Read { regions.source } else { regions.sink };
        Ok(self.end.context.remote(exposed)?)
    }

    /// Connects a queue pair to one of the other end, whose memory is at `remote`.
    pub(in crate::perf) fn connect_lane(
        &mut self,
        index: usize,
        path: &Path,
        remote: RemoteAddress,
        peer: (Qpn, Psn),
    ) -> Result<(), Failure> {
        let lane = &mut self.lanes[index];
        lane.remote = remote;
        let (qp, sq_psn, (dest_qpn, rq_psn)) = (lane.qp, lane.psn, peer);
        self.end.peer = Some(path.address.gid);
        let context = &mut self.end.context;
        match self.plan.service {
            Service::Rc => return self.end.connect(qp, path, sq_psn, peer),
            Service::Uc => {
                let path = UnreliablePath::new(path.address, dest_qpn, rq_psn).path_mtu(path.mtu);
                context.modify_qp(qp, Transition::ReadyToReceiveUnreliable(path))?;
            }
            Service::Ud => {
                context.modify_qp(qp, Transition::ReadyToReceiveDatagrams)?;
                let ah = context.create_ah(self.end.pd, &path.address)?;
                lane.to = Some(Destination { ah, qpn: dest_qpn, qkey: QKEY });
            }
        }
        Ok(context.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn })?)
    }

    /// The path of the queue pairs to the other end.
    pub(in crate::perf) fn path(&self, address: AddressVector, mtu: PathMtu) -> Path {
        Path {
            address,
            mtu,
            timeout: self.plan.timeout,
            rd_atomic: self.plan.outstanding,
            selective_repeat: self.plan.selective_repeat,
        }
    }

    /// Destroys the queue pairs and frees the memory.
    pub(in crate::perf) fn close(&mut self) -> Result<(), Failure> {
        for lane in self.lanes.drain(..) {
            self.end.context.destroy_qp(lane.qp)?;
            if let Some(to) = lane.to {
                self.end.context.destroy_ah(to.ah)?;
            }
        }
        if let Some(Regions { source, sink, .. }) = self.regions.take() {
            self.end.context.deregister(source)?;
            self.end.context.deregister(sink)?;
        }
        Ok(())
    }

    /// Resets the counters, and posts receive WRs for `messages` on each queue pair.
    pub(in crate::perf) fn begin(&mut self, messages: &[u64]) -> Result<(), Failure> {
        let receives = self.plan.operation == Operation::Send
            && (self.role == Origin::Server || self.plan.goes_both_ways());
        self.over = false;
        self.earlier = self.all_requests();
        self.quiet = self.end.now();
        for (lane, count) in self.lanes.iter_mut().zip(messages) {
            (lane.posted, lane.completed, lane.receives, lane.received) = (0, 0, 0, 0);
            lane.expected = if receives { *count } else { 0 };
        }
        (0..self.lanes.len()).try_for_each(|lane| self.post_receives(lane))
    }

    /// Posts the next operation of a lane.
    pub(in crate::perf) fn post(&mut self, index: usize) -> Result<(), Failure> {
        let Regions { source, source_layout, sink, sink_layout } = self.regions()?;
        let QpLane { qp, remote, to, posted: message, counted, .. } = self.lanes[index];
        let at = |offset: u64| RemoteAddress { addr: remote.addr.wrapping_add(offset), ..remote };
        // For remote addresses, both ends use the same layout.
        let (from, into) = (source_layout.offset(index, message), sink_layout.offset(index, message));
        let (there, counter) = (at(source_layout.slot_offset(message)), at(0));
        let (op, mr, offset, length) = match self.plan.operation {
            Operation::Write => (SendOp::Write(there), source, from, source_layout.size),
            Operation::Read => (SendOp::Read(there), sink, into, sink_layout.size),
            Operation::Send => (to.map_or(SendOp::Send, SendOp::SendTo), source, from, source_layout.size),
            Operation::Atomic => {
                let value = counted + message;
                let op = match self.plan.atomic {
                    AtomicType::FetchAndAdd => SendOp::FetchAdd { remote: counter, add: 1 },
                    AtomicType::CmpAndSwap => {
                        SendOp::CompareSwap { remote: counter, compare: value, swap: value + 1 }
                    }
                };
                (op, sink, into, 8)
            }
        };
        if self.plan.doorbell() {
            let last = source_layout.range(index, message).end - 1;
            self.end.context.write(source, last as u64, &[doorbell(&source_layout, message)])?;
        }
        let data = Data::Sges(&[Sge { mr, offset, length }]);
        let wr = SendWorkRequest { wr_id: SENT << 32 | index as u64, op, data, flags: SendFlags::SIGNALED };
        self.end.context.post_send(qp, &wr)?;
        self.lanes[index].posted += 1;
        Ok(())
    }

    /// Sends a message of a latency test back if it has arrived, up to `total` in all.
    pub(in crate::perf) fn echo(&mut self, total: u64) -> Result<(), Failure> {
        let lane = self.lanes[0];
        let next = lane.posted;
        let arrived = match self.plan.operation {
            Operation::Write => next < total && self.rung(next)?,
            _ => lane.received > next,
        };
        if arrived && next - lane.completed < u64::from(self.plan.tx_depth) {
            self.post(0)?;
        }
        Ok(())
    }

    /// Sets the message size, up to that of the slots.
    pub(in crate::perf) fn resize(&mut self, size: u32) -> Result<(), Failure> {
        let mut regions = self.regions()?;
        regions.source_layout.size = size;
        regions.sink_layout.size = size;
        self.regions = Some(regions);
        Ok(())
    }

    /// Whether a message of a WRITE latency test has arrived.
    pub(in crate::perf) fn rung(&self, message: u64) -> Result<bool, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let last = sink_layout.range(0, message).end - 1;
        let mut bell = [0];
        self.end.context.read(sink, last as u64, &mut bell)?;
        Ok(bell[0] == doorbell(&sink_layout, message))
    }

    fn register(&mut self, layout: Layout, counters: Layout) -> Result<Regions, Failure> {
        let plan = &self.plan;
        let server = self.role == Origin::Server;
        let sends = match plan.operation {
            Operation::Write | Operation::Send => !server || plan.goes_both_ways(),
            Operation::Read => server || plan.goes_both_ways(),
            Operation::Atomic => false,
        };
        let takes = plan.operation == Operation::Atomic || !sends || plan.goes_both_ways();
        let sink_layout = if server && plan.operation == Operation::Atomic { counters } else { layout };
        let length = |used: bool, layout: Layout| if used { layout.region_len() } else { 8 };
        let memory = |length: u64| {
            let megabytes = length >> 20;
            let length = usize::try_from(length).map_err(|_| {
                Failure::usage(format!("{megabytes} MiB of memory: more than an address space"))
            })?;
            match &self.gpu {
                Some(gpu) => Ok(gpu.allocate(length)?),
                None => Memory::zeroed(length).or_fail(|| format!("{megabytes} MiB of memory")),
            }
        };
        let access = self.exposed_access() | Access::LOCAL_WRITE;
        let (source, sink) = (memory(length(sends, layout))?, memory(length(takes, sink_layout))?);
        let Endpoint { context, pd, .. } = &mut self.end;
        let source = context.register(*pd, source, access)?;
        let sink = context.register(*pd, sink, access)?;
        Ok(Regions { source, source_layout: layout, sink, sink_layout })
    }

    /// The other end's access rights.
    fn exposed_access(&self) -> Access {
        match self.plan.operation {
            Operation::Write => Access::REMOTE_WRITE,
            Operation::Read => Access::REMOTE_READ,
            Operation::Send => Access::NONE,
            Operation::Atomic => Access::REMOTE_ATOMIC,
        }
    }

    /// Keeps receive WRs posted: as many as are still expected and fit into the queue.
    pub(super) fn post_receives(&mut self, index: usize) -> Result<(), Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let depth = u64::from(self.plan.rx_depth);
        let length = sink_layout.size + self.plan.header();
        let lane = &mut self.lanes[index];
        while lane.receives < lane.expected && lane.receives - lane.received < depth {
            let sge = Sge { mr: sink, offset: sink_layout.offset(index, lane.receives), length };
            let wr = ReceiveWorkRequest { wr_id: RECEIVED << 32 | index as u64, sges: &[sge] };
            self.end.context.post_recv(lane.qp, &wr)?;
            lane.receives += 1;
        }
        Ok(())
    }
}

/// A value that differs between consecutive messages in a slot, and from cleared memory.
fn doorbell(layout: &Layout, message: u64) -> u8 {
    (message / layout.slots + 1) as u8
}
