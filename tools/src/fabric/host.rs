//! A host of the fabric: a context with queue pairs, as with any other driver.

use std::collections::VecDeque;

use ferroce::{
    Access, AddressVector, Config, Context, Counter, Cq, Data, Memory, Mr, Nanos, PacketDriver, Psn, Qp,
    QpConfig, Qpn, RKey, ReadyToReceive, ReadyToSend, ReceiveWorkRequest, RemoteAddress, SendFlags, SendOp,
    SendWorkRequest, Sge, Transition, WcOpcode, WcStatus, WorkCompletion,
};

use super::outcome::HostCounters;
use super::plan::Transport;
use crate::failure::Failure;

/// The most bytes of one work request.
pub(super) const PIECE: u32 = 64 << 10;
/// The most outstanding work requests of a queue pair: as many as fit into the default window.
pub(super) const PIECES: u32 = 32;
/// Posted receive WRs for immediate data: at least as many as there can be pieces.
const RECEIVES: u32 = 2 * PIECES;

pub(super) struct Host {
    pub(super) context: Context,
    cq: Cq,
    mr: Mr,
    path_mtu: u32,
    pub(super) ends: Vec<End>,
}

/// A queue pair.
pub(super) struct End {
    qp: Qp,
    qpn: Qpn,
    /// The remote memory at the other end.
    remote: RemoteAddress,
    /// Messages to send: number, and bytes left to post. `None`: endless.
    to_post: VecDeque<(Option<u32>, u64)>,
    /// Posted pieces: bytes, and the message that ends with the piece.
    posted: VecDeque<(u32, Option<u32>)>,
    /// Acknowledged bytes, and the number of their packets.
    done: u64,
    done_packets: u64,
    pub(super) failure: Option<WcStatus>,
    /// Whether it sends endlessly.
    pub(super) is_endless: bool,
}

/// An event at a host.
pub(super) enum News {
    /// The sender of a message has its completion.
    Completed(u32),
    /// A message has arrived.
    Arrived(u32),
}

impl Host {
    pub(super) fn open(
        driver: Box<dyn PacketDriver>,
        config: Config,
        queue_pairs: usize,
        memory: Memory,
        transport: &Transport,
    ) -> Result<Host, Failure> {
        let config = config
            .max_pds(1)
            .max_mrs(1)
            .max_mws(0)
            .max_cqs(1)
            .max_qps(queue_pairs.max(1) as u32)
            .max_srqs(0)
            .max_ahs(0)
            .max_mcast_attachments(0);
        let mut context = Context::open(driver, &config)?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq((queue_pairs.max(1) as u32) * (PIECES + RECEIVES))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = context.register(pd, memory, access)?;
        let qp_config = QpConfig::rc(pd, cq)
            .max_send_wr(PIECES)
            .max_recv_wr(RECEIVES)
            .max_send_sge(1)
            .max_recv_sge(1)
            .max_inline_data(0);
        let mut host = Host { context, cq, mr, path_mtu: transport.path_mtu.bytes(), ends: Vec::new() };
        for _ in 0..queue_pairs {
            let qp = host.context.create_qp(&qp_config)?;
            let qpn = host.context.query_qp(qp)?.qpn;
            let remote = RemoteAddress { addr: 0, rkey: RKey::new(0) };
            host.ends.push(End {
                qp,
                qpn,
                remote,
                to_post: VecDeque::new(),
                posted: VecDeque::new(),
                done: 0,
                done_packets: 0,
                failure: None,
                is_endless: false,
            });
        }
        Ok(host)
    }

    /// The address of its memory, and the number of a queue pair.
    pub(super) fn end(&self, end: usize) -> Result<(RemoteAddress, Qpn), Failure> {
        let remote = self.context.remote(self.mr)?;
        Ok((RemoteAddress { addr: remote.addr, rkey: remote.rkey }, self.ends[end].qpn))
    }

    /// Connects a queue pair to one of the host with this address.
    pub(super) fn connect(
        &mut self,
        end: usize,
        (remote, qpn): (RemoteAddress, Qpn),
        peer: std::net::IpAddr,
        transport: &Transport,
    ) -> Result<(), Failure> {
        let Transport { dscp, path_mtu, timeout, selective_repeat, .. } = *transport;
        let psn = Psn::new(0);
        let address = AddressVector::new(peer.into(), 0).traffic_class(dscp << 2);
        let receive =
            ReadyToReceive::new(address, qpn, psn).path_mtu(path_mtu).selective_repeat(selective_repeat);
        let send = ReadyToSend::new(psn).timeout(timeout).retry_count(7).rnr_retry(7);
        let End { qp, remote: place, .. } = &mut self.ends[end];
        *place = remote;
        let qp = *qp;
        for transition in [
            Transition::Init { access: Access::LOCAL_WRITE | Access::REMOTE_WRITE },
            Transition::ReadyToReceive(receive),
            Transition::ReadyToSend(send),
        ] {
            self.context.modify_qp(qp, transition)?;
        }
        for _ in 0..RECEIVES {
            self.context.post_recv(qp, &ReceiveWorkRequest { wr_id: end as u64, sges: &[] })?;
        }
        Ok(())
    }

