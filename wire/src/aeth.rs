use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The credit code without a limit, which ferroce sends.
pub const CREDITS_UNLIMITED: u8 = 31;

/// The ACK extended transport header, 4 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Aeth {
    syndrome: u8,
    msn: [u8; 3],
}

impl Aeth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// `syndrome` with the low 24 bits of the message sequence number.
    pub fn new(syndrome: Syndrome, msn: u32) -> Aeth {
        Aeth::with_syndrome_byte(syndrome.byte(), msn)
    }

    /// As [`new`](Aeth::new), from a syndrome byte that may be reserved, for tests of receivers.
    pub fn with_syndrome_byte(syndrome: u8, msn: u32) -> Aeth {
        let [_, a, b, c] = msn.to_be_bytes();
        Aeth { syndrome, msn: [a, b, c] }
    }

    /// The syndrome; `None` for a reserved syndrome or NAK code, which is ignored.
    pub fn syndrome(&self) -> Option<Syndrome> {
        Syndrome::from_byte(self.syndrome)
    }

    /// The syndrome byte.
    pub fn syndrome_byte(&self) -> u8 {
        self.syndrome
    }

    /// The number of messages that the responder has completed, modulo 2²⁴.
    pub fn msn(&self) -> u32 {
        let [a, b, c] = self.msn;
        u32::from_be_bytes([0, a, b, c])
    }
}

/// The meaning of an AETH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// An ACK with a credit code (see [`credits`]).
    Ack {
        /// 0 to 31.
        credit_code: u8,
    },
    /// Receiver not ready: retransmit after the timer.
    RnrNak(RnrTimer),
    /// A NAK.
    Nak(Nak),
}

/// The reason for refusing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Nak {
    /// A packet is missing: retransmit from it.
    PsnSequenceError = 0,
    /// The request is malformed or not allowed on this QP.
    InvalidRequest = 1,
    /// The R_Key does not allow this access to this memory.
    RemoteAccessError = 2,
    /// The responder has an error of its own.
    RemoteOperationalError = 3,
    /// For Reliable Datagram only.
    InvalidRdRequest = 4,
}

impl Syndrome {
    /// ACK without end-to-end flow control.
    pub const ACK: Syndrome = Syndrome::Ack { credit_code: CREDITS_UNLIMITED };

    /// The byte on the wire.
    pub fn byte(self) -> u8 {
        match self {
            Syndrome::Ack { credit_code } => credit_code & 0x1f,
            Syndrome::RnrNak(timer) => 0x20 | timer.code(),
            Syndrome::Nak(nak) => 0x60 | nak as u8,
        }
    }

    /// From the byte on the wire; `None` if it is reserved.
    pub fn from_byte(byte: u8) -> Option<Syndrome> {
        let low = byte & 0x1f;
        match byte >> 5 {
            0 => Some(Syndrome::Ack { credit_code: low }),
            1 => RnrTimer::new(low).map(Syndrome::RnrNak),
            3 => Some(Syndrome::Nak(match low {
                0 => Nak::PsnSequenceError,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccessError,
                3 => Nak::RemoteOperationalError,
                4 => Nak::InvalidRdRequest,
                _ => return None,
            })),
            _ => None,
        }
    }
}

/// The number of receive WRs for a credit code; `None` for no limit.
pub fn credits(code: u8) -> Option<u32> {
    match code & 0x1f {
        0 => Some(0),
        1 => Some(1),
        CREDITS_UNLIMITED => None,
        // 2, 3, 4, 6, 8, 12, ...: powers of two, and the midpoints between them.
        n => Some((2 + u32::from(n & 1)) << (n / 2 - 1)),
    }
}

/// The RNR timer code of a responder: 0 to 31, for values of a table in units of 10 µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// 0.64 ms, code 12.
    pub const DEFAULT: RnrTimer = RnrTimer(12);

    /// 655.36 ms, code 0.
    pub const LONGEST: RnrTimer = RnrTimer(0);

    /// The timer with this code; `None` above 31.
    pub const fn new(code: u8) -> Option<RnrTimer> {
        if code < 32 { Some(RnrTimer(code)) } else { None }
    }

    /// The shortest timer that is at least `time`; the longest one, of 655.36 ms, if all are shorter.
    pub fn at_least(time: Duration) -> RnrTimer {
        (1..32).map(RnrTimer).find(|timer| timer.duration() >= time).unwrap_or(RnrTimer::LONGEST)
    }

    /// The code, 0 to 31.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The least time that the requester waits (docs/protocol.md §2).
    pub const fn duration(self) -> Duration {
        /// In units of 10 µs.
        const TABLE: [u64; 32] = [
            65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
            2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
        ];
        Duration::from_micros(TABLE[self.0 as usize & 31] * 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_codes_follow_the_table() {
        let table = [
            0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
            3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
        ];
        for (code, want) in table.into_iter().enumerate() {
            assert_eq!(credits(code as u8), Some(want), "code {code}");
        }
        assert_eq!(credits(31), None);
    }

    #[test]
    fn rnr_codes_follow_the_table() {
        let ms = |code| RnrTimer::new(code).unwrap().duration().as_secs_f64() * 1e3;
        let table = [(0, 655.36), (1, 0.01), (5, 0.06), (12, 0.64), (14, 1.28), (25, 61.44), (31, 491.52)];
        for (code, want) in table {
            assert!((ms(code) - want).abs() < 1e-9, "code {code}");
        }
        assert_eq!(RnrTimer::new(32), None);
        for (time, code) in [(0, 1), (10, 1), (11, 2), (640, 12), (641, 13), (491_520, 31), (491_521, 0)] {
            assert_eq!(RnrTimer::at_least(Duration::from_micros(time)).code(), code, "{time} us");
        }
        assert_eq!(RnrTimer::at_least(Duration::MAX), RnrTimer::LONGEST);
    }

    #[test]
    fn syndromes_round_trip_and_reserved_ones_do_not_parse() {
        let mut known = 0;
        for byte in 0..=255 {
            if let Some(syndrome) = Syndrome::from_byte(byte) {
                assert_eq!(syndrome.byte(), byte);
                known += 1;
            }
        }
        assert_eq!(known, 32 + 32 + 5);
        assert_eq!(Syndrome::from_byte(0x40), None);
        assert_eq!(Syndrome::from_byte(0x65), None);
        assert_eq!(Aeth::new(Syndrome::ACK, 0x0100_0001).as_bytes(), [0x1f, 0, 0, 1]);
    }
}
