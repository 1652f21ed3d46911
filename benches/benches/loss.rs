//! Goodput over loss rate on a simulated link of 100 Gb/s with a round-trip time of 10 µs, in virtual time: the same
//! seeds give the same results on any machine.
//!
//! Frames of both directions are lost, each with the same probability. A port accepts frames as long as fewer than
//! `RING` wait for the link, as the ring of a NIC does: with go-back-N, the frames that wait there after a loss are
//! sent in vain.

use std::path::Path;
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork, WIRE_OVERHEAD};
use ferroce::*;
use ferroce_benches::pair::{End, Pair, Setup};
use ferroce_benches::plot::{Chart, Line};
use ferroce_benches::report::{Median, Options};
use ferroce_benches::state;
use serde_json::{Value, json};

const RATE: u64 = 100_000_000_000;
const ONE_WAY: Duration = Duration::from_micros(5);
/// One in this many frames is lost; 0 means no loss.
const LOSSES: [u32; 6] = [0, 16384, 4096, 1024, 256, 64];
const LOSS_NAMES: [&str; 6] = ["0", "1/16384", "1/4096", "1/1024", "1/256", "1/64"];
/// The most frames that wait in a port.
const RING: usize = 64;
/// 65 µs: twice the round trip with the rings full.
const TIMEOUT: u8 = 4;
const MESSAGE: u32 = 1 << 16;
const OUTSTANDING: u64 = 128;
const PACKETS: u64 = 100_000;
const SEEDS: u64 = 5;
/// The first cases, which are lines of the chart.
const IN_CHART: usize = 4;

/// The loss recovery.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Recovery {
    GoBackN,
    SelectiveRepeat,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stream {
    Write,
    Send,
    Read,
}

/// A curve: one measurement at each loss rate.
#[derive(Clone, Copy)]
struct Case {
    recovery: Recovery,
    stream: Stream,
    path_mtu: PathMtu,
    window: u32,
    ring: usize,
    timeout: u8,
    /// Outstanding READs.
    rd_atomic: u8,
}

/// The results of a run.
struct Run {
    /// Payload, in bits per second.
    goodput: f64,
    lost: u64,
    /// Retransmitted requests; for a READ, responses are sent again.
    retransmitted: u64,
    timeouts: u64,
}

impl Case {
    fn new(recovery: Recovery, stream: Stream, path_mtu: PathMtu) -> Case {
        Case {
            recovery,
            stream,
            path_mtu,
            window: DEFAULT_WINDOW,
            ring: RING,
            timeout: TIMEOUT,
            rd_atomic: 16,
        }
    }

    /// Nanoseconds of a full packet on the link. Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4.
    fn packet_time(&self) -> f64 {
        let bytes = u64::from(self.path_mtu.bytes()) + 14 + 20 + 8 + 12 + 4 + WIRE_OVERHEAD;
        (bytes * 8) as f64 * 1e9 / RATE as f64
    }

    fn run(&self, loss: u32, seed: u64, packets: u64) -> Result<Run, Error> {
        let link = LinkConfig::default()
            .loss(if loss == 0 { 0.0 } else { 1.0 / f64::from(loss) })
            .delay(ONE_WAY)
            .rate(RATE);
        let on_the_way = (ONE_WAY.as_nanos() as f64 / self.packet_time()).ceil() as usize;
        let config = NetworkConfig::default().frames(on_the_way + self.ring);
        let network = SimNetwork::with_config(seed, link, config)?;
        let ports = [1, 2].map(|n| network.port(&[[192, 0, 2, n].into()]));
        let setup = Setup {
            config: Config::default().seed([1; 32]).window(self.window),
            memory: MESSAGE as usize,
            path_mtu: self.path_mtu,
            timeout: self.timeout,
            selective_repeat: self.recovery == Recovery::SelectiveRepeat,
            max_rd_atomic: self.rd_atomic,
            ..Setup::default()
        };
        let mut pair = Pair::new(ports, &setup)?;
        let end = Nanos((packets as f64 * self.packet_time()) as u64);
        let mut messages = Messages { stream: self.stream, posted: 0, done: 0 };
        while pair.now < end {
            messages.keep_up(&mut pair.ends)?;
            let mut frames = 0;
            for end in &mut pair.ends {
                frames += end.context.poll(pair.now)?;
            }
            if frames == 0 && !messages.take_completions(&mut pair.ends)? {
                let timeouts = pair.ends.iter().filter_map(|end| end.context.next_timeout());
                let next = timeouts.chain(network.next_arrival()).min().unwrap_or(end);
                pair.now = next.max(Nanos(pair.now.0 + 1));
            }
        }
        let counters = pair.ends[0].context.counters();
        Ok(Run {
            goodput: (messages.done * u64::from(MESSAGE) * 8) as f64 * 1e9 / pair.now.0 as f64,
            lost: network.counters().lost,
            retransmitted: counters.value(Counter::RetransmittedPkts),
            timeouts: counters.value(Counter::LocalAckTimeoutErr),
        })
    }
}

