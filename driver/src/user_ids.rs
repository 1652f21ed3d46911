//! User IDs in a user namespace. In a namespace of `unshare -Ur` or of a rootless container, an ordinary user is root, but
//! directories are named by the user ID outside.

use std::fs;

/// The map of a process outside all user namespaces.
const SAME: &str = "0 0 4294967295";

/// The user IDs of this process's user namespace, and the corresponding ones outside (user_namespaces(7)).
#[derive(Debug)]
pub struct UserIds(Vec<Range>);

#[derive(Debug)]
struct Range {
    inside: u32,
    outside: u32,
    count: u32,
}

impl UserIds {
    /// The map of this process.
    pub fn read() -> UserIds {
        // Without /proc it assumes no user namespace.
        UserIds::parse(&fs::read_to_string("/proc/self/uid_map").unwrap_or_else(|_| SAME.to_owned()))
    }

    fn parse(map: &str) -> UserIds {
        let range = |line: &str| {
            let mut numbers = line.split_whitespace().map(|number| number.parse().ok());
            let mut next = || numbers.next().flatten();
            Some(Range { inside: next()?, outside: next()?, count: next()? })
        };
        UserIds(map.lines().filter_map(range).collect())
    }

    /// Whether `uid` may stand for any user: it is the ID of all outside users without an ID in this namespace.
    pub fn is_anybody(&self, uid: u32) -> bool {
        let anybody =
            fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|id| id.trim().parse().ok());
        !self.are_the_same() && uid == anybody.unwrap_or(65_534)
    }

    /// Whether IDs are the same on both sides: outside of all user namespaces, and without /proc.
    pub fn are_the_same(&self) -> bool {
        matches!(self.0[..], [Range { inside: 0, outside: 0, count: u32::MAX }])
    }

    /// The ID outside of `uid`.
    pub fn outside(&self, uid: u32) -> Option<u32> {
        self.translate(uid, |range| (range.inside, range.outside))
    }

    /// The ID here of the outside `uid`; `None` if there is none.
    pub fn inside(&self, uid: u32) -> Option<u32> {
        self.translate(uid, |range| (range.outside, range.inside))
    }

    fn translate(&self, uid: u32, ends: impl Fn(&Range) -> (u32, u32)) -> Option<u32> {
        if self.are_the_same() {
            return Some(uid);
        }
        self.0.iter().find_map(|range| {
            let (from, to) = ends(range);
            let offset = uid.checked_sub(from).filter(|offset| *offset < range.count)?;
            to.checked_add(offset)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_in_both_directions() {
        for map in [SAME, "         0          0 4294967295\n"] {
            let ids = UserIds::parse(map);
            assert!(ids.are_the_same() && !ids.is_anybody(65_534));
            assert_eq!((ids.outside(0), ids.inside(1000)), (Some(0), Some(1000)));
        }
        // A rootless container: root is user 1000, and the others are subordinate IDs.
        let ids = UserIds::parse("0 1000 1\n1 100000 65536\n");
        assert!(!ids.are_the_same());
        assert_eq!((ids.outside(0), ids.outside(5), ids.outside(65_537)), (Some(1000), Some(100_004), None));
        assert_eq!((ids.inside(1000), ids.inside(100_004), ids.inside(0)), (Some(0), Some(5), None));
    }

    /// `unshare -U` has no map until one is written, and a container may run as the overflow user.
    #[test]
    fn a_user_may_stand_for_anybody() {
        for map in ["", "0 1000 1\n1 100000 65536\n"] {
            let ids = UserIds::parse(map);
            assert!(!ids.are_the_same());
            assert_eq!([0, 1000, 65_534].map(|uid| ids.is_anybody(uid)), [false, false, true], "{map}");
        }
        assert_eq!(UserIds::parse("").outside(65_534), None);
    }
}
