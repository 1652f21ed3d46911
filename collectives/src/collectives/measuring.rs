//! How ranks measure the cost of messages.

use ferroce::driver::gpu::Ticket;
use ferroce::driver::reduction::{Computation, ReduceOp, Reduction as Arithmetic};

use super::*;
use crate::compute::ByDevice;

/// Bytes that each rank sends where latency is measured.
const SHORT: usize = 8;
/// Of each time the shortest of so many rounds counts.
const ROUNDS: usize = 3;

/// Blocks of memory that messages between hosts use, the half of them to send from: as many ranks as two hosts have at least.
const BLOCKS: usize = 4;

/// What is measured, with short messages or with long ones: what it takes says how fast messages go where ranks send so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Series {
    way: Way,
    is_long: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// An all-gather by an algorithm.
    Gather(Algorithm),
    /// A message from each rank to that of the same place on the next host, and one back when the other has come: it can't be back
    /// before both have travelled, whoever begins late.
    Hosts { before: u32, behind: u32 },
}

/// An operation of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Barrier,
    /// Of the series at a place.
    Forth(usize),
    /// What belongs to the one before it, and is measured with it.
    Back(usize),
}

/// A measurement under way, of [`Collectives::start_measuring`].
#[derive(Debug)]
#[must_use = "a measurement goes on in `Collectives::measured`"]
pub struct Measurement {
    communicator: Communicator,
    room: Buffer,
    /// Bytes that each rank sends where bandwidth is measured.
    long: usize,
    /// Seconds that this rank takes to reduce a byte.
    reduced: f64,
    /// What is measured, with the seconds that it took.
    series: Vec<(Series, f64)>,
    /// The operations, but for the last one, in which ranks tell each other what they have measured.
    turns: Vec<Turn>,
    /// Operations that have ended.
    ended: usize,
    /// The one under way, and when it began.
    request: Option<(Request, Nanos)>,
}

impl Collectives {
    /// Measures what messages cost, with all ranks at the same time, and chooses algorithms by that from now on. It takes some
    /// milliseconds; [`join`](Collectives::join) has done it, unless [`Options::model`] was given.
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

    /// Begins what [`measure`](Collectives::measure) does, without waiting, for ranks in virtual time. There a reduction takes no time,
    /// and the model says so.
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
        /// Longer than what is copied, so that it goes as long messages do, and not longer than it must be.
        const LONG: usize = 96 << 10;
        /// Of all ranks together at most.
        const MOST: usize = 8 << 20;
        let others = others(communicator);
        let group = self.group(communicator)?;
        let long = ((1 << 20) / others).clamp(LONG, 256 << 10).min(MOST / others);
        // Whole elements, also in halves; some for each rail.
        let long = (long & !0xff).max(256) * group.rails();
        let hosts = group.hosts();
        let beside = hosts.problem().is_none().then(|| hosts.beside(communicator.rank as usize));
        // Those that share links come last: congestion control remembers them.
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
                // Whoever ends a long one early would wait for the others in the next.
                turns.extend(is_long.then_some(Turn::Barrier));
                turns.push(Turn::Forth(at));
                turns.extend(matches!(way, Way::Hosts { .. }).then_some(Turn::Back(at)));
            }
        }
        let room = self.allocate_private(long * (others + 1))?;
        Ok(Measurement { communicator, room, long, reduced: 0.0, series, turns, ended: 0, request: None })
    }

    /// Goes on with a measurement; to be called after each [`poll`](Collectives::poll), until the model is there.
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

    /// The numbers of the slowest rank are those of all.
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

    /// Seconds that this rank takes to reduce a byte.
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

    /// Polls until the device has ended a reduction: other ranks may wait for answers. One that fails, or takes too long, is the
    /// communicator's end.
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
    /// Those of a series, there or back.
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

    /// Bytes that each rank sends to each other one. To all at once they are what is copied: nobody waits for a place then, as in the
    /// operations for which direct exchange is taken.
    fn block(&self, algorithm: Algorithm) -> usize {
        const COPIED: usize = 32 << 10;
        if algorithm == Algorithm::Direct { self.long.min(COPIED) } else { self.long }
    }

    /// What the series say of this rank.
    fn seconds(&self) -> Seconds {
        let times = |way: Way| {
            let [short, long] = [false, true].map(|is_long| {
                let of = Series { way, is_long };
                self.series.iter().find(|(series, _)| *series == of).map_or(0.0, |(_, time)| *time)
            });
            // What is beyond the short one is due to bytes.
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
