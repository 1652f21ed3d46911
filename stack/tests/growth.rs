//! Types that applications construct or match can grow: every public struct with public fields and every public enum is
//! `#[non_exhaustive]`, or listed with its reason in docs/decisions/08-growth.md. And a configuration has a setter for each
//! field that its constructor does not take.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferroce::*;

/// The public types of a file that can be constructed or matched in full: they have variants or only public fields, and are
/// not `#[non_exhaustive]`.
fn exhaustive(text: &str) -> Vec<String> {
    let (mut found, mut is_marked, mut lines) = (Vec::new(), false, text.lines());
    while let Some(line) = lines.next() {
        let (of_struct, of_enum) = (line.strip_prefix("pub struct "), line.strip_prefix("pub enum "));
        if let Some(rest) = of_struct.or(of_enum) {
            let body = lines.by_ref().take(if line.ends_with('{') { usize::MAX } else { 0 });
            let fields: Vec<&str> = body
                .take_while(|line| *line != "}")
                .filter_map(|line| line.strip_prefix("    "))
                .filter(|line| line.starts_with(|c: char| c == '_' || c.is_alphabetic()))
                .collect();
            let is_open = !fields.is_empty() && fields.iter().all(|field| field.starts_with("pub "));
            if !is_marked && (of_enum.is_some() || is_open) {
                found.extend(rest.split(|c: char| !c.is_alphanumeric()).next().map(str::to_owned));
            }
        }
        is_marked = line == "#[non_exhaustive]" || is_marked && line.starts_with(['#', '/']);
    }
    found
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn exhaustive_types_are_listed_with_their_reasons() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let decision = fs::read_to_string(root.join("docs/decisions/08-growth.md")).unwrap();
    let (_, list) = decision.split_once("**Deliberately exhaustive**").unwrap();
    let listed: BTreeSet<String> = list
        .lines()
        .filter_map(|line| line.strip_prefix("- ")?.split_once(':'))
        .flat_map(|(names, _)| names.split('`').skip(1).step_by(2))
        .filter(|name| *name != "wire")
        .map(str::to_owned)
        .collect();
    let mut files = Vec::new();
    for folder in ["stack/src", "driver/src", "collectives/src"] {
        sources(&root.join(folder), &mut files);
    }
    let found: BTreeSet<String> =
        files.iter().flat_map(|file| exhaustive(&fs::read_to_string(file).unwrap())).collect();
    assert_eq!(
        found, listed,
        "left: exhaustive in the sources, right: listed in docs/decisions/08-growth.md"
    );
}

/// The search finds what it should.
#[test]
fn an_unmarked_type_is_found() {
    let text = "#[derive(Debug)]\npub struct A {\n    /// Of it.\n    pub b: u8,\n}\n\n#[non_exhaustive]\n/// C.\n\
                pub struct C {\n    pub d: u8,\n}\n\npub struct E {\n    f: u8,\n}\n\npub struct G(u8);\n\n\
                pub enum H<'a> {\n    I(&'a u8),\n}\n";
    assert_eq!(exhaustive(text), ["A", "H"]);
}

/// Checks for each field given: its default, and that its setter sets only it.
macro_rules! fields {
    ($start:expr; $($field:ident: $default:expr => $value:expr),+ $(,)?) => {{
        let start = $start;
        $(
            assert_eq!(start.$field, $default, "{} by default", stringify!($field));
            let mut expected = start.clone();
            expected.$field = $value;
            let set = start.clone().$field($value);
            assert_ne!(start.$field, set.$field, "{}", stringify!($field));
            assert_eq!(format!("{set:?}"), format!("{expected:?}"), "{}", stringify!($field));
        )+
        [$(stringify!($field)),+]
    }};
}

/// The names of a struct's own fields, of its pretty `Debug` text.
fn names(value: &dyn std::fmt::Debug) -> Vec<String> {
    let text = format!("{value:#?}");
    let own = text.lines().filter_map(|line| line.strip_prefix("    "));
    let named = own.filter(|line| !line.starts_with([' ', '}', ')', ']']));
    named.filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
}

/// Every field is one of those that the constructor takes, or one that has a setter.
#[track_caller]
fn all(value: &dyn std::fmt::Debug, taken: &[&str], set: &[&str]) {
    let mut known = [taken, set].concat();
    let mut fields = names(value);
    known.sort_unstable();
    fields.sort_unstable();
    assert_eq!(fields, known);
}

