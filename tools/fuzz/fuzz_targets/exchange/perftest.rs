use ferroce_tools::perf::perftest::message::{
    DESTINATION, PerftestDestination, SystemData, Version, path_mtu_from_message, path_mtu_to_message,
};

/// A message of perftest; the first byte selects its kind.
pub fn run(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => {
            let Some(message) = bytes.first_chunk() else { return };
            let Ok(version) = Version::from_message(message) else { return };
            assert!(Version::may_start(message));
            assert_eq!(Version::from_message(&version.to_message()), Ok(version));
        }
        1 => {
            let (Some(page), Some(line)) =
                (bytes.first_chunk(), bytes.get(4..).and_then(<[u8]>::first_chunk))
            else {
                return;
            };
            let Ok(data) = SystemData::from_messages([*page, *line]) else { return };
            assert_eq!(data.to_messages(), [*page, *line]);
        }
        2 => {
            let Some(message) = bytes.first_chunk() else { return };
            let Ok(path_mtu) = path_mtu_from_message(*message) else { return };
            assert_eq!(path_mtu_to_message(path_mtu), *message);
        }
        _ => {
            let Ok(Some(destination)) = PerftestDestination::from_start(bytes) else { return };
            assert!(destination.to_message().eq_ignore_ascii_case(&bytes[..DESTINATION]), "{destination:?}");
        }
    }
}
