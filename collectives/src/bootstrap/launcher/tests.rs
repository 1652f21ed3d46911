use std::io::{Error as IoError, ErrorKind};
use std::net::SocketAddr;

use super::*;
use crate::Bootstrap;

type Pairs<'a> = &'a [(&'a str, &'a str)];

fn lookup(pairs: Pairs<'_>) -> impl Fn(&str) -> Option<String> {
    |name| pairs.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
}

fn from(pairs: Pairs<'_>) -> Result<Bootstrap, Error> {
    Bootstrap::from_variables(lookup(pairs))
}

fn read(pairs: Pairs<'_>) -> Result<Told, Error> {
    Environment(&lookup(pairs)).read()
}

fn refusal(pairs: Pairs<'_>) -> String {
    read(pairs).unwrap_err().to_string()
}

/// Launcher, rank, size, host, port and nonce.
fn told(pairs: Pairs<'_>) -> (Launcher, u32, u32, String, u16, u64) {
    let Told { launcher, rank, size, meeting } = read(pairs).unwrap();
    let Meeting::Host { host, port, nonce, .. } = meeting else { panic!("{meeting:?}") };
    (launcher, rank, size, host, port, nonce)
}

const TORCHRUN: [(&str, &str); 4] =
    [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500")];

/// The variables that mpirun of Open MPI 4.1.4 sets on one host.
const OPEN_MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("OMPI_MCA_orte_hnp_uri", "1205469184.0;tcp://192.0.2.2,198.51.100.2:44973;tcp6://[fd00::2]:52591"),
    ("PMIX_NAMESPACE", "1205469185"),
];

const SLURM: [(&str, &str); 5] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_JOB_NODELIST", "node[01-04,7]"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
];

const KUBERNETES: [(&str, &str); 3] =
    [("JOB_COMPLETION_INDEX", "1"), ("FERROCE_SIZE", "2"), ("FERROCE_MASTER_ADDR", "sums-0.sums")];

const ID: (&str, &str) = ("FERROCE_UNIQUE_ID", "ferroce1:192.0.2.1:41234:0123456789abcdef");

#[test]
fn variables_of_torchrun_are_read() {
    let bootstrap = from(&TORCHRUN).unwrap();
    assert_eq!((bootstrap.rank(), bootstrap.size()), (2, 4));
    assert_eq!(bootstrap.master(), "192.0.2.1:29500".parse().unwrap());
    assert_eq!((bootstrap.listen, bootstrap.nonce), (bootstrap.master, 0));
    assert_eq!(bootstrap.launcher(), Some(Launcher::Torchrun));
    let own = [("FERROCE_MASTER_PORT", "7"), ("FERROCE_MASTER_ADDR", "192.0.2.7")];
    let own = from(&[&TORCHRUN[..], &own].concat()).unwrap();
    assert_eq!(own.master(), "192.0.2.7:7".parse().unwrap());
}

/// The store of torchrun's agent uses the port.
#[test]
fn the_port_of_torchruns_own_store_is_not_used() {
    let port = |store, restarts| {
        let elastic = [
            ("TORCHELASTIC_USE_AGENT_STORE", store),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", restarts),
        ];
        let bootstrap = from(&[&TORCHRUN[..], &elastic].concat()).unwrap();
        (bootstrap.master().port(), bootstrap.nonce)
    };
    assert_eq!(port("False", "0"), (29500, 0));
    let [first, second] = ["0", "1"].map(|restarts| port("True", restarts));
    assert!((20_000..30_000).contains(&first.0) && first.0 != 29500 && first.1 != 0, "{first:?}");
    assert_ne!(first, second);
    assert_eq!(port("True", "0"), first);
    let own = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("FERROCE_MASTER_PORT", "7")];
    assert_eq!(from(&[&TORCHRUN[..], &own].concat()).unwrap().master().port(), 7);
}

#[test]
fn rank_0_listens_on_all_addresses_for_a_name() {
    let mut pairs = TORCHRUN;
    pairs[2].1 = "head.example";
    // Addresses need no resolver, whose results depend on the machine.
    for (address, any) in [("192.0.2.9", "0.0.0.0:29500"), ("2001:db8::9", "[::]:29500")] {
        let resolve = |_, name: &str, port| {
            assert_eq!(name, "head.example");
            Ok(SocketAddr::new(address.parse().unwrap(), port))
        };
        let bootstrap = Bootstrap::from_names(lookup(&pairs), resolve).unwrap();
        assert_eq!(bootstrap.master, SocketAddr::new(address.parse().unwrap(), 29500));
        assert_eq!(bootstrap.listen, any.parse().unwrap());
    }
    let unknown = |_, _: &str, _| Err(IoError::new(ErrorKind::NotFound, "no address"));
    let message = Bootstrap::from_names(lookup(&pairs), unknown).unwrap_err().to_string();
    assert!(message.contains("MASTER_ADDR is 'head.example'") && message.contains("no address"), "{message}");
}

