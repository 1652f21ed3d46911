use ferroce_wire::Gid;

/// The UD queue pairs attached to each group, ordered by group. Sized when created.
pub(crate) struct MulticastGroups {
    attachments: Vec<(Gid, u32)>,
    limit: usize,
}

impl MulticastGroups {
    pub(crate) fn new(limit: u32) -> MulticastGroups {
        MulticastGroups { attachments: Vec::with_capacity(limit as usize), limit: limit as usize }
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn is_full(&self) -> bool {
        self.attachments.len() == self.limit
    }

    /// Attaches the queue pair in slot `index`; repeated calls have no effect.
    pub(crate) fn attach(&mut self, group: Gid, index: u32) {
        if let Err(place) = self.find(group, index) {
            self.attachments.insert(place, (group, index));
        }
    }

    pub(crate) fn detach(&mut self, group: Gid, index: u32) {
        if let Ok(place) = self.find(group, index) {
            self.attachments.remove(place);
        }
    }

    pub(crate) fn is_attached(&self, group: Gid, index: u32) -> bool {
        self.find(group, index).is_ok()
    }

    pub(crate) fn has_members(&self, group: Gid) -> bool {
        self.members(group).next().is_some()
    }

    /// The number of groups to which the queue pair in slot `index` is attached.
    pub(crate) fn groups_of(&self, index: u32) -> usize {
        self.attachments.iter().filter(|(_, member)| *member == index).count()
    }

    /// The slots of the queue pairs attached to `group`.
    pub(crate) fn members(&self, group: Gid) -> impl Iterator<Item = u32> {
        let start = self.attachments.partition_point(|(gid, _)| gid.0 < group.0);
        let rest = self.attachments[start..].iter();
        rest.take_while(move |(gid, _)| *gid == group).map(|(_, index)| *index)
    }

    fn find(&self, group: Gid, index: u32) -> Result<usize, usize> {
        self.attachments.binary_search_by_key(&(group.0, index), |(gid, member)| (gid.0, *member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_exactly_their_members() {
        let [a, b, c] = [1, 2, 3].map(|n| Gid::from_ipv4([239, 0, 0, n].into()));
        let mut groups = MulticastGroups::new(4);
        for (group, index) in [(b, 7), (a, 7), (b, 2), (b, 7)] {
            groups.attach(group, index);
        }
        assert_eq!(groups.members(b).collect::<Vec<_>>(), [2, 7]);
        assert_eq!(groups.members(a).collect::<Vec<_>>(), [7]);
        assert!(!groups.has_members(c));
        assert_eq!(groups.groups_of(7), 2);
        for _ in 0..2 {
            groups.detach(b, 7);
            assert_eq!(groups.members(b).collect::<Vec<_>>(), [2]);
        }
        assert!(!groups.is_attached(b, 7) && groups.is_attached(a, 7));
    }
}
