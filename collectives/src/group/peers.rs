//! The other ranks: channels to them, and their control messages.

use super::*;
use crate::fallback;
use crate::ports::Port;

impl Group {
    /// Creates a channel to a peer, if there is none.
    pub(super) fn link(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        if self.peers[peer as usize].channel.is_none() {
            let rails = self.cards[peer as usize].rails().len().clamp(1, self.cqs.len());
            let mut channel =
                Channel::new((process.ports, process.computer), &self.cqs[..rails], peer, self.limits)?;
            if self.is_leaving {
                channel.signal_all();
            }
            self.log.linked(peer, process.ports.query_qp(channel.qp(0))?.qpn.value());
            let link = &mut self.peers[peer as usize];
            link.channel = Some(Box::new(channel));
            // A peer that waits for this rank is usually at most one call ahead.
            link.grants.reserve(8);
            self.linked.push(peer);
            (0..rails).try_for_each(|rail| self.greet(process, peer, rail))?;
        }
        Ok(())
    }

    /// Sends a peer this end's data of the channel's path of a rail, on that rail.
    pub(super) fn greet(&mut self, process: &mut Process<'_>, peer: u32, rail: usize) -> Result<(), Error> {
        // If other rails work, hellos on a failed one are sent at the probe interval.
        let again = if self.is_linked(peer) { self.options.probe_interval } else { self.again() };
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let link = channel.link(process.ports, rail, self.ways[rail].1)?;
        let Some(path) = channel.path(rail) else { return Ok(()) };
        path.greet(process.now, again);
        let (heard, is_open) = (path.heard_of(), path.is_open());
        self.tell_by(process, peer, rail, Message::Hello { link, heard, is_open })
    }

    /// Whether there is a working path to a peer.
    fn is_linked(&self, peer: u32) -> bool {
        self.peers[peer as usize].channel.as_ref().is_some_and(|channel| channel.is_open())
    }

    /// Sends a message to a peer on all rails, because one may have failed.
    pub(super) fn tell(
        &mut self,
        process: &mut Process<'_>,
        peer: u32,
        message: Message,
    ) -> Result<(), Error> {
        let rails = self.cards[peer as usize].rails().len().clamp(1, self.cqs.len());
        for rail in 1..rails {
            self.tell_by(process, peer, rail, message.clone())?;
        }
        self.tell_by(process, peer, 0, message)
    }

    /// Sends a message to a peer on one rail.
    pub(super) fn tell_by(
        &mut self,
        process: &mut Process<'_>,
        peer: u32,
        rail: usize,
        message: Message,
    ) -> Result<(), Error> {
        let Some(card) = self.cards[peer as usize].rails().get(rail).copied() else { return Ok(()) };
        let to = (card.gid(), self.ways[rail].0, self.options.traffic_class);
        let port = process.ports.of_mut(rail);
        if port.is_gone() {
            return Ok(());
        }
        let Port { context, pd, control, .. } = port;
        let ah = match control.address(context, *pd, to) {
            Ok(ah) => ah,
            Err(error @ ferroce::Error::Exhausted { .. }) => return Err(error.into()),
            // As if the message were lost: a lost rank may have no route.
            Err(error) => {
                debug!(%error, peer, "a control message without a path");
                return Ok(());
            }
        };
        let to = Mailbox { ah, qpn: Qpn::new(card.qpn.get()), qkey: card.qkey.get() };
        let envelope = Envelope { communicator: self.id, from: self.rank, message };
        control.send(context, to, &envelope)
    }

    /// Processes a control message of a rank, received on a rail.
    pub(crate) fn hear(&mut self, process: &mut Process<'_>, from: (u32, usize), message: Message) {
        if let Err(error) = self.try_hear(process, from, message) {
            self.refused(&error);
        }
    }

