//! Many processes on one address: connections between all of them and all of another address, while some are killed and
//! others started.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod member;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ferroce_driver_test_support::namespaces::{Namespaces, inside};
use ferroce_driver_test_support::random::Random;
use ferroce_driver_test_support::signal::{Signal, signal};
use member::Role;

/// Connections of a killed peer are detected as ended within this time.
const NOTICED: Duration = Duration::from_secs(40);

/// Not a test, but the process that others start.
#[test]
fn member() {
    if let Some(role) = Role::of_this() {
        member::run(role);
    }
}

struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    slot: Option<usize>,
    born: Instant,
    is_done: bool,
}

/// Two addresses with the same number of processes.
struct Swarm<'a> {
    sides: [IpAddr; 2],
    namespaces: Option<&'a Namespaces>,
    count: usize,
    processes: HashMap<(usize, usize), Process>,
    /// When the process with an index on a side was last killed.
    killed: HashMap<(usize, usize), Instant>,
    lines: Receiver<(usize, usize, u32, String)>,
    sender: Sender<(usize, usize, u32, String)>,
    up: HashMap<(usize, usize), usize>,
    /// The messages sent, received and forwarded, as last reported by each process.
    told: HashMap<u32, [u64; 4]>,
    complaints: Vec<String>,
    ended: usize,
}

