//! A READ: a server has a text in its memory, and a client reads it. The server only polls. They meet by the connection
//! manager, and the server tells where its text is with its acceptance.
//!
//! Alone, both ends in one process: `cargo run -p ferroce --example read`
//!
//! In two terminals, the server first; `udp:ADDRESS` is an address of that host, `eth0` an interface:
//!
//! ```sh
//! cargo run -p ferroce --example read udp:127.0.0.1
//! cargo run -p ferroce --example read udp:127.0.0.2 127.0.0.1
//! ```

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use ferroce::*;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const PORT: u16 = 7471;
const TEXT: &[u8] = b"what the server has to say";
const LONG: Duration = Duration::from_secs(5);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => alone(),
        [device] => serve(listening(Device::open(device)?)?),
        [device, server] => read(Device::open(device)?, server.parse()?),
        _ => Err("usage: read; read DEVICE (the server); read DEVICE SERVER (a client)".into()),
    }
}

fn alone() -> Outcome<()> {
    let server = IpAddr::from([192, 0, 2, 2]);
    let (near, far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[server]);
    let context = listening(Box::new(far).into())?;
    let serving = thread::spawn(move || serve(context));
    read(Box::new(near).into(), server)?;
    serving.join().map_err(|_| "the server has panicked")?
}

/// In INIT: what the peer may do through the queue pair is said here.
fn queue_pair(context: &mut Context, access: Access) -> Result<(Pd, Cq, Qp), ferroce::Error> {
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    context.modify_qp(qp, Transition::Init { access })?;
    Ok((pd, cq, qp))
}

fn listening(device: Device) -> Outcome<Context> {
    let mut context = Context::open(device, &Config::default())?;
    let all = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT);
    context.listen(PortSpace::Tcp, all, &ListenConfig::default())?;
    Ok(context)
}

/// Serves one client.
fn serve(mut context: Context) -> Outcome<()> {
    let (pd, _, qp) = queue_pair(&mut context, Access::REMOTE_READ)?;
    println!("waiting for a client, for 60 s");
    let mr = context.register(pd, Memory::copy_of(TEXT)?, Access::REMOTE_READ)?;
    let memory = context.remote(mr)?.to_bytes();
    loop {
        match context.wait_cm_event(Duration::from_secs(60))? {
            Some(CmEvent::ConnectionRequest(request)) => {
                println!("{} asks", request.peer.ip());
                context.accept(request.id, qp, &ConnectionParameters::default().private_data(&memory))?;
            }
            Some(CmEvent::Established { .. }) => {}
            Some(CmEvent::Disconnected { .. }) => return Ok(()),
            other => return Err(format!("no client: {other:?}").into()),
        }
    }
}

fn read(device: Device, server: IpAddr) -> Outcome<()> {
    let mut context = Context::open(device, &Config::default())?;
    let (pd, cq, qp) = queue_pair(&mut context, Access::NONE)?;
    let parameters = ConnectionParameters::default();
    let (id, answer) = context.connect_blocking(qp, SocketAddr::new(server, PORT), &parameters, LONG)?;
    // Zeros follow: private data has no length on the wire.
    let memory = RemoteMemory::from_bytes(&answer[..RemoteMemory::LEN])?;
    // A length that a peer tells is not believed.
    let length = memory.length.min(4096);

    let mr = context.register(pd, Memory::zeroed(length as usize)?, Access::LOCAL_WRITE)?;
    let (op, data) = (SendOp::Read(memory.at(0)), Data::Sges(&[mr.sge(0..length)]));
    context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
    context.wait_cq(cq, LONG)?.ok_or("no completion in 5 s")?.ok()?;

    let mut text = vec![0; length as usize];
    context.read(mr, 0, &mut text)?;
    println!("{length} bytes read from {server}: {}", String::from_utf8_lossy(&text));
    context.disconnect(id)?;
    context.wait_cm_event(LONG)?;
    if text == TEXT { Ok(()) } else { Err("it has another text".into()) }
}

#[cfg(test)]
#[test]
fn it_reads_the_text() {
    alone().expect("the text is read");
}
