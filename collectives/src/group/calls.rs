//! The calls of the program: an operation is checked, gets an algorithm and a plan, and is started.

use super::plans::Checked;
use super::*;

/// Chunks of a window, if a device reduces while data is transmitted: at most half of the chunks in a channel's staging
/// memory.
const WINDOW: usize = 4;

impl Group {
    /// Bytes of a chunk: fewer with several rails, so that each gets some, but more than the limit of copied messages.
    fn chunk_bytes(&self) -> usize {
        let Options { chunk_bytes, eager_bytes, .. } = self.options;
        let (chunk, eager) = (chunk_bytes as usize, eager_bytes as usize);
        match self.rails() {
            1 => chunk,
            rails => (chunk / rails).max(2 * eager).next_multiple_of(64).min(chunk),
        }
    }

    /// The parameters of an operation for the cost model.
    fn demand(&self, operation: &Operation, lengths: (usize, usize)) -> Demand {
        // The same at all ranks, even if only one has an input or an output.
        let length = match operation.kind {
            Kind::Gather | Kind::Scatter | Kind::AllToAll
                if operation.sent.is_some() || operation.received.is_some() =>
            {
                0
            }
            Kind::Gather | Kind::Scatter => operation.count * self.cards.len(),
            _ => lengths.0.max(lengths.1),
        };
        Demand {
            kind: operation.kind,
            bytes: length * operation.data_type.size(),
            ranks: self.cards.len(),
            chunk: self.chunk_bytes(),
            unmapped: match &self.mapped {
                Err(problem) => Some(problem),
                Ok(_) if operation.kind == Kind::AllToAll && operation.sent.is_some() => {
                    Some("each rank knows its own counts alone")
                }
                Ok(_) => None,
            },
            is_on_device: self.is_on_device,
            is_small_float: matches!(operation.data_type, DataType::F8E4M3 | DataType::F8E5M2),
        }
    }

    /// The algorithm of an operation, and the reason.
    pub(crate) fn explain(&self, operation: &Operation) -> Result<Explanation, Error> {
        let lengths = operation.lengths(self.rank as usize, self.cards.len())?;
        let demand = self.demand(operation, lengths);
        let name = match operation.reduction {
            Some(reduction) => {
                format!("{} of {} {} ({reduction})", operation.kind, operation.count, operation.data_type)
            }
            None => format!("{} of {} {}", operation.kind, operation.count, operation.data_type),
        };
        let hosts = match self.hosts.count() {
            1 => "one host".to_owned(),
            count => format!("{count} hosts"),
        };
        let name = format!("{name}, {} bytes, {} ranks on {hosts}", demand.bytes, demand.ranks);
        Ok(explain(&self.model, &demand, &self.hosts, self.options.algorithm, name))
    }

    /// Checks an operation and plans it, with the algorithm `forced` if possible. Returns the key of its plan.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Failed`].
    pub(crate) fn check(
        &mut self,
        operation: &Operation,
        buffers: [u64; 2],
        forced: Option<Algorithm>,
    ) -> Result<u64, Error> {
        if self.failed.is_some() {
            let name = operation.kind.to_string();
            self.say_failure(name).map_or(Ok(()), Err)?;
        }
        if let Some(plan) = self.plans.find(operation, buffers, forced) {
            return Ok(plan);
        }
        let (rank, size) = (self.rank as usize, self.size() as usize);
        let lengths = operation.lengths(rank, size)?;
        let element = operation.data_type.size();
        for (what, at, length, buffer) in [
            ("input", operation.input, lengths.0, buffers[0]),
            ("output", operation.output, lengths.1, buffers[1]),
        ] {
            let bytes = (length * element) as u64;
            if let Some(at) = at
                && (at.offset > buffer || bytes > buffer - at.offset)
            {
                let value = format!("{bytes} bytes from byte {} on", at.offset);
                return Err(Error::invalid(
                    what,
                    value,
                    format!("a part of the buffer, which has {buffer} bytes"),
                ));
            }
        }
        let in_place = operation.in_place(rank, lengths)?;
        let demand = self.demand(operation, lengths);
        // An option that can't be followed is an error, except for operations that don't have that algorithm.
        let wanted = self.options.algorithm.filter(|algorithm| algorithm.applies_to(operation.kind));
        let has_own_counts = operation.kind == Kind::AllToAll && operation.sent.is_some();
        if let Some(algorithm) = wanted.filter(|_| forced.is_none() && size > 1 && !has_own_counts)
            && let Some(problem) = problem(algorithm, &demand, &self.hosts)
        {
            return Err(Error::invalid("algorithm", algorithm, format!("another one: {problem}")));
        }
        let (algorithm, _) = choose(&self.model, &demand, &self.hosts, forced.or(self.options.algorithm));
        Ok(self.plans.keep((operation, buffers, forced), Checked { lengths, in_place, algorithm }))
    }

