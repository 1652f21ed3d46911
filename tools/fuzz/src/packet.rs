//! Packets of the peer: converts the fuzzer's choices to frames.

use ferroce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extensions, Feth, FlushType, FrameBuilder, Ieth, ImmDt,
    NetworkHeader, Opcode, Operation, PKey, Packet, PathHeader, Reth, Selectivity, Syndrome, icrc,
};
use ferroce::{PathMtu, Psn, QpType, Qpn, RKey, SendOp};

use crate::input::Input;

/// The Q_Key of datagrams to the queue pair.
pub(crate) const QKEY: u32 = 0x1111_2222;
/// The source queue pair number of datagrams.
const SOURCE_QPN: Qpn = Qpn::new(0x78);

/// A packet, with a value for every header that an opcode may have.
#[derive(Clone, Copy, Default)]
pub(crate) struct Fields {
    pub(crate) psn: Psn,
    pub(crate) va: u64,
    pub(crate) rkey: RKey,
    pub(crate) length: u32,
    pub(crate) compare: u64,
    /// Swap or add of an atomic, and the original value of its acknowledgement.
    pub(crate) operand: u64,
    pub(crate) syndrome: u8,
    pub(crate) msn: u32,
    pub(crate) payload: usize,
    /// The contents of the payload; see [`fill`].
    pub(crate) fill: u8,
    /// See the constants of [`Flags`].
    pub(crate) flags: Flags,
}

impl Fields {
    /// The values of all headers.
    fn extensions(&self) -> Extensions {
        let mut extensions = Extensions::default();
        let qkey = QKEY ^ u32::from(self.flags.has(Flags::FOREIGN_QKEY));
        extensions.deth = Some(Deth::new(qkey, SOURCE_QPN));
        extensions.reth = Some(Reth::new(self.va, self.rkey, self.length));
        extensions.atomic_eth = Some(AtomicEth::new(self.va, self.rkey, self.operand, self.compare));
        extensions.aeth = Some(Aeth::with_syndrome_byte(self.syndrome, self.msn));
        extensions.atomic_ack_eth = Some(AtomicAckEth::new(self.operand));
        extensions.immdt = Some(ImmDt::new(0x1000_0000 | u32::from(self.fill)));
        extensions.ieth = Some(Ieth::new(self.rkey));
        let selectivity = if self.fill & 1 == 0 { Selectivity::Range } else { Selectivity::MemoryRegion };
        let kind = FlushType { global_visibility: self.fill & 2 == 0, persistence: self.fill & 4 != 0 };
        extensions.feth = Some(Feth::new(selectivity, kind));
        extensions
    }
}

/// The unusual properties of a packet; none if all bits are zero.
#[derive(Clone, Copy, Default)]
pub(crate) struct Flags(pub(crate) u8);

impl Flags {
    pub(crate) const ACK_REQ: u8 = 1;
    pub(crate) const SOLICITED: u8 = 2;
    pub(crate) const FOREIGN_PKEY: u8 = 4;
    pub(crate) const FOREIGN_SOURCE: u8 = 8;
    pub(crate) const FOREIGN_QPN: u8 = 16;
    pub(crate) const BAD_ICRC: u8 = 32;
    pub(crate) const BAD_PAD: u8 = 64;
    pub(crate) const FOREIGN_QKEY: u8 = 128;

    pub(crate) fn has(self, flag: u8) -> bool {
        self.0 & flag != 0
    }
}

/// The opcode for a byte: one of the service, or with the highest bits set any.
pub(crate) fn opcode(byte: u8, service: QpType) -> Opcode {
    let base = match service {
        QpType::Rc => 0,
        QpType::Uc => 0x20,
        QpType::Ud => 0x60,
    };
    let of_service = |byte: u8| Opcode::from_byte(base | byte & 0x1f);
    let any = || Opcode::from_byte(byte & 0x3f | base & 0x40);
    let opcode = if byte >> 6 == 3 { any() } else { of_service(byte) };
    opcode.or(of_service(4)).unwrap_or(Opcode::RC_SEND_ONLY)
}

