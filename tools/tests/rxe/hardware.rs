//! The command over rdma_rxe as an RNIC, in the guest, and the removal of an RNIC.

use std::time::{Duration, Instant};

use ferroce::driver::gpu::{Device as _, strict::Strict};
use ferroce::{
    Access, Config, Context, DeviceSpec, Memory, MemoryKind, Nanos, QpConfig, ReceiveWorkRequest, Transition,
    WcStatus,
};
use ferroce_driver_test_support::file_gpu::FileGpu;

use crate::guest::{GUEST, Guest, OURS, report};
use crate::write;

/// The commands of `ferroce` on the RNIC in the guest; outside is the software stack, over AF_XDP.
const COMMANDS: [&str; 10] = [
    "pingpong --service rc -n 100",
    "pingpong --service uc -n 100",
    "pingpong --service ud -n 100",
    "perf write bw -n 200 --check",
    "perf read bw -n 200 --check",
    "perf send bw -n 200 --check",
    "perf atomic bw -n 200 --check",
    "perf write lat -n 100",
    "perf send lat -n 100",
    "perf send bw -n 200 -c ud",
];
/// The TCP port of pingpong, perf and perftest.
const PORT: u16 = 18515;
/// The port of the example.
const EXAMPLE: u16 = 7010;
/// Unmodified programs against `ferroce` on an RNIC: the commands here, and in the guest.
const PERFTEST: [(&str, &str); 3] = [
    ("perf write bw -n 200", "ib_write_bw -d rxe0 -x 1 -n 200 -F"),
    ("perf read lat -n 200", "ib_read_lat -d rxe0 -x 1 -n 200 -F"),
    ("perf send bw -n 200", "ib_send_bw -d rxe0 -x 1 -n 200 -F"),
];

pub(crate) fn run(guest: &Guest) -> u32 {
    lists(guest);
    for command in COMMANDS {
        let (name, options) = command.split_once(' ').expect("a command and its options");
        let server = guest.start_inside("", "ferroce", &format!("{name} -d ibverbs:rxe0 {options}"));
        guest.wait_for_listener(PORT);
        guest.start_ferroce(&format!("{name} -d af_xdp:fe0 {options} {}", GUEST[0])).succeed();
        server.succeed();
        report(command, "ibverbs:rxe0", "server");
        let server = guest.start_server(&format!("{name} -d af_xdp:fe0 {options}"));
        guest.start_inside("", "ferroce", &format!("{name} -d ibverbs:rxe0 {options} {}", OURS[0])).succeed();
        server.succeed();
        report(command, "ibverbs:rxe0", "client");
    }
    for (ours, theirs) in PERFTEST {
        let (name, options) = ours.split_once(' ').expect("a command and its options");
        let server = guest.start_inside("", "ferroce", &format!("{name} -d ibverbs:rxe0 {options}"));
        guest.wait_for_listener(PORT);
        guest.start(&format!("{theirs} {}", GUEST[0])).succeed();
        server.succeed();
        report(theirs, "ibverbs:rxe0", "server");
    }
    let connections = connections(guest);
    examples(guest);
    shows_itself(guest);
    refuses_gpus(guest);
    removed(guest);
    connections + (2 * COMMANDS.len() + PERFTEST.len() + 5) as u32
}

/// `devinfo` lists the RNIC, and the RNIC its addresses.
fn lists(guest: &Guest) {
    let said = guest.start_inside("", "ferroce", "devinfo -d ibverbs:rxe0").succeed();
    for expected in [
        "device ibverbs: port 1 of rxe0",
        GUEST[0],
        GUEST[1],
        "-d ibverbs:rxe0 selects ibverbs: the name says so",
        "keys: guessable",
        "events that it does not raise: QP_ACCESS_ERR",
        "congestion control of the card: not reported",
    ] {
        assert!(said.contains(expected), "'{expected}' is not in:\n{said}");
    }
    // The interface's name selects a packet driver, and the output mentions the RNIC. AF_XDP of this kernel requires
    // that a frame fits into a page.
    guest.start("ip link set eth0 mtu 3000").succeed();
    let said = guest.start_inside("", "ferroce", "devinfo -d eth0").succeed();
    compares(guest);
    guest.start("ip link set eth0 mtu 9000").succeed();
    let refused = guest.start_inside("", "ferroce", "pingpong -d af_xdp:eth0").finish();
    let reason = "set the MTU of eth0 to 3400 or less";
    assert!(refused.as_ref().is_err_and(|said| said.contains(reason)), "{refused:?}");
    for expected in [
        "-d eth0 selects af_xdp: the lowest latency",
        "rdma_rxe, the kernel's software RoCE, is on this interface too: -d ibverbs:rxe0",
    ] {
        assert!(said.contains(expected), "'{expected}' is not in:\n{said}");
    }
}

