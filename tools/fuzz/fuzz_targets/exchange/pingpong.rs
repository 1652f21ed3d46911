use ferroce_tools::pingpong::destination::{Destination, MESSAGE};

/// A message of ibv_rc_pingpong.
pub fn run(bytes: &[u8]) {
    let Some((message, _)) = bytes.split_first_chunk::<MESSAGE>() else { return };
    let Some(destination) = Destination::from_message(message) else { return };
    assert!(destination.to_message().eq_ignore_ascii_case(message), "{destination}");
}
