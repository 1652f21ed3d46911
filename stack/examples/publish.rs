//! UD publish and subscribe: a publisher sends datagrams to a multicast group, and every subscriber that has joined it
//! gets each of them.

use std::net::IpAddr;
use std::time::Duration;

use ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce::*;

const GROUP: [u8; 4] = [239, 7, 7, 7];
const QKEY: u32 = 0x1234;
/// In front of a datagram is room for its network header.
const HEADER: u64 = 40;
const MESSAGES: u64 = 10;

/// A context whose datagram queue pair is ready.
fn port(switch: &Switch, address: [u8; 4]) -> Result<(Context, Pd, Cq, Qp), Error> {
    let mut context = Context::open(Box::new(switch.port(&[address.into()])), &Config::default())?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(64)?);
    let qp = context.create_qp(&QpConfig::ud(pd, cq))?;
    context.start_datagrams(qp, QKEY)?;
    Ok((context, pd, cq, qp))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = Gid::from(IpAddr::from(GROUP));
    let switch = Switch::new(SwitchConfig::default())?;
    let mut subscribers = Vec::new();
    for n in 1..=3 {
        let (mut context, pd, cq, qp) = port(&switch, [192, 0, 2, n])?;
        let slot = HEADER + 8;
        let mr = context.register(pd, Memory::zeroed((MESSAGES * slot) as usize)?, Access::LOCAL_WRITE)?;
        for wr_id in 0..MESSAGES {
            let sges = [mr.sge(wr_id * slot..(wr_id + 1) * slot)];
            context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &sges })?;
        }
        context.attach_mcast(qp, group)?;
        subscribers.push((context, cq, mr));
    }

    let (mut publisher, pd, sent, qp) = port(&switch, [192, 0, 2, 100])?;
    // GID index 0: the port has one address.
    let ah = publisher.create_ah(pd, &AddressVector::new(group, 0))?;
    let to = Destination { ah, qpn: Qpn::MULTICAST, qkey: QKEY };
    for number in 0..MESSAGES {
        let (op, text) = (SendOp::SendTo(to), number.to_be_bytes());
        let (data, flags) = (Data::Inline(&text), SendFlags::SIGNALED);
        publisher.post_send(qp, &SendWorkRequest { wr_id: number, op, data, flags })?;
        let completion = publisher.wait_cq(sent, Duration::from_secs(1))?.ok_or("nothing has left")?;
        assert_eq!(completion.status, WcStatus::Success);
    }

    for (n, (context, cq, mr)) in subscribers.iter_mut().enumerate() {
        for number in 0..MESSAGES {
            let completion = context.wait_cq(*cq, Duration::from_secs(1))?.ok_or("a datagram is missing")?;
            let mut text = [0; 8];
            context.read(*mr, completion.wr_id * (HEADER + 8) + HEADER, &mut text)?;
            assert_eq!(u64::from_be_bytes(text), number);
        }
        println!("subscriber {n} has all {MESSAGES}");
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn each_subscriber_receives_all() {
    main().expect("no datagram is lost here");
}