/// A response chosen by the fuzzer: its PSN is near `base` according to the first byte, and `right` returns the correct
/// opcode and payload for it.
pub(crate) fn read_response(
    input: &mut Input<'_>,
    base: impl Fn(u8) -> Psn,
    right: impl Fn(Psn) -> Option<(Opcode, usize)>,
) -> (Opcode, Fields) {
    let (kind, psn, flags) = (input.u8(), input.u8(), input.u8());
    let (syndrome, payload, fill) = (input.u8(), input.u16(), input.u8());
    let psn = near(base(kind), psn);
    let expected = right(psn);
    let opcode = match kind & 7 {
        0 | 1 => Opcode::RC_ACKNOWLEDGE,
        2 => Opcode::RC_READ_RESPONSE_FIRST,
        3 => Opcode::RC_READ_RESPONSE_MIDDLE,
        4 => Opcode::RC_READ_RESPONSE_LAST,
        5 => Opcode::RC_READ_RESPONSE_ONLY,
        6 => Opcode::RC_ATOMIC_ACKNOWLEDGE,
        _ => expected.map_or(Opcode::RC_ACKNOWLEDGE, |(opcode, _)| opcode),
    };
    let payload = match (payload, expected) {
        (0xffff, Some((_, right))) => right,
        _ => usize::from(payload) % 1101,
    };
    let fields = Fields {
        psn,
        syndrome: if kind & 0x40 == 0 { Syndrome::ACK.byte() } else { syndrome },
        msn: u32::from(syndrome),
        operand: u64::from(fill) * 0x0101_0101_0101_0101,
        payload: if opcode.operation() == Operation::ReadResponse { payload } else { 0 },
        fill,
        flags: Flags(flags),
        ..Fields::default()
    };
    (opcode, fields)
}

/// The PSN for a byte.
pub(crate) fn near(base: Psn, byte: u8) -> Psn {
    match byte as i8 {
        i8::MIN => base + (1 << 23),
        delta => base + (delta as u32 & 0xff_ffff),
    }
}

/// The correct response to packet `index` of a send of `length` bytes, if it has its own: opcode and payload.
pub(crate) fn response_to(op: &SendOp, length: usize, index: u32, mtu: PathMtu) -> Option<(Opcode, usize)> {
    match op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => Some((Opcode::RC_ATOMIC_ACKNOWLEDGE, 0)),
        SendOp::Flush { .. } | SendOp::AtomicWrite(_) => Some((Opcode::RC_READ_RESPONSE_ONLY, 0)),
        SendOp::Read(_) => {
            let (last, bytes) = (mtu.packets(length as u32) - 1, mtu.bytes() as usize);
            let opcode = match (index == 0, index == last) {
                (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
                (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
                (false, true) => Opcode::RC_READ_RESPONSE_LAST,
                (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
            };
            Some((opcode, (length - index as usize * bytes).min(bytes)))
        }
        _ => None,
    }
}

/// Payload in which neighbouring bytes differ, and which differs for each `fill`.
pub(crate) fn fill(bytes: &mut [u8], fill: u8) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ fill;
    }
}

/// Writes the frame for `qpn` into `buffer`; returns its length.
pub(crate) fn build(
    buffer: &mut [u8],
    path: &PathHeader,
    qpn: Qpn,
    opcode: Opcode,
    fields: &Fields,
) -> usize {
    let flags = fields.flags;
    let qpn = if flags.has(Flags::FOREIGN_QPN) { Qpn::new(qpn.value() ^ 1) } else { qpn };
    let mut bth = Bth::new(opcode, qpn, fields.psn);
    bth.set_ack_req(flags.has(Flags::ACK_REQ));
    bth.set_solicited(flags.has(Flags::SOLICITED));
    if flags.has(Flags::FOREIGN_PKEY) {
        bth.set_pkey(PKey(0x1234));
    }
    let mut frame =
        FrameBuilder::start(buffer, path, bth, fields.payload).expect("the buffer is long enough");
    frame.put_extensions(&fields.extensions());
    fill(frame.payload(), fields.fill);
    let length = frame.finish();
    if flags.has(Flags::BAD_PAD) {
        buffer[path.len() + 1] ^= 0x10;
        seal(&mut buffer[..length]);
    }
    if flags.has(Flags::BAD_ICRC) {
        buffer[length - 1] ^= 1;
    }
    length
}

/// Corrects the ICRC of a frame, if it contains a packet.
pub fn seal(frame: &mut [u8]) -> bool {
    let Ok(packet) = Packet::decode(frame) else { return false };
    let Some(value) = icrc::compute(packet.header, packet.covered()) else { return false };
    let end = packet.covered().as_ptr_range().end as usize - frame.as_ptr() as usize;
    frame[end..end + 4].copy_from_slice(&value.to_le_bytes());
    true
}

/// Parses a frame of the engine: it must be valid, with a valid ICRC and a zero pad.
pub(crate) fn parse_own(frame: &[u8]) -> Packet<'_> {
    let packet =
        Packet::parse(frame).unwrap_or_else(|e| panic!("the engine sent a broken frame: {e}\n{frame:02x?}"));
    assert_ne!(packet.header, NetworkHeader::Grh, "RoCE v1 is off");
    let covered = packet.covered();
    let pad = &covered[covered.len() - packet.bth.pad()..];
    assert!(pad.iter().all(|byte| *byte == 0), "the engine's pad is not zero: {pad:02x?}");
    packet
}
