//! How the ranks meet.
//!
//! - `bootstrap/launcher.rs`: the variables that launchers set
//! - `bootstrap/unique_id.rs`: the number of a job

mod launcher;
mod unique_id;

use std::env;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Error;
use launcher::{Environment, Meeting, Told};

pub use launcher::Launcher;
pub use unique_id::UniqueId;

/// The most ranks of a communicator.
pub const MAX_SIZE: u32 = 4096;

/// This rank's number, the number of ranks, and the address of rank 0.
///
/// The ranks meet over TCP, independent of the RoCE traffic and possibly on another network: rank 0 listens, the others connect.
/// The connections are neither encrypted nor authenticated, and carry the keys of the memory that ranks write to each other: use
/// a trusted network, as for RoCE. Connections with another protocol only delay the ranks for a moment; an attacker that uses
/// this protocol can take a rank's place.
#[derive(Debug)]
pub struct Bootstrap {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) master: SocketAddr,
    pub(crate) listen: SocketAddr,
    pub(crate) listener: Option<TcpListener>,
    pub(crate) timeout: Duration,
    /// The connections that rank 0 accepts.
    pub(crate) nonce: u64,
    launcher: Option<Launcher>,
}

/// How long to wait for ranks.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time between two look-ups of a name that does not resolve yet.
const ASK_AGAIN: Duration = Duration::from_millis(500);

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
        let (listener, launcher) = (None, None);
        Ok(Bootstrap { rank, size, master, listen: master, listener, timeout: TIMEOUT, nonce: 0, launcher })
    }

    /// Rank `rank` of `size`, of the job `id`. Rank 0 adds the [`listener`](Bootstrap::listener) created with the id; without it,
    /// it listens at the id's address.
    ///
    /// # Errors
    /// As [`new`](Bootstrap::new).
    pub fn with_id(rank: u32, size: u32, id: UniqueId) -> Result<Bootstrap, Error> {
        Ok(Bootstrap { nonce: id.nonce(), ..Bootstrap::new(rank, size, id.address())? })
    }

    /// From the variables of a launcher. The first launcher in this table whose rank variable is set is used:
    ///
    /// | launcher | rank, size | address of rank 0 |
    /// |---|---|---|
    /// | ferroce's own | `FERROCE_RANK`, `FERROCE_SIZE` | the variables below |
    /// | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`; `MASTER_PORT`, or a port derived from it if its agent's store uses `MASTER_PORT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `127.0.0.1` if all are on one host, otherwise the host of mpirun |
    /// | PMI (MPICH, Intel MPI, Cray) | `PMI_RANK`, `PMI_SIZE` | the variables below; in a Slurm job as for Slurm |
    /// | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | the first node of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST` |
    /// | Kubernetes, an indexed job | `JOB_COMPLETION_INDEX`, `FERROCE_SIZE` | `FERROCE_MASTER_ADDR` |
    ///
    /// With `FERROCE_UNIQUE_ID`, a [`UniqueId`], the ranks meet at its address. Without it, `FERROCE_MASTER_ADDR` and
    /// `FERROCE_MASTER_PORT` have priority over `MASTER_ADDR` and `MASTER_PORT`, and these over the launcher's address. Ranks of
    /// Open MPI and Slurm, and those of torchrun whose agent's store uses `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE=True`),
    /// derive a port from 20000 to 29999 from the job, and refuse ranks of other jobs; those of Kubernetes use 29500.
    ///
    /// If the address is a name, rank 0 listens on all addresses of its family, since a machine's own name often resolves to a
    /// loopback address. With Kubernetes, the name is that of the pod with index 0 in a headless service (`JOB-0.SERVICE`). Ranks
    /// wait until it resolves, since pods are in DNS only while they run.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variable, its value, and the valid ones; [`Error::Invalid`].
    pub fn from_env() -> Result<Bootstrap, Error> {
        Bootstrap::from_variables(|name| env::var(name).ok())
    }

    /// As [`from_env`](Bootstrap::from_env), from any source of variables.
    ///
    /// # Errors
    /// Likewise.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Bootstrap, Error> {
        Bootstrap::from_names(variable, |launcher, host, port| {
            let deadline = Instant::now() + TIMEOUT;
            loop {
                let found =
                    (host, port).to_socket_addrs().and_then(|mut all| all.next().ok_or_else(no_address));
                if found.is_ok() || launcher != Launcher::Kubernetes || Instant::now() >= deadline {
                    return found;
                }
                sleep(ASK_AGAIN);
            }
        })
    }

    /// As [`from_variables`](Bootstrap::from_variables), with names looked up by `resolve`.
    fn from_names(
        variable: impl Fn(&str) -> Option<String>,
        resolve: impl Fn(Launcher, &str, u16) -> io::Result<SocketAddr>,
    ) -> Result<Bootstrap, Error> {
        let Told { launcher, rank, size, meeting } = Environment(&variable).read()?;
        let bootstrap = match meeting {
            Meeting::Id(id) => Bootstrap::with_id(rank, size, id)?,
            Meeting::Host { host, variable, port, nonce } => {
                let master = resolve(launcher, &host, port).map_err(|problem| {
                    let expected = format!("an IP address or a name that resolves ({problem})");
                    launcher::odd(variable, &host, &expected)
                })?;
                let mut bootstrap = Bootstrap { nonce, ..Bootstrap::new(rank, size, master)? };
                if host.parse::<IpAddr>().is_err() {
                    let any: IpAddr = match master {
                        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                    };
                    bootstrap.listen = SocketAddr::new(any, port);
                }
                bootstrap
            }
        };
        Ok(Bootstrap { launcher: Some(launcher), ..bootstrap })
    }

    /// Waits for other ranks for at most `timeout`; 60 s by default.
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

    /// The address of rank 0.
    pub fn master(&self) -> SocketAddr {
        self.master
    }

    /// The launcher that set this rank, if not the program itself.
    pub fn launcher(&self) -> Option<Launcher> {
        self.launcher
    }
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no address")
}
