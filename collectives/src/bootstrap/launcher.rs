//! The environment variables by which launchers describe a rank.

use std::fmt;

use super::{MAX_SIZE, UniqueId, unique_id};
use crate::Error;

/// The launcher of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// Any program that sets ferroce's own variables: `FERROCE_UNIQUE_ID`, `FERROCE_RANK`, `FERROCE_SIZE`.
    Ferroce,
    /// torchrun.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpirun or mpiexec of MPICH, Intel MPI or Cray MPICH, by the Process Management Interface.
    Pmi,
    /// srun.
    Slurm,
    /// An indexed job of Kubernetes.
    Kubernetes,
}

impl Launcher {
    /// In the order of detection.
    pub const ALL: [Launcher; 6] = [
        Launcher::Ferroce,
        Launcher::Torchrun,
        Launcher::OpenMpi,
        Launcher::Pmi,
        Launcher::Slurm,
        Launcher::Kubernetes,
    ];

    /// The variables of a process's rank and of the number of ranks. The first one identifies the launcher.
    const fn variables(self) -> [&'static str; 2] {
        match self {
            Launcher::Ferroce => ["FERROCE_RANK", "FERROCE_SIZE"],
            Launcher::Torchrun => ["RANK", "WORLD_SIZE"],
            Launcher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
            Launcher::Pmi => ["PMI_RANK", "PMI_SIZE"],
            Launcher::Slurm => ["SLURM_PROCID", "SLURM_NTASKS"],
            Launcher::Kubernetes => ["JOB_COMPLETION_INDEX", "FERROCE_SIZE"],
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Ferroce => "ferroce",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Pmi => "PMI",
            Launcher::Slurm => "Slurm",
            Launcher::Kubernetes => "Kubernetes",
        })
    }
}

/// The content of the variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) launcher: Launcher,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) meeting: Meeting,
}

/// The address at which the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    Id(UniqueId),
    /// An address or a name, and its variable.
    Host {
        host: String,
        variable: &'static str,
        port: u16,
        nonce: u64,
    },
}

/// Variables by name.
pub(super) struct Environment<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

/// The identifier of a job.
struct Job(String);

const ADDRESS: [&str; 2] = ["FERROCE_MASTER_ADDR", "MASTER_ADDR"];
const PORT: [&str; 2] = ["FERROCE_MASTER_PORT", "MASTER_PORT"];
const ID: &str = "FERROCE_UNIQUE_ID";
/// A pod has its own network namespace, so any port is free.
const KUBERNETES_PORT: u16 = 29500;

