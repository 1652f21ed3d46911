//! The cost that ferroce adds to libibverbs: instructions per message of a context on an RNIC, and of a C program that
//! calls libibverbs directly (`direct.c`), counted by callgrind.
//!
//! The RNIC is one of two stubs that the benchmark builds. One executes work requests, in memory and under a lock; the
//! other completes them at once, and does nothing else: less than any real provider, so the rest is the callers' cost.
//! Each program runs twice, once with more rounds; the difference is the cost of messages without the setup. A round is
//! 16 messages of 8 bytes, posted and polled for.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use ferroce::driver::rnic::Verbs;
use ferroce::*;
use ferroce_benches::{callgrind, state};
use ferroce_driver_test_support::rnic_stub::{HEADERS, Stub};

#[derive(Parser)]
struct Args {
    /// Writes the counts into a file
    #[arg(long)]
    json: Option<PathBuf>,
    /// As `cargo bench` says
    #[arg(long, hide = true)]
    bench: bool,
    /// The process under valgrind: library, workload, rounds
    #[arg(long, hide = true, num_args = 3)]
    inside: Option<Vec<String>>,
}

const WORKLOADS: [(&str, &str); 4] = [
    ("write", "WRITE, posted one by one, each signaled"),
    ("write-inline", "the same, inline"),
    ("write-list", "WRITE, a list of 16, the last signaled"),
    ("send-list", "SEND, lists of 16 sends and receives"),
];
const STUBS: [(&str, &str); 2] = [("NOTHING_WRONG", "carried out"), ("LEAN", "done at once")];
/// For the two runs.
const ROUNDS: [u64; 2] = [256, 1280];
const BATCH: usize = 16;
const LENGTH: u32 = 8;

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args = Args::parse();
    if let Some([library, workload, rounds]) = args.inside.as_deref() {
        run(Path::new(library), workload, rounds.parse()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !callgrind::is_there() {
        println!("not run: no valgrind (package valgrind)");
        return Ok(ExitCode::FAILURE);
    }
    let own = std::env::current_exe()?;
    let mut rows = Vec::new();
    println!("instructions a message, posted and polled for, as callgrind counts them");
    state::print_beside("counts of instructions");
    println!(
        "{:<42} {:<14} {:>8} {:>8} {:>7}",
        "messages of 8 bytes", "the card's part", "ferroce", "C", "ratio"
    );
    for (setting, part) in STUBS {
        let Some(stub) = Stub::build(&[setting]) else { return Ok(ExitCode::FAILURE) };
        let direct = stub.folder().join("direct");
        compile(&direct)?;
        let library = stub.path().display().to_string();
        for (workload, what) in WORKLOADS {
            let each = |program: &Path, first: &[&str]| -> Result<f64, Box<dyn std::error::Error>> {
                let count = |rounds: u64| {
                    let rounds = rounds.to_string();
                    let arguments = [first, &[&library, workload, &rounds]].concat();
                    callgrind::count(program, &arguments).map(|counted| counted.instructions)
                };
                let [few, many] = [count(ROUNDS[0])?, count(ROUNDS[1])?];
                let messages = (ROUNDS[1] - ROUNDS[0]) * BATCH as u64;
                Ok(many.saturating_sub(few) as f64 / messages as f64)
            };
            let (ours, theirs) = (each(&own, &["--inside"])?, each(&direct, &[])?);
            println!("{what:<42} {part:<14} {ours:>8.0} {theirs:>8.0} {:>7.2}", ours / theirs);
            rows.push(serde_json::json!({
                "workload": workload, "card": part, "ferroce": ours, "direct": theirs, "ratio": ours / theirs,
            }));
        }
    }
    if let Some(path) = args.json {
        ferroce_benches::report::write(&path, &(serde_json::to_string_pretty(&rows)? + "\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn compile(program: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/rnic/direct.c");
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-I", HEADERS, source, "-o"]);
    let status = compiler.arg(program).arg("-ldl").status()?;
    if status.success() { Ok(()) } else { Err(format!("gcc, {source}: {status}").into()) }
}

/// Runs the rounds, between two queue pairs of one context.
fn run(library: &Path, workload: &str, rounds: u64) -> Result<(), Error> {
    let port = RnicPort::open_by(&Verbs::load_from(library)?, "stub0", None, None)?;
    let mut context = Context::open(port, &Config::default().seed([7; 32]))?;
    let pd = context.alloc_pd()?;
    let cqs = [context.create_cq(256)?, context.create_cq(256)?];
    let mut qps = Vec::new();
    for cq in cqs {
        let config = QpConfig::rc(pd, cq).max_send_wr(64).max_recv_wr(64).max_inline_data(64);
        qps.push(context.create_qp(&config)?);
    }
    let ends = [context.endpoint(qps[0], 0)?, context.endpoint(qps[1], 0)?];
    context.handshake(qps[0], &ends[0], &ends[1])?;
    context.handshake(qps[1], &ends[1], &ends[0])?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mrs = [
        context.register(pd, Memory::zeroed(4096)?, rights)?,
        context.register(pd, Memory::zeroed(4096)?, rights)?,
    ];
    let remote = context.remote(mrs[1])?.at(0);
    let (here, there) = ([mrs[0].sge(0..LENGTH.into())], [mrs[1].sge(0..LENGTH.into())]);
    let bytes = [0; LENGTH as usize];
    let mut now = Nanos::ZERO;
    let mut wait = |context: &mut Context, cq: Cq, mut expected: usize| -> Result<(), Error> {
        let mut room = [WorkCompletion::EMPTY; BATCH];
        while expected > 0 {
            now = Nanos(now.0 + 1000);
            context.poll(now)?;
            let count = context.poll_cq_into(cq, &mut room)?;
            for wc in &room[..count] {
                assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            }
            expected -= count;
        }
        Ok(())
    };
    for _ in 0..rounds {
        let flags = SendFlags::SIGNALED;
        match workload {
            "write" | "write-inline" => {
                let data = if workload == "write" { Data::Sges(&here) } else { Data::Inline(&bytes) };
                for wr_id in 0..BATCH as u64 {
                    let wr = SendWorkRequest { wr_id, op: SendOp::Write(remote), data, flags };
                    context.post_send(qps[0], &wr)?;
                }
                wait(&mut context, cqs[0], BATCH)?;
            }
            "write-list" => {
                let wrs: [SendWorkRequest<'_>; BATCH] = std::array::from_fn(|n| SendWorkRequest {
                    wr_id: n as u64,
                    op: SendOp::Write(remote),
                    data: Data::Sges(&here),
                    flags: SendFlags::default().signaled(n + 1 == BATCH),
                });
                context.post_sends(qps[0], &wrs)?;
                wait(&mut context, cqs[0], 1)?;
            }
            _ => {
                let receives: [ReceiveWorkRequest<'_>; BATCH] =
                    std::array::from_fn(|n| ReceiveWorkRequest { wr_id: n as u64, sges: &there });
                context.post_recvs(qps[1], &receives)?;
                let data = Data::Sges(&here);
                let wrs: [SendWorkRequest<'_>; BATCH] = std::array::from_fn(|n| SendWorkRequest {
                    wr_id: n as u64,
                    op: SendOp::Send,
                    data,
                    flags,
                });
                context.post_sends(qps[0], &wrs)?;
                wait(&mut context, cqs[0], BATCH)?;
                wait(&mut context, cqs[1], BATCH)?;
            }
        }
    }
    Ok(())
}
