//! The scenarios of two published simulators of DCQCN with ferroce's engine, compared with the published results.
//!
//! `cargo test -p ferroce --test fabric -- --nocapture` runs them with the simulators' own NIC, and reproduces their
//! results. Here the hosts are those of `ferroce fabric`, which differ: packets of 1024 bytes of payload in frames of
//! 1082 bytes plus preamble and gap, a window of 512 packets, CNPs as packets, ACKs for several packets, a pacer that
//! passes three frames at once, and ACK timers. The table shows the effect. It is the performance of DCQCN, not of this
//! machine.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;

use ferroce_benches::command;
use ferroce_benches::report::Options;
use ferroce_benches::state;
use serde_json::{Value, json};

/// A set of parameters (pcap-fixtures/dcqcn/README.md).
struct Set {
    name: &'static str,
    gigabits: u64,
    /// Kmin and Kmax in bytes, and Pmax.
    ecn: (u64, u64, &'static str),
    cnp_interval: &'static str,
    pfc: bool,
    buffer: &'static str,
}

const SETS: [Set; 4] = [
    Set {
        name: "zhu25",
        gigabits: 25,
        ecn: (42_230, 1_031_030, "1.0"),
        cnp_interval: "50us",
        pfc: false,
        buffer: "64MiB",
    },
    Set {
        name: "zhu25p",
        gigabits: 25,
        ecn: (6180, 207_030, "0.01"),
        cnp_interval: "50us",
        pfc: false,
        buffer: "64MiB",
    },
    Set {
        name: "mlx25",
        gigabits: 25,
        ecn: (41_000, 1_030_000, "1.0"),
        cnp_interval: "1us",
        pfc: true,
        buffer: "16MiB",
    },
    Set {
        name: "hpcc100",
        gigabits: 100,
        ecn: (400_000, 1_600_000, "0.2"),
        cnp_interval: "1us",
        pfc: true,
        buffer: "32MiB",
    },
];

/// Bytes on the link per byte of payload.
const WIRE: f64 = (1024.0 + 58.0 + 24.0) / 1024.0;

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::from_args();
    let seeds = options.scale(1, 5);
    let command = command::built(seeds > 1)?;
    let published = Published::read()?;
    state::print_beside("of virtual time");
    println!("{:<38} {:>12} {:>12} {:>9}", "set, scenario, variant, figure", "engine", "published", "off by");
    let mut rows = Vec::new();
    let mut row = |what: String, engine: f64| {
        let published = published.figure(&what)?;
        let off = if published == 0.0 {
            String::new()
        } else {
            format!("{:+.1} %", 100.0 * (engine / published - 1.0))
        };
        println!("{what:<38} {:>12} {:>12} {off:>9}", number(engine), number(published));
        rows.push(json!({ "figure": what, "engine": engine, "published": published }));
        Ok::<(), Box<dyn Error>>(())
    };
    let sets = if seeds > 1 { &SETS[..] } else { &SETS[1..2] };
    for set in sets {
        let limit = if seeds > 1 { "100ms" } else { "25ms" };
        let traffic = "[[traffic]]\npattern = \"incast\"\nhosts = \"1-2\"\nto = 0\nendless = true\n";
        let runs = run(&command, set, seeds, (2, limit, "20ms", set.buffer), traffic)?;
        let mean = |of: &dyn Fn(&Value) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
        let of = |figure: &str| format!("{},a,base,{figure}", set.name);
        let goodput = |run: &Value| flows(run).iter().sum::<f64>();
        row(of("utilization"), mean(&|run| goodput(run) * WIRE / set.gigabits as f64))?;
        row(of("queue_mean_20_100ms"), mean(&|run| measure(run, "queue_mean_kb") * 1e3))?;
        row(of("queue_p99_20_100ms"), mean(&|run| measure(run, "queue_p99_kb") * 1e3))?;
        row(of("jain_80ms"), mean(&|run| jain(&flows(run))))?;
    }
    for (set, variant, buffer) in
        [(1, "nopfc", "64MiB"), (2, "base", "16MiB"), (2, "buf2M", "2MB"), (3, "base", "32MiB")]
    {
        if seeds == 1 {
            break;
        }
        let set = &SETS[set];
        let traffic = "[[traffic]]\nname = \"long\"\npattern = \"pairs\"\npairs = [[1, 0]]\nendless = true\n\n\
                       [[traffic]]\nname = \"burst\"\npattern = \"incast\"\nhosts = \"2-11\"\nto = 0\nbytes = \"512000B\"\n\
                       count = 1\nstart = \"10ms\"\n";
        let runs = run(&command, set, seeds, (11, "30ms", "1ms", buffer), traffic)?;
        let of = |figure: &str| format!("{},c,{variant},{figure}", set.name);
        let mut times: Vec<f64> = runs.iter().flat_map(completions).collect();
        times.sort_by(f64::total_cmp);
        row(of("fct_mean_us"), times.iter().sum::<f64>() / times.len() as f64)?;
        row(of("fct_pooled_p99_us"), times[(times.len() * 99).div_ceil(100) - 1])?;
        row(
            of("queue_max"),
            runs.iter().map(|run| measure(run, "queue_max_kb") * 1e3).sum::<f64>() / runs.len() as f64,
        )?;
        row(
            of("pause_frames"),
            runs.iter().map(|run| measure(run, "pauses")).sum::<f64>() / runs.len() as f64,
        )?;
    }
    Ok(options.save(&json!({ "simulators": rows }))?)
}

