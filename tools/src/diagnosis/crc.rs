//! CRC-32 as a linear map: for messages of one length, the difference of the CRCs is a function of the bits in which
//! the messages differ. The function can be inverted, so a wrong CRC determines the difference at a given place that
//! would explain it.

const POLYNOMIAL: u32 = 0xedb8_8320;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut value, mut bit) = (byte as u32, 0);
        while bit < 8 {
            value = value >> 1 ^ if value & 1 != 0 { POLYNOMIAL } else { 0 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

/// The entry of [`TABLE`] with this top byte.
const BY_TOP: [u8; 256] = {
    let mut inverse = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        inverse[(TABLE[byte] >> 24) as usize] = byte as u8;
        byte += 1;
    }
    inverse
};

/// The difference of the register after `bytes`, given their difference and that of the register before them.
pub(super) fn forward(register: u32, bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(register, |register, byte| {
        register >> 8 ^ TABLE[((register ^ u32::from(byte)) & 0xff) as usize]
    })
}

/// The difference of the register `bytes` bytes earlier, if none of these differ. A difference of the four bytes there,
/// by the little-endian bytes of the result, would have the same effect.
pub(super) fn backward(register: u32, bytes: usize) -> u32 {
    (0..bytes).fold(register, |register, _| {
        let index = BY_TOP[(register >> 24) as usize];
        (register ^ TABLE[usize::from(index)]) << 8 | u32::from(index)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CRC-32 of a message, one bit at a time.
    fn crc(message: &[u8]) -> u32 {
        let mut register = u32::MAX;
        for &byte in message {
            register ^= u32::from(byte);
            for _ in 0..8 {
                register = (register >> 1) ^ ((register & 1) * POLYNOMIAL);
            }
        }
        !register
    }

    #[test]
    fn a_difference_is_found_where_it_was_made() {
        assert_eq!(crc(b"123456789"), 0xcbf4_3926);
        let message: Vec<u8> = (0..100).collect();
        for at in [0, 1, 50, 96] {
            let mut other = message.clone();
            let change = [0xde, 0xad, 0xbe, 0xef];
            for (byte, change) in other[at..at + 4].iter_mut().zip(change) {
                *byte ^= change;
            }
            let difference = crc(&message) ^ crc(&other);
            assert_eq!(backward(difference, 100 - at).to_le_bytes(), change, "at {at}");
            assert_eq!(forward(0, change.into_iter().chain(vec![0; 96 - at])), difference, "at {at}");
        }
    }
}
