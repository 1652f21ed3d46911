//! A pair of ends with device memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::driver::gpu::strict::{Strict, StrictDevice};
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::{End, Pair, Setup};

/// Both ends, each with a device and a region of its memory.
pub(crate) struct World {
    pub(crate) pair: Pair,
    pub(crate) devices: [Arc<StrictDevice>; 2],
    /// Device memory at each end, and as much host memory.
    pub(crate) device: [Mr; 2],
    pub(crate) host: [Mr; 2],
    /// The addresses for peers.
    pub(crate) remote_device: [RemoteMemory; 2],
    pub(crate) remote_host: [RemoteMemory; 2],
    /// Completions of each end that were not examined.
    completions: [VecDeque<WorkCompletion>; 2],
}

/// Rights of regions of devices.
pub(crate) fn rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

pub(crate) fn sge(mr: Mr, offset: u64, length: usize) -> Sge {
    Sge { mr, offset, length: length as u32 }
}

impl World {
    pub(crate) fn new(seed: u64, link: LinkConfig, setup: Setup, strict: &Strict, bytes: usize) -> World {
        let mut pair = Pair::new(seed, link, setup);
        let devices = [0, 1].map(|end| strict.clone().seed(seed + end).open().unwrap());
        let device = [0, 1].map(|end| {
            let memory = devices[end].allocate(bytes).unwrap();
            let pd = pair.ends[end].pd;
            pair.ends[end].context.register(pd, memory, rights()).unwrap()
        });
        let host = [0, 1].map(|end| {
            let pd = pair.ends[end].pd;
            pair.ends[end].context.register(pd, Memory::zeroed(bytes).unwrap(), rights()).unwrap()
        });
        let remote_device = [0, 1].map(|end| pair.ends[end].context.remote(device[end]).unwrap());
        let remote_host = [0, 1].map(|end| pair.ends[end].context.remote(host[end]).unwrap());
        World { pair, devices, device, host, remote_device, remote_host, completions: Default::default() }
    }

    /// As much memory of another device of an end.
    pub(crate) fn second_device(&mut self, end: usize) -> Mr {
        let bytes = self.pair.ends[end].context.remote(self.device[end]).unwrap().length as usize;
        let strict = Strict::default().seed(99).latest(Duration::from_micros(50));
        let memory = strict.open().unwrap().allocate(bytes).unwrap();
        let End { context, pd, .. } = &mut self.pair.ends[end];
        context.register(*pd, memory, rights()).unwrap()
    }

    /// Fills a region with unique random bytes.
    pub(crate) fn fill(&mut self, end: usize, mr: Mr, random: &mut Random) -> Vec<u8> {
        let length = self.pair.ends[end].context.remote(mr).unwrap().length as usize;
        let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
        self.pair.ends[end].context.write(mr, 0, &bytes).unwrap();
        bytes
    }

    pub(crate) fn read(&self, end: usize, mr: Mr, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pair.ends[end].context.read(mr, offset, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn post(&mut self, end: usize, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(sges), flags: SendFlags::SIGNALED };
        let qp = self.pair.ends[end].qp;
        self.pair.ends[end].context.post_send(qp, &wr).unwrap();
    }

    /// As [`post`](World::post), on one of several queue pairs.
    pub(crate) fn post_on(
        &mut self,
        end: usize,
        qp: usize,
        wr_id: u64,
        op: SendOp,
        sges: &[Sge],
        flags: SendFlags,
    ) {
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(sges), flags };
        let End { context, qps, .. } = &mut self.pair.ends[end];
        context.post_send(qps[qp], &wr).unwrap();
    }

    pub(crate) fn post_recv(&mut self, end: usize, wr_id: u64, sges: &[Sge]) {
        let qp = self.pair.ends[end].qp;
        self.pair.ends[end].context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges }).unwrap();
    }

    /// One step; `false` when there is no further event.
    pub(crate) fn step(&mut self) -> bool {
        let more = self.pair.step();
        for (end, taken) in self.pair.ends.iter_mut().zip(&mut self.completions) {
            while let Some(completion) = end.context.poll_cq(end.cq).unwrap() {
                taken.push_back(completion);
            }
        }
        more
    }

    /// The next completion of an end, within 10 s.
    pub(crate) fn completion(&mut self, end: usize) -> WorkCompletion {
        let limit = self.pair.now + Duration::from_secs(10);
        loop {
            if let Some(completion) = self.completions[end].pop_front() {
                return completion;
            }
            assert!(
                self.step() && self.pair.now < limit,
                "no completion at end {end}, at {:?}; {}",
                self.pair.now,
                self.counted()
            );
        }
    }

    /// All completions of an end within this time.
    pub(crate) fn completions_within(&mut self, end: usize, time: Duration) -> Vec<WorkCompletion> {
        let limit = self.pair.now + time;
        while self.step() && self.pair.now < limit {}
        self.completions[end].drain(..).collect()
    }

    /// The counters of both ends.
    pub(crate) fn counted(&self) -> String {
        let counted = |end: &End| -> Vec<String> {
            let counters = end.context.counters();
            counters.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect()
        };
        self.pair.ends.iter().map(|end| counted(end).join(", ")).collect::<Vec<_>>().join("; ")
    }

    /// As [`completion`](World::completion), which is a success.
    pub(crate) fn success(&mut self, end: usize, wr_id: u64) -> WorkCompletion {
        let completion = self.completion(end);
        assert_eq!((completion.wr_id, completion.status), (wr_id, WcStatus::Success), "{completion:?}");
        completion
    }

    /// A completion that has arrived already.
    pub(crate) fn come(&mut self, end: usize) -> Option<WorkCompletion> {
        self.completions[end].pop_front()
    }

    /// Runs until nothing moves any more.
    pub(crate) fn settle(&mut self) {
        let limit = self.pair.now + Duration::from_secs(100);
        while self.step() {
            assert!(self.pair.now < limit, "it never settles");
        }
    }

    /// Nothing is leaked: after queue pairs were destroyed and copies have ended, regions can be deregistered.
    pub(crate) fn end(mut self) {
        self.settle();
        for end in &mut self.pair.ends {
            // The test may have done so.
            let _ = end.context.destroy_qp(end.qp);
        }
        self.settle();
        for end in [0, 1] {
            for mr in [self.device[end], self.host[end]] {
                self.pair.ends[end].context.deregister(mr).unwrap();
            }
        }
    }
}
