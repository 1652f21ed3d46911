//! Joining and leaving a communicator.

use super::*;
use crate::memory::PATIENCE;

impl Group {
    /// Starts the agreement on the lost ranks.
    pub(crate) fn begin_to_shrink(&mut self) -> Result<(), Error> {
        let size = self.size();
        if size.div_ceil(8) as usize > BODY {
            let expected = format!("at most {} ranks", BODY * 8);
            return Err(Error::invalid("size of a communicator that shrinks", size, expected));
        }
        let mut gone = Ranks::none(size);
        if let Some(lost) = self.failed.as_ref().and_then(Cause::lost) {
            gone.add(lost);
        }
        if self.shrink.is_none() && self.shrinking.is_none() {
            self.failed.get_or_insert_with(|| Cause::Local { problem: "it has been shrunk".to_owned() });
            self.has_said_failure = true;
            self.telling = None;
            self.shrinking = Some(gone);
        }
        self.next_look = Nanos::ZERO;
        Ok(())
    }

    /// The lost ranks, once the ranks agree and all ranks that this one must notify know the decision.
    pub(crate) fn agreed(&self) -> Option<&Ranks> {
        self.shrink.as_ref().filter(|shrink| !shrink.is_telling()).and_then(Shrink::decision)
    }

    pub(super) fn agree(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        if let Some(gone) = self.shrinking.take() {
            let (size, patience) = (self.size(), self.options.retry_budget());
            self.shrink = Some(Shrink::new(self.rank, size, gone, patience, self.again(), process.now));
        }
        self.next_look = process.now + self.again();
        let words = self.shrink.as_mut().map(|shrink| shrink.tick(process.now)).unwrap_or_default();
        for (to, word) in words {
            self.tell(process, to, Message::Shrink(word))?;
        }
        Ok(())
    }

    /// The origin of a communicator derived from this one by shrinking.
    pub(crate) const SHRUNK: u64 = 0;

    /// The origin of the next communicator derived from this one. All ranks request it in the same order.
    pub(crate) fn next_child(&mut self) -> u64 {
        self.children += 1;
        self.children
    }

    /// The cards of some ranks, for a communicator of them, and this rank's position among them; `None` if it is not one of
    /// them.
    pub(crate) fn cards_of(&self, ranks: &[u32], origin: u64) -> Option<(u32, Vec<Card>)> {
        let place = ranks.iter().position(|rank| *rank == self.rank)?;
        let mut cards: Vec<Card> = ranks.iter().map(|rank| self.cards[*rank as usize]).collect();
        let parts = [self.id, origin].into_iter().chain(ranks.iter().map(|rank| u64::from(*rank)));
        cards[0].nonce.set(hash(parts.flat_map(u64::to_be_bytes)));
        Some((place as u32, cards))
    }

    /// This rank leaves: it waits for the messages of its last barrier.
    pub(crate) fn begin_to_leave(&mut self) {
        self.is_leaving = true;
        for peer in &mut self.peers {
            if let Some(channel) = &mut peer.channel {
                channel.signal_all();
            }
        }
    }

    /// Whether the others have all that they need of this rank, and it has what it needs: work of its device may be
    /// outstanding that no operation waited for. A rank that has what it needs may have ended.
    pub(crate) fn has_left(&self) -> bool {
        let mut channels = self.peers.iter().filter_map(|peer| peer.channel.as_ref());
        self.failed.is_some() || self.executions.is_empty() && channels.all(|channel| channel.is_flushed())
    }

    /// Ends everything that may still write to memory of operations: peers, devices that copy their data, and computations.
    /// Returns whether no writes are possible any more. It is called after each poll until then.
    ///
    /// # Errors
    /// [`Error::Gpu`] for a device that hangs, repeated at intervals.
    pub(crate) fn calm(&mut self, process: &mut Process<'_>) -> Result<bool, Error> {
        let Process { ports, computer, now, .. } = process;
        let since = *self.calming.get_or_insert(*now);
        let mut is_calm = true;
        if self.failed.is_some() {
            for channel in self.peers.iter_mut().filter_map(|peer| peer.channel.as_mut()) {
                for rail in 0..channel.paths().len() {
                    channel.leave((ports, *now), rail, self.options.retry_budget())?;
                }
                is_calm &= channel.is_still(ports);
            }
            let executions = self.executions.iter_mut().flatten();
            executions.for_each(|execution| execution.drop_from_device(computer));
        }
        is_calm &= !self.executions.iter().flatten().any(Execution::is_on_device);
        if !is_calm && now.since(since) >= PATIENCE {
            self.calming = None;
            return Err(computer.hangs(PATIENCE));
        }
        Ok(is_calm)
    }

    /// Frees the resources of operations, once it is [calm](Group::calm). Control messages continue.
    pub(crate) fn disconnect(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        let Process { ports, computer, host, clock, .. } = process;
        let gone = Err("the communicator can't be used any more");
        if let Ok(mapped) = std::mem::replace(&mut self.mapped, gone) {
            mapped.free(host, ports, || clock.now())?;
        }
        for peer in &mut self.peers {
            if let Some(channel) = peer.channel.take() {
                channel.destroy((ports, computer), || clock.now())?;
            }
        }
        self.linked.clear();
        let in_use = self.in_use.drain(..).map(|(_, mr, _)| mr);
        for mr in self.scratch.drain(..).map(|(mr, _)| mr).chain(in_use) {
            computer.deregister(ports, || clock.now(), mr)?;
        }
        Ok(())
    }

    /// Frees everything, once it is [calm](Group::calm).
    pub(crate) fn destroy(mut self, process: &mut Process<'_>) -> Result<(), Error> {
        self.disconnect(process)?;
        for (rail, cq) in self.cqs.iter().enumerate() {
            process.ports.of_mut(rail).context.destroy_cq(*cq)?;
        }
        Ok(())
    }
}
