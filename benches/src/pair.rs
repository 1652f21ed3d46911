//! Two contexts with connected queue pairs, over any drivers.

use std::sync::Arc;

use ferroce::driver::gpu::Device as Gpu;
use ferroce::*;

/// One end: a context with one CQ, one region of memory, and queue pairs.
pub struct End {
    /// The context.
    pub context: Context,
    /// The CQ of all queue pairs.
    pub cq: Cq,
    /// The queue pairs; each is connected to the one with the same index at the other end.
    pub qps: Vec<Qp>,
    /// The memory.
    pub mr: Mr,
    /// The memory's address and rkey for the peer.
    pub remote: RemoteAddress,
    /// Its IPv4 address.
    pub gid: Gid,
    sgid_index: usize,
}

/// The configuration of both ends.
pub struct Setup {
    /// For each context; `max_qps` is taken from `qps`.
    pub config: Config,
    /// Connected queue pairs.
    pub qps: u32,
    /// For each queue pair.
    pub qp_config: fn(Pd, Cq) -> QpConfig,
    /// Capacity of the CQ.
    pub cqes: u32,
    /// Bytes of memory at each end.
    pub memory: usize,
    /// The GPU that has the memory; without one it is host memory.
    pub gpu: Option<Arc<dyn Gpu>>,
    /// Of the connections.
    pub path_mtu: PathMtu,
    /// Outstanding READs and atomics, in each direction.
    pub max_rd_atomic: u8,
    /// ACK timeout, 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// Whether selective repeat is used.
    pub selective_repeat: bool,
}

impl Default for Setup {
    /// One queue pair with an application's typical attributes, path MTU 4096, 64 KiB.
    fn default() -> Setup {
        Setup {
            config: Config::default(),
            qps: 1,
            qp_config: QpConfig::rc,
            cqes: 4096,
            memory: 1 << 16,
            gpu: None,
            path_mtu: PathMtu::Mtu4096,
            max_rd_atomic: 16,
            timeout: 14,
            selective_repeat: false,
        }
    }
}

/// Both ends, polled in turns on one core.
pub struct Pair {
    /// The requester and the responder.
    pub ends: [End; 2],
    /// The time of the last poll.
    pub now: Nanos,
    /// The source of time; without it, time advances by 1 µs per turn.
    clock: Option<Clock>,
    /// WRITEs posted and completed, by queue pair.
    progress: Vec<(u64, u64)>,
}

/// A stream of WRITEs.
#[derive(Clone, Copy)]
pub struct Writes<'a> {
    /// The indices of the writing queue pairs.
    pub active: &'a [usize],
    /// Bytes of each WRITE.
    pub length: u32,
    /// Outstanding WRITEs of each queue pair, at least 8.
    pub depth: u64,
    /// WRITEs in total, a multiple of the number of `active` ones.
    pub count: u64,
}

