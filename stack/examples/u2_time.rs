use ferroce::*;
use std::time::{Duration, Instant};
fn p<T: std::fmt::Debug>(w: &str, t: Instant, r: Result<T, Error>) {
    match r {
        Ok(v) => println!("{w}: OK {:.100} in {:?}", format!("{v:?}"), t.elapsed()),
        Err(e) => println!("{w}: ERR {e} [{:?}]", t.elapsed()),
    }
}
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a: Vec<String> = std::env::args().collect();
    let mut c = Context::open(a[1].parse::<DeviceSpec>()?.open()?, &Config::default())?;
    println!("# {} {:?}", a[1], c.port().gids);
    let (pd, cq) = (c.alloc_pd()?, c.create_cq(64)?);
    let ms = Duration::from_millis;
    let now = Instant::now;
    for d in [Duration::ZERO, Duration::from_nanos(1), ms(50)] {
        let t = now();
        p(&format!("wait_cq {d:?}"), t, c.wait_cq(cq, d));
        let t = now();
        p(&format!("wait_cm_event {d:?}"), t, c.wait_cm_event(d));
        let t = now();
        p(&format!("wait {d:?}"), t, c.wait(d));
    }
    // Duration::MAX with something that comes
    let qp = c.create_qp(&QpConfig::rc(pd, cq))?;
    let own = (0..c.port().gids.len()).next().unwrap();
    let e = c.endpoint(qp, own)?;
    c.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    c.post_recv(qp, &ReceiveWorkRequest { wr_id: 7, sges: &[] })?;
    c.modify_qp(qp, Transition::Error)?;
    let t = now();
    p("wait_cq MAX, one there", t, c.wait_cq(cq, Duration::MAX));
    let _ = e;
    let init = |c: &mut Context| -> Result<Qp, Error> {
        let q = c.create_qp(&QpConfig::rc(pd, cq))?;
        c.modify_qp(q, Transition::Init { access: Access::NONE })?;
        Ok(q)
    };
    let d = ConnectionParameters::default();
    for to in &a[2..] {
        let q = init(&mut c)?;
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(8)] {
            let t = now();
            p(
                &format!("connect_blocking {to} {time:?}"),
                t,
                c.connect_blocking(q, to.parse()?, &d, time).map(|x| x.0),
            );
            println!("    state {:?}", c.query_qp(q)?.state);
        }
        let t = now();
        p(
            &format!("connect_blocking {to} MAX, cm_timeout 50ms x 2"),
            t,
            c.connect_blocking(
                q,
                to.parse()?,
                &d.clone().cm_timeout_at_least(ms(50)).cm_retries(2),
                Duration::MAX,
            )
            .map(|x| x.0),
        );
        let t = now();
        p(
            &format!("resolve_blocking {to} 1s"),
            t,
            c.resolve_blocking(to.parse()?, &d, Duration::from_secs(1)).map(|x| x.qpn),
        );
        let ip = to.parse::<std::net::SocketAddr>()?.ip();
        let Some(g) = c.port().gid_index_for(Gid::from(ip)) else {
            println!("no gid for {ip}");
            continue;
        };
        // handshake by hand with somebody who isn't there
        let q = c.create_qp(&QpConfig::rc(pd, cq))?;
        let local = c.endpoint(q, g)?;
        let remote: Endpoint = format!("{ip}/qpn=0x000123/psn=0x000001/mtu=1024/rd_atomic=16").parse()?;
        let t = now();
        p(&format!("handshake {ip}"), t, c.handshake(q, &local, &remote));
        if let Err(e) = c.post_send(
            q,
            &SendWorkRequest {
                wr_id: 3,
                op: SendOp::Send,
                data: Data::Inline(b"x"),
                flags: SendFlags::SIGNALED,
            },
        ) {
            println!("   post {e}");
        }
        let t = now();
        p("   wait_cq 6 s", t, c.wait_cq(cq, Duration::from_secs(6)).map(|w| w.map(|w| w.status)));
        while let Some(e) = c.next_event() {
            println!("   event {e:?}");
        }
    }
    for (n, v) in [("zero", Duration::ZERO), ("1ns", Duration::from_nanos(1)), ("max", Duration::MAX)] {
        println!(
            "ReadyToSend::timeout_at_least {n}: {:?}; connection {:?}; cm {:?}; rnr {:?}",
            ReadyToSend::new(Psn::new(1)).timeout_at_least(v).ack_timeout(),
            d.clone().timeout_at_least(v).ack_timeout(),
            d.clone().cm_timeout_at_least(v).patience(),
            RnrTimer::at_least(v)
        );
    }
    let q = init(&mut c)?;
    let to = "127.0.0.9:1".parse()?;
    for (n, x) in [
        ("timeout 0", d.clone().timeout(0)),
        ("timeout 32", d.clone().timeout(32)),
        ("cm_timeout 32", d.clone().cm_timeout(32)),
        ("cm_retries 16", d.clone().cm_retries(16)),
        ("retry 8", d.clone().retry_count(8)),
        ("rd 129", d.clone().responder_resources(129)),
    ] {
        let t = now();
        p(n, t, c.connect(q, to, &x));
    }
    let t = now();
    p("connect port 0", t, c.connect(q, "127.0.0.1:0".parse()?, &d));
    let t = now();
    p("connect 0.0.0.0", t, c.connect(q, "0.0.0.0:1".parse()?, &d));
    let t = now();
    p("connect 255.255.255.255", t, c.connect(q, "255.255.255.255:1".parse()?, &d));
    let t = now();
    p("connect 224.0.0.1", t, c.connect(q, "224.0.0.1:1".parse()?, &d));
    let t = now();
    p("connect [::1]", t, c.connect(q, "[::1]:1".parse()?, &d));
    let t = now();
    p("prepare_wait", t, c.prepare_wait(Clock::start().now()));
    let t = now();
    p("poll NEVER", t, c.poll(Nanos::NEVER));
    println!("{:?}", c.now());
    let t = now();
    p("wait_cq 10ms after NEVER", t, c.wait_cq(cq, ms(10)));
    Ok(())
}