#[test]
fn errors_name_the_variable_and_the_value() {
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

#[test]
fn without_a_launcher_the_error_names_all() {
    let message = refusal(&[("MASTER_ADDR", "192.0.2.1")]);
    for launcher in Launcher::ALL {
        assert!(message.contains(&format!("{} ({launcher})", launcher.variables()[0])), "{message}");
    }
    assert!(refusal(&[ID]).contains("FERROCE_UNIQUE_ID needs a rank"));
}

#[test]
fn a_unique_id_works_with_any_launcher() {
    let own = [("FERROCE_RANK", "1"), ("FERROCE_SIZE", "3")];
    for (pairs, rank, size) in [(&own[..], 1, 3), (&TORCHRUN, 2, 4), (&OPEN_MPI, 1, 4), (&SLURM, 3, 8)] {
        let bootstrap = from(&[pairs, &[ID]].concat()).unwrap();
        assert_eq!((bootstrap.rank(), bootstrap.size()), (rank, size));
        assert_eq!(bootstrap.launcher(), Some(Launcher::Ferroce));
        assert_eq!(bootstrap.master(), "192.0.2.1:41234".parse().unwrap());
        assert_eq!(bootstrap.nonce, 0x0123_4567_89ab_cdef);
    }
    // Without a UniqueId, the address and port of ferroce's variables count.
    let place = [("FERROCE_MASTER_ADDR", "192.0.2.7"), ("FERROCE_MASTER_PORT", "7")];
    let bootstrap = from(&[&own[..], &place].concat()).unwrap();
    assert_eq!((bootstrap.launcher(), bootstrap.master().port()), (Some(Launcher::Ferroce), 7));
    let message = refusal(&[("FERROCE_UNIQUE_ID", "ferroce1:x"), own[0], own[1]]);
    assert!(message.contains("FERROCE_UNIQUE_ID is 'ferroce1:x': ferroce1:ADDRESS:PORT"), "{message}");
    assert!(refusal(&own).contains("MASTER_ADDR is not set"));
    assert!(refusal(&own[..1]).contains("FERROCE_SIZE is not set"));
}

#[test]
fn ranks_of_open_mpi_meet_on_their_host() {
    let (launcher, rank, size, host, port, nonce) = told(&OPEN_MPI);
    assert_eq!((launcher, rank, size, &*host), (Launcher::OpenMpi, 1, 4, "127.0.0.1"));
    assert!((20_000..30_000).contains(&port) && nonce != 0);
    // Another job has another port and nonce.
    let mut other = OPEN_MPI;
    other[3].1 = "1205534720.0;tcp://192.0.2.2,198.51.100.2:33001;tcp6://[fd00::2]:52591";
    assert!(told(&other).4 != port && told(&other).5 != nonce);
    // Open MPI 5 sets no URI.
    other[4].1 = "prterun-head-4711@1";
    let other = [&other[..3], &other[4..]].concat();
    assert_eq!((told(&other).2, &*told(&other).3), (4, "127.0.0.1"));
    let message = refusal(&OPEN_MPI[..3]);
    assert!(message.contains("MASTER_PORT is not set") && message.contains("PMIX_NAMESPACE"), "{message}");
    // Explicit variables have priority.
    let place = [("MASTER_ADDR", "192.0.2.9"), ("MASTER_PORT", "9")];
    let told = told(&[&OPEN_MPI[..], &place].concat());
    assert_eq!((&*told.3, told.4, told.5), ("192.0.2.9", 9, 0));
}

#[test]
fn ranks_of_open_mpi_on_several_hosts_meet_where_mpirun_is() {
    let mut pairs = OPEN_MPI;
    pairs[2].1 = "2";
    assert_eq!(told(&pairs).3, "192.0.2.2");
    pairs[3].1 = "1205469184.0;tcp6://[fd00::2]:52591";
    let message = refusal(&pairs);
    assert!(
        message.contains("OMPI_MCA_orte_hnp_uri is '1205469184.0;") && message.contains("MASTER_ADDR"),
        "{message}"
    );
    let message = refusal(&[&pairs[..3], &pairs[4..]].concat());
    assert!(message.contains("MASTER_ADDR is not set") && message.contains("on several hosts"), "{message}");
    pairs[2].1 = "some";
    assert!(refusal(&pairs).contains("OMPI_COMM_WORLD_LOCAL_SIZE is 'some'"));
    assert!(refusal(&pairs[..1]).contains("OMPI_COMM_WORLD_SIZE is not set"));
}

#[test]
fn ranks_of_slurm_meet_on_the_first_node() {
    let (launcher, rank, size, host, port, nonce) = told(&SLURM);
    assert_eq!((launcher, rank, size, &*host), (Launcher::Slurm, 3, 8, "node01"));
    assert!((20_000..30_000).contains(&port) && nonce != 0);
    let mut next = SLURM;
    next[4].1 = "1";
    assert!(told(&next).4 != port && told(&next).5 != nonce);
    // A step of fewer tasks and nodes than its job.
    let step = [("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_NODELIST", "node[07]")];
    let told = told(&[&SLURM[..], &step].concat());
    assert_eq!((told.2, &*told.3), (4, "node07"));
    for (missing, expected) in [
        (1, "SLURM_NTASKS is not set"),
        (2, "SLURM_STEP_NODELIST is not set"),
        (3, "MASTER_PORT is not set"),
        (4, "SLURM_STEP_ID is not set: the number of the step: start the ranks with srun"),
    ] {
        let mut pairs = SLURM.to_vec();
        pairs.remove(missing);
        let message = refusal(&pairs);
        assert!(message.contains(expected), "{message}");
    }
    let mut odd = SLURM;
    odd[2].1 = "node[01-";
    assert!(refusal(&odd).contains("SLURM_JOB_NODELIST is 'node[01-': nodes of Slurm"));
}

#[test]
fn the_first_of_slurms_nodes_is_found() {
    for (list, first) in [
        ("node[01-04,7]", "node01"),
        ("node[7,01-04],login", "node7"),
        ("login,node[1-2]", "login"),
        ("r[1-2]n[01-16]-ib", "r1n01-ib"),
        ("single.example", "single.example"),
    ] {
        assert_eq!(first_of(list).as_deref(), Some(first), "{list}");
    }
    for list in ["", ",a", "[", "n[", "n[]", "n[a-b]", "n[1", "n]", "no de", "n[1-2]\u{1b}"] {
        assert_eq!(first_of(list), None, "{list}");
    }
}

#[test]
fn ranks_of_pmi_meet_at_the_given_address() {
    let pairs = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
    assert!(refusal(&pairs).contains("MASTER_ADDR is not set"));
    let address = [&pairs[..], &[("MASTER_ADDR", "192.0.2.1")]].concat();
    assert!(refusal(&address).contains("MASTER_PORT is not set"));
    let whole = [&address[..], &[("MASTER_PORT", "9")]].concat();
    assert_eq!(told(&whole), (Launcher::Pmi, 0, 2, "192.0.2.1".to_owned(), 9, 0));
    // Started by hydra in a Slurm job: the rank is not that of Slurm's task, which started several.
    let (launcher, rank, size, host, port, nonce) = told(&[&SLURM[..], &pairs].concat());
    assert_eq!((launcher, rank, size, &*host), (Launcher::Pmi, 0, 2, "node01"));
    assert!((port, nonce) == (told(&SLURM).4, told(&SLURM).5));
    assert!(
        refusal(&[("PMI_RANK", "0"), ("PMI_SIZE", "two")]).contains("PMI_SIZE is 'two': the number of ranks")
    );
}

#[test]
fn pods_meet_at_index_0() {
    let pod = (Launcher::Kubernetes, 1, 2, "sums-0.sums".to_owned(), 29500, 0);
    assert_eq!(told(&KUBERNETES), pod);
    assert!(refusal(&KUBERNETES[..1]).contains("FERROCE_SIZE is not set"));
    let message = refusal(&KUBERNETES[..2]);
    assert!(message.contains("FERROCE_MASTER_ADDR is not set") && message.contains("headless"), "{message}");
}

/// The order in which launchers are detected.
#[test]
fn the_first_launcher_in_order_is_used() {
    let all = [&KUBERNETES[1..], &KUBERNETES[..1], &SLURM, &OPEN_MPI, &TORCHRUN].concat();
    assert_eq!(told(&all).0, Launcher::Torchrun);
    let without = [&KUBERNETES[..], &SLURM, &OPEN_MPI].concat();
    assert_eq!(told(&without).0, Launcher::OpenMpi);
    assert_eq!(told(&[&KUBERNETES[..], &SLURM].concat()).0, Launcher::Slurm);
}
