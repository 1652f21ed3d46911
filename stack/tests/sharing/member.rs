//! One of many processes on an address: it listens, connects to each process of the other address, and sends each messages
//! whose every byte is checked. It prints a line for each event.

use std::collections::HashMap;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferroce::*;

const ROLE: &str = "FERROCE_SHARING_MEMBER";
const PORT: u16 = 20_000;
const LARGEST: u32 = 4096;
/// Posted receives of a queue pair.
const RECEIVES: u64 = 4;
/// The delay until an ended connection is tried again.
const AGAIN: Duration = Duration::from_millis(300);

/// The parameters of a member.
#[derive(Clone, Copy)]
pub(crate) struct Role {
    pub(crate) own: IpAddr,
    pub(crate) index: usize,
    pub(crate) peers: IpAddr,
    pub(crate) count: usize,
    /// The pause between two messages of a connection.
    pub(crate) pause: Duration,
}

impl Role {
    pub(crate) fn to_env(self) -> (&'static str, String) {
        let Role { own, index, peers, count, pause } = self;
        (ROLE, format!("{own} {index} {peers} {count} {}", pause.as_millis()))
    }

    /// The role of this process, if it is a member.
    pub(crate) fn of_this() -> Option<Role> {
        let text = std::env::var(ROLE).ok()?;
        let mut parts = text.split(' ');
        let mut next = || parts.next().unwrap();
        Some(Role {
            own: next().parse().unwrap(),
            index: next().parse().unwrap(),
            peers: next().parse().unwrap(),
            count: next().parse().unwrap(),
            pause: Duration::from_millis(next().parse().unwrap()),
        })
    }
}

/// A queue pair with its memory: a message to send, and receives.
struct Line {
    qp: Qp,
    mr: Mr,
    peer: usize,
    id: Option<CmId>,
    is_client: bool,
    is_up: bool,
    is_sending: bool,
    /// The number of the next message.
    next: u64,
    due: Instant,
}

struct Member {
    role: Role,
    context: Context,
    pd: Pd,
    cq: Cq,
    lines: HashMap<Qp, Line>,
    of_connection: HashMap<CmId, Qp>,
    /// When to connect to each peer; `None` while it is connected or connecting.
    attempts: Vec<Option<Instant>>,
    received: u64,
    sent: u64,
}

/// A byte of message `number` from one process to another.
fn byte(from: usize, to: usize, number: u64, place: usize) -> u8 {
    (number.wrapping_mul(0x9e37_79b9).wrapping_add((from * 131 + to * 17 + place * 7 + (place >> 8)) as u64))
        as u8
}

fn length(number: u64) -> u32 {
    16 + (number.wrapping_mul(2_654_435_761) % u64::from(LARGEST - 16)) as u32
}

pub(crate) fn run(role: Role) {
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    // The test ends the process by closing the pipe.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0; 1]);
        told.store(true, Ordering::Relaxed);
    });
    let config = Config::default();
    let mut context = Context::open(Device::open(&format!("udp:{}", role.own)).unwrap(), &config).unwrap();
    println!("slot {}", context.capabilities().comm_ids.0);
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(8192).unwrap());
    let own = SocketAddr::new(role.own, PORT + role.index as u16);
    context.listen(PortSpace::Tcp, own, &ListenConfig::default().backlog(128)).unwrap();
    let now = Instant::now();
    let mut member = Member {
        role,
        context,
        pd,
        cq,
        lines: HashMap::new(),
        of_connection: HashMap::new(),
        attempts: vec![Some(now); role.count],
        received: 0,
        sent: 0,
    };
    let mut poller = Poller::new();
    let mut report = now;
    while !stop.load(Ordering::Relaxed) {
        poller.poll(&mut member.context).unwrap();
        while let Some(event) = member.context.next_cm_event() {
            member.on_event(event);
        }
        while let Some(wc) = member.context.poll_cq(member.cq).unwrap() {
            member.on_completion(wc);
        }
        let now = Instant::now();
        member.connect(now);
        member.send(now);
        if now >= report {
            report = now + Duration::from_secs(1);
            member.report("is");
        }
    }
    member.report("was");
    for (reason, count) in member.context.counters().drops().filter(|(_, count)| *count > 0) {
        println!("drop {reason:?} {count}");
    }
    println!("done");
}

impl Member {
    fn report(&self, verb: &str) {
        let up = self.lines.values().filter(|line| line.is_client && line.is_up).count();
        let stats = self.context.driver_stats();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        println!(
            "{verb} up {up} sent {} received {} handed_on {} dropped {} descriptors {descriptors}",
            self.sent, self.received, stats.handed_on, stats.rx_dropped
        );
    }

