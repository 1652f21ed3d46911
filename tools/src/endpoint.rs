//! One end of a measurement: an open device with its context, driven by the calling thread. All commands use it to open
//! a port and connect queue pairs.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ferroce::driver::Error as DriverError;
use ferroce::driver::pcap::{Recorder, Recording};
use ferroce::wire::cm::RejectReason;
use ferroce::{
    AddressVector, CmEvent, CmId, CongestionControl, ConnectionParameters, Context, Cq, Device, DeviceSpec,
    Error, Event, Gid, Idle, Nanos, Notify, PKEY_DEFAULT, PKey, PacketDriver, PathMtu, Pd, Poller, Psn, Qp,
    Qpn, ReadyToReceive, ReadyToSend, Transition, Unreachable, WorkCompletion, pin_to_core,
};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tracing::{info, warn};

use crate::congestion::CongestionArgs;
use crate::failure::{Failure, INTERRUPTED, OrFail};

/// Options of every command that drives a port.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PortArgs {
    /// An interface (eth0), or a driver with its argument (af_xdp:eth0:QUEUE, udp:192.0.2.1, shm:NAME, ibverbs:mlx5_0
    /// for an RNIC, loopback). Up to 64 processes of one user can share an address (udp, or an interface). Processes of
    /// this host communicate by shared memory, unless ,shm=off follows the interface or address.
    #[arg(short, long)]
    pub(crate) device: DeviceSpec,
    /// Pin the poll loop to this core.
    #[arg(long, value_name = "N")]
    pub(crate) core: Option<usize>,
    /// What the poll loop does when it has no work: spin, yield, block, or adaptive (spin, then yield, then block).
    #[arg(long, value_name = "HOW", default_value = "adaptive", conflicts_with = "spin")]
    pub(crate) idle: Idle,
    /// The same as --idle spin.
    #[arg(long)]
    pub(crate) spin: bool,
    /// The P_Key of this end's port, instead of 0xffff. Its low 15 bits are the partition, which must be the same at
    /// both ends; 0x8000 is full membership, which at least one end must have.
    #[arg(long, value_name = "KEY", value_parser = parse_pkey)]
    pub(crate) pkey: Option<PKey>,
    #[command(flatten)]
    pub(crate) congestion: CongestionArgs,
    /// Record all frames that this end sends and receives into a pcapng file.
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// The state of that recording.
    #[arg(skip)]
    recording: Arc<OnceLock<Recording>>,
}

impl PortArgs {
    /// Opens the device that `--device` names.
    pub(crate) fn open(&self) -> Result<Device, Failure> {
        Ok(self.device.open()?)
    }

    /// Fails if `--pcap` has missed frames. The last ones are written when the endpoint is dropped.
    pub(crate) fn check_recording(&self) -> Result<(), Failure> {
        match self.recording.get().and_then(|recording| recording.failure()) {
            Some(failure) => Err(Failure::run(format!("{failure}; the rest is not recorded"))),
            None => Ok(()),
        }
    }

    /// The options for the server of a self-test: core and capture belong to the client. The server is a full member,
    /// so the client may be a limited one.
    pub(crate) fn for_server(&self) -> PortArgs {
        let pkey = self.pkey.map(|pkey| PKey(pkey.0 | 0x8000));
        if let Some(pkey) = pkey.filter(|pkey| Some(*pkey) != self.pkey) {
            info!(
                "the server in this process uses P_Key {pkey}: two limited members would drop each other's packets"
            );
        }
        PortArgs { core: None, pcap: None, pkey, ..self.clone() }
    }
}

/// Parses a P_Key.
pub(crate) fn parse_pkey(text: &str) -> Result<PKey, String> {
    let number = match text.strip_prefix("0x") {
        Some(hex) => u16::from_str_radix(hex, 16),
        None => text.parse(),
    };
    let pkey = number.ok().map(PKey).filter(|pkey| pkey.is_valid());
    pkey.ok_or_else(|| {
        "must be a P_Key of 16 bits, as 0x8001, with a partition other than 0 in the low 15".to_owned()
    })
}

/// Whether a device can't be opened because it is in use.
pub(crate) fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Driver(DriverError::PortInUse { .. } | DriverError::QueueBusy { .. }))
}

/// Set by SIGINT and SIGTERM; a second signal ends the process at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    pub(crate) fn install() -> Result<Interrupt, Failure> {
        let interrupt = Interrupt::default();
        let register = |signal| -> io::Result<()> {
            flag::register_conditional_shutdown(signal, INTERRUPTED.into(), interrupt.0.clone())?;
            flag::register(signal, interrupt.0.clone())?;
            Ok(())
        };
        [SIGINT, SIGTERM].into_iter().try_for_each(register).or_fail(|| "handling signals".into())?;
        Ok(interrupt)
    }

    /// As if a signal had arrived.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether a signal has arrived; the next one counts as the first again.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.is_set() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// For a command that needs no cleanup: SIGINT and SIGTERM end the process at once, with this status.
