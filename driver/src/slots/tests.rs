use std::os::fd::AsRawFd;
use std::time::Instant;

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

/// All that the group has stays as long as anybody is there, and ends with the last.
#[test]
fn all_slots_can_have_a_process_and_no_more() {
    let mut all: Vec<Slot> = (0..SLOTS).map(|_| join_one("all")).collect();
    assert_eq!(all.iter().map(Slot::number).collect::<Vec<_>>(), (0..SLOTS).collect::<Vec<_>>());
    let refused = join_some("all", 1).unwrap_err().to_string();
    assert!(refused.ends_with("can't be shared: 64 of its 64 slots have processes"), "{refused}");
    until(|| all.iter().all(|slot| slot.group().alive() == u64::MAX));
    for (from, to) in [(0, 63), (63, 0), (17, 40)] {
        assert!(all[from].group().post(to, 0, b"x", &[]));
        assert_eq!(mail_of(&all[to]).bytes, b"x");
    }
    // Places stay when others go, whoever they are.
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
fn a_service_is_one_members() {
    let [first, second] = [(); 2].map(|()| join_one("service"));
    until(|| first.group().is_shared());
    first.listen(9).unwrap();
    first.listen(9).unwrap();
    let refused = second.listen(9).unwrap_err().to_string();
    assert!(refused.contains(&format!("another process's (pid {})", std::process::id())), "{refused}");
    assert_eq!((second.group().find(9), second.group().first_with_services()), (Some(0), Some(0)));
    drop(first);
    until(|| !second.group().is_shared());
    assert_eq!(second.group().find(9), None);
    second.listen(9).unwrap();
    second.unlisten(9);
    assert_eq!(second.group().find(9), None);
}

/// Whoever does not answer, stopped or forked without its threads, keeps nobody out as long as others do.
#[test]
fn a_member_that_does_not_answer_is_passed_over() {
    let what = format!("test/{}/silent", std::process::id());
    let silent = Name::new(&what).bind("0").unwrap().expect("it is free");
    let refused = join_some("silent", 1).unwrap_err().to_string();
    assert!(refused.contains("slots of it (0) answers within 500 ms"), "{refused}");
    drop(silent);
    let answering = join_one("silent");
    let _silent = Name::new(&what).bind("5").unwrap().expect("it is free");
    let newcomer = join_one("silent");
    assert_eq!(newcomer.number(), 1);
    until(|| answering.group().alive() == 3);
}

/// What anybody of this user may say at a name harms nobody.
#[test]
fn nonsense_at_a_name_is_closed_and_forgotten() {
    let slot = join_one("nonsense");
    let name = Name::new(&format!("test/{}/nonsense", std::process::id()));
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

/// A newcomer that ends before it was a member keeps nobody out: what it had is gone.
#[test]
fn a_newcomer_that_did_not_become_a_member_is_forgotten() {
    let first = join_one("torn");
    first.group().table.set_descriptors(3);
    let second = join_one("torn");
    assert_eq!((second.number(), second.group().table.descriptors()), (1, 2));
    until(|| first.group().alive() == 3);
}