/// Messages one after the other, as fast as possible.
struct Messages {
    stream: Stream,
    posted: u64,
    done: u64,
}

impl Messages {
    fn keep_up(&mut self, [requester, responder]: &mut [End; 2]) -> Result<(), Error> {
        while self.posted - self.done < OUTSTANDING {
            let op = match self.stream {
                Stream::Write => SendOp::Write(responder.remote),
                Stream::Read => SendOp::Read(responder.remote),
                Stream::Send => {
                    let sges = [Sge { mr: responder.mr, offset: 0, length: MESSAGE }];
                    let wr = ReceiveWorkRequest { wr_id: self.posted, sges: &sges };
                    responder.context.post_recv(responder.qps[0], &wr)?;
                    SendOp::Send
                }
            };
            let data = Data::Sges(&[Sge { mr: requester.mr, offset: 0, length: MESSAGE }]);
            let wr = SendWorkRequest { wr_id: self.posted, op, data, flags: SendFlags::SIGNALED };
            requester.context.post_send(requester.qps[0], &wr)?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Whether there were any.
    fn take_completions(&mut self, [requester, responder]: &mut [End; 2]) -> Result<bool, Error> {
        let before = self.done;
        while let Some(wc) = requester.context.poll_cq(requester.cq)? {
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, self.done));
            self.done += 1;
        }
        while let Some(wc) = responder.context.poll_cq(responder.cq)? {
            assert_eq!(wc.status, WcStatus::Success);
        }
        Ok(self.done > before)
    }
}

/// One case at each loss rate.
struct Curve {
    /// Relative to the goodput without loss.
    shares: Vec<f64>,
    json: Value,
}