/// Runs `traffic` around one switch with `senders` senders and a receiver, until a limit, after a warm-up.
fn run(
    command: &Path,
    set: &Set,
    seeds: u32,
    (senders, limit, warm_up, buffer): (usize, &str, &str, &str),
    traffic: &str,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let Set { name, gigabits, ecn: (kmin, kmax, pmax), cnp_interval, pfc, .. } = set;
    let hosts = senders + 1;
    let text = format!(
        "[time]\nlimit = \"{limit}\"\nwarm-up = \"{warm_up}\"\nsample = \"10us\"\n\n[topology.star]\nhosts = {hosts}\n\n\
         [links]\nrate = \"{gigabits}G\"\n\n[switches]\nbuffer = \"{buffer}\"\nkmin = \"{kmin}B\"\nkmax = \"{kmax}B\"\npmax = {pmax}\n\
         pfc = {pfc}\nxon-offset = \"2496B\"\n\n[control]\ncongestion = \"{name}\"\ncnp-interval = \"{cnp_interval}\"\npath-mtu = 1024\n\
         window = 8192\n\n{traffic}"
    );
    let file = std::env::temp_dir().join(format!("ferroce-simulators-{}.toml", std::process::id()));
    fs::write(&file, text)?;
    let output =
        Command::new(command).args(["fabric", "--json", &format!("--seeds={seeds}")]).arg(&file).output()?;
    fs::remove_file(&file)?;
    let said: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(said["cases"][0]["runs"].as_array().ok_or("no runs")?.clone())
}

fn measure(run: &Value, name: &str) -> f64 {
    run["measures"][name].as_f64().unwrap_or(f64::NAN)
}

/// Gb/s of payload of each flow.
fn flows(run: &Value) -> Vec<f64> {
    let flows = run["flows"].as_array().into_iter().flatten();
    flows.filter_map(|flow| flow["goodput_gbps"].as_f64()).collect()
}

/// In µs.
fn completions(run: &Value) -> Vec<f64> {
    let messages = run["messages"].as_array().into_iter().flatten();
    messages.map(|message| message["fct_us"].as_f64().unwrap_or(f64::INFINITY)).collect()
}

fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    sum * sum / (shares.len() as f64 * squares)
}

fn number(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

/// Means of pcap-fixtures/dcqcn/summary.csv.
struct Published(Vec<(String, f64)>);

impl Published {
    fn read() -> Result<Published, Box<dyn Error>> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures/dcqcn/summary.csv");
        let text = fs::read_to_string(file)?;
        let row = |line: &str| {
            let fields: Vec<&str> = line.split(',').collect();
            Some((fields[..4].join(","), fields.get(5)?.parse().ok()?))
        };
        Ok(Published(text.lines().skip(1).filter_map(row).collect()))
    }

    fn figure(&self, name: &str) -> Result<f64, Box<dyn Error>> {
        let found = self.0.iter().find(|(of, _)| of == name);
        Ok(found.ok_or_else(|| format!("no {name} in summary.csv"))?.1)
    }
}
