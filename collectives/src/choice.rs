//! The choice of an algorithm for an operation: a cost model with measured latencies and bandwidths.

use std::fmt;
use std::time::Duration;

use ferroce::driver::gpu::MAX_SOURCES;

use crate::operation::Kind;
use crate::schedule::{Algorithm, Hosts};

/// The cost of messages between ranks. All ranks of a communicator have the same model, which determines the algorithms.
///
/// The distance of messages and the load of links depend on the pattern of communication. So there is a pace for each pattern of
/// the algorithms: to the next rank, to all others at once, to the partners of recursive halving, and between hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct Model {
    /// The latency of a short message to the next rank, while all ranks send.
    pub latency: Duration,
    /// The cost of each additional short message that a rank sends at once.
    pub overhead: Duration,
    /// Bytes per second from a rank to the next one, while all ranks send and receive.
    pub bytes_per_second: f64,
    /// Bytes per second of a rank, while each sends to all others at once: less if there are fewer links between switches than
    /// ranks, or if several messages share a link by chance.
    pub exchanged_per_second: f64,
    /// Between the partners of recursive halving, on average from near to far.
    pub halving: Pace,
    /// From each rank to one of the next host, if each host has as many ranks.
    pub hosts: Pace,
    /// Bytes per second that a rank reduces.
    pub reduced_per_second: f64,
}

/// The latency and bandwidth of one pattern of communication.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "a line: where it begins and how steep it is")]
pub struct Pace {
    /// The latency of a short message.
    pub latency: Duration,
    /// Bytes per second that a rank sends.
    pub bytes_per_second: f64,
}

impl Default for Model {
    /// A port of 25 Gb/s with polling.
    fn default() -> Model {
        let pace = Pace { latency: Duration::from_micros(10), bytes_per_second: 3e9 };
        Model {
            latency: pace.latency,
            overhead: Duration::from_micros(2),
            bytes_per_second: pace.bytes_per_second,
            exchanged_per_second: pace.bytes_per_second,
            halving: pace,
            hosts: pace,
            reduced_per_second: 10e9,
        }
    }
}

impl Model {
    /// The latency of a short message, for all patterns.
    pub fn latency(self, latency: Duration) -> Self {
        let [halving, hosts] = [self.halving, self.hosts].map(|pace| Pace { latency, ..pace });
        Model { latency, halving, hosts, ..self }
    }

    /// The cost of each additional short message.
    pub fn overhead(self, overhead: Duration) -> Self {
        Model { overhead, ..self }
    }

    /// Bytes per second from a rank, for all patterns.
    pub fn bytes_per_second(self, bytes_per_second: f64) -> Self {
        let [halving, hosts] = [self.halving, self.hosts].map(|pace| Pace { bytes_per_second, ..pace });
        Model { bytes_per_second, exchanged_per_second: bytes_per_second, halving, hosts, ..self }
    }

    /// Bytes per second from a rank, while each sends to all others at once.
    pub fn exchanged_per_second(self, exchanged_per_second: f64) -> Self {
        Model { exchanged_per_second, ..self }
    }

    /// Between the partners of recursive halving.
    pub fn halving(self, halving: Pace) -> Self {
        Model { halving, ..self }
    }

    /// From each rank to one of the next host.
    pub fn hosts(self, hosts: Pace) -> Self {
        Model { hosts, ..self }
    }

    /// Bytes per second that a rank reduces.
    pub fn reduced_per_second(self, reduced_per_second: f64) -> Self {
        Model { reduced_per_second, ..self }
    }

    /// From numbers received from any rank, which may be invalid.
    pub(crate) fn from_seconds(seconds: Seconds) -> Model {
        let numbers = seconds
            .to_numbers()
            .map(|number| if number.is_finite() { number.clamp(1e-13, 10.0) } else { 1e-6 });
        let Seconds { latency, overhead, byte, exchanged, halving, hosts, reduced } =
            Seconds::from_numbers(numbers);
        let time = Duration::from_secs_f64;
        let pace = |[latency, byte]: [f64; 2]| Pace { latency: time(latency), bytes_per_second: 1.0 / byte };
        Model {
            latency: time(latency),
            overhead: time(overhead),
            bytes_per_second: 1.0 / byte,
            exchanged_per_second: 1.0 / exchanged,
            halving: pace(halving),
            hosts: pace(hosts),
            reduced_per_second: 1.0 / reduced,
        }
    }
}

