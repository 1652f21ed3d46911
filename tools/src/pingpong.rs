//! `ferroce pingpong`: `ibv_rc_pingpong`, `ibv_uc_pingpong` and `ibv_ud_pingpong` on ferroce's stack. Each end can also
//! be the original program.
//!
//! - `pingpong/destination.rs`: the 52 bytes that the programs exchange
//! - `pingpong/exchange.rs`: their exchange over TCP
//!
//! `--core` pins the poll loop (core_affinity).

pub mod destination;
mod exchange;

use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferroce::{
    Access, Data, Device, Gid, Memory, Mr, PathMtu, Psn, Qp, QpConfig, QpType, ReceiveWorkRequest, SendFlags,
    SendOp, SendWorkRequest, Sge, Transition, UnreliablePath, WcStatus, WorkCompletion,
};
use tracing::{info, warn};

use crate::endpoint::{Endpoint, Interrupt, Path, PortArgs};
use crate::failure::{Failure, OrFail};
use crate::output::say;
use crate::progress::{Progress, SELDOM};
use crate::serving::{ServingArgs, until_signal};
use crate::tcp::Listener;
use crate::visitors::await_client;
use crate::{host, quantity, selftest, tcp};
use destination::Destination;

/// Sends messages (SENDs) back and forth, as ibv_rc_pingpong, ibv_uc_pingpong and ibv_ud_pingpong do.
///
/// Without HOST it is the server and waits for one client; with HOST the client. The other end can be one of these
/// programs, unmodified. With `-d loopback` and no HOST, both ends run in this process.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    port: PortArgs,
    /// The server, by name or IP address.
    host: Option<String>,
    #[command(flatten)]
    serving: ServingArgs,
    /// TCP port of the exchange of addresses.
    #[arg(short = 'p', long = "port", value_name = "PORT", default_value_t = 18515)]
    tcp_port: u16,
    /// Transport service. With uc and ud a lost message is not retransmitted: both ends fail after 10 s without a
    /// message.
    #[arg(short = 't', long, default_value = "rc")]
    service: ServiceArg,
    /// Bytes of a message, as 4096 or 64K (K is 1024, KB is 1000). Default: 4096; for ud 1024, and at most the path
    /// MTU.
    #[arg(short, long, value_name = "BYTES", value_parser = quantity::length::<0, { 1 << 30 }>)]
    size: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096; the same at both ends.
    #[arg(short, long, default_value = "1024", value_parser = path_mtu)]
    mtu: PathMtu,
    /// Receive WRs posted at a time.
    #[arg(short, long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=65536))]
    rx_depth: u32,
    /// Exchanges.
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    iters: u64,
    /// Service level: the priority in VLAN tags. The frames of this command have no VLAN tag, so it has no effect.
    #[arg(short = 'l', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=7))]
    sl: u8,
    /// Sleep on completion events instead of polling.
    #[arg(short, long, conflicts_with = "spin")]
    events: bool,
    /// Index in the GID table that `ferroce devinfo -d DEVICE` shows below `device`; by default a row of the peer's IP
    /// version. An RNIC's own table also has the GIDs of RoCE v1; name a row of it in DEVICE: ibverbs:mlx5_0:1:3 is row 3 of
    /// port 1.
    #[arg(short, long, value_name = "INDEX")]
    gid_idx: Option<usize>,
    /// Check the data of every message received; give it at both ends.
    #[arg(short, long)]
    chk: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ServiceArg {
    Rc,
    Uc,
    Ud,
}

impl Args {
    fn size(&self) -> u32 {
        self.size.unwrap_or(if self.service == ServiceArg::Ud { 1024 } else { 4096 })
    }

    /// Bytes before a received message: the network header of a datagram.
    fn offset(&self) -> u32 {
        if self.service == ServiceArg::Ud { 40 } else { 0 }
    }
}

/// Exchanges messages with a peer, as server or client, and prints the time.
///
/// # Errors
/// The options are invalid, an end fails, a byte is wrong, the recording can't be written, or the command is
/// interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    start(&args)?;
    args.port.check_recording()?;
    Ok(ExitCode::SUCCESS)
}

/// Parses a path MTU.
pub(crate) fn path_mtu(text: &str) -> Result<PathMtu, String> {
    let bytes: u32 = text.parse().map_err(|_| format!("'{text}': must be 256, 512, 1024, 2048 or 4096"))?;
    PathMtu::try_from(bytes).map_err(|error| error.to_string())
}

