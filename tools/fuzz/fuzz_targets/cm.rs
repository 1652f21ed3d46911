#![no_main]

use ferroce::wire::MAD_LEN;
use ferroce::wire::cm::{CmBody, CmMessage, IpCm};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|mad: &[u8]| {
    let Ok(message) = CmMessage::parse(mad) else { return };
    let private_data = match message.body {
        CmBody::Req(req) => {
            let _ = (req.path_mtu(), req.transport(), req.primary_path.flow_label());
            &req.private_data[..]
        }
        CmBody::SidrReq(request) => &request.private_data[..],
        CmBody::Rej(rej) => {
            let _ = (rej.stage(), rej.reason().to_string(), rej.info());
            &[]
        }
        CmBody::SidrRep(reply) => {
            let _ = reply.info();
            &[]
        }
        CmBody::Mra(mra) => {
            let _ = (mra.stage(), mra.service_timeout());
            &[]
        }
        _ => &[],
    };
    if let Ok(ip) = IpCm::parse(private_data) {
        let bytes = ip.to_bytes().expect("both addresses are of the version that was read");
        assert_eq!(IpCm::parse(&bytes), Ok(ip));
    }
    let mut again = [0xaa; MAD_LEN];
    message.emit(&mut again);
    assert_eq!(CmMessage::parse(&again), Ok(message));
});
