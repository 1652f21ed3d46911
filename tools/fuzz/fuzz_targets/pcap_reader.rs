#![no_main]

use std::io::Cursor;

use ferroce::driver::pcap::Reader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let Ok(mut reader) = Reader::new(Box::new(Cursor::new(file.to_vec())), "input".to_owned()) else {
        return;
    };
    // The smallest record has a header of 12 bytes (a simple packet's), and records do not overlap.
    let mut room = file.len();
    loop {
        match reader.next_record() {
            Ok(Some(record)) => {
                let used = record.captured.len() + 12;
                assert!(used <= room, "more records than the file has room for");
                room -= used;
                let _ = (record.timestamp, record.link_type, record.original_len);
            }
            Ok(None) => break,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                break;
            }
        }
    }
    assert!(matches!(reader.next_record(), Ok(None)), "something after the end");
});
