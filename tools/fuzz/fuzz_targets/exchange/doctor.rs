use ferroce_tools::control_message::length;
use ferroce_tools::doctor::message::DoctorMessage;

/// A message of `ferroce doctor`.
pub fn run(bytes: &[u8]) {
    let Some((prefix, body)) = bytes.split_first_chunk() else { return };
    let Ok(length) = length(*prefix) else { return };
    let Some(body) = body.get(..length) else { return };
    let Ok(message) = DoctorMessage::parse(body) else { return };
    // The received form may be shorter than the generated one.
    let Ok(again) = message.to_bytes() else { return };
    assert_eq!(DoctorMessage::parse(&again[prefix.len()..]).as_ref(), Ok(&message));
}
