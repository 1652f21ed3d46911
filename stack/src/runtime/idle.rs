use std::str::FromStr;

use crate::verbs::Error;

/// What a loop does when it finds nothing to do: of a [`Poller`](crate::Poller), of a [`Runner`](crate::Runner), and of threads
/// that wait for a runner.
///
/// | | cost when idle | response time |
/// |---|---|---|
/// | `Spin` | a whole core | one poll |
/// | `Yield` | the part of a core that other threads leave | one poll, and the time slices of other threads |
/// | `Adaptive` | that of `Spin`, `Yield` and `Block`, in turn | likewise |
/// | `Block` | nothing | a wake-up by the kernel: microseconds to tens of microseconds |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Polls again immediately, always: for a dedicated core.
    Spin,
    /// Yields to other threads of the core, and polls again.
    Yield,
    /// Polls again at once `spins` times, yields `yields` times, then blocks.
    Adaptive {
        /// Empty turns before the first yield.
        spins: u32,
        /// Yields before the first block.
        yields: u32,
    },
    /// Blocks as soon as a turn finds nothing, until a frame arrives, a timer is due or another thread has work for it.
    Block,
}

impl Default for Idle {
    /// Adaptive: spins 200 times, which takes about 10 µs, yields 20 times, then blocks.
    fn default() -> Idle {
        Idle::Adaptive { spins: 200, yields: 20 }
    }
}

impl FromStr for Idle {
    type Err = Error;

    /// `spin`, `yield`, `adaptive` or `block`.
    fn from_str(name: &str) -> Result<Idle, Error> {
        match name {
            "spin" => Ok(Idle::Spin),
            "yield" => Ok(Idle::Yield),
            "adaptive" => Ok(Idle::default()),
            "block" => Ok(Idle::Block),
            _ => Err(Error::invalid("idle", name, "spin, yield, adaptive or block")),
        }
    }
}

impl Idle {
    pub(crate) fn may_block(self) -> bool {
        matches!(self, Idle::Adaptive { .. } | Idle::Block)
    }
}

/// Counts empty turns, for loops of a program's own.
///
/// ```
/// use ferroce::{Idle, Idler};
///
/// let mut idler = Idler::new(Idle::Adaptive { spins: 1, yields: 0 });
/// assert!(!idler.rest()); // has spun
/// assert!(idler.rest()); // the loop is to block
/// idler.reset(); // there was something
/// assert!(!idler.rest());
/// ```
#[derive(Debug)]
pub struct Idler {
    idle: Idle,
    empty: u32,
}

impl Idler {
    /// For a loop with this setting.
    pub fn new(idle: Idle) -> Idler {
        Idler { idle, empty: 0 }
    }

    /// A turn found something.
    pub fn reset(&mut self) {
        self.empty = 0;
    }

    /// A turn found nothing: spins or yields. Returns whether to block.
    #[must_use]
    pub fn rest(&mut self) -> bool {
        self.empty = self.empty.saturating_add(1);
        match self.idle {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Adaptive { spins, .. } if self.empty <= spins => std::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Adaptive { spins, yields } if self.empty <= spins.saturating_add(yields) => {
                std::thread::yield_now();
            }
            Idle::Adaptive { .. } | Idle::Block => return true,
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_blocks_after_its_empty_turns_and_restarts_after_work() {
        let mut idler = Idler::new(Idle::Adaptive { spins: 3, yields: 2 });
        for _ in 0..2 {
            let turns: Vec<bool> = (0..7).map(|_| idler.rest()).collect();
            assert_eq!(turns, [false, false, false, false, false, true, true]);
            idler.reset();
        }
        assert!(Idler::new(Idle::Block).rest());
        for idle in [Idle::Spin, Idle::Yield] {
            let mut idler = Idler::new(idle);
            assert!((0..1000).all(|_| !idler.rest()), "{idle:?}");
        }
    }

    #[test]
    fn there_are_four_names() {
        for (name, idle) in [("spin", Idle::Spin), ("yield", Idle::Yield), ("block", Idle::Block)] {
            assert_eq!(name.parse::<Idle>().unwrap(), idle);
        }
        assert_eq!("adaptive".parse::<Idle>().unwrap(), Idle::default());
        assert!("sleep".parse::<Idle>().unwrap_err().to_string().contains("adaptive"));
    }
}
