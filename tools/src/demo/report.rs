//! The results of a demo, as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use ferroce_driver::machine::{Machine, Rounds};
use serde::Serialize;

use super::rank::{Opened, PacketTotals, Totals, Transport};
use super::shapes::Tensor;
use super::state::State;
use super::values::Wrong;

/// The reports of one rank during the run.
#[derive(Debug, Default)]
pub(super) struct RankLog {
    /// Its port.
    pub(super) opened: Option<Opened>,
    /// Its counters.
    pub(super) totals: Option<Totals>,
    ferroce: TransportLog,
    tcp: TransportLog,
}

/// The rounds of one rank over one transport.
#[derive(Debug, Default)]
struct TransportLog {
    /// For each round, the start and end of each tensor.
    rounds: Vec<Vec<[u64; 2]>>,
    /// Number of elements that were compared with the reference.
    elements: u64,
    /// The tensors with wrong elements.
    wrong: Vec<Wrong>,
}

impl RankLog {
    /// Adds the rank's report of a round.
    pub(super) fn add_round(
        &mut self,
        transport: Transport,
        times: Vec<[u64; 2]>,
        elements: u64,
        wrong: Vec<Wrong>,
    ) {
        let log = match transport {
            Transport::Ferroce => &mut self.ferroce,
            Transport::Tcp => &mut self.tcp,
        };
        log.rounds.push(times);
        log.elements += elements;
        log.wrong.extend(wrong);
    }

    /// Finished rounds, over all transports.
    pub(super) fn rounds(&self) -> usize {
        self.ferroce.rounds.len() + self.tcp.rounds.len()
    }

    fn of(&self, transport: Transport) -> &TransportLog {
        match transport {
            Transport::Ferroce => &self.ferroce,
            Transport::Tcp => &self.tcp,
        }
    }
}

/// The results of a demo.
#[derive(Debug, Serialize)]
pub(super) struct DemoReport {
    /// Number of ranks.
    ranks: u32,
    /// All-reduces of each tensor over each transport.
    rounds: u32,
    machine: MachineNames,
    /// The state of the machine in all rounds.
    state: State,
    /// Why this driver was chosen.
    why: String,
    /// One entry per rank.
    ports: Vec<RankPort>,
    /// One row per tensor size, smallest first.
    sizes: Vec<Row>,
    /// One row per size class: all its tensors in one round.
    classes: Vec<Row>,
    /// All tensors of a round.
    total: Row,
    /// Elements that were compared with the reference, at all ranks in all rounds.
    elements_checked: u64,
    /// Those after an all-reduce over TCP.
    tcp_elements_checked: u64,
    /// Tensors with wrong elements.
    pub(super) wrong: Vec<WrongAt>,
}

#[derive(Debug, Serialize)]
struct MachineNames {
    cpu: String,
    cores: usize,
    kernel: String,
}

/// A tensor with wrong elements.
#[derive(Debug, Serialize)]
pub(super) struct WrongAt {
    /// The rank.
    rank: usize,
    /// The transport.
    transport: Transport,
    /// The elements.
    #[serde(flatten)]
    wrong: Wrong,
}

#[derive(Debug, Serialize)]
struct RankPort {
    rank: usize,
    #[serde(flatten)]
    opened: Opened,
    #[serde(flatten)]
    totals: Totals,
}

/// The times of some tensors, over both transports.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    /// The tensors, as text.
    name: String,
    bytes: usize,
    tensors: usize,
    #[serde(flatten)]
    ferroce: Times,
    tcp: Option<Times>,
    /// TCP's median divided by ferroce's.
    tcp_ratio: Option<f64>,
}

/// Bandwidths as in nccl-tests: the algorithm bandwidth is the size divided by the median time; the bus bandwidth is 2
/// (n − 1) / n of that, since each rank sends this fraction of the size.
#[derive(Debug, PartialEq, Serialize)]
struct Times {
    median_us: f64,
    least_us: f64,
    most_us: f64,
    algbw_gb_s: f64,
    busbw_gb_s: f64,
}

impl Row {
    /// `times` are those over ferroce and over TCP, in nanoseconds.
    fn new(name: String, bytes: usize, tensors: usize, ranks: u32, times: [Vec<u64>; 2]) -> Row {
        let [ferroce, tcp] = times.map(|times| Times::new(bytes, ranks, times));
        let ferroce = ferroce.unwrap_or(Times {
            median_us: 0.0,
            least_us: 0.0,
            most_us: 0.0,
            algbw_gb_s: 0.0,
            busbw_gb_s: 0.0,
        });
        let tcp_ratio = tcp.as_ref().map(|tcp| tcp.median_us / ferroce.median_us);
        Row { name, bytes, tensors, ferroce, tcp, tcp_ratio }
    }
}

