use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::join::{HELLO, JOINED};
use super::*;

fn join_some(what: &str, count: usize) -> Result<Vec<Slot>, Error> {
    let what = format!("test/{}/{what}", std::process::id());
    Slot::join(&what, what.clone(), count, Mailboxes)
}

fn join_one(what: &str) -> Slot {
    join_some(what, 1).unwrap().remove(0)
}

#[track_caller]
fn until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < deadline, "it does not become so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn mail_of(slot: &Slot) -> Mail {
    until(|| slot.has_mail());
    slot.take_mail().expect("mail")
}

#[test]
fn members_have_the_lowest_free_slots_and_each_others_mail() {
    let first = join_one("mail");
    assert_eq!((first.number(), first.group().is_shared(), first.group().alive()), (0, false, 1));
    let [second, third] = [(); 2].map(|()| join_one("mail"));
    assert_eq!((second.number(), third.number()), (1, 2));
    until(|| first.group().alive() == 7 && second.group().alive() == 7 && third.group().alive() == 7);
    let all = [first, second, third];
    for (from, to) in [(0, 1), (1, 0), (2, 0), (0, 2), (1, 2), (2, 1)] {
        let text = format!("{from} to {to}");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(all[from].group().post(to, b'T', text.as_bytes(), &[file.as_fd()]));
        let Mail { kind, bytes, descriptors } = mail_of(&all[to]);
        assert_eq!((kind, bytes, descriptors.len()), (b'T', text.into_bytes(), 1));
    }
    assert!(!all[0].group().post(3, b'T', b"nobody", &[]));
    assert!(!all[0].group().post(1, b'T', &[0; MAIL_LEN_MAX + 1], &[]));
    let [first, second, third] = all;
    drop(second);
    until(|| first.group().alive() == 5 && third.group().alive() == 5);
    assert!(!first.group().post(1, b'T', b"gone", &[]));
    assert_eq!(join_one("mail").number(), 1);
    drop(first);
    until(|| !third.group().is_shared());
}

#[test]
fn a_process_may_have_several_slots() {
    let mut some = join_some("several", 3).unwrap();
    let other = join_one("several");
    assert_eq!(some.iter().map(Slot::number).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(other.number(), 3);
    assert!(some[0].group().post(2, 1, b"own", &[]) && other.group().post(1, 2, b"other", &[]));
    assert_eq!((mail_of(&some[2]).bytes, mail_of(&some[1]).bytes), (b"own".to_vec(), b"other".to_vec()));
    drop(some.remove(1));
    until(|| other.group().alive() == 0b1101);
    let again = join_some("several", 2).unwrap();
    assert_eq!(again.iter().map(Slot::number).collect::<Vec<_>>(), [1, 4]);
}

#[test]
fn a_full_mailbox_refuses() {
    let slots = join_some("full", 2).unwrap();
    let taken = (0..2 * MAIL_MAX).filter(|_| slots[0].group().post(1, 0, b"x", &[])).count();
    assert_eq!(taken, MAIL_MAX);
    let other = join_one("full");
    let sent = (0..100_000).take_while(|_| other.group().post(0, 0, &[7; 4096], &[])).count();
    assert!(sent < 100_000, "the kernel's socket has no end");
}

/// All descriptors of the group are kept as long as it has a member, and are closed with the last one.
#[test]
fn all_slots_can_have_a_process_and_no_more() {
    let mut all: Vec<Slot> = (0..SLOTS).map(|_| join_one("all")).collect();
    assert_eq!(all.iter().map(Slot::number).collect::<Vec<_>>(), (0..SLOTS).collect::<Vec<_>>());
    let refused = join_some("all", 1).unwrap_err().to_string();
    assert!(
        refused
            .ends_with("can't be shared: 64 of its 64 slots have processes; end one, or use another address"),
        "{refused}"
    );
    until(|| all.iter().all(|slot| slot.group().alive() == u64::MAX));
    for (from, to) in [(0, 63), (63, 0), (17, 40)] {
        assert!(all[from].group().post(to, 0, b"x", &[]));
        assert_eq!(mail_of(&all[to]).bytes, b"x");
    }
    // Places do not move when any other member leaves.
    let places = |slot: &Slot| -> Vec<u64> {
        let parts = slot.group().parts();
        parts.descriptors.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_ino).collect()
    };
    let before = places(&all[7]);
    assert_eq!(before.len(), SLOTS);
    let last = all.pop().unwrap();
    all.truncate(1);
    let first = all.pop().unwrap();
    until(|| last.group().alive() == 1 << 63 | 1);
    drop(first);
    until(|| !last.group().is_shared());
    assert_eq!(places(&last), before);
    assert_eq!(join_one("all").number(), 0);
}

