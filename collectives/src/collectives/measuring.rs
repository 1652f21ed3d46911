//! How ranks measure the cost of messages.

use ferroce::driver::gpu::Ticket;
use ferroce::driver::reduction::{Computation, ReduceOp, Reduction as Arithmetic};

use super::*;
use crate::compute::ByDevice;

/// Bytes that each rank sends to measure latency.
const SHORT: usize = 8;
/// The number of rounds, of which the shortest time counts.
const ROUNDS: usize = 3;

/// Memory blocks for messages between hosts, half of them to send from: at least as many as two hosts have ranks.
const BLOCKS: usize = 4;

/// A pattern of communication whose time is measured, with short or with long messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Series {
    way: Way,
    is_long: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// An all-gather with an algorithm.
    Gather(Algorithm),
    /// A message from each rank to the one with the same position on the next host, and a reply after the other one's message has
    /// arrived: the round trip covers both messages, even if a rank starts late.
    Hosts { before: u32, behind: u32 },
}

/// An operation of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Barrier,
    /// The operation at a position of the series.
    Forth(usize),
    /// Part of the previous operation, and measured with it.
    Back(usize),
}

/// A measurement in progress, of [`Collectives::start_measuring`].
#[derive(Debug)]
#[must_use = "a measurement goes on in `Collectives::measured`"]
pub struct Measurement {
    communicator: Communicator,
    room: Buffer,
    /// Bytes that each rank sends to measure bandwidth.
    long: usize,
    /// The seconds that this rank needs to reduce a byte.
    reduced: f64,
    /// The patterns, with their measured seconds.
    series: Vec<(Series, f64)>,
    /// The operations, except the last one, in which ranks exchange their results.
    turns: Vec<Turn>,
    /// Completed operations.
    ended: usize,
    /// The current operation, and its start.
    request: Option<(Request, Nanos)>,
}

impl Collectives {
    /// Measures the cost of messages, at all ranks at the same time, and chooses algorithms accordingly from now on. It takes
    /// some milliseconds; [`join`](Collectives::join) does it, unless [`Options::model`] is set.
    ///
    /// # Errors
    /// As [`wait`](Collectives::wait).
    pub fn measure(&mut self, communicator: Communicator) -> Result<Model, Error> {
        let model = self.measure_all(communicator);
        if model.is_err() {
            self.tell_failures()?;
        }
        model
    }

    fn measure_all(&mut self, communicator: Communicator) -> Result<Model, Error> {
        let mut measurement = self.start_measuring(communicator)?;
        measurement.reduced = self.time_of_reduction(&measurement)?;
        loop {
            let now = self.now();
            match self.go_on_measuring(&mut measurement, now)? {
                Some(model) => return Ok(model),
                None => self.turn()?,
            }
        }
    }

    /// Starts [`measure`](Collectives::measure) without waiting, for ranks in virtual time, where reductions take no time, also
    /// in the model.
    ///
    /// ```
    /// # use ferroce_collectives::ferroce::{Config, Context, Device, Nanos};
    /// # use ferroce_collectives::*;
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let mut collectives = Collectives::new(context)?;
    /// # let card = collectives.card(&Options::default())?;
    /// # let all = collectives.join_with(0, &[card], &Options::default())?;
    /// let mut measurement = collectives.start_measuring(all)?;
    /// let mut now = Nanos(1);
    /// let model = loop {
    ///     collectives.poll(now)?;
    ///     match collectives.measured(&mut measurement)? {
    ///         Some(model) => break model,
    ///         None => now = now + Duration::from_micros(1),
    ///     }
    /// };
    /// println!("{model}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Verbs`].
    pub fn start_measuring(&mut self, communicator: Communicator) -> Result<Measurement, Error> {
        /// Longer than copied messages, so that it is sent as a long message, and not longer than necessary.
        const LONG: usize = 96 << 10;
        /// The most bytes of all ranks together.
        const MOST: usize = 8 << 20;
        let others = others(communicator);
        let group = self.group(communicator)?;
        let long = ((1 << 20) / others).clamp(LONG, 256 << 10).min(MOST / others);
        // Whole elements, also in halves; some for each rail.
        let long = (long & !0xff).max(256) * group.rails();
        let hosts = group.hosts();
        let beside = hosts.problem().is_none().then(|| hosts.beside(communicator.rank as usize));
        // Patterns that share links are last, because they affect congestion control.
        let [ring, halving, direct] = [Algorithm::Ring, Algorithm::Halving, Algorithm::Direct]
            .map(|algorithm| Some(Way::Gather(algorithm)));
        let ways = || {
            [ring, beside.map(|[before, behind]| Way::Hosts { before, behind }), halving, direct]
                .into_iter()
                .flatten()
        };
        let series =
            [false, true].into_iter().flat_map(|is_long| ways().map(move |way| Series { way, is_long }));
        let series: Vec<(Series, f64)> = series.map(|series| (series, f64::INFINITY)).collect();
        let mut turns = vec![Turn::Barrier];
        for (at, (Series { way, is_long }, _)) in series.iter().enumerate() {
            for _ in 0..ROUNDS {
                // A rank that completes a long one early would wait for the others in the next.
                turns.extend(is_long.then_some(Turn::Barrier));
                turns.push(Turn::Forth(at));
                turns.extend(matches!(way, Way::Hosts { .. }).then_some(Turn::Back(at)));
            }
        }
        let room = self.allocate_private(long * (others + 1))?;
        Ok(Measurement { communicator, room, long, reduced: 0.0, series, turns, ended: 0, request: None })
    }

