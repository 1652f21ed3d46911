//! Actions that break connections: queue pairs killed, memory withdrawn, invalid work.

use ferroce::*;

use crate::connection::{Closed, Connection, Half, MemoryWindow, Phase};
use crate::model::{Verdict, ensure};
use crate::noise::{NOISE, Window};
use crate::post::{NOTHING, Post, TARGET};
use crate::request::{Action, Change, Flaw};
use crate::schedule::{Accident, Plan, Refused, Service, Work};
use crate::world::{End, World};

impl World {
    /// Applies an accident to a live connection, if it is possible there. The connection ends sooner or later because of
    /// it.
    pub(crate) fn befall(&mut self, c: usize, e: usize, accident: Accident) -> Verdict {
        if self.connections[c].phase != Phase::Up {
            return Ok(());
        }
        let World { ends, connections, .. } = self;
        let Connection { halves, model, plan, .. } = &mut connections[c];
        let (end, half) = (&mut ends[e], &mut halves[e]);
        match accident {
            Accident::Error => {
                end.context.modify_qp(half.qp, Transition::Error)?;
                model.kill();
            }
            Accident::Reset => {
                end.context.modify_qp(half.qp, Transition::Reset)?;
                half.reset = true;
                self.discard(c, e);
            }
            Accident::Destroy => {
                half.replace(end, plan)?;
                self.discard(c, e);
            }
            Accident::Withdraw => {
                if !half.withdraw(end, plan, plan.on_device[e])? {
                    return Ok(());
                }
                model.withdraw(e);
            }
            Accident::CloseWindow => {
                if !self.close_window(c, e)? {
                    return Ok(());
                }
            }
            Accident::Refused(refused) if refused.is_for(plan) => match refused {
                Refused::BadReceive => self.post_bad_receive(c, e)?,
                refused => self.post_refused(c, e, refused)?,
            },
            Accident::Refused(_) => return Ok(()),
        }
        self.tally.accidents += 1;
        self.start_dying(c);
        Ok(())
    }

    /// Revokes the key of a bound window, which the peer may be using. `false` if there is none.
    fn close_window(&mut self, c: usize, e: usize) -> Verdict<bool> {
        let Connection { halves, plan, .. } = &mut self.connections[c];
        let (end, half) = (&self.ends[e], &mut halves[e]);
        half.window.look(&end.context, plan.size)?;
        let Some(RemoteAddress { rkey, .. }) = half.window.open() else { return Ok(false) };
        let (action, op) = (Action::LocalInvalidate, SendOp::LocalInvalidate(rkey));
        let post = Post { action, op, flaw: None, through_window: false, local: (end.noise, 0) };
        if !self.submit(c, e, post, &NOTHING)? {
            return Ok(false);
        }
        let Connection { halves, model, .. } = &mut self.connections[c];
        halves[e].window.closed = Some(Closed::ByOwner);
        model.close_window(e);
        Ok(true)
    }

    /// Posts a receive whose memory does not exist.
    fn post_bad_receive(&mut self, c: usize, e: usize) -> Verdict {
        let Connection { halves, model, plan, .. } = &mut self.connections[c];
        let half = &mut halves[e];
        if (model.receives(e) as u64) < plan.size.slots() {
            let wr_id = half.receives_posted;
            let sges = [Sge { mr: half.receives, offset: u64::MAX - 7, length: plan.size.receive() }];
            self.ends[e].context.post_recv(half.qp, &ReceiveWorkRequest { wr_id, sges: &sges })?;
            half.receives_posted += 1;
            model.post_receive(e, wr_id, true);
        }
        Ok(())
    }

