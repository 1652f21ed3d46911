//! How ranks form a communicator.

use zerocopy::FromZeros;

use super::*;

impl Collectives {
    /// Meets the other ranks and joins a communicator with them. It blocks until all have joined.
    ///
    /// # Errors
    /// Those of the rendezvous ([`Error::Missing`], [`Error::Connect`], [`Error::Refused`], ...), [`Error::Invalid`] for an
    /// option, [`Error::Verbs`].
    pub fn join(&mut self, bootstrap: Bootstrap, options: &Options) -> Result<Communicator, Error> {
        let card = self.card(options)?;
        let rank = bootstrap.rank();
        let cards = match bootstrap.size() {
            1 => vec![card],
            _ => rendezvous(bootstrap, card)?,
        };
        let communicator = self.join_by_cards(rank, &cards, options)?;
        match self.prepare(communicator, options) {
            Ok(()) => Ok(communicator),
            Err(error) => {
                // Its handle is not returned. All ranks know the common results.
                if !matches!(error, Error::Shared { .. }) {
                    self.group_mut(communicator)?.refused(&error);
                }
                self.tell_failures()?;
                self.leave_alone(communicator)?;
                Err(error)
            }
        }
    }

    /// The exchange of the ranks before the first operation.
    fn prepare(&mut self, communicator: Communicator, options: &Options) -> Result<(), Error> {
        if communicator.size > 1 && options.shared_memory != SharedMemory::Off {
            self.agree_on_memory(communicator, options)?;
        }
        if communicator.size > 1 && options.model.is_none() {
            let _ = self.measure(communicator)?;
        }
        Ok(())
    }

    /// The data of this rank for joining a communicator without a [`Bootstrap`]: send the cards of all ranks to all ranks, by any
    /// means, and call [`join_with`](Collectives::join_with). A card is valid for one communicator.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an option.
    pub fn card(&mut self, options: &Options) -> Result<Card, Error> {
        options.check()?;
        let mut rails = [RailCard::new_zeroed(); MAX_RAILS];
        for (port, rail) in self.ports.all().zip(&mut rails) {
            *rail = RailCard::of(port, options)?;
        }
        self.has_card = true;
        let [high, low] = [(); 2].map(|()| u64::from(self.ports.random_psn().value()));
        let host = options.host.unwrap_or_else(this_host);
        let board = self.board(options)?;
        Ok(Card {
            rails,
            rail_count: U32::new(self.ports.count() as u32),
            nonce: U64::new(high << 24 | low),
            host: host.to_be_bytes(),
            chunk_bytes: U32::new(options.chunk_bytes),
            eager_bytes: U32::new(options.eager_bytes),
            algorithm: U32::new(options.algorithm.map_or(0, |algorithm| algorithm as u32)),
            shared_memory: U32::new(options.shared_memory as u32),
            has_model: U32::new(options.model.is_some().into()),
            byte_order: Card::BYTE_ORDER,
            device: U32::new(self.computer.device().is_some().into()),
            board_pid: U32::new(board.pid),
            board_fd: U32::new(board.fd),
            board_bytes: U32::new(board.length as u32),
            board_namespace: U64::new(board.namespace),
            board_nonce: U64::new(board.nonce),
        })
    }

    /// The data with which ranks of this host open this process's board, if it has one.
    pub(super) fn board(&mut self, options: &Options) -> Result<Ticket, Error> {
        if options.shared_memory == SharedMemory::Off || self.computer.device().is_some() {
            return Ok(Ticket::default());
        }
        let pd = self.ports.pd();
        match self.host.board(&mut self.ports, pd) {
            Err(error) if options.shared_memory == SharedMemory::Auto => {
                warn!("no shared memory with ranks of this host: {error}");
                Ok(Ticket::default())
            }
            board => board,
        }
    }