    /// Posts as much of a message as there is room for now.
    pub(super) fn send(&mut self, end: usize, message: u32, bytes: u64) -> Result<(), Failure> {
        self.ends[end].to_post.push_back((Some(message), bytes));
        self.post(end)
    }

    /// Starts or stops endless sending.
    pub(super) fn set_endless(&mut self, end: usize, is_endless: bool) -> Result<(), Failure> {
        self.ends[end].is_endless = is_endless;
        self.post(end)
    }

    fn post(&mut self, number: usize) -> Result<(), Failure> {
        let Host { context, mr, ends, .. } = self;
        let end = &mut ends[number];
        while end.failure.is_none() && end.posted.len() < PIECES as usize {
            if end.to_post.is_empty() && end.is_endless {
                end.to_post.push_back((None, PIECE.into()));
            }
            let Some((message, left)) = end.to_post.front_mut() else { return Ok(()) };
            let length = (*left).min(PIECE.into()) as u32;
            *left -= u64::from(length);
            let ends_now = message.filter(|_| *left == 0);
            if *left == 0 {
                end.to_post.pop_front();
            }
            let data = [Sge { mr: *mr, offset: 0, length }];
            let op = match ends_now {
                Some(message) => SendOp::WriteWithImm(end.remote, message),
                None => SendOp::Write(end.remote),
            };
            let wr = SendWorkRequest {
                wr_id: number as u64,
                op,
                data: Data::Sges(&data),
                flags: SendFlags::SIGNALED,
            };
            context.post_send(end.qp, &wr)?;
            end.posted.push_back((length, ends_now));
        }
        Ok(())
    }

    /// Polls once. Appends events to `news`.
    pub(super) fn poll(&mut self, now: Nanos, news: &mut Vec<News>) -> Result<(), Failure> {
        self.context.poll(now)?;
        let mut posted = false;
        let mut room = [WorkCompletion::EMPTY; 32];
        loop {
            let count = self.context.poll_cq_into(self.cq, &mut room)?;
            for completion in &room[..count] {
                posted |= self.complete(completion, news)?;
            }
            if count < room.len() {
                break;
            }
        }
        if posted {
            self.context.poll(now)?;
        }
        Ok(())
    }

    /// Handles a completion. Returns whether it made room to post more.
    fn complete(&mut self, completion: &WorkCompletion, news: &mut Vec<News>) -> Result<bool, Failure> {
        let number = completion.wr_id as usize;
        let end = &mut self.ends[number];
        if completion.status != WcStatus::Success {
            end.failure.get_or_insert(completion.status);
            return Ok(false);
        }
        if completion.opcode == WcOpcode::RecvRdmaWithImm {
            news.extend(completion.immediate.map(News::Arrived));
            self.context.post_recv(end.qp, &ReceiveWorkRequest { wr_id: completion.wr_id, sges: &[] })?;
            return Ok(false);
        }
        if let Some((bytes, message)) = end.posted.pop_front() {
            end.done += u64::from(bytes);
            end.done_packets += u64::from(bytes.div_ceil(self.path_mtu));
            news.extend(message.map(News::Completed));
        }
        self.post(number)?;
        Ok(true)
    }

    /// The rate that congestion control allows a queue pair, in bit/s, if it is on.
    pub(super) fn rate(&self, end: usize) -> Option<u64> {
        let attributes = self.context.query_qp(self.ends[end].qp).ok()?;
        Some(attributes.reaction?.rate)
    }

    /// Whether a queue pair has data to send, or unacknowledged data.
    pub(super) fn is_busy(&self, end: usize) -> bool {
        let End { to_post, posted, is_endless, .. } = &self.ends[end];
        *is_endless || !to_post.is_empty() || !posted.is_empty()
    }

    /// The PSN that a queue pair expects; the first one is 0.
    pub(super) fn expected(&self, end: usize) -> Option<Psn> {
        Some(self.context.query_qp(self.ends[end].qp).ok()?.rq_psn)
    }

    /// The payload that a queue pair has sent before `expected`, the PSN that its peer expects.
    pub(super) fn payload_before(&self, end: usize, expected: Psn) -> u64 {
        let End { done, done_packets, posted, .. } = &self.ends[end];
        // Packets that arrived and are not acknowledged: fewer than half of all PSNs.
        let mut left = u64::from(expected.value()).wrapping_sub(*done_packets) & 0xff_ffff;
        let mut bytes = *done;
        for (length, _) in posted {
            let packets = u64::from(length.div_ceil(self.path_mtu));
            if left < packets {
                return bytes + left * u64::from(self.path_mtu);
            }
            bytes += u64::from(*length);
            left -= packets;
        }
        bytes
    }

    /// Adds its counters to `sum`.
    pub(super) fn count(&self, sum: &mut HostCounters) {
        let counters = self.context.counters();
        sum.marked += counters.value(Counter::NpEcnMarkedRocePackets);
        sum.cnps_sent += counters.value(Counter::NpCnpSent);
        sum.cnps_handled += counters.value(Counter::RpCnpHandled);
        sum.retransmitted += counters.value(Counter::RetransmittedPkts);
        sum.timeouts += counters.value(Counter::LocalAckTimeoutErr);
    }
}