#[test]
fn a_service_belongs_to_one_member() {
    let [first, second] = [(); 2].map(|()| join_one("service"));
    until(|| first.group().is_shared());
    first.listen(9).unwrap();
    first.listen(9).unwrap();
    let refused = second.listen(9).unwrap_err().to_string();
    assert!(refused.contains(&format!("another process (pid {})", std::process::id())), "{refused}");
    assert_eq!((second.group().find(9), second.group().first_with_services()), (Some(0), Some(0)));
    drop(first);
    until(|| !second.group().is_shared());
    assert_eq!(second.group().find(9), None);
    second.listen(9).unwrap();
    second.unlisten(9);
    // A requester retransmits, and this slot knows its earlier answer.
    assert_eq!((second.group().find(9), second.group().first_with_services()), (Some(1), None));
    let third = join_one("service");
    third.listen(9).unwrap();
    assert_eq!(third.group().find(9), Some(0));
}

/// Connections are ended while a poll processes packets, and a poll never waits.
#[test]
fn unlistening_does_not_wait() {
    let slot = join_one("ending");
    slot.listen(9).unwrap();
    let name = Name::new(&format!("test/{}/ending", std::process::id())).unwrap();
    let lock = Lock::try_take(&name).unwrap().expect("it is free");
    slot.unlisten(9);
    assert_eq!(slot.group().first_with_services(), None);
    drop(lock);
}

/// A member that does not answer, because it is stopped or was forked without its threads, does not prevent joining as
/// long as others answer.
#[test]
fn a_member_that_does_not_answer_is_passed_over() {
    let what = format!("test/{}/silent", std::process::id());
    let silent = Name::new(&what).unwrap().bind("0").unwrap().expect("it is free");
    let refused = join_some("silent", 1).unwrap_err().to_string();
    assert!(refused.contains("slots of it (0) answers within 500 ms"), "{refused}");
    drop(silent);
    let answering = join_one("silent");
    let _silent = Name::new(&what).unwrap().bind("5").unwrap().expect("it is free");
    let newcomer = join_one("silent");
    assert_eq!(newcomer.number(), 1);
    until(|| answering.group().alive() == 3);
}

/// Arbitrary messages from processes of this user at a name are harmless.
#[test]
fn a_connection_with_invalid_messages_is_closed() {
    let slot = join_one("nonsense");
    let name = Name::new(&format!("test/{}/nonsense", std::process::id())).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for bytes in [
        &b"?"[..],
        b"J",
        b"J\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"M",
        b"M\x01\x01\0\0\0\0\0\0\0\0",
        &[b'H'; 300],
    ] {
        let Found::Process(connection) = name.connect("0").unwrap() else { panic!("it is there") };
        message::send(&connection, &[bytes], &[file.as_fd()]).unwrap();
    }
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let Found::Process(_held) = name.connect("0").unwrap() else { panic!("it is there") };
    let second = join_one("nonsense");
    assert_eq!(second.number(), 1);
    assert!(slot.group().parts().descriptors[0].as_raw_fd() > 0 && open > 0);
}