    /// The ranks determine whether all of them are on this host and have mapped each other's memory.
    pub(super) fn agree_on_memory(
        &mut self,
        communicator: Communicator,
        options: &Options,
    ) -> Result<(), Error> {
        let reason = self.group(communicator)?.boards().err();
        let mapped = self.map_boards(communicator);
        let all = self.can_all(communicator, mapped.is_ok());
        let mapped = match (mapped, &all) {
            (Ok(mapped), Ok(true)) => Ok(mapped),
            (Ok(mapped), _) => {
                let Collectives { host, ports, poller, .. } = self;
                mapped.free(host, ports, || poller.now())?;
                Err(Error::Shared {
                    reason: "another rank can't map the shared memory of the others".to_owned(),
                })
            }
            (Err(error), _) => Err(error),
        };
        all?;
        if let (Err(error), SharedMemory::Required) = (&mapped, options.shared_memory) {
            let reason = match error {
                Error::Shared { reason } => reason.clone(),
                error => error.to_string(),
            };
            self.say_farewell(&[communicator])?;
            return Err(Error::Shared { reason });
        }
        if let Err(error) = &mapped {
            warn!(rank = communicator.rank, "{error}");
        }
        if let Some(group) = self.groups.get_mut(communicator.handle) {
            let reason = reason.unwrap_or("a rank can't map the shared memory of others");
            let mapped = mapped.map_err(|_| reason);
            group.set_mapped(&mut self.ports, mapped);
        }
        Ok(())
    }

    /// Whether all ranks can.
    fn can_all(&mut self, communicator: Communicator, can: bool) -> Result<bool, Error> {
        let room = self.allocate_private(1)?;
        self.write(room, 0, &[u8::from(can)])?;
        let all = Operation::all_reduce(room, room, 1, DataType::U8, Reduction::Min);
        let told = self.run_by(communicator, &all, Algorithm::Direct);
        let mut all = [0];
        self.read(room, 0, &mut all)?;
        self.deregister(room)?;
        told.map(|()| all == [1])
    }

    /// Joins a communicator as `rank`; `cards` are those of all ranks, in order. It returns at once: ranks connect when an
    /// operation needs it. The ranks do not determine whether they can share memory: they share it only with
    /// [`SharedMemory::Required`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for no or too many cards, a rank out of range, a card that is not of this process, and for options that
    /// differ; [`Error::Verbs`].
    pub fn join_with(&mut self, rank: u32, cards: &[Card], options: &Options) -> Result<Communicator, Error> {
        let communicator = self.join_by_cards(rank, cards, options)?;
        if options.shared_memory == SharedMemory::Required && communicator.size > 1 {
            // All ranks require it, so no exchange is needed.
            let mapped = match self.map_boards(communicator) {
                Ok(mapped) => mapped,
                Err(error) => {
                    self.leave_alone(communicator)?;
                    return Err(error);
                }
            };
            if let Some(group) = self.groups.get_mut(communicator.handle) {
                group.set_mapped(&mut self.ports, Ok(mapped));
            }
        } else if let Some(group) = self.groups.get_mut(communicator.handle) {
            let reason =
                "ranks that join with cards ask each other nothing: SharedMemory::Required says that all can";
            group.set_mapped(&mut self.ports, Err(reason));
        }
        Ok(communicator)
    }

    /// Maps the boards of all ranks, and reserves a slot on this process's own board.
    fn map_boards(&mut self, communicator: Communicator) -> Result<Mapped, Error> {
        let group = self.group(communicator)?;
        let id = group.id;
        let boards = group.boards().map_err(|problem| Error::Shared { reason: problem.to_owned() })?;
        let Collectives { host, ports, .. } = self;
        let pd = ports.pd();
        boards.iter().try_for_each(|board| host.open(ports, pd, board))?;
        let full = || Error::Shared { reason: "this process is in too many communicators".to_owned() };
        Mapped::new(host, id, communicator.rank as usize, boards).ok_or_else(full)
    }

    fn join_by_cards(&mut self, rank: u32, cards: &[Card], options: &Options) -> Result<Communicator, Error> {
        options.check()?;
        let size = u32::try_from(cards.len()).unwrap_or(u32::MAX);
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(Error::invalid("number of cards", size, format!("1 to {MAX_SIZE}")));
        }
        let Some(own) = cards.get(rank as usize) else {
            return Err(Error::invalid(
                "rank",
                rank,
                format!("0 to {}, below the number of cards", size - 1),
            ));
        };
        if own.rails[0].qpn.get() != self.ports.of(0).control.qpn.value() {
            return Err(Error::invalid("card", format!("that of rank {rank}"), "the card of this process"));
        }
        for (peer, card) in (0..).zip(cards) {
            if let Some(difference) = own.difference(rank, card, peer) {
                return Err(Error::invalid("card", format!("that of rank {peer}"), difference));
            }
        }
        self.idler = Idler::new(options.idle);
        let now = self.now();
        let group = Group::new(&mut self.process(now).0, rank, cards.to_vec(), options)?;
        Ok(Communicator { handle: self.groups.insert(group), rank, size })
    }
}

/// The kernel's boot ID.
fn this_host() -> u128 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(id.trim().replace('-', "").as_str(), 16).unwrap_or(0)
}
