//! The work of a rank.

use std::cmp::Reverse;
use std::fmt;
use std::fs;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use ferroce_collectives::{
    Algorithm, At, Bootstrap, Buffer, Collectives, Communicator, DataType, Explanation, Operation, Reduction,
};
use ferroce_driver::Clock;
use ferroce_driver::machine::Machine;

use super::Args;
use super::pattern::{Part, Place, Size, Source};
use super::report::{Event, Header, Row, Timing, Wrong};
use super::signals::EndingSignals;
use super::values::{Values, bits_of};
use crate::failure::{Failure, legible};
use crate::quantity::Time;

/// An input element that a rank corrupts on purpose: `RANK:INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    rank: u32,
    index: usize,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rank, self.index)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let parts =
            text.split_once(':').and_then(|(rank, index)| Some((rank.parse().ok()?, index.parse().ok()?)));
        let (rank, index) = parts.ok_or("must be RANK:INDEX, two numbers")?;
        Ok(Fault { rank, index })
    }
}

/// A rank that starts late on purpose: `RANK:TIME:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Late {
    rank: u32,
    time: Time,
    /// One of this many calls is late.
    of: u32,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.rank, self.time, self.of)
    }
}

impl FromStr for Late {
    type Err = String;

    fn from_str(text: &str) -> Result<Late, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let late = match parts[..] {
            [rank, time, of] => rank.parse().ok().zip(time.parse().ok()).zip(of.parse().ok()),
            _ => None,
        };
        let is_valid = |late: &Late| late.of > 0 && late.time.0 <= Duration::from_secs(60);
        let late = late.map(|((rank, time), of)| Late { rank, time, of }).filter(is_valid);
        late.ok_or_else(|| {
            format!("'{text}': must be RANK:TIME:N, a time up to 60s in every Nth call, as 2:5ms:10")
        })
    }
}

/// Measures all sizes. Rank 0 reports the result of each.
pub(super) fn run(
    args: &Args,
    bootstrap: Bootstrap,
    tell: &mut dyn FnMut(Event) -> Result<(), Failure>,
) -> Result<(), Failure> {
    args.check_ranks(bootstrap.size())?;
    let signals = EndingSignals::install()?;
    let spec = args.device(bootstrap.rank(), bootstrap.master().ip().to_canonical().is_loopback())?;
    let launcher = bootstrap.launcher().map(|launcher| launcher.to_string());
    let mut collectives = spec.open(args.memory.open()?)?;
    let port = describe(&spec.to_string(), &collectives);
    if let Some(recorder) = collectives.flight_recorder() {
        signals.dump_first(recorder)?;
    }
    let all = collectives.join(bootstrap.timeout(args.timeout()), &args.options())?;
    let place = Place { rank: all.rank(), size: all.size() };
    let sizes = args.operation.sizes(args, place.size);
    let most = sizes.iter().map(|size| size.bytes).max().unwrap_or(0).max(8);
    let buffers = [collectives.allocate(most)?, collectives.allocate(most)?];
    let times = 8 * args.iterations as usize;
    let room = collectives.allocate(times.max(RECORD * place.size as usize))?;
    let clock = Clock::start();
    let mut member = Member { args, collectives, all, place, buffers, room, clock, salt: 0, calls: 0 };
    let places = member.exchange(port.as_bytes())?;
    if place.rank == 0 {
        let places = places.iter().map(text_of).collect();
        let algorithms = sizes.iter().map(|size| Ok(member.explanations(*size)?[0].algorithm));
        let algorithms = algorithms.collect::<Result<Vec<Algorithm>, Failure>>()?;
        tell(Event::Header(Header {
            launcher,
            places,
            machine: Machine::this().to_string(),
            reduces_by: args.memory.reduces_by(),
            sends_nothing: algorithms.iter().all(|algorithm| *algorithm == Algorithm::Mapped),
            sizes: sizes.len(),
        }))?;
    }
    for size in sizes {
        let row = member.measure(size)?;
        if place.rank == 0 {
            tell(Event::Row(row))?;
        }
    }
    member.collectives.finish()?;
    if place.rank == 0 {
        tell(Event::Finished)?;
    }
    Ok(())
}

