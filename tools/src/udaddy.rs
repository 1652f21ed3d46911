//! `ferroce udaddy`: rdma_cm's `udaddy` on ferroce's stack. Each end can also be the original program.

use std::net::SocketAddr;
use std::process::ExitCode;

use ferroce::wire::cm::RDMA_UDP_QKEY;
use ferroce::{
    Access, AddressVector, CmEvent, Data, Destination, Device, Gid, Memory, Mr, PortSpace, Qp, QpConfig, Qpn,
    ReceiveWorkRequest, SendFlags, SendOp, SendWorkRequest, Sge, Transition, WcOpcode, WcStatus,
    WorkCompletion,
};
use tracing::info;

use crate::cause::{Patience, of_messages};
use crate::endpoint::{Endpoint, Interrupt, PortArgs};
use crate::failure::{Failure, OrFail};
use crate::output::say;
use crate::quantity;
use crate::role::{self, Role, RoleArgs};
use crate::serving::{ServingArgs, until_signal};

/// Finds a datagram service by the connection manager and exchanges datagrams with it, as udaddy does.
///
/// Without HOST it is the server and serves one client; with HOST the client (`udaddy -s HOST`). The other end can be
/// an unmodified udaddy. With `-d loopback` and no HOST, both ends run in this process.
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
    /// Datagrams in each direction; the same at both ends.
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=4096))]
    count: u32,
    /// Bytes of a datagram, as 1024 or 4K (K is 1024, KB is 1000); the same at both ends.
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100, value_parser = quantity::length::<1, 4096>)]
    size: u32,
}

/// Runs as the server, or as a client.
///
/// # Errors
/// The options are invalid, an end fails, a byte is wrong, the recording can't be written, or the command is
/// interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let Args { port, host, cm_port, serving, .. } = &args;
    let role = RoleArgs { port, host: host.as_deref(), cm_port: *cm_port, serving };
    role::play(&role, |port, driver, interrupt| Udaddy::new(&args, port, driver, interrupt))
}

/// The network header before a received message.
const GRH: u32 = 40;

struct Udaddy<'a> {
    args: &'a Args,
    end: Endpoint,
    qp: Qp,
    outgoing: Mr,
    incoming: Mr,
    sent: u32,
    received: u32,
    /// The last received datagram: its immediate data are the queue pair to answer to.
    last: Option<WorkCompletion>,
}

impl Role for Udaddy<'_> {
    fn end(&self) -> &Endpoint {
        &self.end
    }

    /// Answers with as many datagrams as were received.
    fn serve(&mut self) -> Result<bool, Failure> {
        self.end.listen(PortSpace::Udp, self.args.cm_port)?;
        info!("waiting for a client on port {}", self.args.cm_port);
        // A client that looks up the service need not send datagrams.
        while self.received == 0 {
            self.end.answer_seekers(self.qp);
            if until_signal(self.take_completions())?.is_none() {
                return Ok(false);
            }
        }
        self.receive()?;
        if let Some(last) = self.last {
            let mut grh = [0; GRH as usize];
            self.end.context.read(self.incoming, 0, &mut grh)?;
            let back = self.end.context.address_from_wc(&last, &grh)?;
            self.send(&back, Qpn::new(last.immediate.unwrap_or_default()), RDMA_UDP_QKEY)?;
        }
        self.report()?;
        Ok(true)
    }

    fn call(&mut self, to: SocketAddr) -> Result<(), Failure> {
        self.end.peer = Some(Gid::from(to.ip()));
        let parameters = self.end.connection_parameters();
        self.end.context.resolve(to, &parameters)?;
        match self.end.wait_cm_event()? {
            CmEvent::Resolved { address, qpn, qkey, .. } => self.send(&address, qpn, qkey)?,
            other => return Err(self.end.no_connection(&other)),
        }
        self.receive()?;
        self.report()
    }
}

impl<'a> Udaddy<'a> {
    fn new(
        args: &'a Args,
        port: &PortArgs,
        device: Device,
        interrupt: Interrupt,
    ) -> Result<Udaddy<'a>, Failure> {
        let mut end = Endpoint::new(device, port, 2 * args.count, interrupt)?;
        let mut register = |length: u32, access| -> Result<Mr, Failure> {
            let memory = Memory::zeroed(length as usize).or_fail(|| "memory for a datagram".into())?;
            Ok(end.context.register(end.pd, memory, access)?)
        };
        let outgoing = register(args.size, Access::NONE)?;
        let incoming = register(args.size + GRH, Access::LOCAL_WRITE)?;
        let config = QpConfig::ud(end.pd, end.cq).max_send_wr(args.count).max_recv_wr(args.count);
        let context = &mut end.context;
        let qp = context.create_qp(&config)?;
        let sq_psn = context.random_psn();
        context.modify_qp(qp, Transition::InitDatagram { qkey: RDMA_UDP_QKEY })?;
        context.modify_qp(qp, Transition::ReadyToReceiveDatagrams)?;
        context.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn })?;
        let sges = [Sge { mr: incoming, offset: 0, length: args.size + GRH }];
        for wr_id in 0..args.count {
            context.post_recv(qp, &ReceiveWorkRequest { wr_id: wr_id.into(), sges: &sges })?;
        }
        Ok(Udaddy { args, end, qp, outgoing, incoming, sent: 0, received: 0, last: None })
    }

    fn send(&mut self, address: &AddressVector, qpn: Qpn, qkey: u32) -> Result<(), Failure> {
        self.end.check_datagram(address.sgid_index, self.args.size)?;
        let ah = self.end.context.create_ah(self.end.pd, address)?;
        let own = self.end.context.query_qp(self.qp)?.qpn;
        let sges = [Sge { mr: self.outgoing, offset: 0, length: self.args.size }];
        for wr_id in 0..self.args.count {
            let op = SendOp::SendToWithImm(Destination { ah, qpn, qkey }, own.value());
            let data = Data::Sges(&sges);
            let wr = SendWorkRequest { wr_id: wr_id.into(), op, data, flags: SendFlags::SIGNALED };
            self.end.context.post_send(self.qp, &wr)?;
        }
        while self.sent < self.args.count {
            self.take_completions()?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Failure> {
        let mut patience = Patience::new(&mut self.end);
        while self.received < self.args.count {
            self.take_completions()?;
            // The received datagrams may come from another program, while the client still looks up the service.
            self.end.answer_seekers(self.qp);
            let all = self.args.count;
            patience.check(&mut self.end, self.received, || of_messages(self.received, all))?;
        }
        Ok(())
    }

    fn take_completions(&mut self) -> Result<(), Failure> {
        while let Some(wc) = self.end.completion()? {
            if wc.status != WcStatus::Success {
                return Err(self.end.failed(&wc, "datagram"));
            }
            if wc.opcode == WcOpcode::Recv {
                self.received += 1;
                self.last = Some(wc);
            } else {
                self.sent += 1;
            }
        }
        self.end.poll().map(drop)
    }

    fn report(&self) -> Result<(), Failure> {
        say!("{} datagrams of {} bytes sent, {} received", self.sent, self.args.size, self.received)
    }
}