/// A new process that ends before it was a member does not prevent joining: its descriptors are forgotten.
#[test]
fn a_newcomer_that_did_not_become_a_member_is_forgotten() {
    let first = join_one("torn");
    first.group().table.set_descriptors(3);
    let second = join_one("torn");
    assert_eq!((second.number(), second.group().table.descriptors()), (1, 2));
    until(|| first.group().alive() == 3);
}

/// Makes a member's thread wait for the group's lock, as if it were stopped, until the guard is dropped.
fn hold(slot: &Slot) -> MutexGuard<'_, Parts> {
    let parts = slot.group().parts();
    slot.group().ring();
    let mut bell = [PollFd::new(&slot.group().bell, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    // It may already wait for the lock, and then has not read the bell.
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end && rustix::event::poll(&mut bell, Some(&now)).unwrap() > 0 {
        std::thread::yield_now();
    }
    parts
}

/// Reports a new process in slot 1, with a mailbox whose other end is returned.
fn say_joined(connection: &OwnedFd) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (mailbox, others) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
    let descriptor = new_bell().unwrap();
    let bytes: [&[u8]; 3] = [&[JOINED], &[2], &(1u64 << 1).to_ne_bytes()];
    message::send(connection, &bytes, &[descriptor.as_fd(), others.as_fd()]).unwrap();
    mailbox
}

/// A member that was stopped learns at the same time that a process has ended and that another one has its slot.
#[test]
fn a_newcomer_is_distinguished_from_the_last_owner_of_its_slot() {
    let [first, second] = [(); 2].map(|()| join_one("swap"));
    until(|| first.group().alive() == 3);
    let Found::Process(connection) = first.group().name.connect("0").unwrap() else { panic!("it is there") };
    message::send(&connection, &[&[HELLO]], &[]).unwrap();
    until(|| message::receive(&connection, &mut [0; 64]).is_ok());
    let held = hold(&first);
    let mailbox = say_joined(&connection);
    drop(second);
    drop(held);
    let arrives = || {
        first.group().post(1, b'T', b"hello", &[]);
        message::receive(&mailbox, &mut [0; 64]).is_ok()
    };
    until(arrives);
    std::thread::sleep(Duration::from_millis(50));
    assert!(first.group().alive() == 3 && arrives());
}

/// A new process is added even if it did not wait for the answer.
#[test]
fn a_newcomer_without_a_timely_answer_is_added() {
    let first = join_one("late");
    let Found::Process(connection) = first.group().name.connect("0").unwrap() else { panic!("it is there") };
    message::send(&connection, &[&[HELLO]], &[]).unwrap();
    let answered = PollFd::new(&connection, PollFlags::IN);
    rustix::event::poll(&mut [answered], None).unwrap();
    let held = hold(&first);
    let _mailbox = say_joined(&connection);
    // Unread data is reported to the member before the messages.
    drop(connection);
    drop(held);
    until(|| first.group().alive() == 3);
}

#[test]
fn losses_are_counted_once() {
    let slots = join_some("lost", 2).unwrap();
    let other = join_one("lost");
    slots[1].group().post_or_count((1, 40), 0, b"nobody is there");
    assert_eq!([&slots[0], &slots[1], &other].map(Slot::lost), [0, 1, 0]);
    for _ in 0..MAIL_MAX + 7 {
        slots[1].group().post_or_count((1, 0), 0, b"x");
    }
    assert_eq!([&slots[0], &slots[1], &other].map(Slot::lost), [0, 8, 0]);
    // The group's count is reported by the first process that asks.
    assert_eq!((slots[0].group().untold(5), other.group().untold(5)), (5, 0));
    assert_eq!((other.group().untold(7), other.group().untold(6)), (2, 0));
}

