//! A tensor from one GPU to another, on two hosts: `tensor udp:192.0.2.2 opencl:0 listen 192.0.2.2:7000` at one, then
//! `tensor udp:192.0.2.1 opencl:0 connect 192.0.2.2:7000` at the other, built with `--features opencl`; `cuda:0` with
//! `--features cuda`. The processor touches the memory of neither GPU: the GPUs copy, to and from staging.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use ferroce::driver::gpu::{Device as Gpu, GpuSpec};
use ferroce::*;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Of f32.
const ELEMENTS: usize = 1 << 18;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, gpu, role, address] = arguments.as_slice() else {
        return Err("DEVICE GPU listen|connect ADDRESS:PORT".into());
    };
    let gpu = gpu.parse::<GpuSpec>()?.open()?;
    let peer = match role.as_str() {
        "connect" => TcpStream::connect(address)?,
        _ => TcpListener::bind(address)?.accept()?.0,
    };
    if role == "connect" { send(device, &*gpu, peer) } else { receive(device, &*gpu, peer) }
}

fn send(device: &str, gpu: &dyn Gpu, peer: TcpStream) -> Outcome<()> {
    let mut end = End::new(device, gpu, peer)?;
    // A program's kernels would have computed it; they have ended when it is posted.
    let elements: Vec<u8> = (0..ELEMENTS).flat_map(|index| (index as f32 * 0.5).to_ne_bytes()).collect();
    end.context.write(end.tensor, 0, &elements)?;

    let there = end.connect()?;
    let (op, sges) = (SendOp::WriteWithImm(there.at(0), 1), [end.tensor.sge(0..4 * ELEMENTS as u64)]);
    let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
    end.context.post_send(end.qp, &wr)?;
    // Completed: it is in the other GPU's memory, if that end is no RNIC, and this one's may be computed with again.
    end.context.wait_cq(end.cq, PATIENCE)?.ok_or("no completion in 10 s")?.ok()?;
    Ok(())
}

fn receive(device: &str, gpu: &dyn Gpu, peer: TcpStream) -> Outcome<()> {
    let mut end = End::new(device, gpu, peer)?;
    end.connect()?;
    end.context.post_recv(end.qp, &ReceiveWorkRequest { wr_id: 2, sges: &[] })?;
    let completion = end.context.wait_cq(end.cq, PATIENCE)?.ok_or("no tensor in 10 s")?.ok()?;
    // From here on kernels may use it, where it is: `OpenCl::buffer` and `Cuda::pointer` name it for
    // them, by `context.piece`.
    println!("a tensor of {} bytes, number {:?}", completion.byte_len, completion.immediate);
    let mut last = [0; 4];
    end.context.read(end.tensor, 4 * ELEMENTS as u64 - 4, &mut last)?;
    assert_eq!(f32::from_ne_bytes(last), (ELEMENTS - 1) as f32 * 0.5);
    // The other end waits for the acknowledgement.
    end.context.acknowledge(end.qp)?;
    end.context.wait_cq(end.cq, Duration::from_millis(100))?;
    Ok(())
}

struct End {
    context: Context,
    cq: Cq,
    qp: Qp,
    tensor: Mr,
    peer: TcpStream,
}

impl End {
    fn new(device: &str, gpu: &dyn Gpu, peer: TcpStream) -> Outcome<End> {
        let mut context = Context::open(Device::open(device)?, &Config::default())?;
        let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
        let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
        // Memory of a GPU registers as any other.
        let memory = gpu.allocate(4 * ELEMENTS)?;
        let tensor = context.register(pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(End { context, cq, qp, tensor, peer })
    }

    /// Tells the other end who this is and where its tensor lies, and hears the same.
    fn connect(&mut self) -> Outcome<RemoteMemory> {
        let End { context, qp, tensor, peer, .. } = self;
        let local = context.endpoint_for(*qp, peer.peer_addr()?.ip())?;
        writeln!(peer, "{local} {}", context.remote(*tensor)?)?;
        let (mut told, mut byte) = (String::new(), [0]);
        while peer.read(&mut byte)? == 1 && byte != *b"\n" && told.len() < 256 {
            told.push(byte[0].into());
        }
        let (remote, memory) = told.split_once(' ').ok_or("an endpoint and a memory were to come")?;
        context.handshake(*qp, &local, &remote.parse()?)?;
        Ok(memory.parse()?)
    }
}

#[cfg(test)]
#[test]
fn the_tensor_arrives() {
    let open = || ferroce_driver_test_support::gpu::first();
    let (Some(near), Some(far)) = (open(), open()) else { return };
    let listener = TcpListener::bind("127.82.0.2:0").expect("a TCP port");
    let address = listener.local_addr().expect("its address");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            let peer = listener.accept().expect("a peer").0;
            receive("udp:127.82.0.2", &*far, peer).map_err(|error| error.to_string())
        });
        let peer = TcpStream::connect(address).expect("a listener");
        send("udp:127.82.0.1", &*near, peer).expect("it is sent");
        receiver.join().expect("no panic").expect("it comes");
    });
}