    /// Advances a measurement; call it after each [`poll`](Collectives::poll), until it returns the model.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn measured(&mut self, measurement: &mut Measurement) -> Result<Option<Model>, Error> {
        let now = self.ports.now();
        self.go_on_measuring(measurement, now)
    }

    fn go_on_measuring(&mut self, of: &mut Measurement, now: Nanos) -> Result<Option<Model>, Error> {
        let mut began = now;
        if let Some((request, since)) = of.request {
            if !self.has_ended(request)? {
                return Ok(None);
            }
            of.request = None;
            match (of.turns.get(of.ended), of.turns.get(of.ended + 1)) {
                (_, Some(Turn::Back(_))) => began = since,
                (Some(Turn::Forth(series) | Turn::Back(series)), _) => {
                    let (_, shortest) = &mut of.series[*series];
                    *shortest = shortest.min(now.since(since).as_secs_f64());
                }
                _ => {}
            }
            of.ended += 1;
        }
        if of.ended > of.turns.len() {
            return self.agreed(of).map(Some);
        }
        let Measurement { communicator, room, .. } = *of;
        let (operations, algorithm) = match of.turns.get(of.ended).copied() {
            Some(Turn::Forth(series)) => of.operations(series, false),
            Some(Turn::Back(series)) => of.operations(series, true),
            Some(Turn::Barrier) => (vec![Operation::barrier()], Algorithm::Direct),
            None => {
                let numbers = of.seconds().to_numbers();
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
                self.write(room, 0, &bytes)?;
                let worst = Operation::all_reduce(room, room, numbers.len(), DataType::F64, Reduction::Max);
                (vec![worst], Algorithm::Direct)
            }
        };
        let request = self.start_by(communicator, &operations, Some(algorithm), true)?;
        of.request = Some((request, began));
        Ok(None)
    }

    /// The numbers of the slowest rank are used for all.
    fn agreed(&mut self, of: &Measurement) -> Result<Model, Error> {
        let mut bytes = [0; 8 * Seconds::COUNT];
        self.read(of.room, 0, &mut bytes)?;
        self.deregister(of.room)?;
        let mut worst = of.seconds().to_numbers();
        for (number, bytes) in worst.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = f64::from_ne_bytes(*bytes);
        }
        let model = Model::from_seconds(Seconds::from_numbers(worst));
        if let Some(group) = self.groups.get_mut(of.communicator.handle) {
            group.set_model(model);
        }
        Ok(model)
    }

    /// The seconds that this rank needs to reduce a byte.
    fn time_of_reduction(&mut self, of: &Measurement) -> Result<f64, Error> {
        let half = (of.long / 2) as u32;
        let [a, b] = [0, half].map(|offset| Sge { mr: of.room.mr, offset: offset.into(), length: half });
        let sum = Computation::Reduce(Arithmetic::new(DataType::F32, ReduceOp::Sum));
        let mut reduced = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = self.now();
            match self.computer.begin(&self.ports, start, sum, a, &[a, b])? {
                ByDevice::Begun(ticket) => self.wait_for_reduction(of.communicator, ticket)?,
                _ => self.computer.compute(&mut self.ports, sum, a, &[a, b])?,
            }
            reduced = reduced.min(self.now().since(start).as_secs_f64() / f64::from(half));
        }
        Ok(reduced)
    }

    /// Polls until the device has completed a reduction: other ranks may wait for answers. If it fails, or takes too long, the
    /// communicator fails.
    fn wait_for_reduction(&mut self, communicator: Communicator, ticket: Ticket) -> Result<(), Error> {
        let (start, patience) = (self.now(), self.group(communicator)?.options.stall_timeout);
        loop {
            let now = self.now();
            self.poll(now)?;
            let failed = match self.computer.has_ended(ticket) {
                Ok(true) => return Ok(()),
                Ok(false) if now.since(start) < patience => None,
                Ok(false) => Some(self.computer.hangs(patience)),
                Err(error) => Some(error),
            };
            let group = self.group_mut(communicator)?;
            if let Some(error) = failed {
                group.fail(Cause::Device { rank: communicator.rank, problem: error.to_string() });
            }
            group.say_failure("measuring".to_owned()).map_or(Ok(()), Err)?;
        }
    }
}