/// A model in seconds and seconds per byte, as ranks measure and exchange it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seconds {
    pub(crate) latency: f64,
    pub(crate) overhead: f64,
    pub(crate) byte: f64,
    pub(crate) exchanged: f64,
    /// Latency, and time per byte.
    pub(crate) halving: [f64; 2],
    pub(crate) hosts: [f64; 2],
    pub(crate) reduced: f64,
}

impl Seconds {
    /// The number of its values.
    pub(crate) const COUNT: usize = 9;

    pub(crate) fn to_numbers(self) -> [f64; Seconds::COUNT] {
        let Seconds { latency, overhead, byte, exchanged, halving, hosts, reduced } = self;
        [latency, overhead, byte, exchanged, halving[0], halving[1], hosts[0], hosts[1], reduced]
    }

    pub(crate) fn from_numbers(numbers: [f64; Seconds::COUNT]) -> Seconds {
        let [latency, overhead, byte, exchanged, halving, halved, hosts, between, reduced] = numbers;
        Seconds {
            latency,
            overhead,
            byte,
            exchanged,
            halving: [halving, halved],
            hosts: [hosts, between],
            reduced,
        }
    }
}

impl From<&Model> for Seconds {
    fn from(model: &Model) -> Seconds {
        let seconds = |time: Duration| time.as_secs_f64();
        let pace = |pace: Pace| [seconds(pace.latency), 1.0 / pace.bytes_per_second];
        Seconds {
            latency: seconds(model.latency),
            overhead: seconds(model.overhead),
            byte: 1.0 / model.bytes_per_second,
            exchanged: 1.0 / model.exchanged_per_second,
            halving: pace(model.halving),
            hosts: pace(model.hosts),
            reduced: 1.0 / model.reduced_per_second,
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let Model {
            latency,
            overhead,
            bytes_per_second,
            exchanged_per_second,
            halving,
            hosts,
            reduced_per_second,
        } = self;
        write!(
            f,
            "latency {:.2} µs, {:.2} µs for one more message, {:.2} GB/s to the next rank, {:.2} GB/s to all others at once, ",
            micros(*latency),
            micros(*overhead),
            bytes_per_second / 1e9,
            exchanged_per_second / 1e9,
        )?;
        for (name, pace) in [("by halving", halving), ("between hosts", hosts)] {
            write!(f, "{:.2} µs and {:.2} GB/s {name}, ", micros(pace.latency), pace.bytes_per_second / 1e9)?;
        }
        /// As measured in virtual time, which advances only with messages.
        const FREE: f64 = 1e12;
        match reduced_per_second {
            FREE.. => f.write_str("reductions free"),
            _ => write!(f, "{:.2} GB/s reduced", reduced_per_second / 1e9),
        }
    }
}

/// The parameters of an operation that determine its cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    pub(crate) kind: Kind,
    /// Bytes of the longer one of input and output, at the rank with the most.
    pub(crate) bytes: usize,
    pub(crate) ranks: usize,
    pub(crate) chunk: usize,
    /// Partial results on the wire would be rounded to the elements' type, which is a small one.
    pub(crate) is_small_float: bool,
    /// A rank has a device that reduces.
    pub(crate) is_on_device: bool,
    /// Why memory mapped by all ranks can't be used, if it can't.
    pub(crate) unmapped: Option<&'static str>,
}

/// The predicted cost of each algorithm, and the chosen one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The operation, in words.
    pub operation: String,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The reason, in words.
    pub reason: String,
    /// The cost of each algorithm by the model, or why it is not applicable.
    pub costs: Vec<(Algorithm, Result<Duration, &'static str>)>,
    /// The model.
    pub model: Model,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}, {}", self.operation, self.algorithm, self.reason)?;
        for (algorithm, cost) in &self.costs {
            match cost {
                Ok(cost) => writeln!(f, "  {algorithm:<13} {:>12.2} µs", cost.as_secs_f64() * 1e6)?,
                Err(problem) => writeln!(f, "  {algorithm:<13} {problem}")?,
            }
        }
        write!(f, "  by {}", self.model)
    }
}