/// AF_XDP and rdma_rxe on one interface, in turn; outside it is always AF_XDP.
fn compares(guest: &Guest) {
    let test = "perf write bw -n 100 -s 4096 -m 1024";
    for (inside, devices) in [
        ("-d af_xdp:eth0 --compare", "af_xdp:eth0 and 3 over ibverbs:rxe0"),
        ("-d af_xdp:eth0 --compare=ibverbs:rxe0:1", "af_xdp:eth0 and 3 over ibverbs:rxe0:1"),
    ] {
        let server = guest.start_inside("", "ferroce", &format!("{test} {inside}"));
        guest.wait_for_listener(PORT);
        let client = format!("{test} -d af_xdp:fe0 --compare=af_xdp:fe0 --json {}", GUEST[0]);
        let said = guest.start_ferroce(&client).succeed();
        assert!(said.contains("\"unit\": \"Gb/s\""), "{said}");
        let said = server.succeed();
        assert!(said.contains(&format!("served 3 runs over {devices}, in turn")), "{said}");
    }
    let server = guest.start_server(&format!("{test} -d af_xdp:fe0 --compare=af_xdp:fe0"));
    let client = format!("{test} -d af_xdp:eth0 --compare {}", OURS[0]);
    let said = guest.start_inside("", "ferroce", &client).succeed();
    print!("{said}");
    assert!(said.contains("ratio: how many times as fast ibverbs:rxe0 is as af_xdp:eth0"), "{said}");
    server.succeed();
    report("perf --compare", "ibverbs:rxe0", "both");

    // rdma_rxe has UDP port 4791 of all addresses, and there is no RNIC on the other interface.
    for (devices, reason) in [
        (
            "-d udp:eth0 --compare=ibverbs:rxe0",
            "'udp:eth0' can't be opened: UDP port 4791 of 10.77.0.11 is in use",
        ),
        ("-d af_xdp:eth1 --compare", "no RNIC is on 'eth1'"),
        ("-d af_xdp:eth0 --compare=ibverbs:rxe9", "'ibverbs:rxe9' can't be opened"),
        (
            "-d af_xdp:eth0 --congestion mlx5 --line-rate 10 --compare=ibverbs:rxe0",
            "'ibverbs:rxe0' can't be opened",
        ),
    ] {
        let refused = guest.start_inside("", "ferroce", &format!("{test} {devices}")).finish();
        assert!(refused.as_ref().is_err_and(|said| said.contains(reason)), "{devices}: {refused:?}");
    }
}

/// rdma_rxe does not support GPU memory, and the error says so.
fn refuses_gpus(guest: &Guest) {
    let said = guest.start_inside("FERROCE_DMA_BUF=ibverbs:rxe0", "test", "--nocapture").succeed();
    for told in said.lines().filter(|line| line.contains("memory of a GPU")) {
        println!("{told}");
    }
    report("memory of a GPU, which is refused", "ibverbs:rxe0", "client");
}

/// The part in the guest, whose kernel has no udmabuf: the file of a fake GPU stands for the dma-buf. It is not
/// accessed, since the provider has no such function.
pub(crate) fn gpu_inside(device: &str) {
    let spec: DeviceSpec = device.parse().expect("a device");
    let mut context = Context::open(spec.open().expect("the card"), &Config::default()).expect("a context");
    let pd = context.alloc_pd().expect("a PD");
    let strict = Strict::default().open().expect("a device").allocate(8192).expect("memory");
    for (memory, expected) in [
        (
            FileGpu::default().memory(8192).0,
            "ibv_reg_dmabuf_mr of rxe0: Operation not supported (os error 95); the card, its driver or this kernel \
             does not accept memory of a GPU (8192 bytes of files:0) as a dma-buf: register memory of the host and \
             copy",
        ),
        (
            strict,
            "rxe0 accesses memory of a GPU through a dma-buf, and there is none: strict:0: a dma-buf of its memory: \
             /dev/udmabuf",
        ),
    ] {
        let refused = context.register(pd, memory, Access::LOCAL_WRITE).expect_err("rdma_rxe takes none");
        let (text, kind) = (refused.source.to_string(), refused.memory.kind());
        println!("{text}");
        assert!(text.contains(expected), "{text}");
        assert_eq!(kind, MemoryKind::Device);
    }
    let host = Memory::zeroed(8192).expect("memory");
    let host = context.register(pd, host, Access::LOCAL_WRITE).expect("a region of the host's");
    context.deregister(host).expect("it ends");
}