impl Times {
    fn new(bytes: usize, ranks: u32, mut times: Vec<u64>) -> Option<Times> {
        times.sort_unstable();
        let us = |nanoseconds: u64| nanoseconds.max(1) as f64 / 1e3;
        let (least_us, most_us) = (us(*times.first()?), us(*times.last()?));
        let median_us = us(times[times.len() / 2]);
        let algbw_gb_s = bytes as f64 / median_us / 1e3;
        let n = f64::from(ranks);
        let busbw_gb_s = algbw_gb_s * 2.0 * (n - 1.0) / n;
        Some(Times { median_us, least_us, most_us, algbw_gb_s, busbw_gb_s })
    }
}

const TRANSPORTS: [Transport; 2] = [Transport::Ferroce, Transport::Tcp];

/// Size classes of the table, by their upper limits.
const CLASSES: [(usize, &str); 4] =
    [(4 << 10, "up to 4 KiB"), (64 << 10, "to 64 KiB"), (1 << 20, "to 1 MiB"), (usize::MAX, "above 1 MiB")];

impl DemoReport {
    /// Creates the report from the logs of the ranks. All ranks have finished.
    pub(super) fn new(tensors: &[Tensor], logs: Vec<RankLog>) -> DemoReport {
        let ranks = logs.len() as u32;
        // For each transport, round and tensor.
        let times = TRANSPORTS.map(|transport| {
            let rounds = logs.iter().map(|log| log.of(transport).rounds.len()).min().unwrap_or(0);
            (0..rounds).map(|round| times_of_round(&logs, transport, round)).collect::<Vec<_>>()
        });
        let row = |name: String, bytes: usize, numbers: &[usize]| {
            let of_each = |rounds: &Vec<Vec<u64>>| {
                rounds.iter().flat_map(|times| numbers.iter().map(|n| times[*n])).collect()
            };
            Row::new(name, bytes, numbers.len(), ranks, times.each_ref().map(of_each))
        };
        let sum_row = |name: &str, numbers: &[usize]| {
            let bytes = numbers.iter().map(|n| tensors[*n].bytes()).sum();
            let sum = |times: &Vec<u64>| numbers.iter().map(|n| times[*n]).sum();
            let of_round = |rounds: &Vec<Vec<u64>>| rounds.iter().map(sum).collect();
            Row::new(name.to_owned(), bytes, numbers.len(), ranks, times.each_ref().map(of_round))
        };
        let (mut by_size, mut by_class) = (BTreeMap::<usize, Vec<usize>>::new(), [const { Vec::new() }; 4]);
        for (number, tensor) in tensors.iter().enumerate() {
            by_size.entry(tensor.bytes()).or_default().push(number);
            let class = CLASSES.iter().position(|(largest, _)| tensor.bytes() <= *largest);
            by_class[class.unwrap_or(CLASSES.len() - 1)].push(number);
        }
        let sizes = by_size
            .into_iter()
            .map(|(bytes, numbers)| row(format!("{} B", grouped(bytes as u64)), bytes, &numbers))
            .collect();
        let classes = CLASSES.iter().zip(&by_class).filter(|(_, numbers)| !numbers.is_empty());
        let classes = classes.map(|((_, name), numbers)| sum_row(name, numbers)).collect();
        let total = sum_row("all", &(0..tensors.len()).collect::<Vec<_>>());
        let rounds = times[0].len() as u32;

        let elements = |transport| logs.iter().map(|log| log.of(transport).elements).sum();
        let (elements_checked, tcp_elements_checked) =
            (elements(Transport::Ferroce), elements(Transport::Tcp));
        let (mut ports, mut wrong) = (Vec::new(), Vec::new());
        for (rank, log) in logs.into_iter().enumerate() {
            for (transport, log) in [(Transport::Ferroce, log.ferroce), (Transport::Tcp, log.tcp)] {
                wrong.extend(log.wrong.into_iter().map(|wrong| WrongAt { rank, transport, wrong }));
            }
            let (opened, totals) = (log.opened.unwrap_or_default(), log.totals.unwrap_or_default());
            ports.push(RankPort { rank, opened, totals });
        }
        let Machine { cpu, cores, kernel, .. } = Machine::this();
        DemoReport {
            ranks,
            rounds,
            machine: MachineNames { cpu, cores, kernel },
            state: State::from(&Rounds::new()),
            why: String::new(),
            ports,
            sizes,
            classes,
            total,
            elements_checked,
            tcp_elements_checked,
            wrong,
        }
    }