/// The most operands of a reduction.
const SOURCES_MAX: usize = ferroce::driver::reduction::MAX_SPANS;

/// Why an algorithm can't execute an operation, if it can't.
pub(crate) fn problem(algorithm: Algorithm, demand: &Demand, hosts: &Hosts) -> Option<&'static str> {
    let Demand { kind, ranks, .. } = *demand;
    let members = if algorithm == Algorithm::Hierarchical { hosts.each().unwrap_or(0) } else { ranks };
    let is_direct = matches!(
        algorithm,
        Algorithm::Direct | Algorithm::TwoStep | Algorithm::Hierarchical | Algorithm::Mapped
    );
    if !algorithm.applies_to(kind) {
        Some("not for this operation")
    } else if algorithm == Algorithm::Mapped && demand.unmapped.is_some() {
        demand.unmapped
    } else if ranks > 1 && algorithm == Algorithm::Hierarchical && hosts.problem().is_some() {
        hosts.problem()
    } else if kind.reduces() && is_direct && members > SOURCES_MAX {
        Some("too many ranks to reduce at once")
    } else {
        None
    }
}

/// The predicted seconds of an operation.
fn cost(model: &Model, demand: &Demand, algorithm: Algorithm, hosts: &Hosts) -> f64 {
    use Algorithm as A;
    let Demand { kind, bytes, ranks, chunk, .. } = *demand;
    let Seconds {
        latency: alpha,
        overhead: more,
        byte: beta,
        exchanged,
        halving,
        hosts: between,
        reduced: gamma,
    } = Seconds::from(model);
    let (n, s) = (ranks as f64, bytes as f64);
    let others = n - 1.0;
    let part = others / n;
    let levels = f64::from(usize::BITS - (ranks - 1).leading_zeros());
    let chunk = s.min(chunk as f64);
    // Time to move all elements once to the next rank or to many, and to reduce them.
    let (all, spread, sum) = (s * beta, s * exchanged, s * gamma);
    let burst = |messages: f64| alpha + (messages - 1.0).max(0.0) * more;
    // In a tree a rank has two children: the first chunk takes twice its time at each level except the root's, which has one. The
    // distances between levels are those of halving.
    let first = (2.0 * levels - 1.0).max(0.0) * chunk;
    let rest = s - chunk;
    let each = hosts.each().unwrap_or(1) as f64;
    let outside = n / each;
    match (kind, algorithm) {
        // Two synchronisations with the others, and one read and write of each element by the CPU.
        (_, A::Mapped) => 0.5e-6 + 2.0 * sum,
        (Kind::AllReduce, A::Direct) => burst(others) + others * (spread + sum),
        (Kind::AllReduce, A::TwoStep) => 2.0 * burst(others) + part * (2.0 * spread + sum),
        (Kind::AllReduce, A::Ring) => 2.0 * others * alpha + part * (2.0 * all + sum),
        (Kind::AllReduce, A::Halving) => {
            2.0 * levels * halving[0] + part * (2.0 * s * halving[1] + sum) + levels * more
        }
        (Kind::AllReduce, A::Tree) => 2.0 * levels * halving[0] + (first + rest) * (2.0 * beta + gamma),
        (Kind::AllReduce, A::Hierarchical) => {
            let inside = 2.0 * burst(each - 1.0) + (each - 1.0) / each * (2.0 * all + sum);
            let to_each = (outside - 1.0) / outside * s / each;
            inside + 2.0 * (outside - 1.0) * between[0] + to_each * (2.0 * between[1] + gamma)
        }
        (Kind::ReduceScatter, A::Ring) => others * alpha + part * (all + sum),
        (Kind::ReduceScatter, A::Halving) => levels * (halving[0] + more) + part * (s * halving[1] + sum),
        (Kind::ReduceScatter, _) => burst(others) + part * (spread + sum),
        (Kind::AllGather, A::Ring) => others * alpha + part * all,
        (Kind::AllGather, A::Halving) => levels * (halving[0] + more) + part * s * halving[1],
        (Kind::AllGather, A::Hierarchical) => {
            let inside = burst(each - 1.0) + (each - 1.0) * outside * more + (each - 1.0) / each * all;
            inside + (outside - 1.0) * (between[0] + s / n * between[1])
        }
        (Kind::AllGather, _) => burst(others) + part * spread,
        (Kind::Broadcast, A::Ring) => others * (alpha + chunk * beta) + all,
        (Kind::Broadcast, A::Tree) => (levels + 1.0) * halving[0] + (first + rest) * beta,
        (Kind::Broadcast, A::Hierarchical) => {
            let levels = outside.log2().ceil();
            (levels + 1.0) * (between[0] + chunk * beta) + all + burst(each - 1.0) + (each - 1.0) * all
        }
        (Kind::Broadcast, _) => burst(others) + others * all,
        (Kind::Reduce, A::Ring) => others * (alpha + chunk * (beta + gamma)) + all + sum,
        (Kind::Reduce, A::Tree) => (levels + 1.0) * halving[0] + (first + rest) * (beta + gamma),
        (Kind::Reduce, _) => burst(others) + others * (all + sum),
        (Kind::AllToAll | Kind::Gather | Kind::Scatter, _) => burst(others) + part * spread,
        (Kind::Send | Kind::Receive, _) => alpha + all,
        (Kind::Barrier, _) => levels * halving[0],
    }
}

