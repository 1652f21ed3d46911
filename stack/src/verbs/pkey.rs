//! Partition keys: a port's table (docs/protocol.md §1).

use ferroce_wire::{PKEY_DEFAULT, PKey};

use crate::verbs::{Error, Port};

/// The P_Keys of a port: initially only the default one, as in RoCEv2. Indices do not change; a removed row holds 0, which is no
/// valid key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PkeyTable {
    rows: Vec<PKey>,
}

impl PkeyTable {
    /// The most rows.
    pub const MAX: usize = 128;

    pub(crate) fn new() -> PkeyTable {
        let mut rows = Vec::with_capacity(PkeyTable::MAX);
        rows.push(PKEY_DEFAULT);
        PkeyTable { rows }
    }

    /// The table of a card.
    pub(crate) fn of(rows: impl Iterator<Item = PKey>) -> PkeyTable {
        PkeyTable { rows: rows.take(PkeyTable::MAX).collect() }
    }

    /// The key at `index`.
    pub fn get(&self, index: usize) -> Option<PKey> {
        self.rows.get(index).copied().filter(|pkey| *pkey != REMOVED)
    }

    /// The index of a key, membership included.
    pub fn index_of(&self, pkey: PKey) -> Option<usize> {
        self.iter().find(|(_, own)| *own == pkey).map(|(index, _)| index)
    }

    /// The index of a key that accepts packets with the P_Key `other`: the key of a full member if there is one, otherwise
    /// that of a limited member.
    pub fn index_admitting(&self, other: PKey) -> Option<usize> {
        let admitting = || self.iter().filter(|(_, own)| own.admits(other));
        let full = admitting().find(|(_, own)| own.is_full_member());
        full.or_else(|| admitting().next()).map(|(index, _)| index)
    }

    /// All keys with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, PKey)> {
        self.rows.iter().copied().enumerate().filter(|(_, pkey)| *pkey != REMOVED)
    }

    pub(crate) fn add(&mut self, pkey: PKey) -> Result<usize, Error> {
        if !pkey.is_valid() {
            return Err(Error::invalid("pkey", pkey, "a partition other than 0 in its low 15 bits"));
        }
        if let Some(index) = self.index_of(pkey) {
            return Err(Error::invalid(
                "pkey",
                pkey,
                format!("one that is not in the table, at index {index}"),
            ));
        }
        if let Some(index) = self.rows.iter().position(|row| *row == REMOVED) {
            self.rows[index] = pkey;
            return Ok(index);
        }
        if self.rows.len() == PkeyTable::MAX {
            let expected = format!("at most {} of them; remove an unused one", PkeyTable::MAX);
            return Err(Error::invalid("pkey", pkey, expected));
        }
        self.rows.push(pkey);
        Ok(self.rows.len() - 1)
    }

    pub(crate) fn remove(&mut self, index: usize) {
        if let Some(row) = self.rows.get_mut(index) {
            *row = REMOVED;
        }
    }
}

impl Port {
    /// The key at an index from a caller.
    pub(crate) fn pkey(&self, index: usize) -> Result<PKey, Error> {
        self.pkeys.get(index).ok_or_else(|| {
            let rows: Vec<String> =
                self.pkeys.iter().map(|(index, pkey)| format!("{index}: {pkey}")).collect();
            let expected =
                format!("an index in the P_Key table of '{}' ({})", self.interface, rows.join(", "));
            Error::invalid("pkey_index", index, expected)
        })
    }
}

const REMOVED: PKey = PKey(0);