#[test]
fn each_setter_sets_its_field_and_defaults_are_as_documented() {
    let set = fields!(Config::default();
        seed: None => Some([7; 32]),
        max_pds: 16 => 1, max_mrs: 1024 => 1, max_mws: 1024 => 1, max_cqs: 256 => 1, max_qps: 256 => 1,
        max_srqs: 64 => 1, max_ahs: 256 => 1, max_mcast_attachments: 256 => 1, max_connections: 256 => 1,
        max_listeners: 64 => 1, max_cm_channels: 16 => 1, window: DEFAULT_WINDOW => 1, reorder_packets: 1024 => 1,
        roce_v1: false => true, drop_access_errors: false => true, flush: true => false, atomic_write: true => false,
        congestion: CongestionControl::Off => CongestionControl::Dcqcn(Dcqcn::MLX5), line_rate: None => Some(1_000_000),
        notification: None => Some(CongestionNotification::default()),
        staging_chunk: 1 << 16 => 1 << 17, staging_chunks: 128 => 4,
    );
    all(&Config::default(), &[], &set);
    let set = fields!(CongestionNotification::default();
        min_time_between_cnps: Duration::from_micros(50) => Duration::ZERO,
        scope: CnpScope::QueuePair => CnpScope::Port, cnp_dscp: 48 => 1, cnp_802p_prio: 6 => 1);
    all(&CongestionNotification::default(), &[], &set);
    // For a preset, whose parameters are not defaults.
    let set = fields!(Dcqcn::MLX5;
        rules: DcqcnRules::Mlx => DcqcnRules::Zhu, dce_tcp_g: 1019 => 1, dce_tcp_rtt: 1 => 2, rpg_time_reset: 300 => 1,
        rpg_byte_reset: 32_767 => 1, rpg_threshold: 1 => 2, rpg_ai_rate: 5 => 1, rpg_hai_rate: 50 => 1,
        rpg_min_rate: 1 => 2, rpg_max_rate: 0 => 1, initial_alpha_value: 1023 => 1,
        rate_reduce_monitor_period: 4 => 1, rpg_gd: 11 => 1, rpg_min_dec_fac: 50 => 1,
        rate_to_set_on_first_cnp: 0 => 1, clamp_tgt_rate: false => true, clamp_tgt_rate_after_time_inc: true => false);
    all(&Dcqcn::MLX5, &[], &set);
    let set = fields!(RunnerConfig::default(); idle: Idle::default() => Idle::Spin, core: None => Some(1));
    all(&RunnerConfig::default(), &[], &set);
    let set = fields!(HandleConfig::default();
        commands: 256 => 1, deliveries: 1024 => 1, idle: Idle::default() => Idle::Spin);
    all(&HandleConfig::default(), &[], &set);
    let set = fields!(SendFlags::default();
        signaled: false => true, fence: false => true, solicited: false => true,
        lazy_ack: false => true);
    all(&SendFlags::default(), &[], &set);
    let gid = Gid::from_ipv4([192, 0, 2, 1].into());
    let set = fields!(GidEntry::new(gid); roce_v1: false => true, vlan: None => Some(5));
    all(&GidEntry::new(gid), &["gid"], &set);
    let endpoint = Endpoint::new(gid, Qpn::new(2), Psn::new(0));
    let set = fields!(endpoint; path_mtu: PathMtu::Mtu1024 => PathMtu::Mtu256, rd_atomic: 16 => 1);
    all(&endpoint, &["gid", "qpn", "psn"], &set);
}

