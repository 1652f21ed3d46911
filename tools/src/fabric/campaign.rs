//! Runs of several settings and seeds, over the cores.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::compile::Compiled;
use super::outcome::Outcome;
use super::world::{self, Progress};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::{self, note};

/// What one run needs beside its plan: something to observe the fabric with.
pub(crate) type Observer<'a> =
    dyn Fn(usize, &ferroce_driver::sim::fabric::Built) -> Result<(), Failure> + Sync + 'a;

/// How far each run has come, as a part of it.
struct Board {
    started: Instant,
    parts: Mutex<Vec<f64>>,
}

/// Carries out all plans, as many at a time as `threads`, and keeps of each what `keep` makes of it. Those that had not come
/// to their end when somebody interrupted it have nothing, but for one that is alone: that has the time until then.
pub(crate) fn carry_out<T: Send>(
    plans: &[Compiled],
    threads: usize,
    interrupt: &Interrupt,
    observe: &Observer<'_>,
    keep: &(dyn Fn(usize, Outcome) -> T + Sync),
) -> Result<Vec<Option<T>>, Failure> {
    let board = Board { started: Instant::now(), parts: Mutex::new(vec![0.0; plans.len()]) };
    let waiting: Mutex<VecDeque<usize>> = Mutex::new((0..plans.len()).collect());
    let outcomes: Mutex<Vec<Option<T>>> = Mutex::new(plans.iter().map(|_| None).collect());
    // Nobody holds the list while a plan is carried out.
    let next = || interrupt.check().ok().and_then(|()| lock(&waiting).pop_front());
    let work = || -> Result<(), Failure> {
        while let Some(number) = next() {
            let plan = &plans[number].plan;
            let mut is_cut = false;
            let mut progress = |progress: Progress| {
                board.note(number, &progress, plan.messages.len());
                is_cut = interrupt.check().is_err();
                !is_cut
            };
            let outcome = world::run_observed(plan, &mut progress, |built| observe(number, built));
            // One that fails ends the others.
            let outcome = outcome.inspect_err(|_| interrupt.set())?;
            board.done(number);
            // A part of a run is no sample of it.
            if !is_cut || plans.len() == 1 {
                let kept = keep(number, outcome);
                lock(&outcomes)[number] = Some(kept);
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads = threads.clamp(1, plans.len().max(1));
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        board.tell_while(|| workers.iter().any(|worker| !worker.is_finished()));
        let mut joined = workers.into_iter().map(|worker| worker.join());
        joined.try_for_each(|result| result.unwrap_or_else(|_| Err(Failure::run("a run panicked"))))
    })?;
    Ok(outcomes.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    fn note(&self, number: usize, progress: &Progress, messages: usize) {
        let time = progress.now.as_secs_f64() / progress.of.as_secs_f64();
        // A run ends with its last message, or when its time is over.
        let part = match messages {
            0 => time,
            _ => time.max(progress.messages_completed as f64 / messages as f64),
        };
        lock(&self.parts)[number] = part;
    }

    fn done(&self, number: usize) {
        lock(&self.parts)[number] = 1.0;
    }

    /// Says how far it is: on a terminal in one line, otherwise now and then.
    fn tell_while(&self, goes_on: impl Fn() -> bool) {
        let is_terminal = stderr().is_terminal() && output::is_verbose();
        let interval = if is_terminal { Duration::from_millis(250) } else { Duration::from_secs(5) };
        let mut told = Instant::now();
        let mut shown = 0;
        while goes_on() {
            thread::sleep(Duration::from_millis(2));
            if told.elapsed() >= interval {
                told = Instant::now();
                let line = format!("ferroce fabric: {}", self.line());
                // Nobody who reads standard error needs to know that it can't be written.
                if is_terminal {
                    let _ = write!(stderr(), "\r{line:shown$}");
                    shown = line.len();
                } else {
                    note!("{line}");
                }
            }
        }
        if shown > 0 {
            let _ = write!(stderr(), "\r{:shown$}\r", "").and_then(|()| stderr().flush());
        }
    }

    fn line(&self) -> String {
        let parts = lock(&self.parts);
        let done = parts.iter().filter(|part| **part >= 1.0).count();
        let all: f64 = parts.iter().sum::<f64>() / parts.len().max(1) as f64;
        let left = self.started.elapsed().as_secs_f64() * (1.0 - all) / all.max(1e-6);
        let left = if all > 0.01 { format!(", {left:.0} s left") } else { String::new() };
        format!("{done} of {} runs, {:.0} %{left}", parts.len(), 100.0 * all)
    }
}
