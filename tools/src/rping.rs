//! `ferroce rping`: rdma_cm's `rping` on ferroce's stack. Each end can also be the original program.

mod advertisement;

use std::net::SocketAddr;
use std::process::ExitCode;

use ferroce::{
    Access, CmEvent, ConnectionParameters, Data, Device, Memory, Mr, Qp, QpConfig, ReceiveWorkRequest,
    SendFlags, SendOp, SendWorkRequest, Sge, Transition, WcOpcode, WcStatus, WorkCompletion,
};
use tracing::info;

use crate::callers::Caller;
use crate::cause::Patience;
use crate::endpoint::{Endpoint, Interrupt, PortArgs};
use crate::failure::{Failure, OrFail, quote};
use crate::output::say;
use crate::progress::{Progress, SELDOM};
use crate::quantity;
use crate::role::{self, Role, RoleArgs};
use crate::serving::{ServingArgs, until_signal};
use advertisement::Advertisement;

/// Connects by the connection manager and moves data there and back by READ, WRITE and SEND, as rping does.
///
/// Without HOST it is the server (as `rping -s`) and serves one client; with HOST the client (as `rping -c -a HOST`).
/// The other end can be an unmodified rping. With `-d loopback` and no HOST, both ends run in this process.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    port: PortArgs,
    /// The server, by name or IP address.
    host: Option<String>,
    #[command(flatten)]
    serving: ServingArgs,
    /// Port of the connection manager.
    #[arg(short = 'p', long = "port", value_name = "PORT", default_value_t = 7174)]
    cm_port: u16,
    /// Bytes of a ping, as 4096 or 64K (K is 1024, KB is 1000); the server's size must be at least the client's.
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 64, value_parser = quantity::length::<17, { 1 << 20 }>)]
    size: u32,
    /// Number of pings. The client decides.
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Print the data of each ping.
    #[arg(short, long)]
    verbose: bool,
}

/// Runs as the server, or as a client.
///
/// # Errors
/// The options are invalid, an end fails, a byte is wrong, the recording can't be written, or the command is
/// interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let Args { port, host, cm_port, serving, .. } = &args;
    let role = RoleArgs { port, host: host.as_deref(), cm_port: *cm_port, serving };
    role::play(&role, |port, driver, interrupt| Rping::new(&args, port, driver, interrupt))
}

const RECEIVE: u64 = 1;
const SEND: u64 = 2;

struct Rping<'a> {
    args: &'a Args,
    end: Endpoint,
    /// Once there is a connection, or a request for one.
    qp: Option<Qp>,
    /// Memory for the peer's advertisements.
    incoming: Mr,
    /// Memory of sent data, and at the server of data that was read.
    source: Mr,
    /// Memory for the data that are returned.
    sink: Mr,
    /// Completions that were not waited for yet.
    sent: u32,
    received: u32,
    /// Whether the connection has ended.
    over: bool,
}

