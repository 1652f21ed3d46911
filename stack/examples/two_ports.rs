//! One buffer on two ports: both contexts hold the same memory, without a copy. What arrives by one port is sent on by
//! the other.

use std::time::Duration;

use ferroce::*;

/// A context with a queue pair, and memory that it is to hold.
struct End {
    context: Context,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    endpoint: Endpoint,
}

fn end(port: driver::loopback::Loopback, memory: Memory) -> Result<End, Error> {
    let mut context = Context::open(Box::new(port), &Config::default())?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    let mr = context.register(pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    // GID index 0: the port has one address.
    let endpoint = context.endpoint(qp, 0)?;
    Ok(End { context, cq, qp, mr, endpoint })
}

/// WRITEs 64 bytes of one end's memory to the other's, while both are polled.
fn write(from: &mut End, to: &mut End) -> Result<(), Error> {
    from.context.handshake(from.qp, &from.endpoint, &to.endpoint)?;
    to.context.handshake(to.qp, &to.endpoint, &from.endpoint)?;
    let (op, data) = (SendOp::Write(to.context.remote(to.mr)?.at(0)), Data::Sges(&[from.mr.sge(0..64)]));
    from.context.post_send(from.qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
    loop {
        to.context.wait_cq(to.cq, Duration::from_micros(10))?;
        if let Some(completion) = from.context.wait_cq(from.cq, Duration::from_micros(10))? {
            assert_eq!(completion.status, WcStatus::Success);
            return Ok(());
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (source, first) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let (second, sink) = driver::loopback::pair(&[[198, 51, 100, 1].into()], &[[198, 51, 100, 2].into()]);

    // Memory that several hold is made so; each context gets a handle of it.
    let buffer = Memory::shared(4096)?;
    let mut source = end(source, Memory::copy_of(&[b'a'; 64])?)?;
    let (mut first, mut second) = (end(first, buffer.share()?)?, end(second, buffer.share()?)?);
    let mut sink = end(sink, Memory::zeroed(64)?)?;

    write(&mut source, &mut first)?;
    let mut byte = [0];
    buffer.read(63, &mut byte)?;
    println!("the program sees {:?}, which came by the first port", char::from(byte[0]));
    write(&mut second, &mut sink)?;
    assert_eq!(sink.context.bytes(sink.mr)?, [b'a'; 64]);
    println!("the second port has sent it on");

    // Nobody has slices of it: somebody else may write.
    if let Err(error) = first.context.bytes(first.mr) {
        println!("{error}");
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn messages_pass_over_both_ports() {
    main().expect("it arrives");
}
