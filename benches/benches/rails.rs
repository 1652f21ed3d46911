//! The gain of a second port: an all-reduce of 64 MiB between two namespaces, over one link of 2 Gb/s, over two, and
//! over two while one fails. The cases take turns in each round.

use std::error::Error;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use ferroce::driver::machine::Rounds;
use ferroce_benches::command;
use ferroce_benches::report::{Median, Options};
use ferroce_benches::veth::{Veth, is_root};
use serde_json::{Value, json};

const RATE: &str = "2gbit";
const MTU: u32 = 9000;

struct Scale {
    bytes: &'static str,
    iterations: u32,
    rounds: usize,
}

/// The links in use.
#[derive(Clone, Copy)]
enum Way {
    One,
    Two,
    /// The second goes down after about half of the calls, and up again at the end.
    Cut,
}

/// Milliseconds of a call: the mean, and the maximum at its slowest rank.
struct Time {
    mean: f64,
    most: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::from_args();
    let scale = options.scale(
        Scale { bytes: "1MiB", iterations: 2, rounds: 1 },
        Scale { bytes: "64MiB", iterations: 20, rounds: 5 },
    );
    if !is_root() {
        println!("rails: left out: namespaces need root");
        return Ok(());
    }
    let command = command::built(scale.rounds > 1)?;
    let veth = Veth::with_rails("rails", MTU, 2, RATE)?;
    let mut state = Rounds::new();
    let rounds = state.hold(scale.rounds, |round| {
        eprintln!("round {} of {}", round + 1, scale.rounds);
        [Way::One, Way::Two, Way::Cut]
            .into_iter()
            .map(|way| run(&command, &veth, way, &scale))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let median = |of: &dyn Fn(&[Time]) -> f64| Median::of(rounds.iter().map(|times| of(times)).collect());
    let [one, two, cut] = [0, 1, 2].map(|way| median(&|times| times[way].mean));
    let longest = median(&|times| times[2].most);
    let ratio = median(&|times| times[0].mean / times[1].mean);
    println!("all_reduce of {}, two ranks, UDP sockets, links of {RATE}", scale.bytes);
    println!("one link                          {:>8.1} ms ± {:.0} %", one.value, 50.0 * one.spread);
    println!("two links                         {:>8.1} ms ± {:.0} %", two.value, 50.0 * two.spread);
    println!(
        "ratio                             {:>8.2}    ± {:.0} %   aim: >= 1.8",
        ratio.value,
        50.0 * ratio.spread
    );
    println!(
        "two links, one cut in the middle  {:>8.1} ms, the call with the cut {:.0} ms",
        cut.value, longest.value
    );
    let figures = json!({
        "bytes": scale.bytes, "rate": RATE, "one_ms": one.value, "two_ms": two.value, "ratio": ratio.value,
        "ratio_spread": ratio.spread, "cut_ms": cut.value, "longest_with_cut_ms": longest.value,
    });
    Ok(options.save_with(&state, json!({ "rails": figures }))?)
}

fn run(ferroce: &Path, veth: &Veth, way: Way, scale: &Scale) -> Result<Time, Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let rails: &[u8] = if matches!(way, Way::One) { &[0] } else { &[0, 1] };
    let mut ranks = Vec::new();
    for end in 0..2 {
        let devices: Vec<String> =
            rails.iter().map(|rail| format!("udp:{}", Veth::address_on(*rail, end))).collect();
        let mut command = veth.command(end);
        command.arg(ferroce).args(["collective", "all_reduce", "--json", "--quiet", "--out-of-place"]);
        command.args(["--device", &devices.join("+"), "--shared-memory", "off", "-w", "2"]);
        command.args(["-b", scale.bytes, "-e", scale.bytes, "-n", &scale.iterations.to_string()]);
        command.env("FERROCE_RANK", end.to_string()).env("FERROCE_SIZE", "2");
        command.env("FERROCE_MASTER_ADDR", Veth::address(0).to_string());
        command.env("FERROCE_MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        ranks.push(command.spawn()?);
    }
    if let Way::Cut = way {
        // 64 MiB take about 150 ms.
        thread::sleep(Duration::from_millis(1000 + 75 * u64::from(scale.iterations)));
        veth.set_link(1, 1, false)?;
    }
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output()).collect::<Result<_, _>>()?;
    if let Way::Cut = way {
        veth.set_link(1, 1, true)?;
    }
    if let Some(failed) = outputs.iter().find(|output| !output.status.success()) {
        return Err(String::from_utf8_lossy(&failed.stderr).into_owned().into());
    }
    let report: Value = serde_json::from_slice(&outputs[0].stdout)?;
    if report["wrong"] != 0 {
        return Err(format!("wrong elements: {report}").into());
    }
    let timing = &report["results"][0]["out_of_place"];
    let number =
        |name: &str| timing[name].as_f64().map(|us| us / 1e3).ok_or_else(|| format!("no {name}: {report}"));
    Ok(Time { mean: number("time_us")?, most: number("max_us")? })
}
