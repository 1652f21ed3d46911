//! The runner's sleep and wake-ups (`stack/src/runtime/runner/wakeup.rs`, this same file) in every order that the
//! memory model allows: a wake-up that gets lost leaves a thread asleep for ever, which loom reports as a
//! deadlock. Each fence is needed: without it loom finds such an order.
#![forbid(unsafe_code)]
#![cfg(test)]

mod stub;
mod sync;
// The file of the crate itself, on loom's atomics (`sync`): a copy would prove nothing about it.
#[allow(dead_code, reason = "what the stub does not need")]
#[path = "../../src/runtime/runner/wakeup.rs"]
mod wakeup;

use std::collections::BTreeSet;
use std::thread::spawn;

use loom::model::Builder;
use loom::thread;

use stub::Stub;

/// What the runner's thread and one or two others do, until all are through.
struct Scenario {
    name: &'static str,
    /// Room for deliveries.
    deliveries: usize,
    runner: fn(&Stub),
    handle: fn(&Stub),
    third: Option<fn(&Stub)>,
}

const SCENARIOS: [Scenario; 13] = [
    Scenario {
        name: "a command wakes the runner",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 0), 1),
        handle: |stub| stub.post(),
        third: None,
    },
    Scenario {
        name: "two commands, one behind the other",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(2, 0), 2),
        handle: |stub| {
            stub.post();
            stub.post();
        },
        third: None,
    },
    Scenario {
        name: "a delivery wakes the handle",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 1), 1),
        handle: |stub| {
            stub.post();
            assert!(stub.wait());
        },
        third: None,
    },
    Scenario {
        name: "room in a full ring wakes the runner",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 2), 1),
        handle: |stub| {
            stub.post();
            assert!(stub.wait() && stub.wait());
        },
        third: None,
    },
    Scenario {
        name: "a delivery wakes a task",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 1), 1),
        handle: |stub| {
            stub.post();
            assert!(stub.wait_as_a_task());
        },
        third: None,
    },
    Scenario {
        name: "room that a task makes wakes the runner, whose delivery wakes a task",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 2), 1),
        handle: |stub| {
            stub.post();
            assert!(stub.wait_as_a_task() && stub.wait_as_a_task());
        },
        third: None,
    },
    Scenario {
        name: "a thread that waits behind a task",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(1, 2), 1),
        handle: |stub| {
            stub.post();
            assert!(stub.wait_as_a_task() && stub.wait());
        },
        third: None,
    },
    Scenario {
        name: "stop, beside a task that waits",
        deliveries: 1,
        runner: |stub| {
            assert_eq!(stub.run(9, 0), 0);
            stub.finish("it was stopped");
        },
        handle: |stub| assert!(!stub.wait_as_a_task()),
        third: Some(|stub| stub.stop()),
    },
    Scenario {
        name: "stop, behind a command",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(9, 0), 1),
        handle: |stub| {
            stub.post();
            stub.stop();
        },
        third: None,
    },
    Scenario {
        name: "stop, beside a thread that posts",
        deliveries: 1,
        runner: |stub| assert!(stub.run(9, 0) <= 1),
        handle: |stub| stub.post(),
        third: Some(|stub| stub.stop()),
    },
    Scenario {
        name: "stop, beside a thread that waits",
        deliveries: 1,
        runner: |stub| {
            assert_eq!(stub.run(9, 0), 0);
            stub.finish("it was stopped");
        },
        handle: |stub| assert!(!stub.wait()),
        third: Some(|stub| stub.stop()),
    },
    Scenario {
        name: "an error or a panic, beside a thread that waits and one that comes",
        deliveries: 1,
        runner: |stub| stub.finish("its thread panicked"),
        handle: |stub| assert!(!stub.wait()),
        third: Some(|stub| stub.come_and_wait_for_the_end()),
    },
    Scenario {
        name: "a handle that goes is noticed, and what it posted done",
        deliveries: 1,
        runner: |stub| assert_eq!(stub.run(9, 0), 1),
        handle: |stub| {
            stub.post();
            stub.leave();
        },
        third: None,
    },
];

impl Scenario {
    fn run(&self) {
        let Scenario { deliveries, runner, handle, third, .. } = *self;
        let mut builder = Builder::new();
        builder.preemption_bound = Some(PREEMPTIONS);
        builder.check(move || {
            let stub = Stub::new(deliveries);
            let others: Vec<_> = [Some(runner), third]
                .into_iter()
                .flatten()
                .map(|other| {
                    let stub = stub.clone();
                    thread::spawn(move || other(&stub))
                })
                .collect();
            handle(&stub);
            others.into_iter().for_each(|other| other.join().expect("it ends"));
        });
    }
}

/// Times that a thread is interrupted where it could go on, in one run. All bugs known to loom's users need
/// two or three.
const PREEMPTIONS: usize = 3;

/// The lines of the fences that the scenario passes, none left out.
fn fences_of(scenario: &'static Scenario) -> BTreeSet<u32> {
    let run = move || {
        scenario.run();
        sync::passed()
    };
    // A thread of its own, for what `sync` remembers.
    spawn(run).join().unwrap_or_else(|_| panic!("{}: see above", scenario.name))
}

#[test]
fn no_thread_sleeps_forever() {
    for scenario in &SCENARIOS {
        let start = std::time::Instant::now();
        let fences = fences_of(scenario);
        println!("{}: {} fences, {:?}", scenario.name, fences.len(), start.elapsed());
    }
}

#[test]
fn without_any_one_fence_a_thread_does() {
    // These pass all that there are; no more are in the file.
    let fences: BTreeSet<u32> = SCENARIOS[..3].iter().flat_map(fences_of).collect();
    assert_eq!(include_str!("../../src/runtime/runner/wakeup.rs").matches(" fence(").count(), fences.len());
    assert_eq!(fences.len(), 4, "one each for the runner and a handle, asleep and awake");
    for line in fences {
        let finds = |scenario: &&'static Scenario| {
            let scenario: &'static Scenario = scenario;
            let outcome = spawn(move || sync::without(line, || scenario.run())).join();
            let panic = outcome.err().and_then(|panic| panic.downcast::<String>().ok());
            panic.is_some_and(|reason| reason.contains("deadlock"))
        };
        let found = SCENARIOS.iter().find(finds);
        let found = found.unwrap_or_else(|| panic!("the fence of line {line} can go, and nobody notices"));
        println!("without the fence of line {line}: {}", found.name);
    }
}
