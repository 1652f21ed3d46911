//! Work requests, as the model sees them.

use std::ops::Range;

use ferroce::WcOpcode;

use crate::noise::Window;

/// What a work request does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Send {
        data: Window,
        immediate: Option<u32>,
        invalidates: Option<usize>,
    },
    Write {
        data: Window,
        at: usize,
        immediate: Option<u32>,
    },
    /// To the place `into` of the requester's landing memory.
    Read {
        at: usize,
        length: u32,
        into: usize,
    },
    /// The old value is written there too.
    Atomic {
        at: usize,
        change: Change,
        into: usize,
    },
    /// Eight bytes of data, to a word.
    AtomicWrite {
        data: Window,
        at: usize,
    },
    /// Of a range, or of the whole range of the key.
    Flush {
        at: usize,
        length: u32,
        whole: bool,
    },
    LocalInvalidate,
    BindWindow,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Add(u64),
    CompareSwap { compare: u64, swap: u64 },
}

/// Why a work request must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// It refers to local memory that does not exist.
    Local,
    /// It binds a bound window.
    Bind,
    /// It refers to memory of the peer that does not exist, or that it may not access.
    Access,
    /// It is invalid.
    Invalid,
    /// It is longer than any receive.
    TooLong,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) action: Action,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) flaw: Option<Flaw>,
    /// It accesses the peer's memory through a window.
    pub(crate) through_window: bool,
}

impl Action {
    pub(crate) fn length(&self) -> u32 {
        match *self {
            Action::Send { data, .. } | Action::Write { data, .. } => data.length,
            Action::Read { length, .. } => length,
            Action::Atomic { .. } | Action::AtomicWrite { .. } => 8,
            Action::Flush { .. } | Action::LocalInvalidate | Action::BindWindow => 0,
        }
    }

    pub(crate) fn opcode(&self) -> WcOpcode {
        match self {
            Action::Send { .. } => WcOpcode::Send,
            Action::Write { .. } => WcOpcode::RdmaWrite,
            Action::Read { .. } => WcOpcode::RdmaRead,
            Action::Atomic { change: Change::Add(_), .. } => WcOpcode::FetchAdd,
            Action::Atomic { change: Change::CompareSwap { .. }, .. } => WcOpcode::CompSwap,
            Action::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            Action::Flush { .. } => WcOpcode::Flush,
            Action::LocalInvalidate => WcOpcode::LocalInv,
            Action::BindWindow => WcOpcode::BindMw,
        }
    }

    /// Whether it uses a receive of the peer.
    pub(crate) fn takes_receive(&self) -> bool {
        matches!(self, Action::Send { .. } | Action::Write { immediate: Some(_), .. })
    }

    /// Whether it has a result.
    pub(crate) fn lands(&self) -> bool {
        matches!(self, Action::Read { .. } | Action::Atomic { .. })
    }

    /// Whether it is executed locally, and nothing is sent.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Action::LocalInvalidate | Action::BindWindow)
    }

    /// Whether it needs access to the peer's memory. READs and WRITEs of length 0 do not.
    pub(crate) fn reaches(&self) -> bool {
        matches!(self, Action::Flush { .. }) || !self.touches().is_empty()
    }

    /// Whether all that it needs of the peer's memory is in `window`, and is not empty.
    pub(crate) fn fits(&self, window: &Range<usize>) -> bool {
        let range = match *self {
            Action::Flush { whole: true, .. } => return true,
            Action::Flush { at, length, .. } => at..at + length as usize,
            _ => self.touches(),
        };
        self.reaches() && window.start <= range.start && range.end <= window.end
    }

    /// The range of the peer's memory that it reads or writes.
    pub(crate) fn touches(&self) -> Range<usize> {
        match *self {
            Action::Write { data, at, .. } => at..at + data.length as usize,
            Action::Read { at, length, .. } => at..at + length as usize,
            Action::Atomic { at, .. } | Action::AtomicWrite { at, .. } => at..at + 8,
            _ => 0..0,
        }
    }

    /// Its effect on the peer's memory.
    pub(crate) fn apply(&self, memory: &mut [u8]) {
        match *self {
            Action::Write { data, .. } | Action::AtomicWrite { data, .. } => {
                memory[self.touches()].copy_from_slice(data.bytes());
            }
            Action::Atomic { change, .. } => {
                let word = &mut memory[self.touches()];
                let old = <[u8; 8]>::try_from(&*word).map_or(0, u64::from_ne_bytes);
                word.copy_from_slice(&change.of(old).to_ne_bytes());
            }
            _ => {}
        }
    }
}

impl Flaw {
    /// Whether it is detected before anything is sent.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Flaw::Local | Flaw::Bind)
    }
}

impl Change {
    pub(crate) fn of(self, old: u64) -> u64 {
        match self {
            Change::Add(value) => old.wrapping_add(value),
            Change::CompareSwap { compare, swap } if compare == old => swap,
            Change::CompareSwap { .. } => old,
        }
    }
}