/// Starts this program again, with only the named test, which does `task`.
fn child(test: &str, task: &str, user: u32) -> Child {
    // Another user may not be able to access its path.
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", &format!("slots::tests::{test}"), "--nocapture"]).env("FERROCE_SLOTS", task);
    if user != 0 {
        // Nor read the sanitizer's options.
        command.uid(user).gid(user).env_remove("ASAN_OPTIONS").env_remove("LSAN_OPTIONS");
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// The rest of a child's line after `word`.
fn line_of(child: &mut Child, word: &str) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map_while(Result::ok);
    lines.filter_map(|line| Some(line.split_once(word)?.1.to_owned())).next().expect("a line")
}

/// Not a test: the other user's process in the test below.
#[test]
fn stranger() {
    let Ok(name) = std::env::var("FERROCE_SLOTS") else { return };
    let directory = std::path::Path::new(&name).parent().unwrap();
    let listed = std::fs::read_dir(directory).map(drop).map_err(|error| error.kind());
    let connected = std::os::unix::net::UnixStream::connect(&name).map(drop).map_err(|error| error.kind());
    println!("found: {listed:?} {connected:?}");
}

/// Any peer can send packets to a process that has ended, and each check makes a connection.
#[test]
fn a_vacant_slot_is_not_checked_for_each_packet() {
    let first = join_one("vacant");
    let group = first.group();
    let known_until = || group.vacant[7].load(Ordering::Relaxed);
    assert!(group.is_vacant(7));
    let first_look = known_until();
    while group.made.elapsed() < Duration::from_nanos(first_look) {
        // Another check would extend the time, unless the time has just passed.
        assert!(group.is_vacant(7));
        assert!(known_until() == first_look || group.made.elapsed() > Duration::from_nanos(first_look));
    }
    assert!(group.is_vacant(7) && known_until() > first_look);
}

/// So another user can neither take a name nor send anything there, such as descriptors that delay the process which
/// closes them.
#[test]
fn strangers_reach_no_name() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: not root, so there is no other user");
    }
    let _first = join_one("strangers");
    let file = path_of("strangers", 0);
    let mut stranger = child("stranger", file.to_str().unwrap(), 65_534);
    let found = line_of(&mut stranger, "found: ");
    stranger.wait().unwrap();
    assert_eq!(found, "Err(PermissionDenied) Err(PermissionDenied)");
}

/// The path of a slot's name.
fn path_of(what: &str, slot: usize) -> std::path::PathBuf {
    let directory = crate::private_directory::of_user();
    let ours = format!("test%2F{}%2F{what}-{slot}", std::process::id());
    let mut files = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    files.find(|file| file.to_str().unwrap().ends_with(&ours)).expect("the name")
}

/// A running process keeps its slot and its descriptors even if a program has cleaned the temporary directory.
#[test]
fn a_slot_is_kept_without_its_name() {
    let [first, second] = [(); 2].map(|()| join_one("nameless"));
    until(|| first.group().alive() == 3 && second.group().alive() == 3);
    let name = path_of("nameless", 0);
    std::fs::remove_file(&name).unwrap();
    let third = join_one("nameless");
    assert_eq!((third.number(), third.group().alive()), (2, 7));
    // The process that was not found is notified, creates its name again, and learns of the new one.
    until(|| first.group().alive() == 7 && name.exists());
    assert!(first.group().post(2, b'T', b"to a newcomer", &[]) && third.group().post(0, b'T', b"back", &[]));
    assert_eq!((mail_of(&third).bytes, mail_of(&first).bytes), (b"to a newcomer".to_vec(), b"back".to_vec()));
    drop(second);
    until(|| first.group().alive() == 5 && third.group().alive() == 5);
    let fourth = join_one("nameless");
    assert_eq!((fourth.number(), fourth.group().alive()), (1, 7));
    std::fs::remove_file(&name).unwrap();
    drop(first);
    until(|| third.group().alive() == 6 && fourth.group().alive() == 6);
    assert_eq!(join_one("nameless").number(), 0);
}

