//! Blocking verbs, for programs that have nothing else to do meanwhile: they poll the context themselves, with a [`Clock`], and
//! once more after the timeout. They take only their own events; all others stay pending.

use std::net::SocketAddr;
use std::time::Duration;

use ferroce_driver::Clock;
use ferroce_wire::Qpn;

use super::Context;
use crate::backend::dispatch;
use crate::cm::{CmEvent, CmId, ConnectionParameters, PrivateData};
use crate::verbs::{
    AddressVector, Ah, Cq, Error, EventSource, Pd, Qp, Transition, Unreachable, WorkCompletion,
};

/// A datagram service that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DatagramService {
    /// The path to it, for an address handle.
    pub address: AddressVector,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The Q_Key that datagrams to it must carry.
    pub qkey: u32,
    /// The private data of its reply.
    pub private_data: PrivateData,
}

impl Context {
    /// As [`connect`](Context::connect), and waits until the connection is established. Returns it with the peer's private data.
    ///
    /// ```no_run
    /// # use ferroce::*;
    /// # use std::time::Duration;
    /// # fn run(context: &mut Context, qp: Qp) -> Result<(), Error> {
    /// let to = "192.0.2.7:7471".parse().expect("an address");
    /// let (id, _) = context.connect_blocking(qp, to, &ConnectionParameters::default(), Duration::from_secs(3))?;
    /// # let _ = id;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`manual::connecting`](crate::manual::connecting) has both ends.
    ///
    /// # Errors
    /// Those of [`connect`](Context::connect) and [`poll`](Context::poll); [`Error::Unreachable`], [`Error::Rejected`];
    /// [`Error::TimedOut`] after `timeout`, which ends the attempt. The queue pair is unchanged.
    pub fn connect_blocking(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
        timeout: Duration,
    ) -> Result<(CmId, PrivateData), Error> {
        let id = self.connect(qp, to, parameters)?;
        match self.await_connection(id, timeout, || format!("connecting to {to}"))? {
            CmEvent::Established { private_data, .. } => Ok((id, private_data)),
            other => Err(no_connection(to, &other)),
        }
    }

    /// As [`accept`](Context::accept), and waits until the peer has confirmed the connection (RTU).
    ///
    /// # Errors
    /// Those of [`accept`](Context::accept) and [`poll`](Context::poll); [`Error::Unreachable`], [`Error::Rejected`];
    /// [`Error::TimedOut`] after `timeout`. After an error the connection has ended, and the queue pair is in ERR.
    pub fn accept_blocking(
        &mut self,
        id: CmId,
        qp: Qp,
        parameters: &ConnectionParameters<'_>,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.accept(id, qp, parameters)?;
        let peer = self.query_qp(qp)?.address.map(|address| address.gid.to_ip().to_canonical());
        let peer = SocketAddr::new(peer.unwrap_or(std::net::Ipv4Addr::UNSPECIFIED.into()), 0);
        match self
            .await_connection(id, timeout, || format!("the answer of {} to an acceptance", peer.ip()))?
        {
            CmEvent::Established { .. } => Ok(()),
            other => Err(no_connection(peer, &other)),
        }
    }

    /// As [`resolve`](Context::resolve), and waits until the datagram service is found.
    ///
    /// # Errors
    /// Those of [`resolve`](Context::resolve) and [`poll`](Context::poll); [`Error::Unreachable`]; [`Error::Rejected`], with the
    /// status of the SIDR reply as the reason; [`Error::TimedOut`] after `timeout`, which ends the search.
    pub fn resolve_blocking(
        &mut self,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
        timeout: Duration,
    ) -> Result<DatagramService, Error> {
        let id = self.resolve(to, parameters)?;
        match self.await_connection(id, timeout, || format!("looking for the datagram service at {to}"))? {
            CmEvent::Resolved { address, qpn, qkey, private_data, .. } => {
                Ok(DatagramService { address, qpn, qkey, private_data })
            }
            other => Err(no_connection(to, &other)),
        }
    }

    /// As [`modify_qp`](Context::modify_qp), and waits until the next hop of a new path is found.
    ///
    /// # Errors
    /// Those of [`modify_qp`](Context::modify_qp) and [`poll`](Context::poll); [`Error::Unreachable`], with the queue pair in
    /// ERR; [`Error::TimedOut`] after `timeout`, while the search continues.
    pub fn modify_qp_blocking(
        &mut self,
        qp: Qp,
        transition: Transition,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.modify_qp(qp, transition)?;
        self.await_next_hop(qp.into(), timeout, || "looking for the next hop of a queue pair".to_owned())
    }