/// The location of this rank: text that is exchanged with the other ranks.
fn describe(device: &str, collectives: &Collectives) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let ports = (0..collectives.rails()).filter_map(|rail| collectives.rail(rail)).map(|context| {
        let capabilities = context.capabilities();
        let addresses: Vec<String> = capabilities.addresses.iter().take(2).map(ToString::to_string).collect();
        format!("({}), MTU {}", addresses.join(" "), capabilities.mtu)
    });
    let ports: Vec<String> = ports.collect();
    format!("{} process {}, {device} {}", host.trim(), std::process::id(), ports.join(" + "))
}

/// Bytes of one record that ranks exchange.
const RECORD: usize = 256;
/// Bytes that are filled or compared at a time.
const PIECE: usize = 1 << 16;

/// The text of a record from another rank.
fn text_of(record: &[u8; RECORD]) -> String {
    let end = record.iter().position(|byte| *byte == 0).unwrap_or(RECORD);
    legible(&String::from_utf8_lossy(&record[..end]))
}

/// A rank and the communicator of all ranks.
struct Member<'a> {
    args: &'a Args,
    collectives: Collectives,
    all: Communicator,
    place: Place,
    /// For inputs and for outputs.
    buffers: [Buffer; 2],
    /// For records that ranks exchange.
    room: Buffer,
    clock: Clock,
    salt: u32,
    calls: u64,
}