/// Not a test: the process of the test below with a limit of its files' length.
#[test]
fn short_of_bytes() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Ok(task) = std::env::var("FERROCE_SLOTS") else { return };
    let (what, most) = task.split_once(' ').unwrap();
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(most.parse().unwrap()), maximum }).unwrap();
    let joined = Slot::join(what, what.to_owned(), 1, Mailboxes);
    println!(
        "joined: {}",
        joined.map_or_else(|error| error.to_string(), |slots| slots[0].number().to_string())
    );
}

/// The kernel kills a process without a message if it makes a file longer than allowed.
#[test]
fn too_short_files_are_named() {
    let what = format!("test/{}/bytes", std::process::id());
    for (most, expected) in [(0, "ulimit -f"), (16_384, "ulimit -f"), (1 << 20, "0")] {
        let mut child = child("short_of_bytes", &format!("{what} {most}"), 0);
        let said = line_of(&mut child, "joined: ");
        child.wait().unwrap();
        assert!(said.contains(expected), "{most} bytes: {said}");
    }
}

/// Not a test: the process of the test below with a limit of open files.
#[test]
fn short_of_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Ok(task) = std::env::var("FERROCE_SLOTS") else { return };
    let (what, more) = task.split_once(' ').unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + more.parse::<u64>().unwrap()), maximum })
        .unwrap();
    match Slot::join(what, what.to_owned(), 1, Mailboxes) {
        Ok(slots) => println!("joined: {}", slots[0].number()),
        Err(error) => println!("joined: {error}"),
    }
}

/// The error names the limit, whether it concerns a socket or a member's descriptors.
#[test]
fn too_few_files_are_named() {
    let _members = join_some("files", 20).unwrap();
    let what = format!("test/{}/files", std::process::id());
    for (more, expected) in [(5, "ulimit -n"), (30, "ulimit -n"), (200, "20")] {
        let mut child = child("short_of_files", &format!("{what} {more}"), 0);
        let said = line_of(&mut child, "joined: ");
        child.wait().unwrap();
        assert!(said.contains(expected), "{more} more: {said}");
    }
}

/// Not a test: the process of the test below, in a user namespace without users.
#[test]
fn in_a_namespace_without_users() {
    use crate::shm::{Shm, ShmConfig};
    use crate::udp::{Udp, UdpConfig};
    let Ok(address) = std::env::var("FERROCE_SLOTS") else { return };
    let config = UdpConfig::new(address.parse().unwrap());
    let first = Udp::open(&config).map(|_port| ());
    let both = [Udp::open(&config), Udp::open(&config)].map(|port| port.map(|_port| ()));
    let switch = Shm::open(&ShmConfig::new("nobody")).map(|_port| ());
    let text =
        |result: Result<(), Error>| result.map_or_else(|error| error.to_string(), |()| "ok".to_owned());
    let [second, third] = both.map(text);
    println!("opened: {} | {second} | {third} | {}", text(first), text(switch));
}

/// A process that can't distinguish its own user from others has an address alone, and can't join a switch.
#[test]
fn a_process_without_a_distinct_user_is_alone() {
    let address = "127.83.77.1";
    let mut command = Command::new("unshare");
    command.arg("--user").arg(std::env::current_exe().unwrap());
    command.args(["--exact", "slots::tests::in_a_namespace_without_users", "--nocapture"]);
    let child = command.env("FERROCE_SLOTS", address).stdout(Stdio::piped()).stderr(Stdio::piped()).output();
    let output = match child {
        Ok(output) => output,
        Err(error) => return println!("skipped: unshare: {error}"),
    };
    let [said, wrong] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    if wrong.contains("unshare failed") {
        return println!("skipped: no user namespaces here: {wrong}");
    }
    let line = said.lines().find_map(|line| line.split_once("opened: ")).expect("a line").1;
    let [first, second, third, switch] = line.split(" | ").collect::<Vec<_>>()[..] else { panic!("{line}") };
    assert_eq!((first, second), ("ok", "ok"));
    assert!(third.contains(&format!("UDP port 4791 of {address} is in use")), "{line}");
    assert!(switch.contains("stands for every user whom this user namespace does not know"), "{line}");
}