    /// As [`create_ah`](Context::create_ah), and waits until the next hop is found.
    ///
    /// # Errors
    /// Those of [`create_ah`](Context::create_ah) and [`poll`](Context::poll); [`Error::Unreachable`]; [`Error::TimedOut`] after
    /// `timeout`. After an error there is no address handle.
    pub fn create_ah_blocking(
        &mut self,
        pd: Pd,
        address: &AddressVector,
        timeout: Duration,
    ) -> Result<Ah, Error> {
        let ah = self.create_ah(pd, address)?;
        let what = || format!("looking for the next hop to {}", address.gid);
        match self.await_next_hop(ah.into(), timeout, what) {
            Ok(()) => Ok(ah),
            Err(error) => {
                self.destroy_ah(ah)?;
                Err(error)
            }
        }
    }

    /// Takes the oldest completion of `cq`, and waits for one if there is none. Returns `None` after `timeout`; with a timeout of
    /// zero, after one poll. It polls the context meanwhile, and sleeps when nothing arrives.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// # let own = context.endpoint(qp, 0)?;
    /// # context.handshake(qp, &own, &own)?;
    /// # context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] })?;
    /// # let (op, data) = (SendOp::Send, Data::Inline(&[]));
    /// # context.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::default() })?;
    /// match context.wait_cq(cq, Duration::from_secs(5))? {
    ///     Some(completion) => println!("{} is done", completion.ok()?.wr_id),
    ///     None => println!("nothing within 5 s"),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; those of [`poll`](Context::poll).
    pub fn wait_cq(&mut self, cq: Cq, timeout: Duration) -> Result<Option<WorkCompletion>, Error> {
        self.poll_until(timeout, |context| context.poll_cq(cq))
    }

    /// Takes the oldest event of the connection manager, and waits for one if there is none. Returns `None` after
    /// `timeout`; with none, after one poll.
    ///
    /// # Errors
    /// Those of [`poll`](Context::poll).
    pub fn wait_cm_event(&mut self, timeout: Duration) -> Result<Option<CmEvent>, Error> {
        self.poll_until(timeout, |context| Ok(context.next_cm_event()))
    }

    /// The result of the next-hop search of a queue pair or an address handle.
    fn await_next_hop(
        &mut self,
        of: EventSource,
        timeout: Duration,
        what: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if !dispatch!(&self.backend, awaits_next_hop(of))? {
            return Ok(());
        }
        let found = self.poll_until(timeout, |context| {
            Ok((!dispatch!(&context.backend, awaits_next_hop(of))?).then_some(()))
        })?;
        found.ok_or_else(|| timed_out(&what(), timeout))?;
        match dispatch!(&mut self.backend, take_unreachable(of)) {
            Some(reason) => Err(reason.into()),
            None => Ok(()),
        }
    }

    /// The result of an exchange of the connection manager, which is ended after a timeout.
    fn await_connection(
        &mut self,
        id: CmId,
        timeout: Duration,
        what: impl FnOnce() -> String,
    ) -> Result<CmEvent, Error> {
        let event =
            self.poll_until(timeout, |context| Ok(dispatch!(&mut context.backend, take_cm_event(id))))?;
        match event {
            Some(event) => Ok(event),
            None => {
                self.disconnect(id)?;
                Err(timed_out(&what(), timeout))
            }
        }
    }

    /// Polls until `done` returns a value, for at most `timeout`: once if that is zero.
    fn poll_until<T>(
        &mut self,
        timeout: Duration,
        mut done: impl FnMut(&mut Context) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        if let Some(there) = done(self)? {
            return Ok(Some(there));
        }
        let mut clock = Clock::start();
        let mut busy = clock.catch_up_with(self.now());
        let end = busy + timeout;
        loop {
            let now = clock.now();
            let worked = self.poll(now)? > 0;
            if let Some(come) = done(self)? {
                return Ok(Some(come));
            }
            if now >= end {
                return Ok(None);
            }
            if worked {
                busy = now;
            } else if now.since(busy) >= SPIN {
                let left = end.since(now);
                let quiet = self.quiet_for(now).unwrap_or(left);
                self.wait(quiet.min(left))?;
            }
        }
    }
}

/// How long polls without a result are repeated without sleeping.
const SPIN: Duration = Duration::from_micros(20);

fn timed_out(what: &str, timeout: Duration) -> Error {
    Error::TimedOut { what: what.to_owned(), timeout }
}

/// The event received instead of a connection.
fn no_connection(peer: SocketAddr, event: &CmEvent) -> Error {
    match *event {
        CmEvent::Rejected { reason, .. } => Error::Rejected { peer, reason },
        CmEvent::Unreachable { reason, .. } => reason.into(),
        // It was established, and has already ended.
        _ => Unreachable::Silent { peer: peer.ip() }.into(),
    }
}
