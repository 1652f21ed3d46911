//! The window of time and packets over which a rate is computed.

use ferroce::Nanos;

/// The least time and the least number of packets of a rate.
const TIME: u64 = 1_000_000;
const PACKETS: usize = 200;

/// For each packet, the last one before it that is at least a window away, if there is one.
pub(super) fn windows(times: &[Nanos], packets: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut start = 0;
    (packets..times.len()).filter_map(move |end| {
        let is_whole = |start: usize| end - start >= packets && times[end].0 - times[start].0 >= TIME;
        while is_whole(start + 1) {
            start += 1;
        }
        is_whole(start).then_some((start, end))
    })
}

/// As [`windows`], over at least 200 packets.
pub(super) fn whole_windows(times: &[Nanos]) -> impl Iterator<Item = (usize, usize)> {
    windows(times, PACKETS)
}