fn start(args: &Args) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    if args.sl != 0 {
        warn!("-l {}: frames carry no VLAN tag here, so the service level has no effect", args.sl);
    }
    if let Some([server, client]) = selftest::ports(&args.port.device, args.host.as_deref())? {
        let listener = Listener::local()?;
        let tcp_port = listener.port()?;
        let serve = || {
            let mut end = PingPong::new(args, &args.port.for_server(), server, interrupt.clone())?;
            let client = end.await_client(&listener)?;
            end.serve(client).map(drop)
        };
        let call = || PingPong::new(args, &args.port, client, interrupt.clone())?.call("127.0.0.1", tcp_port);
        return selftest::run(&interrupt, serve, call)?.print(args);
    }
    let open = || PingPong::new(args, &args.port, args.port.open()?, interrupt.clone());
    if let Some(host) = &args.host {
        return open()?.call(host, args.tcp_port)?.print(args);
    }
    let mut tcp_port = args.tcp_port;
    let listen = || {
        let listener = Listener::any(tcp_port)?;
        tcp_port = listener.port()?;
        Ok((open()?, listener))
    };
    args.serving.run(&interrupt, listen, |(mut end, listener)| {
        let Some(client) = until_signal(end.await_client(&listener))? else { return Ok(false) };
        // Further clients are refused; otherwise they would wait without a message.
        drop(listener);
        end.serve(client)?.print(args)?;
        Ok(true)
    })
}

const RECEIVE: u64 = 1;
const SEND: u64 = 2;
/// Without outstanding work, an end can detect a dead peer only by its silence.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// 67 ms, as in ibv_rc_pingpong.
const TIMEOUT: u8 = 14;
/// Longer than the timeout, so that a peer whose last ACK was lost can retransmit in time.
const LINGER: Duration = Duration::from_millis(100);
const PAGE: usize = 4096;
/// The Q_Key of both ends' datagrams, as in ibv_ud_pingpong.
const QKEY: u32 = 0x1111_1111;
/// A byte that no message contains.
const UNTOUCHED: u8 = 0xff;

struct PingPong<'a> {
    args: &'a Args,
    end: Endpoint,
    qp: Qp,
    psn: Psn,
    /// Memory for sent messages, and for received ones.
    outgoing: Mr,
    incoming: Mr,
    /// The content of a correct message.
    expected: Vec<u8>,
    /// Posted receive WRs.
    receives: u32,
    /// The destination of datagrams.
    peer: Option<ferroce::Destination>,
}

/// The results of a run.
struct Outcome {
    seconds: f64,
    /// Completed exchanges.
    iters: u64,
    /// Whether a signal ended it early.
    interrupted: bool,
}