pub(crate) fn end_at_once_on_signals(status: u8) -> Result<(), Failure> {
    let always = Arc::new(AtomicBool::new(true));
    [SIGINT, SIGTERM].into_iter().try_for_each(|signal| end_at_once_while(&always, signal, status))
}

/// While the flag is set, the signal ends the process at once.
pub(crate) fn end_at_once_while(flag: &Arc<AtomicBool>, signal: i32, status: u8) -> Result<(), Failure> {
    flag::register_conditional_shutdown(signal, status.into(), flag.clone())
        .or_fail(|| "handling signals".into())?;
    Ok(())
}

/// A context with one protection domain and one completion queue.
pub(crate) struct Endpoint {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) interrupt: Interrupt,
    /// The device as given with `--device`.
    pub(crate) device: String,
    /// Its congestion control as a sender.
    pub(crate) congestion: CongestionControl,
    /// The traffic class of its packets, if given.
    traffic_class: Option<u8>,
    /// The other end, once it is known.
    pub(crate) peer: Option<Gid>,
    poller: Poller,
    /// A completion event has arrived since the CQ was armed.
    notified: bool,
    /// Whether packets of another partition have been reported.
    told_pkey: bool,
    /// Queue pairs of callers that are not connected yet. One that violates the protocol is removed, which is not a
    /// failure.
    pub(crate) unproven: Vec<Qp>,
}

/// The attributes of a connected queue pair, the same at both ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// The peer's address, and the index of the own one.
    pub(crate) address: AddressVector,
    /// Payload of a full packet.
    pub(crate) mtu: PathMtu,
    /// ACK timeout, 4.096 µs · 2^timeout.
    pub(crate) timeout: u8,
    /// Outstanding READs and atomics, in each direction.
    pub(crate) rd_atomic: u8,
    /// Both ends have agreed on it.
    pub(crate) selective_repeat: bool,
}

/// The packet driver of a device, for commands that inspect frames.
pub(crate) fn packet_driver(device: Device, what: &str) -> Result<Box<dyn PacketDriver>, Failure> {
    device.into_driver().map_err(|rnic| {
        let name = &rnic.capabilities().interface;
        Failure::usage(format!(
            "{what}: the card handles the frames of '{name}'; use a packet driver, as udp:ADDRESS"
        ))
    })
}

impl Endpoint {
    /// See the function of the same name.
    pub(crate) fn counts_packets(&self) -> bool {
        counts_packets(&self.context)
    }

    /// Creates a context on `device`, with a recording if the options request one, and pins the calling thread.
    pub(crate) fn new(
        device: Device,
        args: &PortArgs,
        cq_capacity: u32,
        interrupt: Interrupt,
    ) -> Result<Endpoint, Failure> {
        if let Some(core) = args.core {
            pin_to_core(core).map_err(|error| Failure::usage(format!("--core: {error}")))?;
            info!(core, "poll loop pinned");
        }
        let device = match &args.pcap {
            Some(path) => {
                let recorder = Recorder::create(packet_driver(device, "--pcap")?, path)?;
                args.recording.get_or_init(|| recorder.recording());
                Box::new(recorder).into()
            }
            None => device,
        };
        let config = args.congestion.config(&device)?;
        let mut context = Context::open(device, &config)?;
        take_pkey(&mut context, args.pkey.unwrap_or(PKEY_DEFAULT))?;
        export(&mut context);
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(cq_capacity)?;
        let poller = Poller::idling(if args.spin { Idle::Spin } else { args.idle });
        let device = args.device.to_string();
        Ok(Endpoint {
            context,
            pd,
            cq,
            interrupt,
            device,
            congestion: args.congestion.congestion,
            traffic_class: args.congestion.traffic_class(),
            peer: None,
            poller,
            notified: false,
            told_pkey: false,
            unproven: Vec::new(),
        })
    }

    /// One iteration of the poll loop.
    pub(crate) fn poll(&mut self) -> Result<usize, Failure> {
        self.interrupt.check()?;
        let frames = self.poller.poll(&mut self.context)?;
        self.check_events()?;
        Ok(frames)
    }

    pub(crate) fn now(&mut self) -> Nanos {
        self.poller.now()
    }

    /// Takes the oldest completion, in success or in error.
    pub(crate) fn completion(&mut self) -> Result<Option<WorkCompletion>, Failure> {
        Ok(self.context.poll_cq(self.cq)?)
    }

    /// Replaces the CQ by one of another size, while no queue pair uses it.
    pub(crate) fn replace_cq(&mut self, capacity: u32) -> Result<(), Failure> {
        let cq = self.context.create_cq(capacity)?;
        self.context.destroy_cq(std::mem::replace(&mut self.cq, cq))?;
        Ok(())
    }

