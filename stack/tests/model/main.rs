//! Random schedules compared with a reference model: several queue pairs between two contexts over a simulated link with
//! impairments; work of every kind, receives posted late, memory withdrawn while peers use it, queue pairs drained, broken,
//! destroyed and connected again. Every work request has one outcome, in order; every message arrives once, in order;
//! memory has the contents that the requests write.
//!
//! `FERROCE_SEED` replays one schedule, and shrinks it if it fails. `FERROCE_MODEL_BYTES` runs schedules until this many
//! payload bytes were transferred (`./do model`), from that seed on if both are set.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod accident;
mod connection;
mod flow;
mod model;
mod noise;
mod old_age;
mod post;
mod request;
mod schedule;
mod tally;
mod tap;
mod world;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::model::Disagreement;
use crate::schedule::Schedule;
use crate::tally::Tally;
use crate::world::World;

/// Schedules of a normal run.
const SCHEDULES: u64 = 300;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
}

#[test]
fn random_schedules_agree_with_the_model() {
    let (seed, bytes) = (from_env("FERROCE_SEED"), from_env("FERROCE_MODEL_BYTES"));
    let first = seed.unwrap_or(0);
    let enough = |total: &Tally| match (seed, bytes) {
        (_, Some(bytes)) => total.bytes() >= bytes,
        (Some(_), None) => total.schedules == 1,
        (None, None) => total.schedules == SCHEDULES,
    };
    let (start, mut told) = (Instant::now(), Instant::now());
    let mut total = Tally::default();
    quiet_while_checking();
    while !enough(&total) {
        let seed = first + total.schedules;
        match check(seed) {
            Ok(tally) => total += tally,
            Err(failure) => panic!("{failure}"),
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            println!("{} schedules, {} bytes", total.schedules, total.bytes());
        }
    }
    println!("{total}");
    let last = first + total.schedules - 1;
    println!(
        "{} schedules, seeds {first} to {last}, {} payload bytes, {:.1} s",
        total.schedules,
        total.bytes(),
        start.elapsed().as_secs_f64()
    );
}

/// Case 135: the message numbers of a connection wrap.
#[test]
fn message_numbers_wrap() {
    if from_env("FERROCE_MODEL_BYTES").is_none() {
        println!("skipped: 2^24 messages take a minute; ./do model sends them");
        return;
    }
    let (seed, start) = (from_env("FERROCE_SEED").unwrap_or(0), Instant::now());
    match old_age::run(seed) {
        Ok(tally) => {
            println!("{tally}\nmessage numbers have wrapped, {:.1} s", start.elapsed().as_secs_f64())
        }
        Err(Disagreement(reason)) => {
            panic!("{reason}\nseed {seed}, replay: FERROCE_SEED={seed} ./do model 1")
        }
    }
}

/// Generates the schedule of a seed and executes it. On failure, returns the error of the smallest failing schedule found,
/// and how to reproduce it.
fn check(seed: u64) -> Result<Tally, String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config {
        failure_persistence: None,
        max_shrink_iters: 4000,
        max_shrink_time: 120_000,
        ..Config::default()
    };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let tree = schedule::schedules().new_tree(&mut runner).map_err(|reason| reason.to_string())?;
    let result = RefCell::new(None);
    let outcome = runner.run_one(tree, |schedule| match carry_out(&schedule) {
        Ok(tally) => {
            result.replace(Some(tally));
            Ok(())
        }
        Err(Disagreement(reason)) => Err(TestCaseError::fail(reason)),
    });
    match outcome {
        Ok(_) => Ok(result.take().unwrap_or_default()),
        Err(TestError::Abort(reason)) => Err(reason.to_string()),
        Err(TestError::Fail(reason, schedule)) => Err(format!(
            "the smallest schedule that fails has {} operations:\n{schedule}\n{reason}\n\nseed {seed}, replay: \
             FERROCE_SEED={seed} cargo test -p ferroce --test model -- --nocapture",
            schedule.operations.len()
        )),
    }
}

thread_local! {
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

/// Panics of the engine during a schedule are part of its result.
fn quiet_while_checking() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !CHECKING.get() {
            loud(info);
        }
    }));
}

fn carry_out(schedule: &Schedule) -> Result<Tally, Disagreement> {
    CHECKING.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| World::run(schedule)));
    CHECKING.set(false);
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(Disagreement(format!("panic: {}", text.unwrap_or_default())))
    })
}
