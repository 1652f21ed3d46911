//! Captures of conforming traffic over impaired networks: none gives a false violation.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce_driver_test_support::random::Random;

use crate::program;
use crate::wild::Frames;
use crate::world::{Psns, Setup, Work, World};

/// A file that is removed when the test ends.
struct Capture(PathBuf);

impl Capture {
    fn new(name: &str) -> Capture {
        Capture(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.pcapng", std::process::id())))
    }

    fn replayed(&self) -> (Option<i32>, String) {
        let Output { status, stdout, stderr } =
            Command::new(program()).arg("replay").arg(&self.0).output().expect("ferroce runs");
        (status.code(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
    }

    /// The report, which must not contain a violation.
    #[track_caller]
    fn conforms(&self, what: &str) -> String {
        let (status, said) = self.replayed();
        if status != Some(0) {
            let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("violates.pcapng");
            std::fs::copy(&self.0, &kept).expect("a copy");
            let lines = said
                .lines()
                .filter(|line| line.contains("VIOLA") || line.contains("<>") || line.contains(": "));
            let shown: Vec<&str> = lines.filter(|line| !line.contains("lawful")).take(40).collect();
            panic!("{what}: status {status:?}, {} is kept:\n{}", kept.display(), shown.join("\n"));
        }
        said
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The conversations of a report.
fn conversations(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.contains(" <> ")).collect()
}

fn impaired(change: impl FnOnce(&mut LinkConfig)) -> LinkConfig {
    let mut link = LinkConfig::default().delay(Duration::from_micros(5));
    change(&mut link);
    link
}

#[test]
fn no_impairment_is_taken_for_a_violation() {
    let mut random = Random::from_env("FERROCE_IMPAIRED_SEED");
    let links = [
        ("loss", impaired(|link| link.loss = 0.05)),
        ("duplicates", impaired(|link| link.duplicate = 0.1)),
        ("reorder", impaired(|link| link.reorder = 0.2)),
        ("reorder far", impaired(|link| (link.reorder, link.reorder_by) = (0.1, 32))),
        ("corruption", impaired(|link| link.corrupt = 0.05)),
        ("jitter", impaired(|link| link.jitter = Duration::from_millis(1))),
        (
            "everything",
            impaired(|link| {
                (link.loss, link.duplicate, link.reorder, link.corrupt) = (0.02, 0.05, 0.1, 0.02);
            }),
        ),
    ];
    let rounds = std::env::var("FERROCE_IMPAIRED_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    for round in 0..rounds {
        for (name, link) in &links {
            let capture = Capture::new("impaired");
            let qps = [1, 4][round % 2];
            let psns: Psns = |qp| [(0xff_fff0 + 40_000 * qp) & 0xff_ffff, 0x100 + 70_000 * qp];
            let seed = random.any();
            let setup = Setup { seed, link: link.clone(), qps, psns, ..Setup::default() };
            let mut world = World::new(&setup, &capture.0);
            world.traffic(&mut random, 24, &Work::ALL);
            drop(world);
            let said = capture.conforms(&format!("{name}, FERROCE_IMPAIRED_SEED={}", random.seed()));
            assert!(conversations(&said).len() >= qps as usize, "{said}");
        }
    }
    println!("{} captures", rounds * links.len());
}

/// NCCL's queue pairs all begin with PSN 0; those of others are near each other.
#[test]
fn queue_pairs_with_near_psns_are_paired_or_not_judged() {
    let apart: [(&str, u32, Psns); 3] = [
        ("3 apart", 64, |qp| [1000 + 3 * qp, 7000 + 3 * qp]),
        ("3 apart, the other end's the other way", 64, |qp| [1000 + 3 * qp, 7000 - 3 * qp]),
        ("all 0", 8, |_| [0, 0]),
    ];
    let jitter = Duration::from_micros(200);
    for (name, qps, psns) in apart {
        for kinds in [&Work::ALL[..], &[Work::Write]] {
            for with_ports in [true, false] {
                let capture = Capture::new("near");
                let mut random = Random::new(u64::from(qps));
                let link = impaired(|link| (link.loss, link.reorder, link.jitter) = (0.02, 0.05, jitter));
                let setup = Setup { qps, psns, link, ..Setup::default() };
                let mut world = World::new(&setup, &capture.0);
                world.traffic(&mut random, 16, kinds);
                let pairs = world.pairs();
                drop(world);
                if !with_ports {
                    // All from one port, as over a UDP socket.
                    let mut frames = Frames::read(&capture.0).expect("Ethernet frames");
                    for number in 1..=frames.len() {
                        frames.edit_network(number, |packet| packet[20..22].copy_from_slice(&[0xc0, 0x01]));
                    }
                    frames.write(&capture.0);
                }
                let what = format!("{name}, {} kinds, ports {with_ports}", kinds.len());
                let said = capture.conforms(&what);
                let found = conversations(&said);
                let guessed =
                    found.iter().filter(|line| line.contains("pairing guessed, not judged")).count();
                println!("{what}: {} conversations, {guessed} guessed", found.len());
                assert_eq!(found.len(), qps as usize, "{what}:\n{}", found.join("\n"));
                for line in found.iter().filter(|line| !line.contains("guessed")) {
                    let belong =
                        pairs.iter().any(|pair| pair.iter().all(|number| line.contains(number.as_str())));
                    assert!(belong, "{what}: {line}");
                }
                if with_ports {
                    assert_eq!(guessed, 0, "{what}: the ports tell");
                }
            }
        }
    }
}

#[test]
fn a_connection_inside_the_psns_of_an_old_read_is_another_one() {
    let capture = Capture::new("anew");
    let mut world = World::new(&Setup::default(), &capture.0);
    world.post(0, 0, Work::Write, 3000);
    world.run(usize::MAX);
    // 8 PSNs, from 0xfffff3 on.
    world.post_refused_read(0, 8192);
    world.run(usize::MAX);
    world.reset(0);
    world.connect(0, [0xff_fff6, 0x180], 10);
    for work in [Work::Write, Work::Read, Work::FetchAdd] {
        world.post(0, 0, work, 3000);
        world.run(usize::MAX);
    }
    drop(world);
    let said = capture.conforms("a queue pair that was connected anew");
    assert_eq!(conversations(&said).len(), 2, "{said}");
}

#[test]
fn both_versions_of_roce_on_one_connection_are_lawful() {
    let capture = Capture::new("versions");
    let mut world = World::new(&Setup::default(), &capture.0);
    for work in Work::ALL {
        world.post_receive(1, 0);
        world.post(0, 0, work, 3000);
        world.run(usize::MAX);
    }
    drop(world);
    let mut frames = Frames::read(&capture.0).expect("Ethernet frames");
    for number in (1..=frames.len()).step_by(3) {
        frames.make_roce_v1(number);
    }
    frames.write(&capture.0);
    let said = capture.conforms("a third of the packets with RoCE v1");
    assert!(said.contains("lawful encapsulation"), "{said}");
    assert_eq!(conversations(&said).len(), 1, "{said}");
}
