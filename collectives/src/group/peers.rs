//! Other ranks: channels to them, and what they say.

use super::*;

impl Group {
    /// Makes a channel to a peer, if there is none.
    pub(super) fn link(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        if self.peers[peer as usize].channel.is_none() {
            let ends = (process.pd, self.cq);
            let mut channel = Channel::new(process.context, ends, peer, self.limits)?;
            if self.is_leaving {
                channel.signal_all();
            }
            self.log.linked(peer, process.context.query_qp(channel.qp())?.qpn.value());
            let link = &mut self.peers[peer as usize];
            link.channel = Some(Box::new(channel));
            // A peer that waits for this rank is a call ahead, seldom more.
            link.grants.reserve(8);
            self.linked.push(peer);
            self.greet(process, peer)?;
        }
        Ok(())
    }

    /// Tells a peer of this end of the channel.
    pub(super) fn greet(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        let next_hello = process.now + self.again();
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let link = channel.link(process.context, self.path_mtu)?;
        let (has_heard, is_open) = (channel.has_heard, channel.is_open);
        channel.next_hello = next_hello;
        self.tell(process, peer, Message::Hello { link, has_heard, is_open })
    }

    pub(super) fn tell(
        &mut self,
        process: &mut Process<'_>,
        peer: u32,
        message: Message,
    ) -> Result<(), Error> {
        let card = self.cards[peer as usize];
        let to = (card.gid(), self.gid_index, self.options.traffic_class);
        let ah = match process.control.address(process.context, process.pd, to) {
            Ok(ah) => ah,
            Err(error @ ferroce::Error::Exhausted { .. }) => return Err(error.into()),
            // As if the message were lost: whoever is gone has no route, either.
            Err(error) => {
                debug!(%error, peer, "a control message without a way");
                return Ok(());
            }
        };
        let to = Mailbox { ah, qpn: Qpn::new(card.qpn.get()), qkey: card.qkey.get() };
        let envelope = Envelope { communicator: self.id, from: self.rank, message };
        process.control.send(process.context, to, &envelope)
    }

    /// Takes a control message of a rank.
    pub(crate) fn hear(&mut self, process: &mut Process<'_>, from: u32, message: Message) {
        if let Err(error) = self.try_hear(process, from, message) {
            self.fail(Cause::Local { problem: error.to_string() });
        }
    }

    fn try_hear(&mut self, process: &mut Process<'_>, from: u32, message: Message) -> Result<(), Error> {
        if from >= self.size() || from == self.rank {
            debug!(from, "a control message of no other rank");
            return Ok(());
        }
        self.peers[from as usize].silent = None;
        if let Some(shrink) = &mut self.shrink {
            shrink.is_there(from, process.now);
        }
        match message {
            Message::Hello { link, has_heard, is_open } => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                self.meet(process, from, &link, has_heard, is_open)
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
                    return self.tell(process, from, Message::Pong { calls, call: None });
                }
                known.into_iter().try_for_each(|header| {
                    self.tell(process, from, Message::Pong { calls, call: Some(header) })
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
                // It is there, and its program has not called yet.
                None => self.tell(process, from, Message::Pong { calls: self.calls, call: None }),
            },
        }
    }

    /// The operations of this rank and a peer that have this number: one that sends to it, and one that receives.
    pub(super) fn of_two(&self, peer: u32, number: u32) -> impl Iterator<Item = ((u32, bool), Call)> {
        let all = self.executions.iter().flatten();
        let of_two = all.filter(move |of| of.call.number == number && number & Call::OF_TWO != 0);
        of_two.flat_map(|of| of.peers().map(|end| (end, of.call))).filter(move |((of, _), _)| *of == peer)
    }

    /// As a PONG has them: elements are what this rank has, and a grant is what it gives.
    pub(super) fn of_two_with(&self, peer: u32, number: u32) -> impl Iterator<Item = Header> {
        let purpose = |sends| if sends { Purpose::Elements } else { Purpose::Grant };
        self.of_two(peer, number).map(move |((_, sends), call)| Header::new(&call, purpose(sends), 0))
    }

    /// The peer's end of a channel.
    pub(super) fn meet(
        &mut self,
        process: &mut Process<'_>,
        from: u32,
        link: &Link,
        has_heard: bool,
        is_open: bool,
    ) -> Result<(), Error> {
        self.link(process, from)?;
        let to = (self.cards[from as usize].gid(), self.gid_index);
        let Some(channel) = &mut self.peers[from as usize].channel else { return Ok(()) };
        let is_new = !channel.has_heard;
        if is_new && let Err(error) = channel.connect(process.context, &self.options, to, self.path_mtu, link)
        {
            let problem = format!("what it says of its end of the channel: {error}");
            self.fail(Cause::Protocol { peer: from, problem });
            return Ok(());
        }
        if has_heard && !channel.is_open {
            channel.is_open = true;
            self.is_dirty = true;
            self.next_look = Nanos::ZERO;
        }
        // The peer waits for a word of this end's until it has one that says so.
        if is_new || !is_open { self.greet(process, from) } else { Ok(()) }
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

    /// Events of the channels' queue pairs.
    pub(super) fn take_events(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        for index in 0..self.linked.len() {
            let number = self.linked[index];
            let Some(channel) = &self.peers[number as usize].channel else { continue };
            let qp = channel.qp();
            while let Some(event) = process.context.next_event_of(qp)? {
                match event {
                    Event::QpFatal(_) | Event::QpReqErr(_) | Event::QpAccessErr(_) => {
                        let problem = format!("asynchronous event {event:?}");
                        self.fail(Cause::Protocol { peer: number, problem });
                    }
                    Event::QpUnreachable { reason, .. } => {
                        self.fail(Cause::Lost { peer: number, how: reason.to_string() });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