impl Role for Rping<'_> {
    fn end(&self) -> &Endpoint {
        &self.end
    }

    /// Reads the memory that the client advertises, and writes it to the memory that the client advertises next.
    fn serve(&mut self) -> Result<bool, Failure> {
        let parameters = self.parameters();
        let Rping { args, end, incoming, .. } = self;
        info!("waiting for a client on port {}", args.cm_port);
        let callers = end.await_callers(args.cm_port, 1, &parameters, |end| queue_pair(end, *incoming));
        let Some(callers) = until_signal(callers)? else { return Ok(false) };
        let [Caller { request, qp }] = callers[..] else {
            return Err(Failure::run(format!("{} clients instead of one", callers.len())));
        };
        self.qp = Some(qp);
        let brought = request.private_data;
        let mut pings = 0;
        let mut progress = Progress::start(SELDOM, self.end.now());
        while let Some(from) = self.wait_advertisement()? {
            let length = from.length.min(self.args.size);
            if from.length > self.args.size {
                return Err(Failure::usage(format!(
                    "the client pings with {} bytes; start the server with -S {0}",
                    from.length
                )));
            }
            self.move_data(SendOp::Read(from.remote()), self.source, length)?;
            self.send(Advertisement::default())?;
            let to = self.wait_advertisement()?.ok_or_else(abandoned)?;
            self.move_data(SendOp::Write(to.remote()), self.source, to.length.min(length))?;
            self.send(Advertisement::default())?;
            pings += 1;
            progress.tell(self.end.now(), pings, length);
            self.print(self.source)?;
        }
        if pings == 0 {
            let mut why = "the client ended the connection without a ping: is it another program?".to_owned();
            if let Some(last) = brought.iter().rposition(|byte| *byte != 0) {
                why +=
                    &format!(" Its request has private data, unlike rping's: {}", quote(&brought[..=last]));
            }
            return Err(Failure::run(why + &self.end.evidence()));
        }
        say!("served {pings} pings")?;
        Ok(true)
    }

    fn call(&mut self, to: SocketAddr) -> Result<(), Failure> {
        let qp = queue_pair(&mut self.end, self.incoming)?;
        self.qp = Some(qp);
        let parameters = self.parameters();
        let id = self.end.call(qp, to, &parameters)?;
        let mut progress = Progress::start(SELDOM, self.end.now());
        for ping in 0..self.args.count {
            progress.tell(self.end.now(), ping.into(), self.args.size);
            let text = message(ping, self.args.size as usize);
            let mut back = vec![0; text.len()];
            self.end.context.write(self.source, 0, &text)?;
            self.end.context.write(self.sink, 0, &back)?;
            self.advertise(self.source)?;
            self.expect_go_ahead(ping)?;
            self.advertise(self.sink)?;
            self.expect_go_ahead(ping)?;
            self.end.context.read(self.sink, 0, &mut back)?;
            if let Some(at) = (0..text.len()).find(|&at| back[at] != text[at]) {
                return Err(Failure::run(format!(
                    "ping {ping}: byte {at} came back as {:#04x} instead of {:#04x}",
                    back[at], text[at]
                )));
            }
            self.print(self.sink)?;
        }
        self.end.context.disconnect(id)?;
        while !matches!(self.end.wait_cm_event()?, CmEvent::Disconnected { .. }) {}
        say!("{} pings of {} bytes came back right", self.args.count, self.args.size)
    }
}

impl<'a> Rping<'a> {
    fn new(
        args: &'a Args,
        port: &PortArgs,
        device: Device,
        interrupt: Interrupt,
    ) -> Result<Rping<'a>, Failure> {
        let mut end = Endpoint::new(device, port, 64, interrupt)?;
        let pd = end.pd;
        let mut register = |length: usize, access| -> Result<Mr, Failure> {
            let memory = Memory::zeroed(length).or_fail(|| format!("memory for {length} bytes"))?;
            Ok(end.context.register(pd, memory, access)?)
        };
        let size = args.size as usize;
        let incoming = register(Advertisement::LEN, Access::LOCAL_WRITE)?;
        let source = register(size, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let sink = register(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Rping { args, end, qp: None, incoming, source, sink, sent: 0, received: 0, over: false })
    }

