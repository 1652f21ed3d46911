use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{PKey, Qpn};

/// Service id resolution request: a query for the datagram queue pair of a service id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SidrReq {
    request_id: U32,
    pkey: U16,
    reserved: U16,
    service_id: U64,
    /// The application's private data; the first 36 bytes may be an [`IpCm`](super::IpCm).
    pub private_data: [u8; 216],
}

impl SidrReq {
    /// A request for `service_id` in the partition of `pkey`.
    pub fn new(request_id: u32, service_id: u64, pkey: PKey) -> SidrReq {
        SidrReq {
            request_id: U32::new(request_id),
            pkey: U16::new(pkey.0),
            service_id: U64::new(service_id),
            ..SidrReq::new_zeroed()
        }
    }

    /// The request's id, which the reply repeats.
    pub fn request_id(&self) -> u32 {
        self.request_id.get()
    }

    /// The partition.
    pub fn pkey(&self) -> PKey {
        PKey(self.pkey.get())
    }

    /// The requested service.
    pub fn service_id(&self) -> u64 {
        self.service_id.get()
    }
}

/// Service id resolution reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SidrRep {
    request_id: U32,
    status: u8,
    info_length: u8,
    reserved_a: U16,
    qpn: [u8; 3],
    reserved_b: u8,
    service_id: U64,
    qkey: U32,
    info: [u8; 72],
    /// The application's private data.
    pub private_data: [u8; 136],
}

impl SidrRep {
    /// A reply with the service's queue pair `qpn` and its Q_Key `qkey`.
    pub fn found(request_id: u32, service_id: u64, qpn: Qpn, qkey: u32) -> SidrRep {
        SidrRep {
            request_id: U32::new(request_id),
            qpn: qpn.to_bytes(),
            service_id: U64::new(service_id),
            qkey: U32::new(qkey),
            ..SidrRep::new_zeroed()
        }
    }

    /// A reply that refuses the service; `status` is not 0.
    pub fn refused(request_id: u32, service_id: u64, status: u8) -> SidrRep {
        SidrRep {
            request_id: U32::new(request_id),
            status,
            service_id: U64::new(service_id),
            ..SidrRep::new_zeroed()
        }
    }

    /// The request's id.
    pub fn request_id(&self) -> u32 {
        self.request_id.get()
    }

    /// 0 if the queue pair is valid.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// The queue pair of the service.
    pub fn qpn(&self) -> Qpn {
        Qpn::from_bytes(self.qpn)
    }

    /// The requested service.
    pub fn service_id(&self) -> u64 {
        self.service_id.get()
    }

    /// The Q_Key of the queue pair.
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// The additional information for some statuses.
    pub fn info(&self) -> &[u8] {
        &self.info[..usize::from(self.info_length).min(self.info.len())]
    }
}