#[test]
fn each_setter_of_a_queue_pair_and_its_transitions_sets_its_field() {
    let (near, _far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let mut context = Context::open(Box::new(near), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let [cq, other] = [(); 2].map(|()| context.create_cq(1).unwrap());
    let srq = context.create_srq(&SrqConfig::new(pd)).unwrap();
    for (config, qp_type) in [
        (QpConfig::rc(pd, cq), QpType::Rc),
        (QpConfig::uc(pd, cq), QpType::Uc),
        (QpConfig::ud(pd, cq), QpType::Ud),
    ] {
        assert_eq!((config.qp_type, config.pd), (qp_type, pd));
        let set = fields!(config;
            send_cq: cq => other, recv_cq: cq => other, srq: None => Some(srq), max_send_wr: 128 => 1,
            max_recv_wr: 128 => 1, max_send_sge: 4 => 1, max_recv_sge: 4 => 1, max_inline_data: 64 => 0,
            signal_all: false => true, congestion: None => Some(CongestionControl::Off), window: None => Some(1));
        all(&config, &["qp_type", "pd"], &set);
    }
    let set = fields!(SrqConfig::new(pd); max_wr: 128 => 1, max_sge: 4 => 1);
    all(&SrqConfig::new(pd), &["pd"], &set);

    let (gid, qpn, psn) = (Gid::from_ipv4([192, 0, 2, 2].into()), Qpn::new(2), Psn::new(7));
    let address = AddressVector::new(gid, 0);
    let set = fields!(address;
        mac: None => Some(MacAddr([2; 6])), traffic_class: 0 => 106, flow_label: 0 => 1, hop_limit: 64 => 1,
        service_level: 0 => 3);
    all(&address, &["gid", "sgid_index"], &set);
    let receive = ReadyToReceive::new(address, qpn, psn);
    let set = fields!(receive;
        path_mtu: PathMtu::Mtu1024 => PathMtu::Mtu4096, max_dest_rd_atomic: 16 => 1,
        min_rnr_timer: RnrTimer::DEFAULT => RnrTimer::LONGEST, selective_repeat: false => true);
    all(&receive, &["address", "dest_qpn", "rq_psn"], &set);
    let path = UnreliablePath::new(address, qpn, psn);
    let set = fields!(path; path_mtu: PathMtu::Mtu1024 => PathMtu::Mtu4096);
    all(&path, &["address", "dest_qpn", "rq_psn"], &set);
    let set = fields!(ReadyToSend::new(psn);
        timeout: 14 => 1, retry_count: 7 => 1, rnr_retry: 7 => 1, max_rd_atomic: 16 => 1);
    all(&ReadyToSend::new(psn), &["sq_psn"], &set);
    let set = fields!(QpUpdate::default();
        access: None => Some(Access::NONE), qkey: None => Some(1), pkey_index: None => Some(1),
        min_rnr_timer: None => Some(RnrTimer::LONGEST), address: None => Some(address), timeout: None => Some(1),
        retry_count: None => Some(1), rnr_retry: None => Some(1), max_rd_atomic: None => Some(1),
        max_dest_rd_atomic: None => Some(1));
    all(&QpUpdate::default(), &[], &set);

    let channel = context.create_cm_channel().unwrap();
    let set = fields!(ListenConfig::default();
        backlog: 128 => 1, per_source: 64 => 1, pkey_index: None => Some(1), channel: None => Some(channel));
    all(&ListenConfig::default(), &[], &set);
    let set = fields!(ConnectionParameters::default();
        private_data: b"" => b"x", responder_resources: 16 => 1, initiator_depth: 16 => 1, retry_count: 7 => 1,
        rnr_retry: 7 => 1, timeout: 17 => 1, path_mtu: None => Some(PathMtu::Mtu256), pkey_index: None => Some(1),
        traffic_class: None => Some(4), cm_timeout: 20 => 1, cm_retries: 15 => 1, channel: None => Some(channel));
    all(&ConnectionParameters::default(), &[], &set);
}

#[test]
fn each_setter_of_a_driver_sets_its_field() {
    use driver::loopback::SwitchConfig;
    use driver::shm::ShmConfig;
    use driver::sim::{EcnConfig, LinkConfig, NetworkConfig};
    use driver::udp::UdpConfig;
    use driver::{Capabilities, Layer, SocketTerms};

    let set = fields!(SwitchConfig::default(); mtu: 4200 => 1500, depth: 4096 => 1);
    all(&SwitchConfig::default(), &[], &set);
    let set = fields!(NetworkConfig::default(); mtu: 4200 => 1500, frames: 4096 => 1);
    all(&NetworkConfig::default(), &[], &set);
    let ecn = EcnConfig::new(1, 2, 0.5);
    assert_eq!((ecn.kmin_bytes, ecn.kmax_bytes, ecn.pmax), (1, 2, 0.5));
    let (zero, micro) = (Duration::ZERO, Duration::from_micros(1));
    let set = fields!(LinkConfig::default();
        loss: 0.0 => 0.5, duplicate: 0.0 => 0.5, corrupt: 0.0 => 0.5, reorder: 0.0 => 0.5, reorder_by: 3 => 1,
        reorder_hold: Duration::from_micros(100) => micro, delay: zero => micro, jitter: zero => micro,
        rate: None => Some(1), queue_limit: None => Some(1), ecn: None => Some(ecn));
    all(&LinkConfig::default(), &[], &set);
    let own = [192, 0, 2, 1].into();
    let set = fields!(UdpConfig::new(own);
        segmentation: true => false, aggregation: true => false, sharing: true => false, shared_memory: SharedMemory::On => SharedMemory::Off,
        busy_poll: None => Some(micro));
    all(&UdpConfig::new(own), &["address"], &set);
    let set = fields!(ShmConfig::new("lab"); icrc: true => false);
    all(&ShmConfig::new("lab"), &["name"], &set);
    let terms = SocketTerms::new(4791, 1 << 20);
    let port = Capabilities::new("mine", "if0", [2; 6], 1500);
    let set = fields!(port.clone();
        layer: Layer::Ethernet => Layer::Ip(terms), addresses: Vec::<std::net::IpAddr>::new() => vec![own],
        max_frame: 1518 => 9000, qpns: (0, 1) => (1, 2), comm_ids: (0, 1) => (1, 2));
    assert_eq!((&*port.description, &*port.clone().description("fast").description), ("", "fast"));
    all(&port, &["driver", "interface", "mac", "mtu", "description"], &set);
    #[cfg(feature = "af_xdp")]
    {
        use driver::af_xdp::AfXdpConfig;
        let set = fields!(AfXdpConfig::new("eth0");
            queue: None => Some(1), rx_frames: 8192 => 64, tx_frames: 1024 => 1, roce_v1: false => true,
            busy_poll: None => Some(micro), sharing: true => false, shared_memory: SharedMemory::On => SharedMemory::Off);
        all(&AfXdpConfig::new("eth0"), &["interface"], &set);
    }
    {
        use driver::dpdk::DpdkConfig;
        let set = fields!(DpdkConfig::new("net_null0", &[]);
            eal: Vec::<String>::new() => vec!["-m".to_owned()], mtu: None => Some(1500),
            rx_descriptors: 4096 => 64, tx_descriptors: 1024 => 64);
        all(&DpdkConfig::new("net_null0", &[]), &["port", "addresses"], &set);
    }
}