impl Measurement {
    /// The messages of a series, in one direction.
    fn operations(&self, series: usize, is_back: bool) -> (Vec<Operation>, Algorithm) {
        let Measurement { communicator, room, long, .. } = *self;
        let (Series { way, is_long }, _) = self.series[series];
        match way {
            Way::Gather(algorithm) => {
                let bytes = if is_long { self.block(algorithm) } else { SHORT };
                let own = room.at((bytes * communicator.rank as usize) as u64);
                (vec![Operation::all_gather(own, room, bytes, DataType::U8)], algorithm)
            }
            Way::Hosts { before, behind } => {
                let bytes = if is_long { BLOCKS / 2 * long } else { SHORT };
                let (from, to) = if is_back { (behind, before) } else { (before, behind) };
                let send = Operation::send(room, bytes, DataType::U8, to);
                let receive = Operation::receive(room.at(bytes as u64), bytes, DataType::U8, from);
                (vec![send, receive], Algorithm::Direct)
            }
        }
    }

    /// Bytes that each rank sends to each other one. For all at once they are short enough to be copied: no rank then waits for
    /// an address, as in the operations for which direct exchange is chosen.
    fn block(&self, algorithm: Algorithm) -> usize {
        const COPIED: usize = 32 << 10;
        if algorithm == Algorithm::Direct { self.long.min(COPIED) } else { self.long }
    }

    /// The results of the series for this rank.
    fn seconds(&self) -> Seconds {
        let times = |way: Way| {
            let [short, long] = [false, true].map(|is_long| {
                let of = Series { way, is_long };
                self.series.iter().find(|(series, _)| *series == of).map_or(0.0, |(_, time)| *time)
            });
            // The time beyond the short message is the cost of the bytes.
            (short, (long - short).max(1e-9))
        };
        let others = others(self.communicator) as f64;
        let (long, ranks) = (self.long as f64, others + 1.0);
        let (along, bytes_along) = times(Way::Gather(Algorithm::Ring));
        let (latency, byte) = (along / others, bytes_along / others / long);
        let (at_once, bytes_at_once) = times(Way::Gather(Algorithm::Direct));
        let overhead = (at_once - latency).max(latency / 16.0) / others;
        let (halved, bytes_halved) = times(Way::Gather(Algorithm::Halving));
        let halving = [halved / ranks.log2().ceil().max(1.0), bytes_halved / others / long];
        let between =
            self.series.iter().map(|(series, _)| series.way).find(|way| matches!(way, Way::Hosts { .. }));
        let hosts = between.map_or([latency, byte], |way| {
            // There and back.
            let (short, bytes) = times(way);
            [short / 2.0, bytes / 2.0 / (BLOCKS / 2) as f64 / long]
        });
        let exchanged = bytes_at_once / others / self.block(Algorithm::Direct) as f64;
        Seconds { latency, overhead, byte, exchanged, halving, hosts, reduced: self.reduced }
    }
}

fn others(communicator: Communicator) -> usize {
    communicator.size.saturating_sub(1).max(1) as usize
}