/// The algorithm for an operation, with the reason. `forced` is used if possible.
pub(crate) fn choose(
    model: &Model,
    demand: &Demand,
    hosts: &Hosts,
    forced: Option<Algorithm>,
) -> (Algorithm, Why) {
    let can = |algorithm: Algorithm| problem(algorithm, demand, hosts).is_none();
    if let Some(forced) = forced.filter(|algorithm| can(*algorithm)) {
        return (forced, Why::Forced);
    }
    if can(Algorithm::Mapped) {
        return (Algorithm::Mapped, Why::SharesMemory);
    }
    if demand.is_small_float && demand.kind.reduces() {
        // Only these add all elements before rounding.
        let rounds_once = [Algorithm::Direct, Algorithm::TwoStep];
        let best =
            cheapest(model, demand, hosts, rounds_once.into_iter().filter(|algorithm| can(*algorithm)));
        if let Some(best) = best {
            return (best, Why::RoundsOnce);
        }
    }
    // An operation of at most one chunk is in one stage at a time.
    let overlaps = demand.bytes > demand.chunk || demand.ranks > MAX_SOURCES;
    if demand.is_on_device && overlaps && demand.kind.reduces() && can(Algorithm::Ring) {
        return (Algorithm::Ring, Why::OnDevice);
    }
    let best = cheapest(model, demand, hosts, Algorithm::ALL.into_iter().filter(|algorithm| can(*algorithm)));
    (best.unwrap_or(Algorithm::Direct), Why::Cheapest)
}

/// Why an algorithm is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Forced,
    SharesMemory,
    OnDevice,
    RoundsOnce,
    Cheapest,
}

fn cheapest(
    model: &Model,
    demand: &Demand,
    hosts: &Hosts,
    algorithms: impl Iterator<Item = Algorithm>,
) -> Option<Algorithm> {
    let cost = |algorithm: &Algorithm| cost(model, demand, *algorithm, hosts);
    algorithms.min_by(|a, b| cost(a).total_cmp(&cost(b)))
}

