//! Who belongs to a communicator, and who leaves it.

use super::*;

impl Group {
    /// Begins to agree on who is gone.
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

    /// Who is gone, once the ranks agree and those know that this one has to tell.
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

    /// The origin of a communicator that is made of this one by shrinking.
    pub(crate) const SHRUNK: u64 = 0;

    /// The origin of the next communicator that is made of this one. All ranks ask for it in the same order.
    pub(crate) fn next_child(&mut self) -> u64 {
        self.children += 1;
        self.children
    }

    /// The cards of some ranks, for a communicator of theirs, and this rank's place among them; `None` if it is not one of them.
    pub(crate) fn cards_of(&self, ranks: &[u32], origin: u64) -> Option<(u32, Vec<Card>)> {
        let place = ranks.iter().position(|rank| *rank == self.rank)?;
        let mut cards: Vec<Card> = ranks.iter().map(|rank| self.cards[*rank as usize]).collect();
        let parts = [self.id, origin].into_iter().chain(ranks.iter().map(|rank| u64::from(*rank)));
        cards[0].nonce.set(hash(parts.flat_map(u64::to_be_bytes)));
        Some((place as u32, cards))
    }

    /// This rank leaves: the messages of its last barrier are waited for.
    pub(crate) fn begin_to_leave(&mut self) {
        self.is_leaving = true;
        for peer in &mut self.peers {
            if let Some(channel) = &mut peer.channel {
                channel.signal_all();
            }
        }
    }

    /// Whether the others have all that they need of this rank. Whoever has what it needs may be gone.
    pub(crate) fn has_left(&self) -> bool {
        let mut channels = self.peers.iter().filter_map(|peer| peer.channel.as_ref());
        self.failed.is_some() || channels.all(|channel| channel.is_flushed())
    }

    /// Frees what operations need. Control messages go on.
    pub(crate) fn disconnect(
        &mut self,
        host: &mut Host,
        ports: &mut Ports,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), Error> {
        let gone = Err("the communicator is of no use any more");
        if let Ok(mapped) = std::mem::replace(&mut self.mapped, gone) {
            mapped.free(host, ports, &mut now)?;
        }
        for peer in &mut self.peers {
            if let Some(channel) = peer.channel.take() {
                channel.destroy(ports, &mut now)?;
            }
        }
        self.linked.clear();
        let in_use = self.in_use.drain(..).map(|(_, mr, _)| mr);
        for mr in self.scratch.drain(..).map(|(mr, _)| mr).chain(in_use) {
            ports.deregister(&mut now, mr)?;
        }
        Ok(())
    }

    /// Frees everything.
    pub(crate) fn destroy(
        mut self,
        host: &mut Host,
        ports: &mut Ports,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), Error> {
        self.disconnect(host, ports, &mut now)?;
        for (rail, cq) in self.cqs.iter().enumerate() {
            ports.of_mut(rail).context.destroy_cq(*cq)?;
        }
        Ok(())
    }
}