impl Environment<'_> {
    /// Reads a launcher's variables.
    pub(super) fn read(&self) -> Result<Told, Error> {
        let id = self.get(ID).map(|text| self.unique_id(&text)).transpose()?;
        let launcher = Launcher::ALL
            .into_iter()
            .find(|launcher| self.has(launcher.variables()[0]))
            .ok_or_else(|| self.nobody(id.is_some()))?;
        let [rank_variable, mut size_variable] = launcher.variables();
        // A step may have fewer tasks than the job.
        if launcher == Launcher::Slurm && self.has("SLURM_STEP_NUM_TASKS") {
            size_variable = "SLURM_STEP_NUM_TASKS";
        }
        let rank = self.number(rank_variable, "a number, 0 or more")?;
        let size = self.number(size_variable, &format!("the number of ranks, 1 to {MAX_SIZE}"))?;
        let (launcher, meeting) = match id {
            Some(id) => (Launcher::Ferroce, Meeting::Id(id)),
            None => (launcher, self.meeting(launcher, size)?),
        };
        Ok(Told { launcher, rank, size, meeting })
    }

    fn meeting(&self, launcher: Launcher, size: u32) -> Result<Meeting, Error> {
        let (variable, host) = self.host(launcher, size)?;
        let (port, nonce) = match PORT.into_iter().find(|name| self.has(name)) {
            Some(name) if name == PORT[1] && self.has_agent_store(launcher) => {
                let job = self.job_of_torchrun(&host, self.port(name)?);
                (job.port(), job.nonce())
            }
            Some(name) => (self.port(name)?, 0),
            None if launcher == Launcher::Kubernetes => (KUBERNETES_PORT, 0),
            None => {
                let job = self.job(launcher)?;
                (job.port(), job.nonce())
            }
        };
        Ok(Meeting::Host { host, variable, port, nonce })
    }

    /// The host of rank 0, and its variable.
    fn host(&self, launcher: Launcher, size: u32) -> Result<(&'static str, String), Error> {
        if let Some((name, host)) = ADDRESS.into_iter().find_map(|name| Some((name, self.get(name)?))) {
            return Ok((name, host));
        }
        let at_slurm = self.has("SLURM_STEP_NODELIST") || self.has("SLURM_JOB_NODELIST");
        match launcher {
            Launcher::OpenMpi => self.host_of_open_mpi(size),
            Launcher::Slurm => self.first_node(),
            // Ranks of mpirun inside a Slurm job, or of `srun --mpi=pmi2`.
            Launcher::Pmi if at_slurm => self.first_node(),
            Launcher::Kubernetes => Err(missing(
                ADDRESS[0],
                "the name of the pod with index 0 behind a headless service, as JOB-0.SERVICE",
            )),
            Launcher::Ferroce | Launcher::Torchrun | Launcher::Pmi => {
                Err(missing(ADDRESS[1], "the address of the host of rank 0, or its name"))
            }
        }
    }

    /// This host if all ranks are on it, otherwise that of mpirun, which usually has rank 0.
    fn host_of_open_mpi(&self, size: u32) -> Result<(&'static str, String), Error> {
        const LOCAL: &str = "OMPI_COMM_WORLD_LOCAL_SIZE";
        const URI: &str = "OMPI_MCA_orte_hnp_uri";
        if self.has(LOCAL) && self.number(LOCAL, "the number of ranks of this host")? == size {
            return Ok((LOCAL, "127.0.0.1".to_owned()));
        }
        let expected = "the address of the host of rank 0, because the ranks are on several hosts and mpirun does not \
            provide it (mpirun -x MASTER_ADDR=ADDRESS)";
        let uri = self.get(URI).ok_or_else(|| missing(ADDRESS[1], expected))?;
        // Such as 1205469184.0;tcp://192.0.2.2,198.51.100.2:44973;tcp6://[fd00::2]:52591
        let first = uri.split(';').find_map(|part| part.strip_prefix("tcp://")?.split([',', ':']).next());
        match first.filter(|address| !address.is_empty()) {
            Some(address) => Ok((URI, address.to_owned())),
            None => Err(odd(
                URI,
                &uri,
                "tcp://ADDRESS:PORT in it, or MASTER_ADDR set to that of the host of rank 0",
            )),
        }
    }

    /// The first node of a Slurm step, which has its rank 0.
    fn first_node(&self) -> Result<(&'static str, String), Error> {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        let found = lists.into_iter().find_map(|name| Some((name, self.get(name)?)));
        let (name, list) = found.ok_or_else(|| {
            missing(
                lists[0],
                "the nodes of the step, as srun sets it, or MASTER_ADDR the address of rank 0's",
            )
        })?;
        match first_of(&list) {
            Some(node) => Ok((name, node)),
            None => Err(odd(name, &list, "nodes of Slurm, as node[01-04,7],login")),
        }
    }

    /// Whether torchrun's agent listens at `MASTER_PORT` itself.
    fn has_agent_store(&self, launcher: Launcher) -> bool {
        launcher == Launcher::Torchrun && self.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True")
    }

    /// The job includes the restart count of torchrun, so ranks only meet ranks of the same restart.
    fn job_of_torchrun(&self, host: &str, port: u16) -> Job {
        let [run, restarts] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
            .map(|name| self.get(name).unwrap_or_default());
        Job(format!("{host} {port} {run} {restarts}"))
    }

    /// The value from which the port is derived.
    fn job(&self, launcher: Launcher) -> Result<Job, Error> {
        let no_port = |hint: &str| missing(PORT[1], &format!("the TCP port at which rank 0 listens{hint}"));
        match launcher {
            Launcher::OpenMpi => {
                let names = ["OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"];
                let shared = names.into_iter().find_map(|name| self.get(name));
                shared.map(Job).ok_or_else(|| {
                    no_port("; neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE is set to derive it from")
                })
            }
            Launcher::Slurm | Launcher::Pmi if self.has("SLURM_JOB_ID") => {
                let step = self.get("SLURM_STEP_ID").ok_or_else(|| {
                    missing(
                        "SLURM_STEP_ID",
                        "the number of the step: start the ranks with srun, or set MASTER_PORT",
                    )
                })?;
                Ok(Job(format!("{}.{step}", self.get("SLURM_JOB_ID").unwrap_or_default())))
            }
            Launcher::Slurm => Err(no_port("; SLURM_JOB_ID is not set to derive it from")),
            _ => Err(no_port("")),
        }
    }

    fn unique_id(&self, text: &str) -> Result<UniqueId, Error> {
        text.parse().map_err(|_| odd(ID, text, unique_id::EXPECTED))
    }

    fn port(&self, name: &'static str) -> Result<u16, Error> {
        const EXPECTED: &str = "a TCP port, 1 to 65535";
        let port = self.number(name, EXPECTED)?;
        let fits = u16::try_from(port).ok().filter(|port| *port > 0);
        fits.ok_or_else(|| odd(name, &port.to_string(), EXPECTED))
    }

    fn number(&self, name: &'static str, expected: &str) -> Result<u32, Error> {
        let text = self.get(name).ok_or_else(|| missing(name, expected))?;
        text.trim().parse().map_err(|_| odd(name, &text, expected))
    }

    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The error if no launcher has set this rank.
    fn nobody(&self, has_id: bool) -> Error {
        let known = Launcher::ALL.map(|launcher| format!("{} ({launcher})", launcher.variables()[0]));
        let what = if has_id { "FERROCE_UNIQUE_ID needs a rank, and " } else { "" };
        missing(
            "RANK",
            &format!("{what}no launcher has set the rank of this process; looked for {}", known.join(", ")),
        )
    }
}

fn missing(variable: &'static str, expected: &str) -> Error {
    Error::Environment { variable, problem: "is not set".to_owned(), expected: expected.to_owned() }
}

pub(super) fn odd(variable: &'static str, value: &str, expected: &str) -> Error {
    Error::Environment { variable, problem: format!("is '{value}'"), expected: expected.to_owned() }
}

impl Job {
    /// Below the kernel's ephemeral ports (32768), and the NodePorts of Kubernetes (30000).
    fn port(&self) -> u16 {
        20_000 + (self.nonce() % 10_000) as u16
    }

    /// Distinguishes two jobs with the same port. FNV-1a.
    fn nonce(&self) -> u64 {
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        self.0.bytes().fold(0xcbf2_9ce4_8422_2325, hash).max(1)
    }
}

/// The first of the nodes that Slurm lists: `node01` of `node[01-04,7],login`.
fn first_of(list: &str) -> Option<String> {
    let mut first = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        let (plain, behind) = rest.split_at(end);
        first.push_str(plain);
        let Some(range) = behind.strip_prefix('[') else { break };
        let (range, behind) = range.split_once(']')?;
        let number = range.split([',', '-']).next()?;
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        first.push_str(number);
        rest = behind;
    }
    let is_name =
        !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    is_name.then_some(first)
}

#[cfg(test)]
mod tests;