    fn try_hear(
        &mut self,
        process: &mut Process<'_>,
        (from, rail): (u32, usize),
        message: Message,
    ) -> Result<(), Error> {
        if from >= self.size() || from == self.rank {
            debug!(from, "a control message of no other rank");
            return Ok(());
        }
        let peer = &mut self.peers[from as usize];
        peer.silent = None;
        if let Some(path) = peer.channel.as_mut().and_then(|channel| channel.path(rail)) {
            path.heard = process.now;
        }
        if let Some(shrink) = &mut self.shrink {
            shrink.is_there(from, process.now);
        }
        match message {
            Message::Hello { link, heard, is_open } => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                self.meet(process, (from, rail), &link, heard, is_open)
            }
            Message::Left(left) => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                self.hear_left(process, from, &left)
            }
            Message::Ping { call } => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                let calls = self.calls;
                let mut known: Vec<Header> = self.of_two_with(from, call).collect();
                let of_all = self.history.iter().find(|known| known.number == call);
                known.extend(of_all.map(|call| Header::new(call, Purpose::Call, 0)));
                if known.is_empty() {
                    return self.tell_by(process, from, rail, Message::Pong { calls, call: None });
                }
                known.into_iter().try_for_each(|header| {
                    self.tell_by(process, from, rail, Message::Pong { calls, call: Some(header) })
                })
            }
            Message::Pong { calls, call } => {
                self.peers[from as usize].calls = Some(calls);
                let Some(Ok((theirs, purpose))) = call.map(|header| header.parse()) else { return Ok(()) };
                let ours = match purpose {
                    Purpose::Call => self.history.iter().find(|ours| ours.number == theirs.number).copied(),
                    _ => {
                        let end = (from, purpose == Purpose::Grant);
                        self.of_two(from, theirs.number).find(|(of, _)| *of == end).map(|(_, call)| call)
                    }
                };
                if let Some(ours) = ours.filter(|ours| *ours != theirs) {
                    let (ours, theirs) = (ours.to_string(), theirs.to_string());
                    self.fail(Cause::Mismatch { peer: from, ours, theirs });
                }
                Ok(())
            }
            Message::Abort { origin, lost, reason } => {
                self.peers[from as usize].knows_abort = true;
                self.tell(process, from, Message::Aborted)?;
                if self.failed.is_none() {
                    let size = self.size();
                    let lost = lost.filter(|lost| *lost < size && *lost != self.rank);
                    self.fail(Cause::Aborted { origin, lost, reason });
                }
                Ok(())
            }
            Message::Aborted => {
                self.peers[from as usize].knows_abort = true;
                Ok(())
            }
            Message::Wake => Ok(()),
            Message::Shrink(word) => match &mut self.shrink {
                Some(shrink) => match shrink.hear(from, word, process.now) {
                    Some(answer) => self.tell(process, from, Message::Shrink(answer)),
                    None => Ok(()),
                },
                // It is alive, and its program has not called yet.
                None => self.tell(process, from, Message::Pong { calls: self.calls, call: None }),
            },
        }
    }

    /// The operations between this rank and a peer with this number: one that sends to it, and one that receives.
    pub(super) fn of_two(&self, peer: u32, number: u32) -> impl Iterator<Item = ((u32, bool), Call)> {
        let all = self.executions.iter().flatten();
        let of_two = all.filter(move |of| of.call.number == number && number & Call::OF_TWO != 0);
        of_two.flat_map(|of| of.peers().map(|end| (end, of.call))).filter(move |((of, _), _)| *of == peer)
    }

    /// The same for a PONG: a header with elements means a send, one with a grant means a receive.
    pub(super) fn of_two_with(&self, peer: u32, number: u32) -> impl Iterator<Item = Header> {
        let purpose = |sends| if sends { Purpose::Elements } else { Purpose::Grant };
        self.of_two(peer, number).map(move |((_, sends), call)| Header::new(&call, purpose(sends), 0))
    }

    /// Processes the peer's data of a channel's path.
    pub(super) fn meet(
        &mut self,
        process: &mut Process<'_>,
        (from, rail): (u32, usize),
        link: &Link,
        heard: u32,
        is_open: bool,
    ) -> Result<(), Error> {
        self.link(process, from)?;
        let Some(card) = self.cards[from as usize].rails().get(rail) else { return Ok(()) };
        let (gid_index, path_mtu) = self.ways[rail];
        let Some(channel) = &mut self.peers[from as usize].channel else { return Ok(()) };
        let is_new = channel.is_to_connect(process.now, rail, link.epoch);
        if is_new
            && let Err(error) =
                channel.connect(process.ports, rail, &self.options, (card.gid(), gid_index), path_mtu, link)
        {
            if channel.is_open() {
                // The other rails are used instead. A hello is sent again later.
                debug!(%error, peer = from, rail, "a rail that can't be connected");
                return Ok(());
            }
            let problem = format!("the description of its end of the channel: {error}");
            self.fail(Cause::Protocol { peer: from, problem });
            return Ok(());
        }
        if channel.path(rail).is_none_or(|path| path.heard_of() != link.epoch) {
            // A queue pair that no longer exists, or is not used yet.
            return Ok(());
        }
        if channel.open(process.now, rail, heard) {
            if self.peers[from as usize]
                .channel
                .as_ref()
                .is_some_and(|channel| channel.paths()[rail].was_missed())
            {
                fallback::with_rail(process.ports, (self.rank, from, rail));
                self.log.rail_is_back(from, rail);
            }
            self.is_dirty = true;
            self.next_look = Nanos::ZERO;
        }
        // The peer waits for an answer of this end until it has one that reports it as ready.
        if is_new || !is_open { self.greet(process, from, rail) } else { Ok(()) }
    }

    pub(super) fn granted(&mut self, from: u32, call: Call, grant: Grant) {
        let execution = self.executions.iter_mut().flatten().find(|execution| {
            execution.call.number == call.number && execution.peers().any(|peer| peer == (from, true))
        });
        match execution {
            Some(execution) if execution.call == call => execution.granted(from, &grant),
            Some(execution) => {
                let (ours, theirs) = (execution.call.to_string(), call.to_string());
                self.fail(Cause::Mismatch { peer: from, ours, theirs });
            }
            None if self.peers[from as usize].grants.len() < GRANTS => {
                self.peers[from as usize].grants.push_back((call, grant));
            }
            None => {
                let problem = format!("more than {GRANTS} grants of operations that have not begun");
                self.fail(Cause::Protocol { peer: from, problem });
            }
        }
    }

    /// Processes the events of the channels' queue pairs.
    pub(super) fn take_events(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        for index in 0..self.linked.len() {
            let number = self.linked[index];
            let Some(channel) = &self.peers[number as usize].channel else { continue };
            for rail in 0..channel.paths().len() {
                self.take_events_of(process, (number, rail))?;
            }
        }
        Ok(())
    }

    pub(super) fn take_events_of(
        &mut self,
        process: &mut Process<'_>,
        (number, rail): (u32, usize),
    ) -> Result<(), Error> {
        loop {
            let Some(channel) = &self.peers[number as usize].channel else { return Ok(()) };
            let (qp, can_do_without) = (channel.qp(rail), channel.can_do_without(rail));
            match process.ports.of_mut(rail).context.next_event_of(qp)? {
                None => return Ok(()),
                Some(event) => match event {
                    Event::QpFatal(_) | Event::QpReqErr(_) | Event::QpAccessErr(_) => {
                        let problem = format!("asynchronous event {event:?}");
                        let of_device = self.own_device_failed(process.ports, &problem);
                        self.fail(of_device.unwrap_or(Cause::Protocol { peer: number, problem }));
                    }
                    Event::QpUnreachable { reason, .. } if can_do_without => {
                        self.leave_rail(process, (number, rail), &reason.to_string())?;
                    }
                    Event::QpUnreachable { reason, .. } => {
                        self.fail(Cause::Lost { peer: number, how: reason.to_string() });
                    }
                    _ => {}
                },
            }
        }
    }
}