    /// Sets the reason for the choice of the driver.
    pub(super) fn because(self, why: &str) -> DemoReport {
        DemoReport { why: why.to_owned(), ..self }
    }

    /// Sets the state of the machine.
    pub(super) fn in_state(self, rounds: &Rounds) -> DemoReport {
        DemoReport { state: State::from(rounds), ..self }
    }

    /// 0 if every element is right.
    pub(super) fn exit_status(&self) -> u8 {
        u8::from(!self.wrong.is_empty())
    }
}

/// The time of each tensor: from the start at the last rank to the end at the last rank.
fn times_of_round(logs: &[RankLog], transport: Transport, round: usize) -> Vec<u64> {
    let mut last: Vec<[u64; 2]> = Vec::new();
    for log in logs {
        let times = &log.of(transport).rounds[round];
        last.resize(times.len(), [0; 2]);
        for (last, time) in last.iter_mut().zip(times) {
            *last = [last[0].max(time[0]), last[1].max(time[1])];
        }
    }
    last.iter().map(|[begun, ended]| ended.saturating_sub(*begun)).collect()
}

/// The progress message when the last rank has finished a round over a transport.
pub(super) fn news_of_round(
    rounds: u32,
    logs: &[RankLog],
    transport: Transport,
    rank: u32,
) -> Option<String> {
    let round = logs[rank as usize].of(transport).rounds.len();
    if logs.iter().any(|log| log.of(transport).rounds.len() < round) {
        return None;
    }
    let seconds = times_of_round(logs, transport, round - 1).iter().sum::<u64>() as f64 / 1e9;
    Some(format!("round {round} of {rounds}: all-reduced over {transport} in {seconds:.2} s and checked"))
}

/// Columns of the report. The first ones hold the label of each paragraph.
const WIDTH: usize = 80;
const INDENT: usize = 10;

/// Writes a paragraph with its label.
fn paragraph(f: &mut fmt::Formatter<'_>, name: &str, text: &str) -> fmt::Result {
    write!(f, "{name:<INDENT$}")?;
    let mut column = INDENT;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > INDENT && column + 1 + length > WIDTH {
            write!(f, "\n{:INDENT$}", "")?;
            column = INDENT;
        } else if column > INDENT {
            write!(f, " ")?;
            column += 1;
        }
        write!(f, "{word}")?;
        column += length;
    }
    writeln!(f)
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoReport { ranks, rounds, total, .. } = self;
        writeln!(
            f,
            "\nAll-reduce (sum of f32) of ResNet-50's {} parameter tensors over {ranks} ranks\n",
            total.tensors
        )?;
        self.write_setup(f)?;
        let times = if *rounds == 1 { "one round".to_owned() } else { format!("median of {rounds} rounds") };
        let figures = format!("milliseconds for all tensors of a row: {times} (least - most)");
        paragraph(f, "figures", &figures)?;
        paragraph(f, "state", &self.state.text)?;
        writeln!(f)?;
        self.write_table(f)?;
        writeln!(f)?;
        self.write_packets(f)?;
        self.write_outcome(f)
    }
}

