//! The agreement of ranks on the lost ranks: pure, with time and messages as inputs.
//!
//! The lowest rank that is not known to be lost decides, when all others that answer have sent the ranks that they consider
//! lost. It repeats the decision until each of them has confirmed it. If it fails before that, the next rank asks all: a
//! rank that knows the decision reports it, and that decision stands. A rank that does not answer within the patience is
//! lost. If the network is partitioned and the parts do not receive each other's messages, each part considers the other
//! one lost.

use std::fmt;
use std::time::Duration;

use ferroce::Nanos;

/// A set of ranks.
#[derive(Clone, PartialEq, Eq, Default)]
pub(crate) struct Ranks(Vec<u8>);

impl Ranks {
    /// The empty set, for `size` ranks.
    pub(crate) fn none(size: u32) -> Ranks {
        Ranks(vec![0; size.div_ceil(8) as usize])
    }

    /// As bytes; the first bit is rank 0.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// From a peer, which may send any bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Ranks {
        Ranks(bytes.to_vec())
    }

    /// Whether it is for a communicator of `size` ranks.
    pub(crate) fn fits(&self, size: u32) -> bool {
        self.0.len() == size.div_ceil(8) as usize
            && (size..self.0.len() as u32 * 8).all(|rank| !self.has(rank))
    }

    pub(crate) fn has(&self, rank: u32) -> bool {
        self.0.get(rank as usize / 8).is_some_and(|byte| byte >> (rank % 8) & 1 == 1)
    }

    pub(crate) fn add(&mut self, rank: u32) {
        if let Some(byte) = self.0.get_mut(rank as usize / 8) {
            *byte |= 1 << (rank % 8);
        }
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries((0..self.0.len() as u32 * 8).filter(|rank| self.has(*rank))).finish()
    }
}

/// A message of the agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The sender wants to continue without these, and asks for the receiver's vote.
    Vote(Ranks),
    /// The decision: continue without these.
    Decision(Ranks),
    /// The sender knows the decision.
    Known,
}

/// One rank's part of the agreement.
#[derive(Debug)]
pub(crate) struct Shrink {
    rank: u32,
    size: u32,
    patience: Duration,
    again: Duration,
    gone: Ranks,
    decision: Option<Ranks>,
    /// For each rank: whether it has voted, whether it knows the decision, when it was last heard.
    votes: Vec<bool>,
    knows: Vec<bool>,
    heard: Vec<Nanos>,
    next: Nanos,
}

impl Shrink {
    /// For rank `rank`, with the ranks known to be lost.
    pub(crate) fn new(
        rank: u32,
        size: u32,
        gone: Ranks,
        patience: Duration,
        again: Duration,
        now: Nanos,
    ) -> Shrink {
        let each = size as usize;
        let (votes, knows, heard) = (vec![false; each], vec![false; each], vec![now; each]);
        Shrink { rank, size, patience, again, gone, decision: None, votes, knows, heard, next: now }
    }

    /// The lost ranks, once decided.
    pub(crate) fn decision(&self) -> Option<&Ranks> {
        self.decision.as_ref()
    }

    /// Whether this rank has decided, and others may not know it yet.
    pub(crate) fn is_telling(&self) -> bool {
        let decides = self.coordinator() == Some(self.rank);
        self.decision.is_some() && decides && self.others().any(|rank| !self.knows[rank as usize])
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        (0..self.size).filter(|rank| *rank != self.rank && !self.gone.has(*rank))
    }

    /// The rank that decides.
    fn coordinator(&self) -> Option<u32> {
        (0..self.size).find(|rank| !self.gone.has(*rank))
    }

    /// Processes a message of a rank. Returns the immediate answer, if any.
    pub(crate) fn hear(&mut self, from: u32, word: Word, now: Nanos) -> Option<Word> {
        self.heard[from as usize] = now;
        match word {
            Word::Vote(gone) | Word::Decision(gone) if !gone.fits(self.size) => None,
            Word::Vote(gone) => {
                if let Some(decision) = &self.decision {
                    return Some(Word::Decision(decision.clone()));
                }
                self.votes[from as usize] = true;
                // Only ranks that continue without this one can decide that it is lost.
                let others = (0..self.size).filter(|rank| *rank != self.rank && gone.has(*rank));
                others.for_each(|rank| self.gone.add(rank));
                None
            }
            Word::Decision(gone) => {
                if self.decision.is_none() {
                    self.gone = gone.clone();
                    self.decision = Some(gone);
                }
                self.knows[from as usize] = true;
                Some(Word::Known)
            }
            Word::Known => {
                self.knows[from as usize] = true;
                None
            }
        }
    }

    /// Any message from a rank.
    pub(crate) fn is_there(&mut self, from: u32, now: Nanos) {
        self.heard[from as usize] = now;
    }