    /// Arms the CQ. Returns whether completions may be pending: those of a notification that arrived meanwhile.
    pub(crate) fn arm(&mut self) -> Result<bool, Failure> {
        let notified = std::mem::take(&mut self.notified);
        self.context.req_notify_cq(self.cq, Notify::Next)?;
        Ok(notified)
    }

    /// From now on polls without spinning.
    pub(crate) fn block_when_idle(&mut self) {
        self.poller = Poller::blocking();
    }

    /// The index of the source GID: `wanted` if it is given, else the first one of the peer's IP version, else the
    /// first IPv4 one, else the first one.
    pub(crate) fn gid_index(&self, wanted: Option<usize>, peer: Option<Gid>) -> Result<usize, Failure> {
        let port = self.context.port();
        let table = &port.gids;
        let listed = || {
            let rows: Vec<_> = table.iter().enumerate().map(|(i, row)| format!("{i} {}", row.gid)).collect();
            format!("the GID table of '{}' has {}", port.interface, rows.join(", "))
        };
        if table.is_empty() {
            return Err(Failure::usage(format!(
                "'{}' has no IP address, so it has no GID; add an address: `ip addr add 10.0.0.1/24 dev {0}`",
                port.interface
            )));
        }
        match wanted {
            Some(index) if index < table.len() => Ok(index),
            Some(index) => Err(Failure::usage(format!("GID index {index}: {}", listed()))),
            None => {
                let index = peer
                    .and_then(|peer| port.gid_index_for(peer))
                    .or_else(|| table.iter().position(|row| !row.gid.is_ipv6()))
                    .unwrap_or(0);
                info!(index, gid = %table[index].gid, "GID chosen; {}", listed());
                Ok(index)
            }
        }
    }

    /// The largest path MTU from the GID at `index`.
    pub(crate) fn largest_path_mtu(&self, index: usize) -> Result<PathMtu, Failure> {
        let port = self.context.port();
        port.path_mtu(port.gids[index].gid.is_ipv6()).ok_or_else(|| {
            Failure::usage(format!(
                "'{}' has an MTU of {}, too small for any path MTU",
                port.interface, port.mtu
            ))
        })
    }

    /// Fails if full packets of a path MTU exceed the interface's MTU, from the GID at `index` or else from any.
    pub(crate) fn check_path_mtu(&self, path_mtu: PathMtu, index: Option<usize>) -> Result<(), Failure> {
        let port = self.context.port();
        let may_send = port.gids.iter().enumerate().filter(|(i, _)| index.is_none_or(|index| index == *i));
        match may_send.map(|(_, row)| path_mtu.required_l3_mtu(row.gid.is_ipv6())).min() {
            Some(needed) if needed > port.mtu => {
                let (interface, mtu) = (port.interface.clone(), port.mtu);
                Err(Error::PathMtu { path_mtu, needed, interface, mtu }.into())
            }
            _ => Ok(()),
        }
    }

    /// Fails if a datagram from the GID at `index` exceeds a packet.
    pub(crate) fn check_datagram(&self, index: usize, size: u32) -> Result<(), Failure> {
        let most = self.largest_path_mtu(index)?.bytes();
        if size <= most {
            return Ok(());
        }
        let interface = &self.context.port().interface;
        Err(Failure::usage(format!(
            "-s {size}: must be at most {most}, the longest datagram on '{interface}'"
        )))
    }

    /// The address of a peer, with the GID at `index` as the source.
    pub(crate) fn address(&self, peer: Gid, index: usize) -> AddressVector {
        AddressVector::new(peer, index).traffic_class(self.traffic_class.unwrap_or_default())
    }

