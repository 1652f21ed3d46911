//! Instructions per message, counted by callgrind: the same on every run and every machine with the same compiler, so
//! it shows changes of a few percent that times do not.
//!
//! Both ends are on one core, with a ring in memory between them, as in `engine`. Each workload runs twice under
//! valgrind, once with more messages; the difference is the cost of the messages without the setup. The counts must
//! match `instructions.toml` within a few percent, upwards and downwards: a lower cost should lower the budget.
//! `-- --update` writes the file.
//!
//! Valgrind's processor has no AVX-512, so the counts are not those of the fastest CRC; the table says which one was
//! used.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use ferroce::driver::Crc32;
use ferroce::*;
use ferroce_benches::pair::{Pair, Setup};
use ferroce_benches::{callgrind, ring, state};

#[derive(Parser)]
struct Args {
    /// Writes the counts into instructions.toml, as the new budgets
    #[arg(long)]
    update: bool,
    /// As `cargo bench` says
    #[arg(long, hide = true)]
    bench: bool,
    /// The process under valgrind
    #[arg(long, hide = true, requires = "messages")]
    workload: Option<String>,
    #[arg(long, hide = true)]
    messages: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Write,
    Read,
    Send,
}

/// Messages of one kind.
struct Workload {
    name: &'static str,
    op: Op,
    length: u32,
    qps: u32,
    /// Per message.
    packets: u64,
}

const fn workload(name: &'static str, op: Op, length: u32, qps: u32, packets: u64) -> Workload {
    Workload { name, op, length, qps, packets }
}

const WORKLOADS: [Workload; 8] = [
    workload("write-8", Op::Write, 8, 1, 1),
    workload("write-8-of-1024-qps", Op::Write, 8, 1024, 1),
    workload("write-1024", Op::Write, 1024, 1, 1),
    workload("write-4096", Op::Write, 4096, 1, 1),
    workload("write-65536", Op::Write, 1 << 16, 1, 16),
    workload("send-1024", Op::Send, 1024, 1, 1),
    workload("read-1024", Op::Read, 1024, 1, 1),
    workload("read-65536", Op::Read, 1 << 16, 1, 16),
];