impl Pair {
    /// Opens both ends and connects all their queue pairs, ready to send.
    ///
    /// # Errors
    /// A verb fails.
    pub fn new<D: PacketDriver + 'static>(drivers: [D; 2], setup: &Setup) -> Result<Pair, Error> {
        let [a, b] = drivers;
        let mut ends = [End::open(Box::new(a), setup)?, End::open(Box::new(b), setup)?];
        for n in 0..setup.qps as usize {
            let [a, b] = &mut ends;
            let qpns = [a.context.query_qp(a.qps[n])?.qpn, b.context.query_qp(b.qps[n])?.qpn];
            let gids = [a.gid, b.gid];
            for (end, peer) in [(a, 1), (b, 0)] {
                end.connect(n, AddressVector::new(gids[peer], end.sgid_index), qpns[peer], setup)?;
            }
        }
        let progress = vec![(0, 0); setup.qps as usize];
        Ok(Pair { ends, now: Nanos::ZERO, clock: None, progress })
    }

    /// Uses the machine's time from now on, as required by ports of the kernel, which has its own time.
    pub fn in_real_time(self) -> Pair {
        Pair { clock: Some(Clock::start()), ..self }
    }

    /// Begins the next turn; returns its time.
    pub fn tick(&mut self) -> Nanos {
        self.now = self.clock.as_mut().map_or(Nanos(self.now.0 + 1000), |clock| clock.now());
        self.now
    }

    /// Executes `writes`.
    ///
    /// # Errors
    /// A verb fails.
    ///
    /// # Panics
    /// A WRITE fails: the queue pairs are connected and no packet is lost permanently.
    pub fn write(&mut self, writes: &Writes<'_>) -> Result<(), Error> {
        let Writes { active, length, depth, count } = *writes;
        let share = count / active.len() as u64;
        let data = [Sge { mr: self.ends[0].mr, offset: 0, length }];
        self.progress.fill((0, 0));
        let mut unfinished = active.len();
        while unfinished > 0 {
            let now = self.tick();
            let Pair { ends: [requester, responder], progress, .. } = self;
            for qp in active {
                let (posted, done) = &mut progress[*qp];
                while *posted < share && *posted - *done < depth {
                    *posted += 1;
                    // One completion for eight, as in optimized applications.
                    let signaled = *posted % 8 == 0 || *posted == share;
                    let wr = SendWorkRequest {
                        wr_id: (*qp as u64) << 32 | *posted,
                        op: SendOp::Write(responder.remote),
                        data: Data::Sges(&data),
                        flags: SendFlags::default().signaled(signaled),
                    };
                    requester.context.post_send(requester.qps[*qp], &wr)?;
                }
            }
            requester.context.poll(now)?;
            responder.context.poll(now)?;
            while let Some(wc) = requester.context.poll_cq(requester.cq)? {
                assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
                let number = wc.wr_id & u64::from(u32::MAX);
                progress[(wc.wr_id >> 32) as usize].1 = number;
                unfinished -= usize::from(number == share);
            }
        }
        Ok(())
    }
}

impl End {
    fn open(driver: Box<dyn PacketDriver>, setup: &Setup) -> Result<End, Error> {
        let config = setup.config.clone().max_qps(setup.qps);
        let mut context = Context::open(driver, &config)?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(setup.cqes)?;
        let config = (setup.qp_config)(pd, cq);
        let qps = (0..setup.qps).map(|_| context.create_qp(&config)).collect::<Result<_, _>>()?;
        let (memory, access) = match &setup.gpu {
            Some(gpu) => (gpu.allocate(setup.memory)?, access(true)),
            None => (Memory::zeroed(setup.memory)?, access(false)),
        };
        let mr = context.register(pd, memory, access)?;
        let RemoteMemory { addr, rkey, .. } = context.remote(mr)?;
        let gids = &context.port().gids;
        let sgid_index = gids.iter().position(|entry| !entry.gid.is_ipv6()).unwrap_or_default();
        let gid = gids[sgid_index].gid;
        Ok(End { context, cq, qps, mr, remote: RemoteAddress { addr, rkey }, gid, sgid_index })
    }

    fn connect(&mut self, n: usize, peer: AddressVector, qpn: Qpn, setup: &Setup) -> Result<(), Error> {
        let psn = Psn::new(0);
        let receive = ReadyToReceive::new(peer, qpn, psn)
            .path_mtu(setup.path_mtu)
            .max_dest_rd_atomic(setup.max_rd_atomic)
            .selective_repeat(setup.selective_repeat);
        let send = ReadyToSend::new(psn).max_rd_atomic(setup.max_rd_atomic).timeout(setup.timeout);
        let access = access(setup.gpu.is_some());
        self.context.modify_qp(self.qps[n], Transition::Init { access })?;
        self.context.modify_qp(self.qps[n], Transition::ReadyToReceive(receive))?;
        self.context.modify_qp(self.qps[n], Transition::ReadyToSend(send))
    }
}

/// All access rights that such memory allows.
fn access(is_gpus: bool) -> Access {
    let plain = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    if is_gpus { plain } else { plain | Access::REMOTE_ATOMIC }
}