    /// rdma_cm's defaults, except that a peer that does not answer is given up after 9 s instead of 69 s.
    pub(crate) fn connection_parameters(&self) -> ConnectionParameters<'static> {
        ConnectionParameters::default()
            .cm_timeout_at_least(Duration::from_secs(1))
            .cm_retries(7)
            .traffic_class(self.traffic_class)
    }

    /// INIT → RTR → RTS.
    pub(crate) fn connect(
        &mut self,
        qp: Qp,
        path: &Path,
        local_psn: Psn,
        (remote_qpn, remote_psn): (Qpn, Psn),
    ) -> Result<(), Failure> {
        let receive = ReadyToReceive::new(path.address, remote_qpn, remote_psn)
            .path_mtu(path.mtu)
            .max_dest_rd_atomic(path.rd_atomic)
            .selective_repeat(path.selective_repeat);
        let send = ReadyToSend::new(local_psn)
            .timeout(path.timeout)
            .retry_count(RETRY_COUNT)
            .rnr_retry(RETRY_COUNT)
            .max_rd_atomic(path.rd_atomic);
        self.peer = Some(path.address.gid);
        self.context.modify_qp(qp, Transition::ReadyToReceive(receive))?;
        self.context.modify_qp(qp, Transition::ReadyToSend(send))?;
        Ok(())
    }

    /// The next event of the connection manager, without a time limit.
    pub(crate) fn wait_cm_event(&mut self) -> Result<CmEvent, Failure> {
        loop {
            if let Some(event) = self.context.next_cm_event() {
                return Ok(event);
            }
            self.poll()?;
        }
    }

    /// Connects a queue pair to a server.
    pub(crate) fn call(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Failure> {
        self.peer = Some(Gid::from(to.ip()));
        let id = self.context.connect(qp, to, parameters)?;
        match self.wait_cm_event()? {
            CmEvent::Established { id: connected, .. } if connected == id => Ok(id),
            other => Err(self.no_connection(&other)),
        }
    }

    /// The shared-memory switch that this end has joined, if any.
    pub(crate) fn switch(&self) -> Option<&str> {
        let capabilities = self.context.capabilities();
        (capabilities.driver == "shm").then_some(&capabilities.interface)
    }

    /// The failure for an event other than the expected one.
    pub(crate) fn no_connection(&self, event: &CmEvent) -> Failure {
        Failure::run(match event {
            CmEvent::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } if self.switch().is_some() => {
                format!(
                    "no server on '{}' listens on this port (-p); has it joined that too, as this user and in this network \
                     namespace?",
                    self.device
                )
            }
            CmEvent::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } => {
                "the peer refuses: no server listens on this port (-p); a server that serves another \
                 client listens again afterwards"
                    .to_owned()
            }
            CmEvent::Rejected { reason, .. } => format!("the peer refuses: {reason}"),
            CmEvent::Unreachable { reason: Unreachable::Silent { .. }, .. } => format!(
                "the peer does not answer; is its UDP port 4791 open, does a server listen there, and is it in the \
                 partition of {} (--pkey)?{}",
                self.pkey(),
                self.evidence()
            ),
            CmEvent::Unreachable { reason, .. } => reason.to_string(),
            CmEvent::Disconnected { .. } => "the peer has ended the connection".to_owned(),
            other => format!("{other:?} was not expected"),
        })
    }

    /// The one P_Key of this end.
    pub(crate) fn pkey(&self) -> PKey {
        self.context.port().pkeys.iter().next().map_or(PKEY_DEFAULT, |(_, pkey)| pkey)
    }

    fn check_events(&mut self) -> Result<(), Failure> {
        while let Some(event) = self.context.next_event() {
            match event {
                // Work requests report the reason in their completions.
                Event::Completion(_) => self.notified = true,
                // Anyone can send packets of another partition; they are dropped and counted, and reported once.
                Event::PkeyViolation { pkey, source, .. } => {
                    if !std::mem::replace(&mut self.told_pkey, true) {
                        let own = self.pkey();
                        warn!(
                            "{source} sends packets with P_Key {pkey}, and this end has {own} (--pkey): they are \
                             dropped (rx_pkey_mismatch)"
                        );
                    }
                }
                Event::CommEst(_) | Event::SqDrained(_) => {}
                Event::QpUnreachable { reason, .. } | Event::AhUnreachable { reason, .. } => {
                    return Err(Failure::run(reason.to_string()));
                }
                Event::QpFatal(qp) | Event::QpReqErr(qp) | Event::QpAccessErr(qp)
                    if self.unproven.contains(&qp) =>
                {
                    self.unproven.retain(|unproven| *unproven != qp);
                }
                other => return Err(self.struck(&other)),
            }
        }
        Ok(())
    }
}

/// Whether packets are counted here. An RNIC counts its own packets, and reports them incompletely.
pub(crate) fn counts_packets(context: &Context) -> bool {
    context.capabilities().driver != "ibverbs"
}

/// Sets the P_Key of a new context.
pub(crate) fn take_pkey(context: &mut Context, pkey: PKey) -> Result<(), Failure> {
    if pkey != PKEY_DEFAULT {
        // The first P_Key is the default of all objects.
        context.remove_pkey(0).map_err(|error| match error {
            Error::Unsupported(what) => Failure::usage(format!("--pkey {pkey}: {what}")),
            error => error.into(),
        })?;
        context.add_pkey(pkey)?;
    }
    Ok(())
}

/// Makes a context visible to `ferroce stat`. A failure to do so is ignored.
pub(crate) fn export(context: &mut Context) {
    if let Err(error) = context.export() {
        warn!("`ferroce stat` will not show this context: {error}");
    }
}

/// Retries of both kinds; for RNR, 7 means without limit.
pub(crate) const RETRY_COUNT: u8 = 7;