impl DemoReport {
    /// Writes the setup of the measurement.
    fn write_setup(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoReport { ranks, machine: MachineNames { cpu, cores, kernel }, why, ports, .. } = self;
        let each = (*ranks as usize).div_ceil(*cores);
        let share = match each {
            1 => "a core for each rank".to_owned(),
            _ if *cores == 1 => format!("{ranks} ranks share ONE core"),
            _ => format!("{ranks} ranks share {cores} cores, {each} to a core"),
        };
        paragraph(f, "machine", &format!("{cpu}, Linux {kernel}; {share}"))?;
        if let Some(RankPort { opened, .. }) = ports.first() {
            paragraph(f, "ferroce", &format!("{opened}; {why}"))?;
        }
        if self.total.tcp.is_some() {
            let what = "the kernel's, on interfaces without ferroce: the same ring, chunks, memory, sums and checks, \
                alternating with ferroce";
            paragraph(f, "TCP", what)?;
        }
        Ok(())
    }

    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoReport { classes, total, .. } = self;
        let compared = total.tcp.is_some();
        let spread = "(least - most)";
        write!(f, "{:<12}{:>6}{:>8} {spread:<19}", "tensors", "number", "ferroce")?;
        if compared {
            write!(f, "{:>8} {spread:<19}{:>6}", "TCP", "ratio")?;
        }
        writeln!(f)?;
        for row in classes.iter().chain([total]) {
            write!(f, "{:<12}{:>6}{}", row.name, row.tensors, row.ferroce)?;
            if let (Some(tcp), Some(ratio)) = (&row.tcp, row.tcp_ratio) {
                write!(f, "{tcp}{ratio:>6.2}")?;
            }
            writeln!(f)?;
        }
        write!(f, "{:<12}{:>6}{:>8.2} {:<19}", "busbw GB/s", "", total.ferroce.busbw_gb_s, "")?;
        if let Some(tcp) = &total.tcp {
            write!(f, "{:>8.2}", tcp.busbw_gb_s)?;
        }
        writeln!(f)?;
        if compared {
            writeln!(f, "ratio: TCP's time divided by ferroce's; above 1 ferroce is faster")?;
        }
        writeln!(f, "busbw: bytes divided by time, times 2 (ranks - 1) / ranks, as in nccl-tests")
    }

    fn write_packets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packets: Vec<&PacketTotals> =
            self.ports.iter().filter_map(|port| port.totals.packets.as_ref()).collect();
        if packets.is_empty() {
            return paragraph(f, "packets", "the card counts packets of all programs on its port together");
        }
        let sum = |get: fn(&PacketTotals) -> u64| grouped(packets.iter().map(|one| get(one)).sum());
        let text = format!(
            "{} sent by all ranks, {} retransmitted, {} timeouts, {} sequence NAKs, {} dropped",
            sum(|one| one.sent),
            sum(|one| one.retransmitted),
            sum(|one| one.timeouts),
            sum(|one| one.sequence_naks),
            sum(|one| one.dropped.values().sum()),
        );
        paragraph(f, "packets", &text)?;
        for RankPort { rank, totals, .. } in &self.ports {
            for (reason, count) in totals.packets.iter().flat_map(|packets| &packets.dropped) {
                paragraph(f, "", &format!("rank {rank} dropped {count}: {reason}"))?;
            }
        }
        Ok(())
    }

    fn write_outcome(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoReport { elements_checked, tcp_elements_checked, wrong, total, .. } = self;
        let over_tcp = match tcp_elements_checked {
            0 => String::new(),
            count => format!(", and {} over TCP", grouped(*count)),
        };
        let text = format!(
            "{} elements{over_tcp}: all, at every rank, after every round, bit for bit, with sums computed without a \
             network",
            grouped(*elements_checked)
        );
        paragraph(f, "checked", &text)?;
        for WrongAt { rank, transport, wrong } in wrong.iter().take(SHOWN) {
            writeln!(f, "WRONG at rank {rank} over {transport}: {wrong}")?;
        }
        if wrong.len() > SHOWN {
            writeln!(f, "and {} more tensors (all of them with --json)", wrong.len() - SHOWN)?;
        }
        let outcome = match wrong.iter().map(|at| at.wrong.count).sum::<usize>() {
            0 => "all elements right".to_owned(),
            count => {
                let all = elements_checked + tcp_elements_checked;
                format!("{} of {} elements WRONG", grouped(count as u64), grouped(all))
            }
        };
        let speed = match total.tcp_ratio {
            // With wrong results there is no speed.
            Some(_) if !wrong.is_empty() => String::new(),
            Some(ratio) if ratio >= 1.0 => format!("; ferroce is {ratio:.2} times as fast"),
            Some(ratio) => format!("; TCP is {:.2} times as fast", 1.0 / ratio),
            None => String::new(),
        };
        write!(f, "{:<INDENT$}{outcome}{speed}; exit status {}", "result", self.exit_status())
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, least, most] = [self.median_us, self.least_us, self.most_us].map(|us| us / 1e3);
        let spread = format!("({least:.1} - {most:.1})");
        write!(f, "{median:>8.1} {spread:<19}")
    }
}

/// The most wrong tensors that are listed.
const SHOWN: usize = 20;

