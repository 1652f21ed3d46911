use std::env;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use crate::Error;

/// The most ranks of a communicator.
pub const MAX_SIZE: u32 = 4096;

/// Who this rank is, and where rank 0 is to be met.
///
/// The ranks meet over TCP, which has nothing to do with the RoCE traffic and may use another
/// network: rank 0 listens, the others connect. Nothing of it is encrypted or authenticated, and it
/// tells the keys of the memory that ranks write to each other: it belongs on a trusted network, as
/// RoCE does. Whoever speaks no such protocol costs the ranks a moment; whoever speaks it can take a rank.
#[derive(Debug)]
pub struct Bootstrap {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) master: SocketAddr,
    pub(crate) listen: SocketAddr,
    pub(crate) listener: Option<TcpListener>,
    pub(crate) timeout: Duration,
}

impl Bootstrap {
    /// Rank `rank` of `size`, with rank 0 at `master`.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless `rank` < `size` ≤ [`MAX_SIZE`].
    pub fn new(rank: u32, size: u32, master: SocketAddr) -> Result<Bootstrap, Error> {
        if size == 0 || size > MAX_SIZE {
            return Err(Error::invalid("size", size, format!("1 to {MAX_SIZE} ranks")));
        }
        if rank >= size {
            return Err(Error::invalid("rank", rank, format!("0 to {}, below the size {size}", size - 1)));
        }
        let timeout = Duration::from_secs(60);
        Ok(Bootstrap { rank, size, master, listen: master, listener: None, timeout })
    }

    /// From `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them.
    ///
    /// `FERROCE_MASTER_PORT` goes before `MASTER_PORT`: under torchrun the agent's own store may
    /// listen there. If `MASTER_ADDR` is a name, rank 0 listens on all addresses of its family,
    /// since a machine's own name often resolves to a loopback address.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variable; [`Error::Invalid`].
    pub fn from_env() -> Result<Bootstrap, Error> {
        Bootstrap::from_variables(|name| env::var(name).ok())
    }

    /// As [`from_env`](Bootstrap::from_env), from any source of variables.
    ///
    /// # Errors
    /// Likewise.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Bootstrap, Error> {
        Bootstrap::from_names(variable, |host, port| {
            (host, port).to_socket_addrs()?.next().ok_or_else(no_address)
        })
    }

    /// As [`from_variables`](Bootstrap::from_variables), with names looked up by `resolve`.
    fn from_names(
        variable: impl Fn(&str) -> Option<String>,
        resolve: impl Fn(&str, u16) -> io::Result<SocketAddr>,
    ) -> Result<Bootstrap, Error> {
        let number = |name: &'static str, expected: &str| -> Result<u32, Error> {
            required(&variable, name)?.trim().parse().map_err(|_| Error::Environment {
                variable: name,
                problem: format!("is '{}'", variable(name).unwrap_or_default()),
                expected: expected.to_owned(),
            })
        };
        let rank = number("RANK", "a number from 0")?;
        let size = number("WORLD_SIZE", "the number of ranks")?;
        let host = required(&variable, "MASTER_ADDR")?;
        let port_variable = match variable("FERROCE_MASTER_PORT") {
            Some(_) => "FERROCE_MASTER_PORT",
            None => "MASTER_PORT",
        };
        let port = number(port_variable, "a TCP port, 1 to 65535")?;
        let bad_port = || Error::Environment {
            variable: port_variable,
            problem: format!("is '{port}'"),
            expected: "a TCP port, 1 to 65535".to_owned(),
        };
        let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(bad_port)?;
        let master = resolve(&host, port).map_err(|problem| Error::Environment {
            variable: "MASTER_ADDR",
            problem: format!("is '{host}'"),
            expected: format!("an IP address or a name that resolves ({problem})"),
        })?;
        let mut bootstrap = Bootstrap::new(rank, size, master)?;
        if host.parse::<IpAddr>().is_err() {
            let any: IpAddr = match master {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            bootstrap.listen = SocketAddr::new(any, port);
        }
        Ok(bootstrap)
    }

    /// Waits for other ranks for at most `timeout`, 60 s unless told otherwise.
    pub fn timeout(self, timeout: Duration) -> Bootstrap {
        Bootstrap { timeout, ..self }
    }

    /// Rank 0 listens here, instead of at the bootstrap address. The others do not use it.
    pub fn listener(self, listener: TcpListener) -> Bootstrap {
        Bootstrap { listener: Some(listener), ..self }
    }

    /// The rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.size
    }
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no address")
}

fn required(variable: &impl Fn(&str) -> Option<String>, name: &'static str) -> Result<String, Error> {
    variable(name).ok_or_else(|| Error::Environment {
        variable: name,
        problem: "is not set".to_owned(),
        expected: "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Bootstrap, Error> {
        Bootstrap::from_variables(lookup(pairs))
    }

    fn lookup(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
    }

    const TORCHRUN: [(&str, &str); 4] =
        [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500")];

    #[test]
    fn reads_what_torchrun_sets() {
        let bootstrap = from(&TORCHRUN).unwrap();
        assert_eq!((bootstrap.rank(), bootstrap.size()), (2, 4));
        assert_eq!(bootstrap.master, "192.0.2.1:29500".parse().unwrap());
        assert_eq!(bootstrap.listen, bootstrap.master);
        let own_port = from(&[&TORCHRUN[..], &[("FERROCE_MASTER_PORT", "7")]].concat()).unwrap();
        assert_eq!(own_port.master.port(), 7);
    }

    #[test]
    fn a_name_is_listened_for_everywhere() {
        let mut pairs = TORCHRUN;
        pairs[2].1 = "head.example";
        // No resolver is asked: what it knows is the machine's affair.
        for (address, any) in [("192.0.2.9", "0.0.0.0:29500"), ("2001:db8::9", "[::]:29500")] {
            let resolve = |name: &str, port| {
                assert_eq!(name, "head.example");
                Ok(SocketAddr::new(address.parse().unwrap(), port))
            };
            let bootstrap = Bootstrap::from_names(lookup(&pairs), resolve).unwrap();
            assert_eq!(bootstrap.master, SocketAddr::new(address.parse().unwrap(), 29500));
            assert_eq!(bootstrap.listen, any.parse().unwrap());
        }
        let unknown = |_: &str, _| Err(no_address());
        let message = Bootstrap::from_names(lookup(&pairs), unknown).unwrap_err().to_string();
        assert!(
            message.contains("MASTER_ADDR is 'head.example'") && message.contains("no address"),
            "{message}"
        );
    }

    #[test]
    fn refusals_name_the_variable_and_the_value() {
        for missing in 0..4 {
            let mut pairs = TORCHRUN.to_vec();
            let (name, _) = pairs.remove(missing);
            let message = from(&pairs).unwrap_err().to_string();
            assert!(message.contains(&format!("{name} is not set")), "{message}");
        }
        for (index, value, expected) in [
            (0, "x", "RANK is 'x'"),
            (0, "4", "rank = 4: 0 to 3"),
            (1, "0", "size = 0: 1 to 4096"),
            (1, "-1", "WORLD_SIZE is '-1'"),
            (3, "0", "MASTER_PORT is '0'"),
            (3, "65536", "MASTER_PORT is '65536'"),
            (2, "", "MASTER_ADDR is ''"),
        ] {
            let mut pairs = TORCHRUN;
            pairs[index].1 = value;
            let message = from(&pairs).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