impl<'a> PingPong<'a> {
    fn new(
        args: &'a Args,
        port: &PortArgs,
        device: Device,
        interrupt: Interrupt,
    ) -> Result<PingPong<'a>, Failure> {
        let mut end = Endpoint::new(device, port, args.rx_depth + 1, interrupt)?;
        if args.gid_idx.is_some() || args.service == ServiceArg::Ud {
            let index = end.gid_index(args.gid_idx, None)?;
            if args.service == ServiceArg::Ud {
                end.check_datagram(index, args.size())?;
            }
        }
        if args.service != ServiceArg::Ud {
            end.check_path_mtu(args.mtu, args.gid_idx)?;
        }
        if args.events {
            end.block_when_idle();
        }
        let memory =
            |bytes: &[u8]| Memory::copy_of(bytes).or_fail(|| format!("memory for {} bytes", bytes.len()));
        let expected = payload(args.size() as usize, args.chk);
        let outgoing = end.context.register(end.pd, memory(&expected)?, Access::NONE)?;
        let incoming = end.context.register(
            end.pd,
            memory(&vec![UNTOUCHED; (args.size() + args.offset()) as usize])?,
            Access::LOCAL_WRITE,
        )?;
        let (qp_type, init) = match args.service {
            ServiceArg::Rc => (QpType::Rc, Transition::Init { access: Access::NONE }),
            ServiceArg::Uc => (QpType::Uc, Transition::Init { access: Access::NONE }),
            ServiceArg::Ud => (QpType::Ud, Transition::InitDatagram { qkey: QKEY }),
        };
        let config = QpConfig::new(qp_type, end.pd, end.cq).max_send_wr(1).max_recv_wr(args.rx_depth);
        let qp = end.context.create_qp(&config)?;
        end.context.modify_qp(qp, init)?;
        let psn = end.context.random_psn();
        let mut ping_pong =
            PingPong { args, end, qp, psn, outgoing, incoming, expected, receives: 0, peer: None };
        ping_pong.post_receives()?;
        Ok(ping_pong)
    }

    fn await_client(&mut self, listener: &Listener) -> Result<(TcpStream, Destination), Failure> {
        info!("waiting for a client on TCP port {}", listener.port()?);
        let meanwhile = || self.end.poll().map(drop);
        await_client(listener, meanwhile, exchange::FIRST, exchange::judge)
    }

    fn serve(&mut self, (mut stream, remote): (TcpStream, Destination)) -> Result<Outcome, Failure> {
        let interrupt = self.end.interrupt.clone();
        let index = self.end.gid_index(self.args.gid_idx, Some(remote.gid))?;
        let local = self.destination(index)?;
        self.connect(index, remote)?;
        exchange::send(&mut stream, local)?;
        exchange::receive_done(&mut stream, &interrupt)?;
        self.exchange_messages(false)
    }

    fn call(&mut self, host: &str, tcp_port: u16) -> Result<Outcome, Failure> {
        let mut stream = tcp::connect(host::look_up(&self.end, host, tcp_port)?, &self.end.interrupt)?;
        let server = stream.peer_addr().or_fail(|| format!("the address of {host}"))?;
        let index = self.end.gid_index(self.args.gid_idx, Some(Gid::from(server.ip().to_canonical())))?;
        let local = self.destination(index)?;
        exchange::send(&mut stream, local)?;
        let remote = exchange::receive(&mut stream, &self.end.interrupt)?;
        self.connect(index, remote)?;
        exchange::send_done(&mut stream)?;
        self.exchange_messages(true)
    }

    fn destination(&self, gid_index: usize) -> Result<Destination, Failure> {
        let qpn = self.end.context.query_qp(self.qp)?.qpn;
        let gid = self.end.context.port().gids[gid_index].gid;
        Ok(Destination { lid: 0, qpn, psn: self.psn, gid })
    }

    fn connect(&mut self, gid_index: usize, remote: Destination) -> Result<(), Failure> {
        say!("  local address:  {}", self.destination(gid_index)?)?;
        say!("  remote address: {remote}")?;
        self.end.peer = Some(remote.gid);
        let (address, path_mtu) = (self.end.address(remote.gid, gid_index), self.args.mtu);
        let (qp, sq_psn) = (self.qp, self.psn);
        let context = &mut self.end.context;
        match self.args.service {
            ServiceArg::Rc => {
                let path = Path {
                    address,
                    mtu: path_mtu,
                    timeout: TIMEOUT,
                    rd_atomic: 1,
                    // ibv_rc_pingpong's exchange has no field for it.
                    selective_repeat: false,
                };
                return self.end.connect(qp, &path, sq_psn, (remote.qpn, remote.psn));
            }
            ServiceArg::Uc => {
                let path = UnreliablePath::new(address, remote.qpn, remote.psn).path_mtu(path_mtu);
                context.modify_qp(qp, Transition::ReadyToReceiveUnreliable(path))?;
            }
            ServiceArg::Ud => {
                context.modify_qp(qp, Transition::ReadyToReceiveDatagrams)?;
                let ah = context.create_ah(self.end.pd, &address)?;
                self.peer = Some(ferroce::Destination { ah, qpn: remote.qpn, qkey: QKEY });
            }
        }
        Ok(self.end.context.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn })?)
    }

    fn exchange_messages(&mut self, first: bool) -> Result<Outcome, Failure> {
        let started = Instant::now();
        let iters = self.args.iters;
        let (mut sent, mut received) = (0, 0);
        // The client sends first.
        let (mut sending, mut awaiting) = (false, true);
        if first {
            self.post_send()?;
            sending = true;
        }
        let mut heard = self.end.now();
        let mut progress = Progress::start(SELDOM, heard);
        while sent < iters || received < iters {
            let next = match self.next_completion() {
                // The results until then are reported.
                Err(Failure::Interrupted) if received > 0 => {
                    let seconds = started.elapsed().as_secs_f64();
                    return Ok(Outcome { seconds, iters: received, interrupted: true });
                }
                next => next?,
            };
            let Some(wc) = next else {
                if !sending && self.end.now().since(heard) > LONGEST_SILENCE {
                    return Err(Failure::run(format!(
                        "the peer has sent nothing for {} s, after {received} of {iters} messages; are service (-t), size \
                         (-s) and path MTU (-m) the same at both ends?{}",
                        LONGEST_SILENCE.as_secs(),
                        self.end.evidence()
                    )));
                }
                continue;
            };
            heard = self.end.now();
            progress.tell(heard, sent + received, self.args.size());
            let number = if wc.wr_id == SEND { sent } else { received };
            if wc.status != WcStatus::Success {
                let what = if wc.wr_id == SEND { "SEND" } else { "receive" };
                return Err(self.end.failed(&wc, &format!("{what} {number} of {iters}")));
            }
            if wc.wr_id == SEND {
                sent += 1;
                sending = false;
            } else {
                self.check(number, wc.byte_len)?;
                received += 1;
                awaiting = false;
                self.receives -= 1;
                if self.receives <= 1 {
                    self.post_receives()?;
                }
            }
            if !sending && !awaiting && sent < iters {
                self.post_send()?;
                (sending, awaiting) = (true, true);
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        self.linger()?;
        Ok(Outcome { seconds, iters, interrupted: false })
    }

    /// The next completion, or `None` after one iteration of the poll loop.
    fn next_completion(&mut self) -> Result<Option<WorkCompletion>, Failure> {
        if let Some(wc) = self.end.completion()? {
            return Ok(Some(wc));
        }
        if self.args.events && self.end.arm()? {
            return self.end.completion();
        }
        self.end.poll()?;
        Ok(None)
    }

    fn post_send(&mut self) -> Result<(), Failure> {
        let sge = Sge { mr: self.outgoing, offset: 0, length: self.args.size() };
        let (op, data) = (self.peer.map_or(SendOp::Send, SendOp::SendTo), Data::Sges(&[sge]));
        let wr = SendWorkRequest { wr_id: SEND, op, data, flags: SendFlags::SIGNALED };
        Ok(self.end.context.post_send(self.qp, &wr)?)
    }

    fn post_receives(&mut self) -> Result<(), Failure> {
        let sge = Sge { mr: self.incoming, offset: 0, length: self.args.size() + self.args.offset() };
        while self.receives < self.args.rx_depth {
            self.end.context.post_recv(self.qp, &ReceiveWorkRequest { wr_id: RECEIVE, sges: &[sge] })?;
            self.receives += 1;
        }
        Ok(())
    }

    fn check(&mut self, number: u64, length: u32) -> Result<(), Failure> {
        let (size, offset) = (self.args.size(), self.args.offset());
        if length != size + offset {
            return Err(Failure::run(format!(
                "message {number} has {} bytes; must be {size}: is -s the same at the other end?",
                length.saturating_sub(offset)
            )));
        }
        if !self.args.chk {
            return Ok(());
        }
        let incoming = &mut self.end.context.bytes_mut(self.incoming)?[offset as usize..];
        if let Some(at) = (0..incoming.len()).find(|&i| incoming[i] != self.expected[i]) {
            let (found, expected) = (incoming[at], self.expected[at]);
            return Err(Failure::run(format!(
                "invalid data: byte {at} of message {number} is {found:#04x} instead of {expected:#04x}; is -c given \
                 at the other end too?"
            )));
        }
        incoming.fill(UNTOUCHED);
        Ok(())
    }

    /// Acknowledges packets for a while: the peer's last message is complete only when it is acknowledged.
    fn linger(&mut self) -> Result<(), Failure> {
        let end = self.end.now() + LINGER;
        while self.end.now() < end {
            self.end.poll()?;
        }
        Ok(())
    }
}

impl Outcome {
    fn print(&self, args: &Args) -> Result<(), Failure> {
        let Outcome { seconds, iters, interrupted } = *self;
        let bytes = 2 * iters * u64::from(args.size());
        let (rate, time) = (bytes as f64 * 8.0 / seconds / 1e6, seconds * 1e6 / iters as f64);
        say!("{bytes} bytes in {seconds:.2} seconds = {rate:.2} Mbit/sec")?;
        say!("{iters} iters in {seconds:.2} seconds = {time:.2} usec/iter")?;
        if interrupted { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// The payload of ibv_rc_pingpong: the same byte everywhere; with `-c` a zero at the start of each page, which
/// distinguishes the message from the server's own buffer.
fn payload(size: usize, check: bool) -> Vec<u8> {
    let mut bytes = vec![0x7b; size];
    if check {
        bytes.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
    }
    bytes
}