/// `stat` shows a context on an RNIC: its objects, and the kernel's counters of the port.
fn shows_itself(guest: &Guest) {
    let server = guest.start_inside("", "ferroce", "perf write bw -d ibverbs:rxe0 -D 8");
    guest.wait_for_listener(PORT);
    let client = guest.start_ferroce(&format!("perf write bw -d af_xdp:fe0 -D 8 {}", GUEST[0]));
    std::thread::sleep(Duration::from_secs(4));
    let said = guest.start_inside("", "ferroce", "stat rxe0 --json").succeed();
    let start = said.find('[').unwrap_or_else(|| panic!("no contexts:\n{said}"));
    let told: serde_json::Value =
        serde_json::from_str(&said[start..]).unwrap_or_else(|error| panic!("{error}:\n{said}"));
    let context = &told[0];
    assert_eq!(context["labels"]["driver"], "ibverbs", "{said}");
    assert_eq!(context["gauges"]["qps"]["rts"], 1, "{said}");
    assert!(context["counters"]["rcvd_pkts"].as_u64() > Some(0), "{said}");
    client.succeed();
    server.succeed();
    report("stat of a running perf", "ibverbs:rxe0", "server");
}

/// rdma_cm's programs by `ferroce` on an RNIC, with the kernel's connection manager, against those by `ferroce` on the
/// software stack and against the unmodified ones.
fn connections(guest: &Guest) -> u32 {
    let programs = [
        ("rping", 7174, "5 pings", ["DISCONNECT EVENT", "rdma-ping-4:"]),
        ("ucmatose", 7471, "disconnected", ["return status 0"; 2]),
        ("udaddy", 7174, "5 received", ["return status 0"; 2]),
    ];
    let mut cases = 0;
    for (name, port, good, [as_server, as_client]) in programs {
        let options = "-C 5 -S 300";
        for (version, device) in [(0, "af_xdp:fe0"), (1, "udp:fd77::1")] {
            let case = format!("{name}, IPv{}, to {device}", if version == 0 { 4 } else { 6 });
            let (theirs, ours) = (GUEST[version], OURS[version]);
            let server = guest.start_inside("", "ferroce", &format!("{name} -d ibverbs:rxe0 {options}"));
            guest.wait_for_cm_listener(port);
            let here = guest.start_ferroce(&format!("{name} -d {device} {options} {theirs}")).succeed();
            let there = server.succeed();
            assert!(here.contains(good) && there.contains(good), "{case}: {here}\n{there}");
            report(&case, "ibverbs:rxe0", "server");

            let server = guest.start_server(&format!("{name} -d {device} {options}"));
            let client = format!("{name} -d ibverbs:rxe0 {options} {ours}");
            let there = guest.start_inside("", "ferroce", &client).succeed();
            let here = server.succeed();
            assert!(here.contains(good) && there.contains(good), "{case}: {here}\n{there}");
            report(&case, "ibverbs:rxe0", "client");
            cases += 2;
        }
        // Both ends in the guest, where the kernel's connection manager connects to itself.
        let (server, client) = match name {
            "rping" => (format!("rping -s -v -a {}", GUEST[0]), format!("rping -c -v -a {}", GUEST[0])),
            _ => (name.to_owned(), format!("{name} -s {}", GUEST[0])),
        };
        let running = guest.start(&format!("{server} {options}"));
        guest.wait_for_cm_listener(port);
        let client_here = format!("{name} -d ibverbs:rxe0 {options} {}", GUEST[0]);
        let here = guest.start_inside("", "ferroce", &client_here).succeed();
        let there = running.succeed();
        assert!(here.contains(good) && there.contains(as_server), "{name}: {here}\n{there}");
        report(&format!("{name}, unmodified"), "ibverbs:rxe0", "client");
        let running = guest.start_inside("", "ferroce", &format!("{name} -d ibverbs:rxe0 {options}"));
        guest.wait_for_cm_listener(port);
        let there = guest.start(&format!("{client} {options}")).succeed();
        let here = running.succeed();
        assert!(here.contains(good) && there.contains(as_client), "{name}: {here}\n{there}");
        report(&format!("{name}, unmodified"), "ibverbs:rxe0", "server");
        cases += 2;
    }
    cases
}