    /// The messages to send now; and decides, if this rank must and all votes are known.
    pub(crate) fn tick(&mut self, now: Nanos) -> Vec<(u32, Word)> {
        if now < self.next {
            return Vec::new();
        }
        self.next = now + self.again;
        let silent: Vec<u32> =
            self.others().filter(|rank| now.since(self.heard[*rank as usize]) >= self.patience).collect();
        if let Some(decision) = self.decision.clone() {
            // Ranks lost since then need not know it.
            silent.iter().for_each(|rank| self.knows[*rank as usize] = true);
            let missing = self.others().filter(|rank| self.is_telling() && !self.knows[*rank as usize]);
            return missing.map(|rank| (rank, Word::Decision(decision.clone()))).collect();
        }
        silent.iter().for_each(|rank| self.gone.add(*rank));
        let vote = Word::Vote(self.gone.clone());
        match self.coordinator() {
            Some(coordinator) if coordinator == self.rank => {
                if self.others().all(|rank| self.votes[rank as usize]) {
                    self.decision = Some(self.gone.clone());
                    let decision = Word::Decision(self.gone.clone());
                    return self.others().map(|rank| (rank, decision.clone())).collect();
                }
                self.others().map(|rank| (rank, vote.clone())).collect()
            }
            // A rank that is not heard may be the one that should decide.
            Some(_) => self.others().map(|rank| (rank, vote.clone())).collect(),
            None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AGAIN: Duration = Duration::from_millis(20);
    const PATIENCE: Duration = Duration::from_millis(500);

    /// Ranks that are lost from the start, and ranks that fail during the agreement, at a random moment; messages are lost.
    fn agree(size: u32, dead: &[u32], dying: &[(u32, u64)], loss: u32, picks: &mut dyn FnMut(u32) -> u32) {
        let mut now = Nanos::ZERO;
        let mut gone = Ranks::none(size);
        dead.iter().for_each(|rank| gone.add(*rank));
        // One rank knows the lost ones, the others detect them.
        let mut ranks: Vec<Option<Shrink>> = (0..size)
            .map(|rank| {
                let known = if rank == size / 2 { gone.clone() } else { Ranks::none(size) };
                (!dead.contains(&rank)).then(|| Shrink::new(rank, size, known, PATIENCE, AGAIN, now))
            })
            .collect();
        let mut flying: Vec<(u32, u32, Word)> = Vec::new();
        for _ in 0..2_000 {
            now = now + Duration::from_millis(5);
            for (rank, at) in dying {
                if now.0 / 1_000_000 >= *at {
                    ranks[*rank as usize] = None;
                }
            }
            for rank in 0..size {
                if let Some(shrink) = &mut ranks[rank as usize] {
                    flying.extend(shrink.tick(now).into_iter().map(|(to, word)| (rank, to, word)));
                }
            }
            let arrive = flying.len() as u32;
            for _ in 0..picks(arrive + 1).max(arrive / 2) {
                let (from, to, word) = flying.swap_remove(picks(flying.len() as u32) as usize);
                if picks(100) < loss {
                    continue;
                }
                if let Some(answer) =
                    ranks[to as usize].as_mut().and_then(|shrink| shrink.hear(from, word, now))
                {
                    flying.push((to, from, answer));
                }
            }
        }
        let decisions: Vec<&Ranks> = ranks
            .iter()
            .flatten()
            .map(|shrink| shrink.decision().unwrap_or_else(|| panic!("no decision: {shrink:?}")))
            .collect();
        assert!(decisions.windows(2).all(|pair| pair[0] == pair[1]), "{decisions:?}");
        // Ranks lost since then are not waited for.
        assert!(ranks.iter().flatten().all(|shrink| !shrink.is_telling()), "{ranks:?}");
        if let Some(decision) = decisions.first() {
            assert!(dead.iter().all(|rank| decision.has(*rank)), "{decision:?} without {dead:?}");
            let alive =
                (0..size).filter(|rank| !dead.contains(rank) && !dying.iter().any(|(of, _)| of == rank));
            assert!(alive.into_iter().all(|rank| !decision.has(rank)), "{decision:?}, but it lives");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn all_remaining_ranks_agree(
            size in 1u32..12,
            dead in prop::collection::btree_set(0u32..12, 0..3),
            dying in prop::collection::btree_map(0u32..12, 0u64..1500, 0..3),
            loss in 0u32..20,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 200),
        ) {
            let dead: Vec<u32> = dead.into_iter().filter(|rank| *rank < size).collect();
            let dying: Vec<(u32, u64)> = dying.into_iter().filter(|(rank, _)| *rank < size && !dead.contains(rank)).collect();
            let mut picks = picks.iter().cycle();
            agree(size, &dead, &dying, loss, &mut |of| picks.next().map_or(0, |index| index.index(of.max(1) as usize) as u32));
        }
    }

    /// A rank whose last message names all ranks does not block the others.
    #[test]
    fn a_vote_against_all_is_survived() {
        let mut shrink = Shrink::new(0, 3, Ranks::none(3), PATIENCE, AGAIN, Nanos::ZERO);
        assert_eq!(shrink.hear(2, Word::Vote(Ranks::from_bytes(&[7])), Nanos::ZERO), None);
        let later = Nanos::ZERO + PATIENCE + AGAIN;
        let _ = shrink.tick(later);
        assert_eq!(shrink.decision(), Some(&Ranks::from_bytes(&[6])), "{shrink:?}");
    }

    #[test]
    fn ranks_are_stored_as_bits() {
        let mut ranks = Ranks::none(11);
        ranks.add(0);
        ranks.add(10);
        assert_eq!(ranks.as_bytes(), [1, 4]);
        assert_eq!(Ranks::from_bytes(&[1, 4]), ranks);
        assert!(ranks.fits(11) && !ranks.fits(10) && !ranks.fits(17));
    }
}