/// The accepted deviation of a count from its budget.
const TOLERANCE: f64 = 0.03;
/// For the two runs of a workload; multiples of the number of queue pairs and of the signaling interval.
const MESSAGES: [u64; 2] = [4096, 12288];

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args = Args::parse();
    if let (Some(name), Some(messages)) = (&args.workload, args.messages) {
        let workload = WORKLOADS.iter().find(|workload| workload.name == name).ok_or("no such workload")?;
        run(workload, messages)?;
        println!("{}", Crc32::detect().name());
        return Ok(ExitCode::SUCCESS);
    }
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: the budgets are of x86-64");
        return Ok(ExitCode::SUCCESS);
    }
    if !callgrind::is_there() {
        println!("skipped: no valgrind (package valgrind)");
        return Ok(ExitCode::SUCCESS);
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.toml");
    // Without the file every budget is reported as missing.
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let budgets = read_budgets(&text)?;
    println!("instructions a packet, both ends together, as callgrind counts them");
    state::print_beside("counts of instructions");
    println!("{:<22} {:>9} {:>9} {:>8}", "messages", "counted", "budget", "");
    let (mut counts, mut crc, mut outside) = (Vec::new(), String::new(), Vec::new());
    for workload in &WORKLOADS {
        let (few, _) = count(workload, MESSAGES[0])?;
        let (many, name) = count(workload, MESSAGES[1])?;
        crc = name;
        let packets = (MESSAGES[1] - MESSAGES[0]) * workload.packets;
        let each = many.saturating_sub(few) as f64 / packets as f64;
        let budget = budgets.get(workload.name).copied();
        let change = budget.map(|budget| each / budget - 1.0);
        let (budget, change) = match (budget, change) {
            (Some(budget), Some(change)) => {
                if change.abs() > TOLERANCE {
                    outside.push(workload.name);
                }
                (format!("{budget:.0}"), format!("{:+.1}%", change * 100.0))
            }
            _ => {
                outside.push(workload.name);
                ("none".to_owned(), String::new())
            }
        };
        println!("{:<22} {each:>9.0} {budget:>9} {change:>8}", workload.name);
        counts.push((workload.name, each));
    }
    println!("CRC under valgrind: {crc}");
    if args.update {
        std::fs::write(&file, write_budgets(&counts))?;
        println!("written: {}", file.display());
    } else if !outside.is_empty() {
        println!(
            "more than {:.0}% from the budget: {}; where that is meant, `./do bench --bench instructions -- \
             --update` writes {}",
            TOLERANCE * 100.0,
            outside.join(", "),
            file.display()
        );
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Instructions of a whole process, and the CRC method that it used.
fn count(workload: &Workload, messages: u64) -> Result<(u64, String), Box<dyn std::error::Error>> {
    let arguments = ["--workload", workload.name, "--messages", &messages.to_string()];
    let counted = callgrind::count(&std::env::current_exe()?, &arguments)?;
    Ok((counted.instructions, counted.said))
}

fn read_budgets(text: &str) -> Result<BTreeMap<&str, f64>, String> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let budget = |line| {
        let (name, count) = str::split_once(line, '=').ok_or_else(|| format!("'{line}': NAME = COUNT"))?;
        let count = count.trim().parse().map_err(|error| format!("'{line}': {error}"))?;
        Ok((name.trim(), count))
    };
    lines.map(budget).collect()
}

fn write_budgets(counts: &[(&str, f64)]) -> String {
    let mut text =
        "# Instructions a packet, both ends together, as `./do bench --bench instructions` counts them;\n\
                    # `./do bench --bench instructions -- --update` writes this file.\n"
            .to_owned();
    for (name, count) in counts {
        text += &format!("{name} = {count:.0}\n");
    }
    text
}

/// Transfers messages, round robin over the queue pairs.
fn run(workload: &Workload, messages: u64) -> Result<(), Error> {
    let Workload { op, length, qps, .. } = *workload;
    let depth = if qps == 1 { 64 } else { 4 };
    let config = Config::default().seed([7; 32]);
    let mut pair = Pair::new(ring::ports(), &Setup { config, qps, memory: 1 << 17, ..Setup::default() })?;
    let share = messages / u64::from(qps);
    let (mut posted, mut done) = (vec![0u64; qps as usize], vec![0u64; qps as usize]);
    let [a, b] = &mut pair.ends;
    let here = [Sge { mr: a.mr, offset: 0, length }];
    let there = [Sge { mr: b.mr, offset: 0, length }];
    let receive = ReceiveWorkRequest { wr_id: 0, sges: &there };
    if op == Op::Send {
        for _ in 0..depth {
            b.qps.iter().try_for_each(|qp| b.context.post_recv(*qp, &receive))?;
        }
    }
    let mut now = Nanos::ZERO;
    while done.iter().any(|done| *done < share) {
        for lane in 0..qps as usize {
            while posted[lane] < share && posted[lane] - done[lane] < depth {
                posted[lane] += 1;
                let signaled = posted[lane] % 4 == 0;
                let op = match op {
                    Op::Write => SendOp::Write(b.remote),
                    Op::Read => SendOp::Read(b.remote),
                    Op::Send => SendOp::Send,
                };
                let wr_id = (lane as u64) << 32 | posted[lane];
                let flags = SendFlags::default().signaled(signaled);
                a.context
                    .post_send(a.qps[lane], &SendWorkRequest { wr_id, op, data: Data::Sges(&here), flags })?;
            }
        }
        now = Nanos(now.0 + 1000);
        a.context.poll(now)?;
        b.context.poll(now)?;
        while let Some(wc) = a.context.poll_cq(a.cq)? {
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            done[(wc.wr_id >> 32) as usize] = wc.wr_id & u64::from(u32::MAX);
        }
        while let Some(wc) = b.context.poll_cq(b.cq)? {
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            b.context.post_recv(b.qps[0], &receive)?;
        }
    }
    Ok(())
}
