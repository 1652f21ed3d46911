//! What every port owes to a sink that keeps frames.

use std::thread;

use ferroce_driver::{FrameSink, KeptFrame, RxFrame};

/// Keeps what it can.
#[derive(Debug, Default)]
pub struct Keep {
    /// What it has kept, oldest first.
    pub kept: Vec<KeptFrame>,
    /// How many of them stayed where they were.
    lent: usize,
    /// What the port refused to keep.
    pub refused: Vec<Vec<u8>>,
}

impl FrameSink for Keep {
    fn take(&mut self, frame: RxFrame<'_>) {
        let at = frame.bytes().as_ptr();
        match frame.keep() {
            Ok(frame) => {
                self.lent += usize::from(frame.as_ptr() == at);
                self.kept.push(frame);
            }
            Err(frame) => self.refused.push(frame.bytes().to_vec()),
        }
    }
}

/// Keeps as many frames as the port allows while hundreds of others pass, gives some back on another thread, and keeps
/// others in their place. `pass` sends the frame with a number and receives it; `frame` makes it. Returns frames that
/// are kept at the end. Either all are `lent` or none.
pub fn keeps_frames(
    limit: usize,
    lent: bool,
    frame: impl Fn(usize) -> Vec<u8>,
    mut pass: impl FnMut(&[u8], &mut dyn FrameSink),
) -> Vec<KeptFrame> {
    assert!(limit >= 16, "{limit} frames may be kept");
    let mut next = 0;
    let mut keep = Keep::default();
    let others = |pass: &mut dyn FnMut(&[u8], &mut dyn FrameSink), count: usize| {
        for n in 0..count {
            let sent = frame(1_000_000 + n);
            let mut seen = 0;
            pass(&sent, &mut |frame: &[u8]| {
                assert!(frame == sent);
                seen += 1;
            });
            assert_eq!(seen, 1);
        }
    };
    let mut numbers: Vec<usize> = Vec::new();
    let mut total = 0;
    for round in 0..3 {
        // As many as go, and three more.
        let room = limit - keep.kept.len();
        total += room;
        for n in 0..room + 3 {
            let sent = frame(next);
            pass(&sent, &mut keep);
            if n < room {
                numbers.push(next);
                assert_eq!(
                    (keep.kept.len(), keep.refused.len()),
                    (numbers.len(), 0),
                    "round {round}, frame {n}"
                );
            } else {
                // Refused, and there to be copied.
                assert_eq!(keep.refused, [sent], "round {round}, {} kept", keep.kept.len());
                keep.refused.clear();
            }
            next += 1;
        }
        others(&mut pass, 400);
        for (kept, number) in keep.kept.iter().zip(&numbers) {
            assert!(**kept == frame(*number), "frame {number} has changed");
        }
        // The first ones go back on another thread, and some on this one.
        let back: Vec<KeptFrame> = keep.kept.drain(..limit / 2).collect();
        thread::spawn(move || drop(back)).join().unwrap();
        drop(keep.kept.drain(..limit / 4));
        numbers.drain(..limit / 2 + limit / 4);
        // They count no more from the next burst on.
        others(&mut pass, 1);
    }
    for (kept, number) in keep.kept.iter().zip(&numbers) {
        assert!(**kept == frame(*number), "frame {number} has changed");
    }
    assert_eq!(keep.lent, if lent { total } else { 0 });
    keep.kept
}