fn measure(name: &str, case: Case, seeds: u64, packets: u64) -> Result<Curve, Error> {
    let line_rate = f64::from(case.path_mtu.bytes()) * 8.0 * 1e9 / case.packet_time();
    let mut rows = Vec::new();
    let (mut shares, mut lossless) = (Vec::new(), 0.0);
    println!();
    let Case { stream, window, ring, timeout, .. } = case;
    let timeout = (4.096 * f64::from(1u32 << timeout)).round();
    println!("{name}: {stream:?}, window {window}, ring {ring}, ACK timeout {timeout} µs");
    println!(
        "{:>8} {:>8} {:>9} {:>8} {:>9} {:>12} {:>14}",
        "loss", "Gb/s", "goodput", "spread", "ceiling", "resent/loss", "timeouts/loss"
    );
    for (loss, loss_name) in LOSSES.into_iter().zip(LOSS_NAMES) {
        let runs = (1..=seeds).map(|seed| case.run(loss, seed, packets)).collect::<Result<Vec<_>, _>>()?;
        let Median { value, spread } = Median::of(runs.iter().map(|run| run.goodput).collect());
        if loss == 0 {
            lossless = value;
        }
        let share = value / lossless;
        let ceiling = if loss == 0 { 1.0 } else { 1.0 - 1.0 / f64::from(loss) };
        let sum = |of: fn(&Run) -> u64| runs.iter().map(of).sum::<u64>() as f64;
        let lost = sum(|run| run.lost).max(1.0);
        let (resent, timeouts) = (sum(|run| run.retransmitted) / lost, sum(|run| run.timeouts) / lost);
        println!(
            "{loss_name:>8} {:>8.2} {:>7.2} % {:>6.2} % {:>7.2} % {resent:>12.2} {timeouts:>14.4}",
            value / 1e9,
            share * 100.0,
            spread * 100.0,
            ceiling * 100.0
        );
        shares.push(share);
        rows.push(json!({
            "loss": loss_name, "bits_per_second": value, "share": share, "spread": spread,
            "ceiling": ceiling, "resent_per_loss": resent, "timeouts_per_loss": timeouts,
        }));
    }
    println!(
        "without loss {:.2} % of what the link's rate leaves after headers",
        lossless / line_rate * 100.0
    );
    let json = json!({
        "name": name, "stream": format!("{:?}", case.stream), "path_mtu": case.path_mtu.bytes(),
        "window": case.window, "ring": case.ring, "timeout": case.timeout, "rd_atomic": case.rd_atomic,
        "line_rate": line_rate, "rows": rows,
    });
    Ok(Curve { shares, json })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let (seeds, packets) = options.scale((1, 5_000), (SEEDS, PACKETS));
    println!(
        "goodput of payload over 100 Gb/s with a round trip of 10 µs, both directions lossy; messages of \
         {MESSAGE} bytes, {OUTSTANDING} outstanding;"
    );
    println!("median of {seeds} seeds of the time of {packets} packets each");
    state::print_beside("of virtual time");
    let case = |recovery| Case::new(recovery, Stream::Write, PathMtu::Mtu4096);
    let (plain, selective) = (case(Recovery::GoBackN), case(Recovery::SelectiveRepeat));
    let path_mtu = PathMtu::Mtu1024;
    // A READ that waits for a lost packet counts as outstanding until it is complete: 16 of them are a quarter of what
    // the window and the span of selective repeat allow. With READs or a deep ring, a window of packets may wait before
    // the retransmission: they take 170 µs, so the timeout is 0.5 ms there.
    let (send, read) = (Stream::Send, Stream::Read);
    let cases = [
        ("selective repeat, 4096", selective),
        ("selective repeat, 1024", Case { path_mtu, ..selective }),
        ("go-back-N, 4096", plain),
        ("go-back-N, 1024", Case { path_mtu, ..plain }),
        ("selective repeat, SEND", Case { stream: send, ..selective }),
        ("go-back-N, SEND", Case { stream: send, ..plain }),
        ("selective repeat, READ, 64 at once", Case { stream: read, timeout: 7, rd_atomic: 64, ..selective }),
        ("selective repeat, READ, 16 at once", Case { stream: read, timeout: 7, ..selective }),
        ("go-back-N, READ, 64 at once", Case { stream: read, timeout: 7, rd_atomic: 64, ..plain }),
        ("selective repeat, ring of 4096", Case { ring: 4096, timeout: 7, ..selective }),
        ("go-back-N, ring of 4096", Case { ring: 4096, timeout: 7, ..plain }),
        ("selective repeat, timeout 67 ms", Case { timeout: 14, ..selective }),
        ("go-back-N, timeout 67 ms", Case { timeout: 14, ..plain }),
    ];
    let bound = LOSSES.map(|loss| if loss == 0 { 1.0 } else { 1.0 - 1.0 / f64::from(loss) });
    let mut lines = vec![Line { name: "1 - loss".to_owned(), shares: bound.to_vec(), dashed: true }];
    let mut results = Vec::new();
    for (name, case) in cases {
        let Curve { shares, json } = measure(name, case, seeds, packets)?;
        if lines.len() <= IN_CHART {
            lines.push(Line { name: name.to_owned(), shares, dashed: false });
        }
        results.push(json);
    }
    let chart = Chart {
        title: "Goodput against loss: 100 Gb/s, round trip 10 µs",
        x_label: "frames lost, each way",
        cases: &LOSS_NAMES,
    };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("loss.svg");
    std::fs::write(&path, chart.svg(&lines))?;
    println!("\nwritten: {}", path.display());
    Ok(options.save(&json!({ "bench": "loss", "curves": results }))?)
}