/// `stack/examples/write.rs`, unmodified: on the RNIC, and on the software stack outside.
fn examples(guest: &Guest) {
    let (here, there) = (format!("{}:{EXAMPLE}", OURS[0]), format!("{}:{EXAMPLE}", GUEST[0]));
    let start = |role: &str, address: &str| {
        let environment = format!("cd /tmp; FERROCE_EXAMPLE='ibverbs:rxe0 {role} {address}'");
        guest.start_inside(&environment, "test", "--nocapture")
    };
    let server = start("listen", &there);
    guest.wait_for_listener(EXAMPLE);
    guest.inside(|| example(&format!("af_xdp:fe0 connect {there}")));
    let said = server.succeed();
    assert!(said.contains(&format!("hello from {}", OURS[0])), "{said}");
    report("stack/examples/write.rs", "ibverbs:rxe0", "server");
    let client = start("connect", &here);
    guest.inside(|| example(&format!("af_xdp:fe0 listen {here}")));
    client.succeed();
    report("stack/examples/write.rs", "ibverbs:rxe0", "client");
}

/// Runs the example with these arguments.
pub(crate) fn example(arguments: &str) {
    let [device, role, address] = arguments.split(' ').collect::<Vec<_>>()[..] else {
        panic!("FERROCE_EXAMPLE: DEVICE listen|connect ADDRESS:PORT")
    };
    // The other end may not listen yet.
    for _ in 0..400 {
        match write::run(device, role == "connect", address) {
            Err(error) if error.to_string().contains("refused") => {
                std::thread::sleep(Duration::from_millis(50));
            }
            end => return end.unwrap_or_else(|error| panic!("{arguments}: {error}")),
        }
    }
    panic!("nobody listens at {address}");
}

/// The removal of an RNIC while a context is open.
fn removed(guest: &Guest) {
    guest
        .start(
            "ip link add v2 type veth peer name v3 && ip link set v2 up && ip link set v3 up && \
                 ip addr add 10.80.0.1/24 dev v2 && rdma link add rxe2 type rxe netdev v2",
        )
        .succeed();
    let said = guest.start_inside("cd /tmp; FERROCE_REMOVED=ibverbs:rxe2", "test", "--nocapture").succeed();
    print!("{said}");
    guest.start("! rdma link show | grep rxe2 && ip link del v2").succeed();
    report("a card that is removed", "ibverbs:rxe2", "owner");
}

/// In the guest: a context on an RNIC, which is removed while receive WRs are posted.
pub(crate) fn inside(device: &str) {
    let spec: DeviceSpec = device.parse().expect("a device");
    let mut context = Context::open(spec.open().expect("the card"), &Config::default()).expect("a context");
    let pd = context.alloc_pd().expect("a PD");
    let cq = context.create_cq(16).expect("a CQ");
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).expect("a QP");
    let memory = Memory::zeroed(4096).expect("memory");
    let mr = context.register(pd, memory, Access::LOCAL_WRITE).expect("a region");
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).expect("INIT");
    for wr_id in 1..=3 {
        let sges = [mr.sge(0..64)];
        context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &sges }).expect("a receive");
    }
    let (start, name) = (Instant::now(), device.trim_start_matches("ibverbs:"));
    let now = || Nanos(start.elapsed().as_nanos() as u64);
    context.poll(now()).expect("the card is there");
    // rdma_rxe can't revoke a device from its users: the removal waits for the last of them, without a notification.
    let mut removal =
        std::process::Command::new("rdma").args(["link", "delete", name]).spawn().expect("rdma runs");
    while start.elapsed() < Duration::from_millis(500) {
        context.poll(now()).expect("the card is there until it is given back");
    }
    assert!(removal.try_wait().expect("a child").is_none(), "the removal did not wait");
    context.modify_qp(qp, Transition::Error).expect("the card still works");
    for wr_id in 1..=3 {
        let told = loop {
            context.poll(now()).expect("the card is there until it is given back");
            if let Some(told) = context.poll_cq(cq).expect("a CQ") {
                break told;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "receive {wr_id} is not flushed");
        };
        assert_eq!((told.wr_id, told.status), (wr_id, WcStatus::WrFlushErr));
    }
    drop(context);
    assert!(removal.wait().expect("a child").success());
    println!("given back and removed after {:?}", start.elapsed());
}