    fn line(&mut self, peer: usize, is_client: bool) -> Qp {
        let Member { context, pd, cq, .. } = self;
        let qp =
            context.create_qp(&QpConfig::rc(*pd, *cq).max_recv_wr(RECEIVES as u32).max_send_wr(4)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::LOCAL_WRITE }).unwrap();
        let size = (RECEIVES as usize + 1) * LARGEST as usize;
        let mr = context.register(*pd, Memory::zeroed(size).unwrap(), Access::LOCAL_WRITE).unwrap();
        let now = Instant::now();
        let line =
            Line { qp, mr, peer, id: None, is_client, is_up: false, is_sending: false, next: 0, due: now };
        self.lines.insert(qp, line);
        for place in 0..if is_client { 0 } else { RECEIVES } {
            self.receive(qp, place);
        }
        qp
    }

    fn receive(&mut self, qp: Qp, place: u64) {
        let sge = Sge { mr: self.lines[&qp].mr, offset: place * u64::from(LARGEST), length: LARGEST };
        self.context.post_recv(qp, &ReceiveWorkRequest { wr_id: place, sges: &[sge] }).unwrap();
    }

    fn connect(&mut self, now: Instant) {
        for peer in 0..self.role.count {
            if self.attempts[peer].is_none_or(|due| due > now) {
                continue;
            }
            self.attempts[peer] = None;
            let qp = self.line(peer, true);
            let to = SocketAddr::new(self.role.peers, PORT + peer as u16);
            let own = [self.role.index as u8];
            let parameters = ConnectionParameters::default()
                .private_data(&own)
                .timeout_at_least(Duration::from_millis(300));
            match self.context.connect(qp, to, &parameters) {
                Ok(id) => {
                    self.of_connection.insert(id, qp);
                    self.lines.get_mut(&qp).unwrap().id = Some(id);
                }
                Err(error) => {
                    println!("refused {peer} {error}");
                    self.end(qp, "refused");
                }
            }
        }
    }

    fn on_event(&mut self, event: CmEvent) {
        match event {
            CmEvent::ConnectionRequest(request) => {
                let peer = usize::from(request.private_data[0]);
                self.replace(peer);
                let qp = self.line(peer, false);
                self.of_connection.insert(request.id, qp);
                self.lines.get_mut(&qp).unwrap().id = Some(request.id);
                let parameters = ConnectionParameters::default().timeout_at_least(Duration::from_millis(300));
                if let Err(error) = self.context.accept(request.id, qp, &parameters) {
                    println!("not accepted {peer} {error}");
                    self.end(qp, "refused");
                }
            }
            CmEvent::Established { id, .. } => {
                if let Some(line) = self.of_connection.get(&id).and_then(|qp| self.lines.get_mut(qp)) {
                    line.is_up = true;
                }
            }
            CmEvent::Rejected { id, .. } | CmEvent::Unreachable { id, .. } | CmEvent::Disconnected { id } => {
                if let Some(qp) = self.of_connection.get(&id).copied() {
                    self.end(qp, format!("{event:?}").split([' ', '(']).next().unwrap());
                }
            }
            _ => {}
        }
    }

    /// The peer is a new process. A receiver has no other indication that the previous one was killed.
    fn replace(&mut self, peer: usize) {
        let is_its = |line: &&mut Line| line.peer == peer && !line.is_client;
        let Some(line) = self.lines.values_mut().find(is_its) else { return };
        line.is_up = false;
        let qp = line.qp;
        self.end(qp, "replaced");
    }

    /// A connection has ended, or could not be made.
    fn end(&mut self, qp: Qp, why: &str) {
        let Some(line) = self.lines.remove(&qp) else { return };
        if line.is_up {
            println!("ended {} {} {why}", line.peer, if line.is_client { "client" } else { "server" });
        }
        if line.is_client {
            self.attempts[line.peer] = Some(Instant::now() + AGAIN);
        }
        if let Some(id) = line.id {
            self.of_connection.remove(&id);
            let _ = self.context.disconnect(id);
        }
        self.context.destroy_qp(line.qp).unwrap();
        self.context.deregister(line.mr).unwrap();
    }

    fn on_completion(&mut self, wc: WorkCompletion) {
        let Some(line) = self.lines.get_mut(&wc.qp) else { return };
        if wc.status != WcStatus::Success {
            let why = format!("{:?}", wc.status);
            return self.end(wc.qp, &why);
        }
        if line.is_client {
            line.is_sending = false;
            self.sent += 1;
            return;
        }
        let (peer, number, mr) = (line.peer, line.next, line.mr);
        line.next += 1;
        let start = wc.wr_id as usize * LARGEST as usize;
        let bytes = &self.context.bytes(mr).unwrap()[start..start + wc.byte_len as usize];
        let is_right = wc.byte_len == length(number)
            && bytes.iter().enumerate().all(|(place, is)| *is == byte(peer, self.role.index, number, place));
        if !is_right {
            println!("wrong {peer} message {number} of {} bytes", wc.byte_len);
        }
        self.received += 1;
        self.receive(wc.qp, wc.wr_id);
    }

    fn send(&mut self, now: Instant) {
        let Member { lines, context, role, .. } = self;
        for line in lines.values_mut().filter(|line| line.is_client && line.is_up && !line.is_sending) {
            if line.due > now {
                continue;
            }
            let (number, length) = (line.next, length(line.next));
            line.next += 1;
            let bytes = context.bytes_mut(line.mr).unwrap();
            for (place, to) in bytes[..length as usize].iter_mut().enumerate() {
                *to = byte(role.index, line.peer, number, place);
            }
            let sges = [Sge { mr: line.mr, offset: 0, length }];
            let data = Data::Sges(&sges);
            let wr = SendWorkRequest { wr_id: number, op: SendOp::Send, data, flags: SendFlags::SIGNALED };
            context.post_send(line.qp, &wr).unwrap();
            line.is_sending = true;
            // Not all at the same time.
            line.due = now + role.pause / 2 + role.pause / 64 * ((number as u32 * 7 + line.peer as u32) % 64);
        }
    }
}