impl Member<'_> {
    fn measure(&mut self, size: Size) -> Result<Row, Failure> {
        let (algorithm, explanation) = self.explain(size)?;
        let [out_of_place, in_place] = self.args.passes();
        let out_of_place = if out_of_place { Some(self.pass(size, false)?) } else { None };
        let in_place = if in_place { Some(self.pass(size, true)?) } else { None };
        Ok(Row {
            bytes: size.bytes as u64,
            count: size.count as u64,
            algorithm,
            explanation,
            out_of_place,
            in_place,
        })
    }

    /// The algorithm of a size, and the explanation if `--explain` is on. Fails if a forced algorithm is not used.
    fn explain(&self, size: Size) -> Result<(String, Option<String>), Failure> {
        let explanations = self.explanations(size)?;
        let algorithm = explanations[0].algorithm;
        if let Some(forced) = self.args.algorithm.filter(|forced| *forced != algorithm) {
            let reason = &explanations[0].reason;
            return Err(Failure::usage(format!("--algorithm {forced}; without it {algorithm}, {reason}")));
        }
        let texts: Vec<String> = explanations.iter().map(ToString::to_string).collect();
        Ok((algorithm.to_string(), self.args.explain.then(|| texts.join("\n"))))
    }

    /// The explanation of each operation of a size; there is at least one.
    fn explanations(&self, size: Size) -> Result<Vec<Explanation>, Failure> {
        let Args { operation, data_type, .. } = *self.args;
        let places = operation.places(self.buffers, self.place, size.count, data_type.size(), false);
        let operations = operation.operations(self.args, self.place, size.count, places);
        let explanations = operations.iter().map(|operation| self.collectives.explain(self.all, operation));
        Ok(explanations.collect::<Result<_, _>>()?)
    }

    fn pass(&mut self, size: Size, in_place: bool) -> Result<Timing, Failure> {
        let Args { operation, data_type, warmup, iterations, .. } = *self.args;
        let places = operation.places(self.buffers, self.place, size.count, data_type.size(), in_place);
        let operations = operation.operations(self.args, self.place, size.count, places);
        self.salt += 1;
        // The timed iterations use valid numbers, too: other bit patterns may take a different time.
        self.fill(size, places)?;
        for _ in 0..warmup {
            self.call(&operations)?;
        }
        self.barrier()?;
        let mut nanos = Vec::with_capacity(iterations as usize);
        let mut before = Instant::now();
        for _ in 0..iterations {
            self.call(&operations)?;
            let now = Instant::now();
            nanos.push((now - before).as_nanos() as u64);
            before = now;
        }
        let mut slowest = self.of_slowest(&nanos)?;
        slowest.sort_unstable();
        let mean = slowest.iter().sum::<u64>() as f64 / slowest.len().max(1) as f64;
        let microseconds = |nanos: Option<&u64>| nanos.map_or(0.0, |nanos| *nanos as f64 / 1e3);
        let algbw = if mean > 0.0 { size.bytes as f64 / mean } else { 0.0 };
        let mut timing = Timing {
            time_us: mean / 1e3,
            min_us: microseconds(slowest.first()),
            median_us: microseconds(slowest.get(slowest.len() / 2)),
            max_us: microseconds(slowest.last()),
            algbw_gb_s: algbw,
            busbw_gb_s: algbw * operation.bus_factor(self.place.size),
            wrong: None,
            first_wrong: None,
        };
        if self.args.checks() {
            self.spoil(size, places)?;
            self.fill(size, places)?;
            self.barrier()?;
            self.call(&operations)?;
            let (count, first) = self.compare(size, places[1])?;
            (timing.wrong, timing.first_wrong) = self.verdict(count, first)?;
        }
        Ok(timing)
    }

    fn call(&mut self, operations: &[Operation]) -> Result<(), Failure> {
        if let Some(late) = self.args.late.filter(|late| late.rank == self.place.rank) {
            self.calls += 1;
            if self.calls.is_multiple_of(late.of.into()) {
                thread::sleep(late.time.0);
            }
        }
        let request = self.collectives.start_all(self.all, operations)?;
        Ok(self.collectives.wait(request)?)
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        Ok(self.collectives.run(self.all, &Operation::barrier())?)
    }

    /// Answers the other ranks while no operation is in progress.
    fn answer(&mut self) -> Result<(), Failure> {
        self.collectives.poll(self.clock.now())?;
        Ok(())
    }

    fn values(&self) -> Values {
        let Args { operation, data_type, reduction, .. } = *self.args;
        let reduction: Option<Reduction> = operation.reduces().then_some(reduction);
        Values { data_type, reduction, ranks: self.place.size, salt: self.salt }
    }

    /// Writes this rank's input.
    fn fill(&mut self, size: Size, [input, _]: [At; 2]) -> Result<(), Failure> {
        let Args { operation, data_type, fault, .. } = *self.args;
        let len = operation.input(self.args, self.place, size.count);
        let element = data_type.size();
        let table = self.values().input(self.place.rank, len);
        self.write(input, len * element, &table)?;
        if let Some(fault) = fault.filter(|fault| fault.rank == self.place.rank && fault.index < len) {
            let at = input.offset + (fault.index * element) as u64;
            let mut bytes = [0];
            self.collectives.read(input.buffer, at, &mut bytes)?;
            self.collectives.write(input.buffer, at, &[bytes[0] ^ 1])?;
        }
        Ok(())
    }

    /// Writes values to the output that are wrong for every element.
    fn spoil(&mut self, size: Size, [_, output]: [At; 2]) -> Result<(), Failure> {
        let parts = self.args.operation.output(self.args, self.place, size.count);
        let bytes = parts.iter().map(|part| part.len).sum::<usize>() * self.args.data_type.size();
        self.write(output, bytes, &[0xa5; PIECE])
    }

    /// Writes `bytes` bytes by repeating a table.
    fn write(&mut self, to: At, bytes: usize, table: &[u8]) -> Result<(), Failure> {
        let mut at = 0;
        while at < bytes {
            let piece = &table[..table.len().min(bytes - at)];
            self.collectives.write(to.buffer, to.offset + at as u64, piece)?;
            at += piece.len();
            self.answer()?;
        }
        Ok(())
    }

    /// The number of wrong elements in this rank's output, and the first of them.
    fn compare(&mut self, size: Size, output: At) -> Result<(u64, Option<Wrong>), Failure> {
        let Args { operation, data_type, .. } = *self.args;
        let (values, rank) = (self.values(), self.place.rank);
        let (mut wrong, mut first) = (0, None);
        let mut done = 0;
        for Part { source, at, len } in operation.output(self.args, self.place, size.count) {
            // One period of the expected values, from the first element of the input.
            let table = match source {
                Source::Rank(rank) => values.input(rank, at + len),
                Source::Reduced => values.reduced(at + len),
            };
            self.compare_part(data_type, output, done, &table, at, len, &mut |index, expected, got| {
                wrong += 1;
                first.get_or_insert(Wrong { rank, index, expected, got });
            })?;
            done += len;
        }
        Ok((wrong, first))
    }

    /// Compares `len` elements of the output, starting at `from`, with those of a periodic table, starting at `at`.
    #[expect(clippy::too_many_arguments, reason = "two ranges, and what to do with a difference")]
    fn compare_part(
        &mut self,
        data_type: DataType,
        output: At,
        from: usize,
        table: &[u8],
        at: usize,
        len: usize,
        differs: &mut dyn FnMut(u64, u64, u64),
    ) -> Result<(), Failure> {
        let element = data_type.size();
        let period = (table.len() / element).max(1);
        let mut room = vec![0; PIECE];
        let mut done = 0;
        while done < len {
            let start = (at + done) % period;
            let count = (len - done).min(PIECE / element).min(period - start);
            let piece = &mut room[..count * element];
            self.collectives.read(output.buffer, output.offset + ((from + done) * element) as u64, piece)?;
            let expected = &table[start * element..][..count * element];
            if piece != expected {
                let pairs = piece.chunks_exact(element).zip(expected.chunks_exact(element));
                for (index, (got, expected)) in
                    pairs.enumerate().filter(|(_, (got, expected))| got != expected)
                {
                    differs((from + done + index) as u64, bits_of(expected), bits_of(got));
                }
            }
            done += count;
            self.answer()?;
        }
        Ok(())
    }

    /// The number of wrong elements at all ranks, and the first of them.
    fn verdict(&mut self, count: u64, first: Option<Wrong>) -> Result<(Option<u64>, Option<Wrong>), Failure> {
        let Wrong { index, expected, got, .. } = first.unwrap_or_default();
        let record = [count, index, expected, got].map(u64::to_be_bytes);
        let records = self.exchange(record.as_flattened())?;
        let words = |record: &[u8; RECORD]| {
            let word =
                |at: usize| record[8 * at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            [word(0), word(1), word(2), word(3)]
        };
        let all: Vec<[u64; 4]> = records.iter().map(words).collect();
        let first = (0..).zip(&all).find(|(_, [count, ..])| *count > 0);
        let first = first.map(|(rank, [_, index, expected, got])| Wrong {
            rank,
            index: *index,
            expected: *expected,
            got: *got,
        });
        Ok((Some(all.iter().map(|[count, ..]| count).sum()), first))
    }

    /// The times of the rank with the greatest sum, on all ranks.
    fn of_slowest(&mut self, own: &[u64]) -> Result<Vec<u64>, Failure> {
        let sum: u64 = own.iter().sum();
        let sums = self.exchange(&sum.to_be_bytes())?;
        let sums = sums.iter().map(|record| record.first_chunk().map_or(0, |sum| u64::from_be_bytes(*sum)));
        let (_, Reverse(slowest)) =
            sums.zip((0..).map(Reverse)).max().unwrap_or((0, Reverse(self.place.rank)));
        let mut bytes: Vec<u8> = own.iter().flat_map(|number| number.to_be_bytes()).collect();
        self.collectives.write(self.room, 0, &bytes)?;
        let operation = Operation::broadcast(self.room, self.room, bytes.len(), DataType::U8, slowest);
        self.collectives.run(self.all, &operation)?;
        self.collectives.read(self.room, 0, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| u64::from_be_bytes(*bytes)).collect())
    }

    /// The texts of all ranks, cut to the length of a record.
    fn exchange(&mut self, own: &[u8]) -> Result<Vec<[u8; RECORD]>, Failure> {
        let mut record = [0; RECORD];
        let len = own.len().min(RECORD);
        record[..len].copy_from_slice(&own[..len]);
        let at = u64::from(self.place.rank) * RECORD as u64;
        self.collectives.write(self.room, at, &record)?;
        let operation = Operation::all_gather(self.room.at(at), self.room, RECORD, DataType::U8);
        self.collectives.run(self.all, &operation)?;
        let mut records = vec![[0; RECORD]; self.place.size as usize];
        self.collectives.read(self.room, 0, records.as_flattened_mut())?;
        Ok(records)
    }
}
