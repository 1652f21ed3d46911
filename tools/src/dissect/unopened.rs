//! Frames without a known RoCE packet, by kind.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;

/// The kind of such a frame.
pub(crate) type Name = Cow<'static, str>;

/// The number of frames that were not decoded, by name.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Unopened(BTreeMap<Name, u64>);

/// The most names that are shown.
const SHOWN: usize = 8;

impl Unopened {
    pub(crate) fn count(&mut self, name: Name) {
        *self.0.entry(name).or_default() += 1;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names and counts to show, the most frequent first, and the sum of the others.
    pub(crate) fn most(&self) -> Vec<(Name, u64)> {
        let mut all: Vec<(Name, u64)> = self.0.iter().map(|(name, count)| (name.clone(), *count)).collect();
        all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let rest = all.split_off(all.len().min(SHOWN));
        if !rest.is_empty() {
            let name = format!("{} other kinds, which --json names", rest.len());
            all.push((name.into(), rest.iter().map(|(_, count)| count).sum()));
        }
        all
    }
}