    /// Starts an operation. Returns its ID.
    pub(crate) fn start(
        &mut self,
        process: &mut Process<'_>,
        operation: &Operation,
        buffers: [u64; 2],
        forced: Option<Algorithm>,
        is_own: bool,
    ) -> Result<u64, Error> {
        let plan = self.check(operation, buffers, forced)?;
        let Checked { lengths, algorithm, .. } = self.plans.checked(plan);
        if algorithm == Algorithm::Mapped {
            return Ok(self.start_mapped(process, operation, lengths, is_own));
        }
        let call = self.call(operation, algorithm, is_own);
        let begun = self.begin(process, operation, plan, call);
        if let Err(error) = &begun {
            // The others have started it, or will start it.
            self.refused(error);
        }
        begun
    }

    /// Starts an operation with its schedule.
    fn begin(
        &mut self,
        process: &mut Process<'_>,
        operation: &Operation,
        plan: u64,
        call: Call,
    ) -> Result<u64, Error> {
        let id = self.first + self.executions.len() as u64;
        let mut execution = match self.plans.take_ended(plan) {
            // Equal operations may have the factors 0 and -0.
            Some(ended) => ended.again(id, call, self.arithmetic(operation)),
            None => self.execution(operation, plan, (id, call)),
        };
        let scratch = execution.scratch_bytes();
        execution.idle_since = self.executions.is_empty().then_some(self.idle_since);
        let (steps, _) = execution.progress();
        execution.bytes = self.bytes_of(operation, plan);
        execution.record = self.log.called(&call, execution.bytes, steps, false);
        execution.places.scratch = self.take_scratch(process, id, scratch)?.map(|mr| (mr, 0));
        for (peer, sends) in execution.peers() {
            self.link(process, peer)?;
            let peer = &mut self.peers[peer as usize];
            if sends { peer.sends.push_back(id) } else { peer.receives.push_back(id) }
        }
        // Allocated here and not during a poll: it is long, and all of it is zeroed.
        for peer in execution.staged(self.limits.eager as usize) {
            if let Some(channel) = &mut self.peers[peer as usize].channel {
                channel.make_staging(process.ports, process.computer)?;
            }
        }
        execution.take_grants(&mut self.peers);
        self.executions.push_back(Some(execution));
        self.is_dirty = true;
        self.next_look = Nanos::ZERO;
        Ok(id)
    }

    /// Bytes of an operation's input or output, whichever is longer.
    fn bytes_of(&self, operation: &Operation, plan: u64) -> u64 {
        let Checked { lengths, .. } = self.plans.checked(plan);
        (lengths.0.max(lengths.1) * operation.data_type.size()) as u64
    }

