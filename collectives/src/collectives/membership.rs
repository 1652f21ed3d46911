//! Deriving communicators from others, and leaving them.

use super::*;

impl Collectives {
    /// Ends a communicator on all ranks: outstanding operations fail with `reason`.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn abort(&mut self, communicator: Communicator, reason: &str) -> Result<(), Error> {
        let group = self.group_mut(communicator)?;
        group.fail(Cause::Local { problem: format!("aborted: {reason}") });
        let _ = group.say_failure(String::new());
        self.tell_failures()
    }

    /// A communicator of some ranks of another one, in this order. All ranks of the latter call it, with the same `ranks`, and
    /// nothing is sent. `None` at ranks that are not among them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no ranks, a rank out of range, and duplicates; [`Error::Failed`] of a communicator that has failed;
    /// [`Error::InvalidHandle`], [`Error::Verbs`].
    pub fn subset(
        &mut self,
        communicator: Communicator,
        ranks: &[u32],
    ) -> Result<Option<Communicator>, Error> {
        let is_outside = |rank: &&u32| **rank >= communicator.size;
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| &pair[0]);
        if let Some(rank) = ranks.iter().find(is_outside).or(twice) {
            let expected = format!("ranks below {}, each once", communicator.size);
            return Err(Error::invalid("rank of a subset", rank, expected));
        }
        if ranks.is_empty() {
            return Err(Error::invalid("ranks of a subset", "none", "at least one"));
        }
        let group = self.group_mut(communicator)?;
        if let Some(error) = group.say_failure("subset".to_owned()) {
            return Err(error);
        }
        let origin = group.next_child();
        self.child(communicator, origin, ranks)
    }

    /// A communicator of some ranks of another one; only these ranks know `origin`.
    fn child(
        &mut self,
        communicator: Communicator,
        origin: u64,
        ranks: &[u32],
    ) -> Result<Option<Communicator>, Error> {
        let group = self.group(communicator)?;
        let (options, model) = (group.options, group.model());
        let Some((rank, cards)) = group.cards_of(ranks, origin) else { return Ok(None) };
        let boards = group.mapped_boards(ranks);
        let now = self.now();
        let mut group = Group::new(&mut self.process(now).0, rank, cards, &options)?;
        group.set_model(model);
        let mapped = boards.map(|boards| Mapped::new(&self.host, group.id, rank as usize, boards));
        let is_full = matches!(mapped, Ok(None));
        let mapped = match mapped {
            Ok(mapped) => mapped.ok_or("this process is in too many communicators"),
            Err(_) => Err("the communicator that it was made of shares no memory"),
        };
        group.set_mapped(&mut self.ports, mapped);
        let size = ranks.len() as u32;
        let child = Communicator { handle: self.groups.insert(group), rank, size };
        if is_full {
            // The others have mapped memory, and can't be notified to use packets.
            self.leave_alone(child)?;
            let reason = "this process is in too many communicators".to_owned();
            return Err(Error::Shared { reason });
        }
        Ok(Some(child))
    }

    /// Splits a communicator: the ranks with the same `color` form one, ordered by `key` and then by their ranks. All ranks call
    /// it; it blocks. `None` at ranks without a color.
    ///
    /// # Errors
    /// As [`wait`](Collectives::wait).
    pub fn split(
        &mut self,
        communicator: Communicator,
        color: Option<u32>,
        key: i32,
    ) -> Result<Option<Communicator>, Error> {
        const EACH: usize = 12;
        let room = self.allocate_private(EACH * communicator.size as usize)?;
        let own = (EACH * communicator.rank as usize) as u64;
        let words = [u32::from(color.is_some()), color.unwrap_or(0), key as u32];
        self.write(room, own, &words.map(u32::to_ne_bytes).concat())?;
        let rows = Operation::all_gather(room.at(own), room, EACH, DataType::U8);
        let told = self.run_by(communicator, &rows, Algorithm::Direct);
        let mut bytes = vec![0; EACH * communicator.size as usize];
        self.read(room, 0, &mut bytes)?;
        self.deregister(room)?;
        told?;
        let rows = bytes.as_chunks::<EACH>().0.iter().zip(0..).map(|(row, rank): (_, u32)| {
            let word = |at: usize| u32::from_ne_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
            ((word(0) == 1).then(|| word(4)), word(8) as i32, rank)
        });
        let mut members: Vec<(i32, u32)> =
            rows.filter(|(of, ..)| *of == color).map(|(_, key, rank)| (key, rank)).collect();
        members.sort_unstable();
        let ranks: Vec<u32> = members.into_iter().map(|(_, rank)| rank).collect();
        // A rank that is in none counts it too, as the others do.
        let origin = self.group_mut(communicator)?.next_child();
        if color.is_some() { self.child(communicator, origin, &ranks) } else { Ok(None) }
    }

    /// After a failure, creates a communicator without the lost ranks: the remaining ranks call it, agree on the lost ranks, and
    /// get a communicator, in the same order. It blocks until all ranks that answer have called it; a rank that does not answer
    /// for [`Options::retry_budget`] is lost. The old communicator can't be used any more.
    ///
    /// If the network is partitioned, each part continues as a communicator of its own.
    ///
    /// # Errors
    /// [`Error::Failed`] if the others have given up this rank; [`Error::Invalid`] for more than 1792 ranks; [`Error::Gpu`] if a
    /// device completes nothing for 10 s: call it again; [`Error::InvalidHandle`], [`Error::Verbs`].
    pub fn shrink(&mut self, communicator: Communicator) -> Result<Communicator, Error> {
        self.start_shrink(communicator)?;
        loop {
            match self.shrunk(communicator)? {
                Some(left) => return Ok(left),
                None => self.turn()?,
            }
        }
    }

    /// Starts [`shrink`](Collectives::shrink) without waiting. Each [`poll`](Collectives::poll) advances it, until
    /// [`shrunk`](Collectives::shrunk) returns the communicator.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than 1792 ranks; [`Error::InvalidHandle`].
    pub fn start_shrink(&mut self, communicator: Communicator) -> Result<(), Error> {
        self.group_mut(communicator)?.begin_to_shrink()
    }

    /// The communicator of the remaining ranks, after they have agreed.
    ///
    /// # Errors
    /// As [`shrink`](Collectives::shrink).
    pub fn shrunk(&mut self, communicator: Communicator) -> Result<Option<Communicator>, Error> {
        let group = self.group(communicator)?;
        let Some(gone) = group.agreed().cloned() else { return Ok(None) };
        let known = self.shrunk.iter().find(|(parent, _)| *parent == communicator.handle);
        let child = match known.map(|(_, child)| *child) {
            Some(handle) => {
                let group = self.groups.get(handle).ok_or(UNKNOWN)?;
                Some(Communicator { handle, rank: group.rank, size: group.size() })
            }
            None => {
                let ranks: Vec<u32> = (0..communicator.size).filter(|rank| !gone.has(*rank)).collect();
                // The ranks may have derived different numbers of communicators from it before.
                let child = self.child(communicator, Group::SHRUNK, &ranks)?;
                self.shrunk.extend(child.map(|child| (communicator.handle, child.handle)));
                child
            }
        };
        // The program may use its buffers again.
        if !self.calm(communicator.handle)? {
            return Ok(None);
        }
        let now = self.now();
        let (mut process, groups) = self.process(now);
        if let Some(group) = groups.get_mut(communicator.handle) {
            group.disconnect(&mut process)?;
        }
        if child.is_some() {
            return Ok(child);
        }
        let problem = "the other ranks have given up this one".to_owned();
        let (rank, operation) = (communicator.rank, "shrink".to_owned());
        Err(Error::Failed { rank, operation, cause: Cause::Local { problem } })
    }

    /// Whether a communicator no longer writes to memory, as of the last poll.
    fn calm(&mut self, communicator: Handle) -> Result<bool, Error> {
        let now = self.now();
        let (mut process, groups) = self.process(now);
        groups.get_mut(communicator).map_or(Ok(true), |group| group.calm(&mut process))
    }

    /// Leaves a communicator: polls until all ranks have called it, so that the last packets of all are acknowledged, and frees
    /// its resources. A communicator that has failed is left at once.
    ///
    /// # Errors
    /// [`Error::Failed`] if a rank ended without calling it, or the communicator has failed and no call has returned the failure
    /// yet; everything is then freed, too. [`Error::Gpu`] if a device completes nothing for 10 s: then nothing is freed, and it
    /// may be called again. [`Error::InvalidHandle`].
    pub fn leave(&mut self, communicator: Communicator) -> Result<(), Error> {
        self.group(communicator)?;
        let left = self.say_farewell(&[communicator]);
        let told = self.tell_failures();
        self.leave_alone(communicator)?;
        left.and(told)
    }

    /// Frees a communicator, independent of the other ranks.
    pub(super) fn leave_alone(&mut self, communicator: Communicator) -> Result<(), Error> {
        let mut handles = vec![communicator.handle];
        while let Some(handle) = handles.pop() {
            while !self.calm(handle)? {
                if let Err(error) = self.turn() {
                    warn!("no more messages arrive: {error}");
                    break;
                }
            }
            // This includes those from which it was shrunk.
            let parents = self.shrunk.extract_if(.., |(_, child)| *child == handle).map(|(parent, _)| parent);
            handles.extend(parents);
            let now = self.now();
            if let Some(group) = self.groups.remove(handle) {
                group.destroy(&mut self.process(now).0)?;
            }
        }
        Ok(())
    }

    /// A barrier on each, until its last messages are acknowledged in both directions: all at once, because ranks may have them
    /// in any order. Those that have failed are left without a barrier.
    pub(super) fn say_farewell(&mut self, communicators: &[Communicator]) -> Result<(), Error> {
        // This rank's shared memory must exist as long as others may need it.
        let handles = || communicators.iter().map(|communicator| communicator.handle);
        while handles().any(|handle| self.groups.get(handle).is_some_and(Group::is_on_memory)) {
            self.turn()?;
        }
        let mut leaving = Vec::new();
        let mut first = Ok(());
        for communicator in communicators.iter().copied().filter(|communicator| communicator.size > 1) {
            let Ok(group) = self.group_mut(communicator) else { continue };
            if group.failure().is_some() {
                first = first.and(group.last_word().map_or(Ok(()), Err));
                continue;
            }
            group.begin_to_leave();
            // By packets: a rank's shared memory is removed when it has left.
            let barrier = [Operation::barrier()];
            match self.start_by(communicator, &barrier, Some(Algorithm::Direct), true) {
                Ok(request) => leaving.push((communicator, request)),
                Err(error) => {
                    warn!(%error, "leaving a communicator");
                    first = first.and(Err(error));
                }
            }
        }
        for (communicator, request) in leaving {
            if let Err(error) = self.wait(request) {
                warn!(%error, "leaving a communicator");
                first = first.and(Err(error));
                continue;
            }
            while let Ok(group) = self.group_mut(communicator) {
                if group.has_left() {
                    break;
                }
                self.turn()?;
            }
            let Collectives { groups, ports, .. } = self;
            if let Some(group) = groups.get_mut(communicator.handle) {
                group.acknowledge(ports)?;
            }
        }
        let now = self.now();
        self.ports.poll(now)?;
        first
    }

    /// Leaves all communicators and returns the context. Buffers that are still registered are freed.
    ///
    /// # Errors
    /// As [`leave`](Collectives::leave), for the first that fails; [`Error::Verbs`].
    pub fn finish(mut self) -> Result<Context, Error> {
        let communicators: Vec<Communicator> = self
            .groups
            .handles()
            .filter_map(|handle| {
                let group = self.groups.get(handle)?;
                Some(Communicator { handle, rank: group.rank, size: group.size() })
            })
            .collect();
        let left = self.say_farewell(&communicators);
        let first = left.and(self.tell_failures());
        for communicator in communicators {
            self.leave_alone(communicator)?;
        }
        let freed = self.free();
        // Consequences of an earlier error are not reported.
        first?;
        freed
    }

    pub(super) fn free(self) -> Result<Context, Error> {
        let Collectives { mut ports, mut poller, buffers, host, .. } = self;
        for buffer in buffers {
            ports.deregister(|| poller.now(), buffer.mr)?;
        }
        host.free(&mut ports, || poller.now())?;
        ports.free(|| poller.now())
    }
}
