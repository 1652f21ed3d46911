use ferroce_tools::perf::message::{Incoming, PerfMessage};
use ferroce_tools::perf::plan::Layout;

/// Bytes of the control connection, which arrive in pieces; the first byte determines their length.
pub fn run(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else { return };
    let mut incoming = Incoming::default();
    for piece in bytes.chunks(usize::from(*step) + 1) {
        incoming.extend(piece);
        loop {
            match incoming.pop() {
                Ok(Some(message)) => look_at(message),
                Ok(None) => break,
                Err(reason) => {
                    assert!(!reason.is_empty());
                    return;
                }
            }
        }
    }
}

fn look_at(message: PerfMessage) {
    let mut again = Incoming::default();
    again.extend(&message.to_bytes().expect("it was JSON before"));
    assert_eq!(again.pop().as_ref(), Ok(&Some(message.clone())));
    // The server's checks of the plan before it allocates.
    if let PerfMessage::Plan(plan) = message
        && plan.check_limits().is_ok()
    {
        for size in [1, 8, 4096, 1 << 20, 1 << 30] {
            if plan.check_size(size).is_ok() {
                let layout = Layout::new(&plan, size);
                let last = layout.range(plan.qps as usize - 1, layout.slots - 1);
                assert!(last.end as u64 <= layout.region_len() && last.len() == size as usize);
                // All compared messages have a slot.
                assert!(!plan.check || plan.check_lap(size, &[layout.slots + 1]).is_err());
            }
        }
    }
}