impl<'a> Swarm<'a> {
    fn new(sides: [&str; 2], namespaces: Option<&'a Namespaces>, count: usize) -> Swarm<'a> {
        let (sender, lines) = channel();
        Swarm {
            sides: sides.map(|side| side.parse().unwrap()),
            namespaces,
            count,
            processes: HashMap::new(),
            killed: HashMap::new(),
            lines,
            sender,
            up: HashMap::new(),
            told: HashMap::new(),
            complaints: Vec::new(),
            ended: 0,
        }
    }

    fn start(&mut self, side: usize, index: usize) {
        let pause = Duration::from_millis(16 * self.count as u64);
        let role =
            Role { own: self.sides[side], index, peers: self.sides[1 - side], count: self.count, pause };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "member", "--nocapture"]).envs([role.to_env()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut start = move || command.spawn().unwrap();
        let mut child = match self.namespaces {
            Some(pair) => inside([&pair.a, &pair.b][side], start),
            None => start(),
        };
        let (stdin, stdout, pid) = (child.stdin.take(), child.stdout.take().unwrap(), child.id());
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send((side, index, pid, line));
            }
        });
        let born = Instant::now();
        self.processes.insert((side, index), Process { child, stdin, slot: None, born, is_done: false });
    }

    /// Starts one, and waits until it has reported this slot.
    #[track_caller]
    fn start_into(&mut self, side: usize, index: usize, slot: usize) {
        self.start(side, index);
        let start = Instant::now();
        while self.processes[&(side, index)].slot.is_none() {
            self.hear(Duration::from_millis(10));
            assert!(start.elapsed() < Duration::from_secs(10), "it does not come");
        }
        assert_eq!(self.processes[&(side, index)].slot, Some(slot));
    }

    fn kill(&mut self, side: usize, index: usize) {
        if let Some(mut process) = self.processes.remove(&(side, index)) {
            process.child.kill().unwrap();
            process.child.wait().unwrap();
            self.killed.insert((side, index), Instant::now());
            self.up.remove(&(side, index));
        }
    }

    /// Processes the reports for this time.
    fn hear(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            self.take(line);
        }
    }

    fn take(&mut self, (side, index, pid, line): (usize, usize, u32, String)) {
        let words: Vec<&str> = line.split(' ').collect();
        match &words[..] {
            ["slot", slot] => {
                let slot = slot.parse().unwrap();
                // Another live process may have it only if it was killed and is being started again.
                let has_it = |((other, _), process): (&(usize, usize), &Process)| {
                    *other == side && process.slot == Some(slot)
                };
                if self.processes.iter().any(has_it) || slot >= self.count {
                    self.complaints.push(format!("side {side}: slot {slot} twice, or too high"));
                }
                if let Some(process) = self.processes.get_mut(&(side, index)).filter(|p| p.child.id() == pid)
                {
                    process.slot = Some(slot);
                }
            }
            [
                "is" | "was",
                "up",
                up,
                "sent",
                sent,
                "received",
                received,
                "handed_on",
                on,
                "dropped",
                dropped,
                "descriptors",
                descriptors,
            ] => {
                let number = |text: &str| text.parse::<u64>().unwrap();
                if self.processes.get(&(side, index)).is_some_and(|p| p.child.id() == pid) {
                    self.up.insert((side, index), number(up) as usize);
                }
                self.told.insert(pid, [number(sent), number(received), number(on), number(dropped)]);
                if number(descriptors) > 2 * self.count as u64 + 200 {
                    self.complaints.push(format!("process {pid} has {descriptors} descriptors"));
                }
            }
            ["ended", peer, ..] => {
                self.ended += 1;
                let peer = (1 - side, peer.parse().unwrap());
                let was_killed = self.killed.get(&peer).is_some_and(|at| at.elapsed() < NOTICED);
                if !was_killed {
                    self.complaints.push(format!("{:?}: {line}, and nobody was killed there", (side, index)));
                }
            }
            ["done"] => {
                if let Some(process) = self.processes.get_mut(&(side, index)) {
                    process.is_done = true;
                }
            }
            ["wrong", ..] | ["not", "accepted", ..] | ["refused", ..] => {
                self.complaints.push(format!("{:?}: {line}", (side, index)));
            }
            _ => {
                if line.contains("panicked") || line.contains("FAILED") {
                    self.complaints.push(format!("{:?}: {line}", (side, index)));
                }
            }
        }
    }

    /// Whether every process is connected to every existing one of the other side.
    fn is_whole(&self) -> bool {
        let there = |side: usize| self.processes.keys().filter(|(other, _)| *other == side).count();
        let peers = [there(1), there(0)];
        self.processes.keys().all(|key| self.up.get(key) == Some(&peers[key.0]))
    }

    #[track_caller]
    fn expect_whole(&mut self, patience: Duration) -> Duration {
        let start = Instant::now();
        while !self.is_whole() {
            self.hear(Duration::from_millis(100));
            assert!(self.complaints.is_empty(), "{:#?}", self.complaints);
            let up: usize = self.up.values().sum();
            assert!(
                start.elapsed() < patience,
                "{up} of {} connections after {patience:?}",
                2 * self.count * self.count
            );
        }
        start.elapsed()
    }

    /// Ends all, and returns their totals.
    fn finish(&mut self) -> [u64; 4] {
        for process in self.processes.values_mut() {
            process.stdin = None;
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.processes.values().any(|process| !process.is_done) {
            // Disconnections from now on are expected.
            self.killed = self.processes.keys().map(|key| (*key, Instant::now())).collect();
            self.hear(Duration::from_millis(50));
            assert!(Instant::now() < deadline, "some do not end");
        }
        for process in self.processes.values_mut() {
            assert!(process.child.wait().unwrap().success());
        }
        assert!(self.complaints.is_empty(), "{:#?}", self.complaints);
        self.told.values().fold([0; 4], |sum, told| std::array::from_fn(|n| sum[n] + told[n]))
    }
}