    fn parameters(&self) -> ConnectionParameters<'static> {
        self.end.connection_parameters().responder_resources(1).initiator_depth(1)
    }

    fn advertise(&mut self, mr: Mr) -> Result<(), Failure> {
        let remote = self.end.context.remote(mr)?;
        self.send(Advertisement { address: remote.addr, rkey: remote.rkey.value(), length: self.args.size })
    }

    fn expect_go_ahead(&mut self, ping: u32) -> Result<(), Failure> {
        let message = self.wait_advertisement()?;
        message
            .map(drop)
            .ok_or_else(|| Failure::run(format!("the server ended the connection at ping {ping}")))
    }

    fn send(&mut self, advertisement: Advertisement) -> Result<(), Failure> {
        let bytes = advertisement.to_bytes();
        self.post(SendOp::Send, Data::Inline(&bytes))?;
        if self.complete(SEND)? { Ok(()) } else { Err(abandoned()) }
    }

    fn move_data(&mut self, op: SendOp, mr: Mr, length: u32) -> Result<(), Failure> {
        self.post(op, Data::Sges(&[Sge { mr, offset: 0, length }]))?;
        if self.complete(SEND)? { Ok(()) } else { Err(abandoned()) }
    }

    fn post(&mut self, op: SendOp, data: Data<'_>) -> Result<(), Failure> {
        let wr = SendWorkRequest { wr_id: SEND, op, data, flags: SendFlags::SIGNALED };
        Ok(self.end.context.post_send(self.connected()?, &wr)?)
    }

    fn connected(&self) -> Result<Qp, Failure> {
        self.qp.ok_or_else(|| Failure::run("no queue pair is connected yet"))
    }

    /// The peer's next advertisement; `None` when the peer has ended the connection.
    fn wait_advertisement(&mut self) -> Result<Option<Advertisement>, Failure> {
        if !self.complete(RECEIVE)? {
            return Ok(None);
        }
        let mut message = [0; Advertisement::LEN];
        self.end.context.read(self.incoming, 0, &mut message)?;
        let advertisement = Advertisement::parse(&message);
        let qp = self.connected()?;
        post_receive(&mut self.end, qp, self.incoming)?;
        Ok(advertisement)
    }

    /// Waits for a completion of this kind. Returns `false` if the peer ends the connection instead.
    fn complete(&mut self, wanted: u64) -> Result<bool, Failure> {
        let mut patience = Patience::new(&mut self.end);
        loop {
            while let Some(wc) = self.end.completion()? {
                let what = if wc.wr_id == SEND { "work request" } else { "receive" };
                match wc.status {
                    WcStatus::Success if wc.wr_id == SEND => self.sent += 1,
                    WcStatus::Success => {
                        check_message(&wc)?;
                        self.received += 1;
                    }
                    WcStatus::WrFlushErr => self.over = true,
                    _ => return Err(self.end.failed(&wc, what)),
                }
            }
            let count = if wanted == SEND { &mut self.sent } else { &mut self.received };
            if *count > 0 {
                *count -= 1;
                return Ok(true);
            }
            if self.over {
                return Ok(false);
            }
            self.end.poll()?;
            patience.check(&mut self.end, 0, || "where the next step of a ping was due".to_owned())?;
        }
    }

    fn print(&self, mr: Mr) -> Result<(), Failure> {
        if self.args.verbose {
            let mut text = vec![0; self.args.size as usize];
            self.end.context.read(mr, 0, &mut text)?;
            let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
            say!("ping data: {}", text.escape_ascii())?;
        }
        Ok(())
    }
}

/// In INIT, with a posted receive WR.
fn queue_pair(end: &mut Endpoint, incoming: Mr) -> Result<Qp, Failure> {
    let config = QpConfig::rc(end.pd, end.cq).max_send_wr(16).max_recv_wr(2);
    let qp = end.context.create_qp(&config)?;
    end.context.modify_qp(qp, Transition::Init { access: Access::REMOTE_READ | Access::REMOTE_WRITE })?;
    post_receive(end, qp, incoming)?;
    Ok(qp)
}

fn post_receive(end: &mut Endpoint, qp: Qp, incoming: Mr) -> Result<(), Failure> {
    let sge = Sge { mr: incoming, offset: 0, length: Advertisement::LEN as u32 };
    Ok(end.context.post_recv(qp, &ReceiveWorkRequest { wr_id: RECEIVE, sges: &[sge] })?)
}

/// The error for a connection that the peer has ended too early.
fn abandoned() -> Failure {
    Failure::run("the peer ended the connection in the middle of a ping")
}

/// Fails if the received message is not one of rping's.
fn check_message(wc: &WorkCompletion) -> Result<(), Failure> {
    let length = wc.byte_len as usize;
    if wc.opcode == WcOpcode::Recv && length == Advertisement::LEN {
        return Ok(());
    }
    let what = if wc.opcode == WcOpcode::Recv { "a SEND" } else { "an RDMA WRITE with immediate" };
    Err(Failure::run(format!(
        "{what} of {length} bytes arrived instead of rping's SEND of {}: the peer is another program",
        Advertisement::LEN
    )))
}

/// The data of rping: the number of the ping, and letters that advance by one each time; a NUL at the end.
fn message(ping: u32, size: usize) -> Vec<u8> {
    let mut text = format!("rdma-ping-{ping}: ").into_bytes();
    let letters = (b'A'..=b'z').cycle().skip(ping as usize % 58);
    text.extend(letters.take(size.saturating_sub(text.len())));
    text.truncate(size);
    if let Some(last) = text.last_mut() {
        *last = 0;
    }
    text
}
