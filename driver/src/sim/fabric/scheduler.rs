//! Which class of a port sends next.

use super::config::{CLASSES, Scheduling};

/// Strict classes, and deficit round robin among the others (Shreedhar and Varghese, 1995).
pub(super) struct Scheduler {
    strict: u8,
    /// The bytes that a class may send per round.
    quanta: [u64; CLASSES],
    deficits: [u64; CLASSES],
    /// The class whose turn it is, and whether its quantum was added.
    turn: usize,
    granted: bool,
}

impl Scheduler {
    /// For frames of up to `max_frame` bytes.
    pub(super) fn new(scheduling: &[Scheduling; CLASSES], max_frame: usize) -> Scheduler {
        let strict = (0..CLASSES).filter(|class| scheduling[*class] == Scheduling::Strict);
        let strict = strict.fold(0, |strict, class| strict | 1 << class);
        // A quantum is at least a frame, so that each turn sends one.
        let quanta = scheduling.map(|scheduling| match scheduling {
            Scheduling::Weighted(weight) => u64::from(weight) * max_frame as u64,
            Scheduling::Strict => 0,
        });
        Scheduler { strict, quanta, deficits: [0; CLASSES], turn: 0, granted: false }
    }

    /// The class in `ready` that sends next; `length` returns the length of a class's next frame.
    pub(super) fn pick(&mut self, ready: u8, length: impl Fn(usize) -> u64) -> Option<usize> {
        let strict = ready & self.strict;
        if strict != 0 {
            return Some(strict.ilog2() as usize);
        }
        if ready == 0 {
            return None;
        }
        loop {
            let class = self.turn;
            if ready & 1 << class != 0 {
                if !self.granted {
                    self.deficits[class] += self.quanta[class];
                    self.granted = true;
                }
                let length = length(class);
                if length <= self.deficits[class] {
                    self.deficits[class] -= length;
                    return Some(class);
                }
            } else {
                // An empty class does not keep its deficit for later.
                self.deficits[class] = 0;
            }
            self.turn = (class + 1) % CLASSES;
            self.granted = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_classes_are_first_and_weights_count_bytes() {
        let mut scheduling = [Scheduling::Weighted(1); CLASSES];
        scheduling[2] = Scheduling::Weighted(3);
        scheduling[6] = Scheduling::Strict;
        scheduling[7] = Scheduling::Strict;
        let mut scheduler = Scheduler::new(&scheduling, 1500);
        assert_eq!(scheduler.pick(0b1111_1111, |_| 100), Some(7));
        assert_eq!(scheduler.pick(0b0111_1111, |_| 100), Some(6));
        assert_eq!(scheduler.pick(0, |_| 100), None);
        let lengths = |class: usize| if class == 1 { 200 } else { 1000 };
        let mut sent = [0.0; CLASSES];
        for _ in 0..100_000 {
            let class = scheduler.pick(0b0000_0111, lengths).unwrap();
            sent[class] += lengths(class) as f64;
        }
        let sum: f64 = sent.iter().sum();
        for (class, share) in [(0, 0.2), (1, 0.2), (2, 0.6)] {
            assert!((sent[class] / sum - share).abs() < 0.001, "{sent:?}");
        }
    }

    #[test]
    fn an_idle_class_gains_no_deficit() {
        let mut scheduler = Scheduler::new(&[Scheduling::Weighted(1); CLASSES], 1000);
        for _ in 0..1000 {
            assert_eq!(scheduler.pick(0b01, |_| 1000), Some(0));
        }
        let picks: Vec<_> = (0..6).map(|_| scheduler.pick(0b11, |_| 1000).unwrap()).collect();
        assert_eq!(picks.iter().sum::<usize>(), 3, "{picks:?}");
    }
}