impl Drop for Swarm<'_> {
    fn drop(&mut self) {
        for process in self.processes.values_mut() {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// Kills and starts processes at random, one after the other.
fn churn(mut swarm: Swarm<'_>, time: Duration, mut random: Random) {
    let Swarm { count, .. } = swarm;
    for index in 0..count {
        for side in 0..2 {
            swarm.start(side, index);
        }
    }
    let first = swarm.expect_whole(Duration::from_secs(20 + count as u64 * 4));
    println!("{count} processes on each of two addresses: {} connections after {first:?}", 2 * count * count);
    let (end, mut kills) = (Instant::now() + time, 0);
    let mut shown = Instant::now();
    while Instant::now() < end {
        let key = ((random.any() % 2) as usize, (random.any() as usize) % count);
        match swarm.processes.get(&key) {
            Some(process) if process.born.elapsed() > Duration::from_millis(random.any() % 5000) => {
                swarm.kill(key.0, key.1);
                kills += 1;
            }
            Some(_) => {}
            None => swarm.start(key.0, key.1),
        }
        swarm.hear(Duration::from_millis(random.any() % 400));
        assert!(swarm.complaints.is_empty(), "seed {}: {:#?}", random.seed(), swarm.complaints);
        if shown.elapsed() > Duration::from_secs(10) {
            shown = Instant::now();
            println!("{kills} killed, {} of {} up", swarm.up.values().sum::<usize>(), 2 * count * count);
        }
    }
    for side in 0..2 {
        for index in 0..count {
            if !swarm.processes.contains_key(&(side, index)) {
                swarm.start(side, index);
            }
        }
    }
    let last = swarm.expect_whole(Duration::from_secs(60 + count as u64 * 4));
    let [sent, received, handed_on, dropped] = swarm.finish();
    println!(
        "{kills} were killed, {} connections ended for it, all are up again after {last:?}; {sent} messages sent, \
         {received} received, {handed_on} packets handed on, {dropped} dropped",
        swarm.ended
    );
    assert!(kills > 0 && received > 0);
}

/// A process is stopped while another one gets the slot of a killed one. It learns of it afterwards, and forwards to it the
/// packets of QP1, which it receives; and when it ends itself, the next one does.
#[test]
fn a_stopped_process_learns_of_new_ones() {
    let mut swarm = Swarm::new(["127.79.1.1", "127.79.1.2"], None, 3);
    for index in 0..3 {
        swarm.start_into(0, index, index);
        swarm.start(1, index);
    }
    swarm.expect_whole(Duration::from_secs(20));
    let stopped = swarm.processes[&(0, 0)].child.id();
    signal(stopped, Signal::STOP);
    swarm.kill(0, 1);
    // The new one asks those that answer, and waits a moment for the one that does not.
    swarm.start_into(0, 1, 1);
    signal(stopped, Signal::CONT);
    // Requests to the new one are received by the stopped one, which forwards them.
    swarm.expect_whole(Duration::from_secs(20));
    swarm.kill(0, 0);
    // Requests to both remaining ones are received by the new one.
    swarm.kill(1, 1);
    swarm.start(1, 1);
    swarm.expect_whole(Duration::from_secs(20));
    // And it learns of further ones.
    swarm.start_into(0, 0, 0);
    swarm.expect_whole(Duration::from_secs(20));
    let [_, received, _, _] = swarm.finish();
    assert!(received > 0);
}

fn size() -> (usize, Duration) {
    let number =
        |name: &str, default: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    let count = number("FERROCE_SHARING_COUNT", 6) as usize;
    (count, Duration::from_secs(number("FERROCE_SHARING_SECONDS", 15)))
}

/// The full test: `FERROCE_SHARING_COUNT=64 FERROCE_SHARING_SECONDS=600 cargo test -p ferroce --test sharing -- --nocapture
/// veth`.
#[test]
fn processes_over_veth_come_and_go_and_nobody_else_notices() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (count, time) = size();
    churn(
        Swarm::new(["10.9.0.1", "10.9.0.2"], Some(&pair), count),
        time,
        Random::from_env("FERROCE_SHARING_SEED"),
    );
}

/// Without any privilege.
#[test]
fn processes_over_loopback_come_and_go_and_nobody_else_notices() {
    let (count, time) = size();
    churn(
        Swarm::new(["127.79.0.1", "127.79.0.2"], None, count),
        time,
        Random::from_env("FERROCE_SHARING_SEED"),
    );
}