    /// Plans an operation.
    fn execution(&self, operation: &Operation, plan: u64, (id, call): (u64, Call)) -> Execution {
        let Checked { in_place, algorithm, .. } = self.plans.checked(plan);
        let (rank, size, element) = (self.rank as usize, self.size() as usize, operation.data_type.size());
        let [sent, received] =
            [&operation.sent, &operation.received].map(|counts| counts.as_ref().map(|counts| ends(counts)));
        let task = Task {
            kind: operation.kind,
            count: operation.count,
            sent: sent.as_deref(),
            received: received.as_deref(),
            root: operation.root as usize,
            is_scaled: matches!(operation.reduction, Some(crate::Reduction::PreMulSum(_))),
            is_average: matches!(operation.reduction, Some(crate::Reduction::Average)),
            in_place,
        };
        let chunk = (self.chunk_bytes() / element).max(1);
        let window = if self.is_on_device { WINDOW } else { usize::MAX };
        let shape = Shape { chunk, lands_above: self.options.eager_bytes as usize / element, window };
        let seat = Seat { rank, size, hosts: &self.hosts };
        let schedule = schedule::plan(&task, algorithm, seat, shape);
        Execution::new((id, plan), call, schedule, Places::of(operation), self.arithmetic(operation))
    }

    /// The arithmetic of an operation.
    pub(super) fn arithmetic(&self, operation: &Operation) -> What {
        What { data_type: operation.data_type, reduction: operation.reduction, size: self.size() }
    }

    /// The values of an operation that both ends of a channel must have in common.
    pub(super) fn call(&mut self, operation: &Operation, algorithm: Algorithm, is_own: bool) -> Call {
        let hash = |counts: &[usize]| hash(counts.iter().flat_map(|count| (*count as u64).to_be_bytes()));
        let counts = match operation.kind {
            // Ranks know only their own counts.
            Kind::AllToAll => operation.sent.as_ref().map(|_| &[][..]),
            _ => operation.sent.as_deref().or(operation.received.as_deref()),
        };
        let number = if operation.kind.is_of_two() {
            let way = usize::from(operation.kind == Kind::Receive);
            let count = &mut self.peers[operation.root as usize].of_two[way];
            *count = count.wrapping_add(1);
            (*count - 1) & !Call::OF_TWO | Call::OF_TWO
        } else {
            let (count, bits) = if is_own { (&mut self.own_calls, Call::OWN) } else { (&mut self.calls, 0) };
            *count = (*count + 1) & (Call::OWN - 1);
            count.wrapping_sub(1) & (Call::OWN - 1) | bits
        };
        let call = Call {
            number,
            kind: if operation.kind == Kind::Receive { Kind::Send } else { operation.kind },
            data_type: operation.data_type,
            reduction: operation.reduction.map_or(0, crate::Reduction::number),
            algorithm,
            root: if operation.kind.has_root() { operation.root as u16 } else { 0 },
            count: counts.map_or(Count::Each(operation.count as u64), |counts| Count::Differ(hash(counts))),
        };
        if !operation.kind.is_of_two() {
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(call);
        }
        call
    }

    fn take_scratch(
        &mut self,
        process: &mut Process<'_>,
        id: u64,
        bytes: usize,
    ) -> Result<Option<Mr>, Error> {
        if bytes == 0 {
            return Ok(None);
        }
        let found = self.scratch.iter().position(|(_, length)| *length >= bytes);
        let (mr, length) = match found {
            Some(index) => self.scratch.swap_remove(index),
            None => {
                let length = bytes.next_power_of_two().max(4096);
                let Process { ports, computer, .. } = process;
                let memory = ports.allocate(computer.device(), length)?;
                (computer.register(ports, memory, ferroce::Access::LOCAL_WRITE)?, length)
            }
        };
        self.in_use.push((id, mr, length));
        Ok(Some(mr))
    }
}

/// The ends of blocks of these lengths.
pub(super) fn ends(counts: &[usize]) -> Vec<usize> {
    let sum = |end: &mut usize, count: &usize| {
        *end += count;
        Some(*end)
    };
    counts.iter().scan(0, sum).collect()
}
