//! `ferroce ucmatose`: rdma_cm's `ucmatose` on ferroce's stack. Each end can also be the original program.

use std::net::SocketAddr;
use std::process::ExitCode;

use ferroce::{
    Access, CmEvent, CmId, Data, Device, Memory, Mr, Qp, QpConfig, ReceiveWorkRequest, SendFlags, SendOp,
    SendWorkRequest, Sge, Transition, WcOpcode, WcStatus,
};
use tracing::info;

use crate::cause::{Patience, of_messages};
use crate::endpoint::{Endpoint, Interrupt, PortArgs};
use crate::failure::{Failure, OrFail};
use crate::output::say;
use crate::role::{self, Role, RoleArgs};
use crate::serving::{ServingArgs, until_signal};
use crate::{callers, quantity};

/// Makes connections by the connection manager and exchanges SENDs over them, as ucmatose does.
///
/// Without HOST it is the server and serves one client; with HOST the client (`ucmatose -s HOST`). The other end can be
/// an unmodified ucmatose. With `-d loopback` and no HOST, both ends run in this process.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    port: PortArgs,
    /// The server, by name or IP address.
    host: Option<String>,
    #[command(flatten)]
    serving: ServingArgs,
    /// Port of the connection manager.
    #[arg(short = 'p', long = "port", value_name = "PORT", default_value_t = 7471)]
    cm_port: u16,
    /// Number of connections. -c, -C and -S must be the same at both ends.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=128))]
    connections: u32,
    /// Messages per connection in each direction; 0 connects and disconnects.
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=4096))]
    count: u32,
    /// Bytes of a message, as 4096 or 64K (K is 1024, KB is 1000).
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100, value_parser = quantity::length::<1, { 1 << 20 }>)]
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
    role::play(&role, |port, driver, interrupt| Ucmatose::new(&args, port, driver, interrupt))
}

struct Ucmatose<'a> {
    args: &'a Args,
    end: Endpoint,
    outgoing: Mr,
    incoming: Mr,
    connections: Vec<(CmId, Qp)>,
    sent: u32,
    received: u32,
}

impl Role for Ucmatose<'_> {
    fn end(&self) -> &Endpoint {
        &self.end
    }

    /// Sends first, and ends the connections.
    fn serve(&mut self) -> Result<bool, Failure> {
        let Ucmatose { args, end, incoming, .. } = self;
        info!("waiting for {} connections on port {}", args.connections, args.cm_port);
        let parameters = end.connection_parameters();
        let callers = end.await_callers(args.cm_port, args.connections as usize, &parameters, |end| {
            queue_pair(end, args, *incoming)
        });
        let Some(callers) = until_signal(callers)? else { return Ok(false) };
        self.connections = callers.iter().map(|caller| (caller.request.id, caller.qp)).collect();
        self.send()?;
        self.receive()?;
        for (id, _) in &self.connections {
            self.end.context.disconnect(*id)?;
        }
        self.wait_disconnected()?;
        self.report()?;
        Ok(true)
    }

    fn call(&mut self, to: SocketAddr) -> Result<(), Failure> {
        for _ in 0..self.args.connections {
            let qp = queue_pair(&mut self.end, self.args, self.incoming)?;
            let parameters = self.end.connection_parameters();
            let id = self.end.call(qp, to, &parameters)?;
            self.connections.push((id, qp));
        }
        self.receive()?;
        self.send()?;
        self.wait_disconnected()?;
        self.report()
    }
}

impl<'a> Ucmatose<'a> {
    fn new(
        args: &'a Args,
        port: &PortArgs,
        device: Device,
        interrupt: Interrupt,
    ) -> Result<Ucmatose<'a>, Failure> {
        let work = (2 * args.connections + callers::MOST as u32) * args.count.max(1);
        let mut end = Endpoint::new(device, port, work, interrupt)?;
        let mut register = |access| -> Result<Mr, Failure> {
            let memory = Memory::zeroed(args.size as usize).or_fail(|| "memory for a message".into())?;
            Ok(end.context.register(end.pd, memory, access)?)
        };
        let (outgoing, incoming) = (register(Access::NONE)?, register(Access::LOCAL_WRITE)?);
        Ok(Ucmatose { args, end, outgoing, incoming, connections: Vec::new(), sent: 0, received: 0 })
    }

    fn send(&mut self) -> Result<(), Failure> {
        let sges = [Sge { mr: self.outgoing, offset: 0, length: self.args.size }];
        for (_, qp) in &self.connections {
            for wr_id in 0..self.args.count {
                let (op, data) = (SendOp::Send, Data::Sges(&sges));
                let wr = SendWorkRequest { wr_id: wr_id.into(), op, data, flags: SendFlags::SIGNALED };
                self.end.context.post_send(*qp, &wr)?;
            }
        }
        let all = self.args.connections * self.args.count;
        while self.sent < all {
            self.take_completions()?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Failure> {
        let all = self.args.connections * self.args.count;
        let mut patience = Patience::new(&mut self.end);
        while self.received < all {
            self.take_completions()?;
            patience.check(&mut self.end, self.received, || of_messages(self.received, all))?;
        }
        Ok(())
    }

    fn take_completions(&mut self) -> Result<(), Failure> {
        while let Some(wc) = self.end.completion()? {
            if wc.status != WcStatus::Success {
                return Err(self.end.failed(&wc, "message"));
            }
            match wc.opcode {
                WcOpcode::Recv if wc.byte_len != self.args.size => {
                    let (size, length) = (self.args.size, wc.byte_len);
                    return Err(Failure::usage(format!(
                        "a message of {length} bytes; must be {size}: is -S the same at the other end?"
                    )));
                }
                WcOpcode::Recv => self.received += 1,
                _ => self.sent += 1,
            }
        }
        self.end.poll().map(drop)
    }

    fn wait_disconnected(&mut self) -> Result<(), Failure> {
        let mut ended = 0;
        let mut patience = Patience::new(&mut self.end);
        while ended < self.args.connections {
            self.end.poll()?;
            while let Some(event) = self.end.context.next_cm_event() {
                let is_ours = |id| self.connections.iter().any(|(ours, _)| *ours == id);
                ended += u32::from(matches!(event, CmEvent::Disconnected { id } if is_ours(id)));
            }
            let all = self.args.connections;
            patience.check(&mut self.end, ended, || format!("with {ended} of {all} connections ended"))?;
        }
        Ok(())
    }

    fn report(&self) -> Result<(), Failure> {
        let Args { connections, size, .. } = self.args;
        say!(
            "{connections} connections, {} messages of {size} bytes sent, {} received, disconnected",
            self.sent,
            self.received
        )
    }
}

/// In INIT, with posted receive WRs.
fn queue_pair(end: &mut Endpoint, args: &Args, incoming: Mr) -> Result<Qp, Failure> {
    let depth = args.count.max(1);
    let config = QpConfig::rc(end.pd, end.cq).max_send_wr(depth).max_recv_wr(depth);
    let qp = end.context.create_qp(&config)?;
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    let sges = [Sge { mr: incoming, offset: 0, length: args.size }];
    for wr_id in 0..args.count {
        end.context.post_recv(qp, &ReceiveWorkRequest { wr_id: wr_id.into(), sges: &sges })?;
    }
    Ok(qp)
}
