//! Datagrams (UD): a client looks for a service by address and port, sends it a question, and gets an answer.
//!
//! Alone, both ends in one process: `cargo run -p ferroce --example datagrams`
//!
//! In two terminals, the server first; `udp:ADDRESS` is an address of that host, `eth0` an interface:
//!
//! ```sh
//! cargo run -p ferroce --example datagrams udp:127.0.0.1
//! cargo run -p ferroce --example datagrams udp:127.0.0.2 127.0.0.1
//! ```

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use ferroce::*;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const PORT: u16 = 7472;
const QKEY: u32 = 0x1234;
const QUESTION: &[u8] = b"are you there?";
const ANSWER: &[u8] = b"yes";
/// A receive has room for the network header in front of the datagram.
const HEADER: usize = 40;
const LONG: Duration = Duration::from_secs(5);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => alone(),
        [device] => serve(listening(Device::open(device)?)?),
        [device, server] => ask(Device::open(device)?, server.parse()?),
        _ => {
            Err("usage: datagrams; datagrams DEVICE (the server); datagrams DEVICE SERVER (a client)".into())
        }
    }
}

fn alone() -> Outcome<()> {
    let server = IpAddr::from([192, 0, 2, 2]);
    let (near, far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[server]);
    let end = listening(Box::new(far).into())?;
    let serving = thread::spawn(move || serve(end));
    ask(Box::new(near).into(), server)?;
    serving.join().map_err(|_| "the server has panicked")?
}

/// A context whose UD queue pair is ready, with a receive posted.
struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    mr: Mr,
}

impl End {
    fn open(device: Device) -> Outcome<End> {
        let mut context = Context::open(device, &Config::default())?;
        let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
        let qp = context.create_qp(&QpConfig::ud(pd, cq))?;
        context.start_datagrams(qp, QKEY)?;
        let mr = context.register(pd, Memory::zeroed(HEADER + 256)?, Access::LOCAL_WRITE)?;
        let sges = [mr.sge(0..HEADER as u64 + 256)];
        context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &sges })?;
        Ok(End { context, pd, cq, qp, mr })
    }

    /// Sends one datagram, and waits until it has left.
    fn send(&mut self, address: &AddressVector, qpn: Qpn, qkey: u32, text: &[u8]) -> Outcome<()> {
        let ah = self.context.create_ah_blocking(self.pd, address, LONG)?;
        let (op, data) = (SendOp::SendTo(Destination { ah, qpn, qkey }), Data::Inline(text));
        let flags = SendFlags::SIGNALED;
        self.context.post_send(self.qp, &SendWorkRequest { wr_id: 2, op, data, flags })?;
        self.next(LONG)?;
        Ok(())
    }

    /// The next completion, if it is a success.
    fn next(&mut self, timeout: Duration) -> Outcome<WorkCompletion> {
        Ok(self.context.wait_cq(self.cq, timeout)?.ok_or("nothing has come in time")?.ok()?)
    }
}

fn listening(device: Device) -> Outcome<End> {
    let mut end = End::open(device)?;
    let all = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT);
    end.context.listen(PortSpace::Udp, all, &ListenConfig::default())?;
    Ok(end)
}

/// Answers one question.
fn serve(mut end: End) -> Outcome<()> {
    println!("waiting for a client, for 60 s");
    let Some(CmEvent::ConnectionRequest(request)) = end.context.wait_cm_event(Duration::from_secs(60))?
    else {
        return Err("nobody asks".into());
    };
    end.context.accept_datagrams(request.id, end.qp, &[])?;
    let received = end.next(LONG)?;
    let mut datagram = vec![0; received.byte_len as usize];
    end.context.read(end.mr, 0, &mut datagram)?;
    let (header, question) = datagram.split_first_chunk::<HEADER>().ok_or("no network header")?;
    // The header has the way back, and the completion the queue pair.
    let back = end.context.address_from_wc(&received, header)?;
    println!("{} asks: {}", back.gid.to_ip(), String::from_utf8_lossy(question));
    end.send(&back, received.src_qpn, QKEY, ANSWER)
}

fn ask(device: Device, server: IpAddr) -> Outcome<()> {
    let mut end = End::open(device)?;
    let to = SocketAddr::new(server, PORT);
    let service = end.context.resolve_blocking(to, &ConnectionParameters::default(), LONG)?;
    end.send(&service.address, service.qpn, service.qkey, QUESTION)?;
    let received = end.next(LONG)?;
    let mut datagram = vec![0; received.byte_len as usize];
    end.context.read(end.mr, 0, &mut datagram)?;
    let answer = datagram.get(HEADER..).ok_or("no network header")?;
    println!("{server} answers: {}", String::from_utf8_lossy(answer));
    if answer == ANSWER { Ok(()) } else { Err("that is another answer".into()) }
}

#[cfg(test)]
#[test]
fn the_request_is_answered() {
    alone().expect("an answer");
}
