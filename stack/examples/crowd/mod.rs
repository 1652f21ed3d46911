//! Clients of the echo server: a hundred connections, each with a message at a time.

use std::collections::HashMap;

use ferroce::driver::loopback::Loopback;
use ferroce::*;

use super::{CONNECTIONS, ROUNDS, SERVER, SIZE};

pub(crate) fn run(port: Loopback) -> Result<(), Error> {
    let mut context = Context::open(Box::new(port), &Config::default())?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(4096)?);
    let memory = Memory::zeroed(CONNECTIONS * SIZE as usize)?;
    let mr = context.register(pd, memory, Access::LOCAL_WRITE)?;
    let mut clients = HashMap::new();
    for n in 0..CONNECTIONS as u64 {
        let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
        context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        let id = context.connect(qp, SERVER, &ConnectionParameters::default())?;
        clients.insert(id, (n, qp));
    }
    let ask = |context: &mut Context, n: u64, qp: Qp, round: u8| {
        let sges = [Sge { mr, offset: n * u64::from(SIZE), length: SIZE }];
        context.post_recv(qp, &ReceiveWorkRequest { wr_id: n, sges: &sges })?;
        let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
        context.post_send(qp, &SendWorkRequest { wr_id: n, op, data: Data::Inline(&[n as u8, round]), flags })
    };
    let (mut poller, mut rounds, mut ended) = (Poller::new(), [0; CONNECTIONS], 0);
    while ended < CONNECTIONS {
        poller.poll(&mut context)?;
        while let Some(event) = context.next_cm_event() {
            match event {
                CmEvent::Established { id, .. } => ask(&mut context, clients[&id].0, clients[&id].1, 0)?,
                CmEvent::Disconnected { .. } => ended += 1,
                other => panic!("{other:?}"),
            }
        }
        while let Some(completion) = context.poll_cq(cq)? {
            if completion.opcode != WcOpcode::Recv || completion.status != WcStatus::Success {
                continue;
            }
            let (n, round) = (completion.wr_id, &mut rounds[completion.wr_id as usize]);
            let start = n as usize * SIZE as usize;
            assert_eq!(
                (completion.byte_len, &context.bytes(mr)?[start..start + 2]),
                (2, &[n as u8, *round][..])
            );
            *round += 1;
            if usize::from(*round) < ROUNDS {
                ask(&mut context, n, completion.qp, *round)?;
            } else if let Some((id, _)) = clients.iter().find(|(_, client)| client.0 == n) {
                context.disconnect(*id)?;
            }
        }
    }
    Ok(())
}
