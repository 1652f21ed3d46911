//! Runs with several settings and seeds, distributed over the cores.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::{self, note};

/// Carries out a run, by number, and reports the fraction that is done; a returned `false` stops it.
pub(crate) type Carry<'a, T> = dyn Fn(usize, &mut dyn FnMut(f64) -> bool) -> Result<T, Failure> + Sync + 'a;

/// The progress of each run, as a fraction.
struct Board {
    started: Instant,
    parts: Mutex<Vec<f64>>,
}

/// Carries out `count` runs on `threads` threads. After an interruption, unfinished runs have no result; a single run
/// has the result up to then.
pub(crate) fn carry_out<T: Send>(
    count: usize,
    threads: usize,
    interrupt: &Interrupt,
    run: &Carry<'_, T>,
) -> Result<Vec<Option<T>>, Failure> {
    let board = Board { started: Instant::now(), parts: Mutex::new(vec![0.0; count]) };
    let waiting: Mutex<VecDeque<usize>> = Mutex::new((0..count).collect());
    let outcomes: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    // The list is not locked during a run.
    let next = || interrupt.check().ok().and_then(|()| lock(&waiting).pop_front());
    let work = || -> Result<(), Failure> {
        while let Some(number) = next() {
            let mut is_cut = false;
            let mut progress = |part: f64| {
                lock(&board.parts)[number] = part;
                is_cut = interrupt.check().is_err();
                !is_cut
            };
            // A failed run stops the others.
            let outcome = run(number, &mut progress).inspect_err(|_| interrupt.set())?;
            board.done(number);
            // An incomplete run is no sample.
            if !is_cut || count == 1 {
                lock(&outcomes)[number] = Some(outcome);
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads = threads.clamp(1, count.max(1));
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
    fn done(&self, number: usize) {
        lock(&self.parts)[number] = 1.0;
    }

    /// Prints the progress: on a terminal in one line, otherwise every few seconds.
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
                // A failed write to standard error is ignored.
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
