//! The cost of a run of `ferroce fabric`: time per event, events per second and memory, from 16 to 1,024 hosts.
//!
//! The hosts are those of a fat tree at 100 Gb/s with path MTU 4096, and each sends to another one for a millisecond.
//! The command runs in its own process for each run; sizes take turns in each round.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use ferroce::driver::machine::Rounds;
use ferroce_benches::command;
use ferroce_benches::report::{Median, Options};
use serde_json::{Value, json};

/// Full fat trees of switches with 4, 8 and 16 ports.
const HOSTS: [u64; 3] = [16, 128, 1024];

struct Scale {
    hosts: &'static [u64],
    rounds: usize,
}

/// Of one run.
struct Cost {
    events: f64,
    seconds: f64,
    set_up: f64,
    megabytes: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::from_args();
    let scale = options.scale(Scale { hosts: &HOSTS[..1], rounds: 1 }, Scale { hosts: &HOSTS, rounds: 5 });
    let command = command::built(scale.rounds > 1)?;
    let mut state = Rounds::new();
    let rounds = state.hold(scale.rounds, |round| {
        eprintln!("round {} of {}", round + 1, scale.rounds);
        scale.hosts.iter().map(|hosts| run(&command, *hosts)).collect::<Result<Vec<Cost>, _>>()
    })?;
    println!("hosts    events   ns an event  events a second  seconds  of set-up  MB at most");
    let mut rows = Vec::new();
    for (n, hosts) in scale.hosts.iter().enumerate() {
        let median = |of: fn(&Cost) -> f64| Median::of(rounds.iter().map(|costs| of(&costs[n])).collect());
        let nanos = median(|cost| cost.seconds * 1e9 / cost.events);
        let seconds = median(|cost| cost.seconds);
        let (events, set_up) = (rounds[0][n].events, median(|cost| cost.set_up).value);
        let megabytes = median(|cost| cost.megabytes).value;
        println!(
            "{hosts:>5} {events:>9.0} {:>6.0} ± {:>3.0} % {:>16.0} {:>8.2} {set_up:>10.2} {megabytes:>11.0}",
            nanos.value,
            50.0 * nanos.spread,
            events / seconds.value,
            seconds.value,
        );
        rows.push(json!({
            "hosts": hosts, "events": events, "ns_per_event": nanos.value, "spread": nanos.spread,
            "seconds": seconds.value, "set_up_seconds": set_up, "megabytes": megabytes,
        }));
    }
    if let [first, .., last] = &rows[..] {
        let cost = |row: &Value| row["ns_per_event"].as_f64().unwrap_or(f64::NAN);
        println!(
            "an event costs {:.2} times as much with {} hosts as with {}",
            cost(last) / cost(first),
            HOSTS[2],
            HOSTS[0]
        );
    }
    Ok(options.save_with(&state, json!({ "fabric": rows }))?)
}

fn run(command: &Path, hosts: u64) -> Result<Cost, Box<dyn Error>> {
    let hosts = hosts.to_string();
    let arguments = [
        "fabric",
        "permutation",
        "--topology",
        "fat-tree",
        "--hosts",
        &hosts,
        "--count",
        "20",
        "--limit",
        "1ms",
        "--sample",
        "50us",
        "--json",
    ];
    let output = Command::new(command).args(arguments).output()?;
    // Status 1: the messages do not complete within the millisecond.
    let said: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&output.stderr)))?;
    let run = &said["cases"][0]["runs"][0];
    let number =
        |name: &str| run[name].as_f64().ok_or_else(|| format!("no {name} in what the command printed"));
    Ok(Cost {
        events: number("events")?,
        seconds: number("wall_ms")? / 1e3,
        set_up: number("set_up_ms")? / 1e3,
        megabytes: said["peak_memory_kb"].as_f64().unwrap_or(f64::NAN) / 1e3,
    })
}
