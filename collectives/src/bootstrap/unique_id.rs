//! The identification of a job: the address of its rank 0, and a unique number.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::str::FromStr;

use crate::Error;

/// Identifies a job, for all its ranks: the address at which rank 0 listens, and a random number. Rank 0 accepts only ranks with
/// this number, so two jobs never mix, even with the same port.
///
/// Rank 0 creates it with [`listen`](UniqueId::listen) and sends its text (`ferroce1:192.0.2.1:41234:0123456789abcdef`) to the
/// others by any means, such as the variable `FERROCE_UNIQUE_ID`. Anyone who knows it can take a rank's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId {
    address: SocketAddr,
    nonce: u64,
}

/// The version of the text.
const PREFIX: &str = "ferroce1";

impl UniqueId {
    /// Listens at `address`, whose port may be 0 for a free one, and draws the number. Rank 0 calls it, and passes the listener
    /// to [`Bootstrap::listener`](crate::Bootstrap::listener).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an address that others can't connect to; [`Error::Listen`].
    pub fn listen(address: SocketAddr) -> Result<(UniqueId, TcpListener), Error> {
        if address.ip().is_unspecified() || address.ip().is_multicast() {
            return Err(Error::invalid(
                "address",
                address,
                "an address of this host that the other ranks reach",
            ));
        }
        let failed = |source| Error::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let nonce = random().map_err(failed)?;
        Ok((UniqueId { address, nonce }, listener))
    }

    /// The address of rank 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number that rank 0 accepts.
    pub(super) fn nonce(&self) -> u64 {
        self.nonce
    }
}

/// Not 0, which is for ranks without an id.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}:{}:{:016x}", self.address, self.nonce)
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<UniqueId, Error> {
        let parts = || {
            let (address, nonce) = text.trim().strip_prefix(PREFIX)?.strip_prefix(':')?.rsplit_once(':')?;
            let is_hex = nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit());
            let address: SocketAddr = address.parse().ok()?;
            let nonce = u64::from_str_radix(nonce, 16).ok()?;
            (is_hex && nonce != 0 && address.port() != 0).then_some(UniqueId { address, nonce })
        };
        parts().ok_or_else(|| Error::invalid("unique id", format!("'{text}'"), EXPECTED))
    }
}

/// The format of the text.
pub(super) const EXPECTED: &str =
    "ferroce1:ADDRESS:PORT:NUMBER, the number 16 hexadecimal digits and not 0, as rank 0 printed it";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_text_reads_back() {
        let [(first, _), (second, listener)] =
            [(); 2].map(|()| UniqueId::listen("127.0.0.1:0".parse().unwrap()).unwrap());
        assert_ne!(first.nonce, second.nonce);
        assert_eq!(second.address(), listener.local_addr().unwrap());
        for text in [
            &first.to_string(),
            "ferroce1:192.0.2.1:41234:0123456789abcdef",
            "ferroce1:[2001:db8::1]:7:ffffffffffffffff",
        ] {
            assert_eq!(text.parse::<UniqueId>().unwrap().to_string(), *text);
        }
    }

    #[test]
    fn invalid_texts_are_refused() {
        for wrong in [
            "",
            "ferroce2:192.0.2.1:41234:0123456789abcdef",
            "ferroce1:192.0.2.1:0123456789abcdef",
            "ferroce1:192.0.2.1:0:0123456789abcdef",
            "ferroce1:host:41234:0123456789abcdef",
            "ferroce1:192.0.2.1:41234:123",
            "ferroce1:192.0.2.1:41234:+123456789abcdef",
            "ferroce1:192.0.2.1:41234:0000000000000000",
        ] {
            let refusal = wrong.parse::<UniqueId>().unwrap_err().to_string();
            assert!(refusal.starts_with(&format!("unique id = '{wrong}': ferroce1:ADDRESS")), "{refusal}");
        }
        for address in ["0.0.0.0:0", "[::]:7"] {
            let refusal = UniqueId::listen(address.parse().unwrap()).unwrap_err().to_string();
            assert!(refusal.contains(address) && refusal.contains("reach"), "{refusal}");
        }
    }
}