/// The choice, with its input.
pub(crate) fn explain(
    model: &Model,
    demand: &Demand,
    hosts: &Hosts,
    forced: Option<Algorithm>,
    operation: String,
) -> Explanation {
    let (algorithm, why) = choose(model, demand, hosts, forced);
    let costs = Algorithm::ALL.map(|algorithm| {
        let cost = match problem(algorithm, demand, hosts) {
            Some(problem) => Err(problem),
            None => Ok(Duration::from_secs_f64(cost(model, demand, algorithm, hosts))),
        };
        (algorithm, cost)
    });
    let mut reason = match why {
        Why::Forced => "which an option forces".to_owned(),
        Why::SharesMemory => "because the ranks share memory, which is faster than packets".to_owned(),
        Why::OnDevice => {
            "because a rank's device reduces: in a ring, copies, transfers and reductions overlap".to_owned()
        }
        Why::RoundsOnce => "the cheapest that rounds the sum of all elements once".to_owned(),
        Why::Cheapest => "the cheapest by the model".to_owned(),
    };
    if let Some(forced) = forced
        && why != Why::Forced
    {
        let problem = problem(forced, demand, hosts).unwrap_or_default();
        reason += &format!(" (an option forces {forced}: {problem})");
    }
    Explanation { operation, algorithm, reason, costs: costs.to_vec(), model: *model }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(kind: Kind, bytes: usize, ranks: usize) -> Demand {
        Demand {
            kind,
            bytes,
            ranks,
            chunk: 1 << 18,
            is_small_float: false,
            is_on_device: false,
            unmapped: Some("not here"),
        }
    }

    fn hosts(ranks: usize, each: usize) -> Hosts {
        Hosts::new(&(0..ranks).map(|rank| rank / each).collect::<Vec<_>>())
    }

    /// In a ring, copies, transmission and reductions overlap. Reductions have two operands each, so a device supports any number
    /// of ranks.
    #[test]
    fn long_operations_of_devices_and_of_many_ranks_use_the_ring() {
        let choice = |bytes, ranks| {
            let demand = Demand { is_on_device: true, ..demand(Kind::AllReduce, bytes, ranks) };
            choose(&Model::default(), &demand, &hosts(ranks, 1), None).0
        };
        assert_eq!([choice(8, 4), choice(8, 9)], [Algorithm::Direct, Algorithm::Ring]);
        assert_eq!([choice(1 << 19, 2), choice(1 << 19, 9)], [Algorithm::Ring; 2]);
    }

    #[test]
    fn short_operations_have_few_steps_and_long_ones_few_bytes() {
        let choice = |kind, bytes, ranks| {
            choose(&Model::default(), &demand(kind, bytes, ranks), &hosts(ranks, 1), None).0
        };
        assert_eq!(choice(Kind::AllReduce, 8, 8), Algorithm::Direct);
        assert!(matches!(
            choice(Kind::AllReduce, 64 << 20, 8),
            Algorithm::TwoStep | Algorithm::Halving | Algorithm::Ring
        ));
        assert_ne!(choice(Kind::AllReduce, 64 << 20, 64), Algorithm::Direct);
        assert_eq!(choice(Kind::Broadcast, 8, 4), Algorithm::Direct);
        assert!(matches!(choice(Kind::Broadcast, 64 << 20, 16), Algorithm::Tree | Algorithm::Ring));
        assert_eq!(choice(Kind::AllToAll, 1 << 20, 8), Algorithm::Direct);
    }

    /// 64 ranks on eight leaf switches with half as many uplinks as hosts, as measured by `ferroce fabric allreduce`.
    #[test]
    fn patterns_that_share_switch_links_have_their_own_pace() {
        let pace = |nanos, bytes_per_second| Pace { latency: Duration::from_nanos(nanos), bytes_per_second };
        let flat = Model::default().latency(Duration::from_nanos(2290)).bytes_per_second(10.4e9);
        let flat = flat.overhead(Duration::from_nanos(90)).reduced_per_second(1e13);
        let shared = flat.exchanged_per_second(4.8e9).halving(pace(2950, 3.3e9)).hosts(pace(4300, 2.5e9));
        let choice =
            |model: &Model, bytes| choose(model, &demand(Kind::AllReduce, bytes, 64), &hosts(64, 8), None).0;
        for (bytes, best) in [
            (1 << 10, Algorithm::TwoStep),
            (256 << 10, Algorithm::TwoStep),
            (1 << 20, Algorithm::Hierarchical),
            (4 << 20, Algorithm::Ring),
            (256 << 20, Algorithm::Ring),
        ] {
            assert_eq!(choice(&shared, bytes), best, "{bytes} bytes");
        }
        assert_eq!(choice(&flat, 4 << 20), Algorithm::TwoStep);
    }

    #[test]
    fn no_cost_is_negative() {
        for ranks in [1, 2, 3, 64] {
            for bytes in [0, 8, 1 << 30] {
                let text = explain(
                    &Model::default(),
                    &demand(Kind::AllReduce, bytes, ranks),
                    &hosts(ranks, 1),
                    None,
                    String::new(),
                );
                assert!(text.costs.iter().filter(|(_, cost)| cost.is_ok()).count() >= 5, "{text}");
            }
        }
    }

    /// Each rank of a tree except the root sends to two, so a chunk takes twice its time at each level.
    #[test]
    fn a_chunk_goes_to_two_children_at_each_level() {
        let model =
            Model::default().latency(Duration::ZERO).overhead(Duration::ZERO).reduced_per_second(1e13);
        let chunk = 1 << 18;
        let cost = |bytes: usize| {
            cost(&model, &demand(Kind::AllReduce, bytes, 64), Algorithm::Tree, &hosts(64, 1)) * 3e9
        };
        assert!((cost(chunk) / chunk as f64 - 2.0 * 11.0).abs() < 0.1, "{}", cost(chunk));
        assert!(((cost(2 * chunk) - cost(chunk)) / chunk as f64 - 2.0).abs() < 0.1);
    }

    #[test]
    fn inapplicable_algorithms_have_reasons() {
        let model = Model::default();
        let one_each = hosts(4, 1);
        let forced = Some(Algorithm::Hierarchical);
        let demand = demand(Kind::AllReduce, 1 << 20, 4);
        let text = explain(&model, &demand, &one_each, forced, "all_reduce of 262144 f32 (sum)".to_owned())
            .to_string();
        assert!(text.contains("an option forces hierarchical: each host has one rank"), "{text}");
        assert!(text.contains("  hierarchical  each host has one rank\n"), "{text}");
        let even = hosts(4, 2);
        assert_eq!(choose(&model, &demand, &even, forced), (Algorithm::Hierarchical, Why::Forced));
        let uneven = Hosts::new(&[0, 0, 0, 1]);
        assert_eq!(
            problem(Algorithm::Hierarchical, &demand, &uneven),
            Some("hosts have different numbers of ranks")
        );
        let many = Demand { ranks: 65, ..demand };
        assert_eq!(
            problem(Algorithm::Direct, &many, &hosts(65, 1)),
            Some("too many ranks to reduce at once")
        );
        assert_eq!(problem(Algorithm::Mapped, &demand, &even), Some("not here"));
        let many = Demand { unmapped: None, ..many };
        assert_eq!(
            problem(Algorithm::Mapped, &many, &hosts(65, 65)),
            Some("too many ranks to reduce at once")
        );
        let gather = Demand { kind: Kind::AllGather, ..many };
        assert_eq!(problem(Algorithm::Mapped, &gather, &hosts(65, 65)), None);
    }

    #[test]
    fn small_floats_are_rounded_once() {
        for bytes in [8, 64 << 20] {
            let demand = Demand { is_small_float: true, ..demand(Kind::AllReduce, bytes, 8) };
            let (algorithm, why) = choose(&Model::default(), &demand, &hosts(8, 1), None);
            assert!(matches!(algorithm, Algorithm::Direct | Algorithm::TwoStep) && why == Why::RoundsOnce);
        }
    }

    #[test]
    fn numbers_parse_back_and_invalid_ones_are_safe() {
        let model = Model::default();
        let back = Model::from_seconds(Seconds::from(&model));
        assert_eq!((back.latency, back.overhead), (model.latency, model.overhead));
        assert!((back.bytes_per_second / model.bytes_per_second - 1.0).abs() < 1e-9);
        let numbers: [f64; Seconds::COUNT] = std::array::from_fn(|at| at as f64);
        assert_eq!(Seconds::from_numbers(numbers).to_numbers(), numbers);
        for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let model = Model::from_seconds(Seconds::from_numbers([bad; Seconds::COUNT]));
            assert!(model.bytes_per_second.is_finite() && model.bytes_per_second > 0.0, "{model:?}");
        }
    }
}
