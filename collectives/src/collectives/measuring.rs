//! How ranks measure what messages cost.

use super::*;

/// Bytes that each rank sends where latency is measured.
const SHORT: usize = 8;
/// Of each time the shortest of so many rounds counts.
const ROUNDS: usize = 4;

/// What is measured, in this order, and by which algorithm: short messages one after the other, short messages at once, long
/// messages one after the other.
const SERIES: [Algorithm; 3] = [Algorithm::Ring, Algorithm::Direct, Algorithm::Ring];

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
    /// Operations that have ended.
    ended: usize,
    /// The one under way, and when it began.
    request: Option<(Request, Nanos)>,
    /// Seconds, for each of the series.
    shortest: [f64; SERIES.len()],
}

impl Collectives {
    /// Measures what messages cost, with all ranks at the same time, and chooses algorithms by that from now on. It takes some
    /// milliseconds; [`join`](Collectives::join) has done it, unless [`Options::model`] was given.
    ///
    /// # Errors
    /// As [`wait`](Collectives::wait).
    pub fn measure(&mut self, communicator: Communicator) -> Result<Model, Error> {
        let mut measurement = self.start_measuring(communicator)?;
        measurement.reduced = self.time_of_reduction(&measurement)?;
        loop {
            let now = self.now();
            match self.go_on_measuring(&mut measurement, now) {
                Ok(Some(model)) => return Ok(model),
                Ok(None) => self.turn()?,
                Err(error) => {
                    self.tell_failures()?;
                    return Err(error);
                }
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
        let others = others(communicator);
        // Whole elements, also in halves.
        let long = ((1 << 20) / others).clamp(32 << 10, 256 << 10) & !0xff;
        let room = self.room(long * (others + 1))?;
        let shortest = [f64::INFINITY; SERIES.len()];
        Ok(Measurement { communicator, room, long, reduced: 0.0, ended: 0, request: None, shortest })
    }

    /// Goes on with a measurement; to be called after each [`poll`](Collectives::poll), until the model is there.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn measured(&mut self, measurement: &mut Measurement) -> Result<Option<Model>, Error> {
        let now = self.context.now();
        self.go_on_measuring(measurement, now)
    }

    fn go_on_measuring(&mut self, of: &mut Measurement, now: Nanos) -> Result<Option<Model>, Error> {
        /// A barrier comes before the series, and an exchange of what was measured after it.
        const OPERATIONS: usize = 1 + SERIES.len() * ROUNDS + 1;
        if let Some((request, since)) = of.request {
            if !self.has_ended(request)? {
                return Ok(None);
            }
            of.request = None;
            if let Some(series) = series(of.ended) {
                of.shortest[series] = of.shortest[series].min(now.since(since).as_secs_f64());
            }
            of.ended += 1;
        }
        if of.ended == OPERATIONS {
            return self.agreed(of).map(Some);
        }
        let Measurement { communicator, room, long, .. } = *of;
        let gather = |bytes: usize| {
            let own = room.at((bytes * communicator.rank as usize) as u64);
            Operation::all_gather(own, room, bytes, DataType::U8)
        };
        let (operation, algorithm) = match series(of.ended) {
            Some(series) => (gather(if series == 2 { long } else { SHORT }), SERIES[series]),
            None if of.ended == 0 => (Operation::barrier(), Algorithm::Direct),
            None => {
                let numbers = of.numbers();
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
                self.write(room, 0, &bytes)?;
                let worst =
                    Operation::all_reduce(room, room, numbers.len(), DataType::F64, Reduction::Max);
                (worst, Algorithm::Direct)
            }
        };
        let request = self.start_by(communicator, std::slice::from_ref(&operation), Some(algorithm), true)?;
        of.request = Some((request, now));
        Ok(None)
    }

    /// The numbers of the slowest rank are those of all.
    fn agreed(&mut self, of: &Measurement) -> Result<Model, Error> {
        let mut bytes = [0; 32];
        self.read(of.room, 0, &mut bytes)?;
        self.deregister(of.room)?;
        let mut worst = of.numbers();
        for (number, bytes) in worst.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = f64::from_ne_bytes(*bytes);
        }
        let model = Model::from_numbers(worst);
        if let Some(group) = self.groups.get_mut(of.communicator.handle) {
            group.set_model(model);
        }
        Ok(model)
    }

    /// Seconds that this rank takes to reduce a byte.
    fn time_of_reduction(&mut self, of: &Measurement) -> Result<f64, Error> {
        let half = (of.long / 2) as u32;
        let [a, b] = [0, half].map(|offset| Sge { mr: of.room.mr, offset: offset.into(), length: half });
        let sum = ferroce::driver::reduction::Reduction::new(
            DataType::F32,
            ferroce::driver::reduction::ReduceOp::Sum,
        );
        let mut reduced = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = self.now();
            self.computer.reduce(&mut self.context, sum, a, &[a, b])?;
            reduced = reduced.min(self.now().since(start).as_secs_f64() / f64::from(half));
        }
        Ok(reduced)
    }
}

impl Measurement {
    /// Latency, overhead, and seconds for a byte that travels and for one that is reduced.
    fn numbers(&self) -> [f64; 4] {
        let others = others(self.communicator) as f64;
        let [along, at_once, long] = self.shortest;
        let latency = along / others;
        let overhead = (at_once - latency).max(latency / 16.0) / others;
        let byte = (long / others - latency).max(1e-9) / self.long as f64;
        [latency, overhead, byte, self.reduced]
    }
}

fn others(communicator: Communicator) -> usize {
    communicator.size.saturating_sub(1).max(1) as usize
}

/// The series that an operation is of.
fn series(operation: usize) -> Option<usize> {
    let series = operation.checked_sub(1)? / ROUNDS;
    (series < SERIES.len()).then_some(series)
}
