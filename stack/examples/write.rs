//! Two hosts connected, and a WRITE: `write udp:192.0.2.1 listen 192.0.2.1:7000` at one, then
//! `write udp:192.0.2.2 connect 192.0.2.1:7000` at the other. `eth0` in place of `udp:ADDRESS` takes AF_XDP,
//! `ibverbs:mlx5_0` an RNIC, at either end or both. Tested in `stack/tests/either_backend.rs` and `tools/tests/rxe`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use ferroce::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, role, address] = arguments.as_slice() else {
        return Err("DEVICE listen|connect ADDRESS:PORT".into());
    };
    run(device, role == "connect", address)
}

pub(crate) fn run(device: &str, connects: bool, address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut context = Context::open(Device::open(device)?, &Config::default())?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;

    // Each end sends its endpoint and its memory to the other; then `handshake` connects.
    let mut peer =
        if connects { TcpStream::connect(address)? } else { TcpListener::bind(address)?.accept()?.0 };
    let local = context.endpoint_for(qp, peer.peer_addr()?.ip())?;
    writeln!(peer, "{local} {}", context.remote(mr)?)?;
    let told = line(&mut peer)?;
    let (remote, memory) = told.split_once(' ').ok_or("an endpoint and a memory were to come")?;
    let (remote, memory): (Endpoint, RemoteMemory) = (remote.parse()?, memory.parse()?);
    context.handshake(qp, &local, &remote)?;

    if connects {
        context.write(mr, 0, b"hello")?;
        let (op, data) = (SendOp::Write(memory.at(100)), Data::Sges(&[mr.sge(0..5)]));
        context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
        context.wait_cq(cq, Duration::from_secs(5))?.ok_or("no completion in 5 s")?.ok()?;
    } else {
        peer.set_nonblocking(true)?;
        // The other end closes when it has its completion.
        while !matches!(peer.read(&mut [0]), Ok(0)) {
            context.wait_cq(cq, Duration::from_millis(1))?;
        }
        let mut bytes = [0; 5];
        context.read(mr, 100, &mut bytes)?;
        println!("{} from {}", String::from_utf8_lossy(&bytes), remote.gid.to_ip());
        assert_eq!(&bytes, b"hello");
    }
    Ok(())
}

fn line(peer: &mut TcpStream) -> std::io::Result<String> {
    let (mut line, mut byte) = (String::new(), [0]);
    while peer.read(&mut byte)? == 1 && byte != *b"\n" && line.len() < 256 {
        line.push(byte[0].into());
    }
    Ok(line)
}