/// A number with a comma before each group of three digits.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (25_557_032, "25,557,032")];
        for (n, text) in cases {
            assert_eq!(grouped(n), text);
        }
    }

    /// Each round has the start and end of each tensor.
    fn log(ferroce: &[&[[u64; 2]]], tcp: &[&[[u64; 2]]]) -> RankLog {
        let mut log = RankLog::default();
        for (transport, rounds) in [(Transport::Ferroce, ferroce), (Transport::Tcp, tcp)] {
            for times in rounds {
                log.add_round(transport, times.to_vec(), 0, Vec::new());
            }
        }
        log
    }

    /// 3,000 B in 1 µs are 3 GB/s, and with 4 ranks 1.5 times that on the bus.
    #[test]
    fn times_go_from_last_rank_to_last_rank() {
        let tensors = ["a", "b"].map(|name| Tensor { name: name.into(), shape: vec![750] });
        // Rank 0 starts the first tensor early; measured from its start, the time would be twice as long.
        let early: &[[u64; 2]] = &[[0, 2000], [5000, 6000]];
        let late: &[[u64; 2]] = &[[1000, 1500], [5000, 5001]];
        let tcp: &[[u64; 2]] = &[[0, 2000], [2000, 4000]];
        let logs = vec![
            log(&[early, late], &[tcp, tcp]),
            log(&[late, early], &[tcp, tcp]),
            log(&[late, late], &[tcp, tcp]),
            log(&[&[[0, 1], [0, 1]], &[[0, 1], [0, 1]]], &[tcp, tcp]),
        ];
        let report = DemoReport::new(&tensors, logs);
        let times = |us, algbw_gb_s| Times {
            median_us: us,
            least_us: us,
            most_us: us,
            algbw_gb_s,
            busbw_gb_s: 1.5 * algbw_gb_s,
        };
        let row = |name: &str, bytes, tensors, us| Row {
            name: name.to_owned(),
            bytes,
            tensors,
            ferroce: times(us, 3.0),
            tcp: Some(times(2.0 * us, 1.5)),
            tcp_ratio: Some(2.0),
        };
        assert_eq!(report.sizes, [row("3,000 B", 3000, 2, 1.0)]);
        assert_eq!(report.classes, [row("up to 4 KiB", 6000, 2, 2.0)]);
        assert_eq!(report.total, row("all", 6000, 2, 2.0));
        let text = report.because("told so").to_string();
        let last = "result    all elements right; ferroce is 2.00 times as fast; exit status 0";
        assert!(text.ends_with(last) && text.contains("told so"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }

    /// The verdict names the faster transport.
    #[test]
    fn the_table_says_which_is_faster_and_fits_80_columns() {
        let tensors = [Tensor { name: "a".into(), shape: vec![1 << 20] }];
        let slow: &[&[[u64; 2]]] = &[&[[0, 99_999_900_000]], &[[0, 19_999_900_000]], &[[0, 59_999_900_000]]];
        let logs = vec![log(slow, &[&[[0, 1]][..]; 3]), log(slow, &[&[[0, 14_999_975_000]][..]; 3])];
        let text = DemoReport::new(&tensors, logs).because(&"because ".repeat(30)).to_string();
        assert!(text.contains("; TCP is 4.00 times as fast; "), "{text}");
        assert!(text.contains(" 59999.9 (19999.9 - 99999.9) "), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        // Without TCP there is one column less, and no verdict.
        let text = DemoReport::new(&tensors, vec![log(slow, &[]), log(slow, &[])]).to_string();
        assert!(!text.contains("TCP") && !text.contains("ratio"), "{text}");
    }

    #[test]
    fn wrong_elements_are_told() {
        let wrong = Wrong { tensor: "fc.bias".into(), index: 7, expected: 2.0, got_bits: 0, count: 3 };
        let mut log = RankLog::default();
        log.add_round(Transport::Ferroce, vec![], 600, Vec::new());
        log.add_round(Transport::Tcp, vec![], 400, vec![wrong]);
        let report = DemoReport::new(&[], vec![RankLog::default(), log]);
        assert_eq!(report.exit_status(), 1);
        let text = report.to_string();
        let which = "WRONG at rank 1 over TCP: fc.bias[7] is 0.0 (0x00000000), not 2.0; 3 elements";
        assert!(text.contains(which), "{text}");
        assert!(text.ends_with("result    3 of 1,000 elements WRONG; exit status 1"), "{text}");
    }
}