    /// Posts work that must be refused.
    fn post_refused(&mut self, c: usize, e: usize, refused: Refused) -> Verdict {
        let Connection { halves, plan, .. } = &self.connections[c];
        let (half, peer) = (&halves[e], &halves[1 - e]);
        let data = Window { start: 1000, length: 8 };
        let end = plan.size.target();
        let bad_key = RKey::new(!peer.reach.rkey.value());
        let noise = (self.ends[e].noise(plan, e), data.start as u64);
        let landing = (half.landing, 0);
        let read = |at| Action::Read { at, length: 8, into: 0 };
        let write = |at| Action::Write { data, at, immediate: None };
        let send = |data| Action::Send { data, immediate: None, invalidates: None };
        let plain =
            |action: Action, local, flaw| (action, self.op(c, e, &action, peer.reach, bad_key), local, flaw);
        let (action, op, local, flaw) = match refused {
            Refused::WriteWithBadKey => {
                let remote = RemoteAddress { rkey: bad_key, ..peer.reach };
                (write(TARGET), SendOp::Write(remote), noise, Flaw::Access)
            }
            Refused::WritePastTheEnd => plain(write(end - 7), noise, Flaw::Access),
            Refused::WritePastTheWindow => {
                let Some(reach) = peer.window.open() else { return Ok(()) };
                let action = write(plan.size.window().end - 7);
                (action, self.op(c, e, &action, reach, bad_key), noise, Flaw::Access)
            }
            Refused::ReadPastTheEnd => plain(read(end - 7), landing, Flaw::Access),
            Refused::ReadWithRevokedKey => {
                let Some((mr, _)) = peer.keys.iter().find(|key| key.1) else { return Ok(()) };
                let remote = RemoteAddress { addr: 0, rkey: self.rkey(1 - e, *mr)? };
                (read(0), SendOp::Read(remote), landing, Flaw::Access)
            }
            Refused::ReadThroughClosedWindow => {
                let Some(remote) = peer.window.reach.filter(|_| peer.window.closed == Some(Closed::ByPeer))
                else {
                    return Ok(());
                };
                (read(0), SendOp::Read(remote), landing, Flaw::Access)
            }
            Refused::AtomicAtOddAddress => {
                let atomic = Action::Atomic { at: 4, change: Change::Add(1), into: 0 };
                plain(atomic, landing, Flaw::Invalid)
            }
            Refused::InvalidateBadKey => {
                (send(data), SendOp::SendWithInvalidate(bad_key), noise, Flaw::Access)
            }
            Refused::SendTooLong => {
                let length = plan.size.receive() + 1;
                plain(send(Window { length, ..data }), noise, Flaw::TooLong)
            }
            Refused::FlushPastTheEnd => {
                plain(Action::Flush { at: end - 7, length: 8, whole: false }, noise, Flaw::Access)
            }
            Refused::BindTwice => {
                if half.window.open().is_none() {
                    return Ok(());
                }
                plain(Action::BindWindow, noise, Flaw::Bind)
            }
            // Into memory that only its owner may write.
            Refused::BadResult => plain(read(TARGET), noise, Flaw::Local),
            Refused::BadSource => plain(send(data), (noise.0, NOISE as u64 - 7), Flaw::Local),
            Refused::BadReceive => return Ok(()),
        };
        let work = Work { signaled: true, ..NOTHING };
        let post = Post { action, op, flaw: Some(flaw), through_window: false, local };
        self.submit(c, e, post, &work)?;
        if let Refused::BindTwice = refused {
            // If the peer closed it now, the bind might be valid when its turn comes.
            self.connections[c].halves[e].window.closed = Some(Closed::ByOwner);
        }
        Ok(())
    }
}

impl Half {
    /// Withdraws the memory that the peer can access. `false` if a window holds it.
    fn withdraw(&mut self, end: &mut End, plan: &Plan, on_device: bool) -> Verdict<bool> {
        self.window.look(&end.context, plan.size)?;
        if self.window.posted && self.window.reach.is_none() {
            return Ok(false);
        }
        if self.window.open().is_some() {
            ensure!(end.context.deregister(self.target).is_err(), "gone under its window");
            end.context.dealloc_mw(self.window.mw)?;
            let mw = end.context.alloc_mw(end.pd)?;
            self.window = MemoryWindow { closed: Some(Closed::ByOwner), mw, ..self.window };
        }
        match end.context.deregister(self.target) {
            Ok(memory) => self.withdrawn = Some(memory),
            // The access has ended nevertheless.
            Err(Error::Busy { users, .. }) if on_device && users.contains("copies of its device") => {
                self.leaving = Some(self.target);
            }
            // The peer has not closed the window yet, or its own requests use it.
            Err(Error::Busy { .. }) if self.window.closed.is_some() || on_device => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        // It is replaced by other memory: the old key must not give access to it.
        self.target = end.register(plan.size.target(), on_device)?;
        Ok(true)
    }
}

impl Refused {
    /// Whether a queue pair can be made to refuse this.
    fn is_for(self, plan: &Plan) -> bool {
        match self {
            Refused::BadSource => true,
            Refused::BadReceive => !plan.srq,
            Refused::BindTwice => plan.service != Service::Ud,
            Refused::AtomicAtOddAddress if plan.has_device() => false,
            Refused::WriteWithBadKey | Refused::WritePastTheEnd | Refused::WritePastTheWindow => {
                plan.service != Service::Ud
            }
            Refused::SendTooLong => plan.service != Service::Ud,
            _ => plan.service == Service::Rc,
        }
    }
}
