//! An echo server of 100 connections in one asynchronous task. tokio waits for the context's file descriptor, beside
//! whatever else its runtime has to do.
//!
//! Here the port is one inside this process, with the clients at its other end (`crowd`);
//! `Device::open("eth0")?` would be a real one.

mod crowd;

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::thread;

use ferroce::driver::loopback;
use ferroce::*;
use tokio::io::unix::AsyncFd;

const CONNECTIONS: usize = 100;
const ROUNDS: usize = 10;
const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), 7471);
/// Bytes of a message. Each connection has room for two.
const SIZE: u32 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let (near, far) = loopback::pair(&[[10, 0, 0, 1].into()], &[SERVER.ip()]);
    let clients = thread::spawn(move || crowd::run(near).expect("each message comes back"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let echoed = runtime.block_on(serve(Context::open(Box::new(far), &Config::default())?))?;
    clients.join().map_err(|_| "the clients have failed")?;
    println!("{echoed} messages of {CONNECTIONS} connections");
    assert_eq!(echoed, CONNECTIONS * ROUNDS);
    Ok(())
}

#[allow(
    deprecated,
    reason = "tokio's `register` is unsafe; the descriptor of a context is the same for its life"
)]
async fn serve(mut context: Context) -> Result<usize, Box<dyn Error>> {
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(4096)?);
    let mr = context.register(pd, Memory::zeroed(2 * CONNECTIONS * SIZE as usize)?, Access::LOCAL_WRITE)?;
    let listen = ListenConfig::default().per_source(CONNECTIONS as u32);
    context.listen(PortSpace::Tcp, SERVER, &listen)?;

    let place = |n: u64| [Sge { mr, offset: n * u64::from(SIZE), length: SIZE }];
    let (mut context, mut clock) = (AsyncFd::new(context)?, Clock::start());
    let mut connections = HashMap::new();
    let (mut begun, mut ended, mut echoed) = (0, 0, 0);
    while ended < CONNECTIONS {
        let port = context.get_mut();
        port.poll(clock.now())?;
        while let Some(event) = port.next_cm_event() {
            match event {
                CmEvent::ConnectionRequest(request) => {
                    let qp = port.create_qp(&QpConfig::rc(pd, cq))?;
                    port.modify_qp(qp, Transition::Init { access: Access::NONE })?;
                    port.post_recv(qp, &ReceiveWorkRequest { wr_id: 2 * begun, sges: &place(2 * begun) })?;
                    port.accept(request.id, qp, &ConnectionParameters::default())?;
                    connections.insert(request.id, qp);
                    begun += 1;
                }
                // A queue pair is destroyed with its connection, or each client would leave one behind.
                CmEvent::Disconnected { id } | CmEvent::Unreachable { id, .. } => {
                    if let Some(qp) = connections.remove(&id) {
                        port.destroy_qp(qp)?;
                        ended += 1;
                    }
                }
                _ => {}
            }
        }
        while let Some(WorkCompletion { wr_id, qp, opcode, status, byte_len, .. }) = port.poll_cq(cq)? {
            if status != WcStatus::Success {
                // A client that is gone says nothing: its connection is over when an echo has found nobody. The rest of
                // what was posted completes so too (`WrFlushErr`).
                if let Some((&id, _)) = connections.iter().find(|(_, at)| **at == qp) {
                    connections.remove(&id);
                    port.destroy_qp(qp)?;
                    ended += 1;
                }
            } else if opcode == WcOpcode::Recv {
                // The next message finds the connection's other place.
                port.post_recv(qp, &ReceiveWorkRequest { wr_id: wr_id ^ 1, sges: &place(wr_id ^ 1) })?;
                let sges = place(wr_id).map(|sge| Sge { length: byte_len, ..sge });
                let (op, data, flags) = (SendOp::Send, Data::Sges(&sges), SendFlags::SIGNALED);
                port.post_send(qp, &SendWorkRequest { wr_id, op, data, flags })?;
                echoed += 1;
            }
        }
        if port.prepare_wait(clock.now())? {
            context.readable().await?.clear_ready();
        } else {
            tokio::task::yield_now().await;
        }
    }
    Ok(echoed)
}

#[cfg(test)]
#[test]
fn it_serves_all_clients() {
    main().expect("each message comes back");
}
