//! Frames that a receiver must drop, by the reason.

use ferroce::wire::{
    Bth, Encapsulation, FrameBuilder, Opcode, PKEY_DEFAULT, PKey, PathAddress, PathHeader, Sack,
};
use ferroce::{Counter, Gid, Psn, Qpn};
use ferroce_driver_test_support::random::Random;

use crate::packet::{BTH, IP, UDP, reseal};

/// The error of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Junk {
    /// Noise after an Ethernet header, or UDP to another port.
    NotRoce,
    /// The frame is truncated, or its lengths contradict each other.
    Truncated,
    /// An IPv4 fragment, IPv4 options, another IP version.
    BadIp,
    /// One of its bits is flipped.
    WrongIcrc,
    /// An opcode that does not exist.
    UnknownOpcode,
    /// A transport version that does not exist.
    WrongVersion,
    /// RoCE v1, which is off.
    RoceV1,
    /// Valid except for the QPN, which does not exist.
    UnknownQp,
    /// Valid except for the sender's address.
    WrongSource,
    /// Valid except for the partition.
    WrongPkey,
    /// Valid, but of another service.
    WrongService,
    /// A congestion notification.
    Cnp,
}

/// The target of a flood, by a sender with all the knowledge of the peer.
#[derive(Clone, Copy)]
pub struct Target {
    /// The path from the peer to it.
    pub path: PathAddress,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Bytes of payload where the opcode has any.
    pub payload: usize,
}

impl Junk {
    /// All kinds.
    pub const ALL: [Junk; 12] = [
        Junk::NotRoce,
        Junk::Truncated,
        Junk::BadIp,
        Junk::WrongIcrc,
        Junk::UnknownOpcode,
        Junk::WrongVersion,
        Junk::RoceV1,
        Junk::UnknownQp,
        Junk::WrongSource,
        Junk::WrongPkey,
        Junk::WrongService,
        Junk::Cnp,
    ];

    /// The counter for it.
    pub fn counter(self) -> Counter {
        match self {
            Junk::NotRoce => Counter::RxNotRoce,
            Junk::Truncated => Counter::RxLengthErrors,
            Junk::BadIp => Counter::RxIpErrors,
            Junk::WrongIcrc => Counter::RxIcrcEncapsulated,
            Junk::UnknownOpcode => Counter::RxUnknownOpcode,
            Junk::WrongVersion => Counter::RxTransportVersion,
            Junk::RoceV1 => Counter::RxRoceV1Off,
            Junk::UnknownQp => Counter::RxUnknownQp,
            Junk::WrongSource => Counter::RxWrongAddress,
            Junk::WrongPkey => Counter::RxPkeyMismatch,
            Junk::WrongService => Counter::RxWrongService,
            Junk::Cnp => Counter::RpCnpIgnored,
        }
    }

    /// Frames of this kind, with all opcodes to which it applies.
    pub fn frames(self, target: &Target, random: &mut Random) -> Vec<Vec<u8>> {
        // Neither belongs to a service.
        let others = [Opcode::CNP, Opcode::SELECTIVE_ACKNOWLEDGE];
        let exists = |byte: &u8| Opcode::from_byte(*byte).is_some_and(|opcode| !others.contains(&opcode));
        let mut opcodes: Vec<u8> = match self {
            Junk::Cnp => vec![Opcode::CNP.byte(); 16],
            Junk::WrongService => (0x20..0xff).filter(exists).collect(),
            // Opcodes of RC, which the queue pair would process.
            _ => (0..0x20).filter(exists).collect(),
        };
        // So that all kinds have the same share in a mix.
        opcodes = opcodes.into_iter().cycle().take(64).collect();
        opcodes.into_iter().map(|opcode| self.frame(target, opcode, random)).collect()
    }

    fn frame(self, target: &Target, opcode: u8, random: &mut Random) -> Vec<u8> {
        let (mut path, mut qpn) = (target.path, target.qpn);
        match self {
            Junk::RoceV1 => path.encapsulation = Encapsulation::RoceV1,
            Junk::WrongSource => path.source = Gid::from_ipv4([10, 66, 6, random.below(256) as u8].into()),
            Junk::UnknownQp => {
                while qpn == target.qpn || !qpn.is_ordinary() {
                    qpn = Qpn::new(random.below(1 << 24) as u32);
                }
            }
            _ => {}
        }
        let pkey = if self == Junk::WrongPkey { PKey(0x9234) } else { PKEY_DEFAULT };
        let mut frame = sealed(&path, qpn, opcode, pkey, target.payload, random);
        let length = frame.len();
        match self {
            Junk::NotRoce if random.below(2) == 0 => {
                // An unknown EtherType.
                frame[12] = 0x99;
                frame[14..].fill_with(|| random.below(256) as u8);
            }
            // Another UDP port.
            Junk::NotRoce => frame[UDP + 2] ^= 0x40,
            Junk::Truncated if random.below(2) == 0 => {
                frame.truncate(IP + random.below((length - IP) as u64) as usize);
            }
            // A UDP length beyond the packet, or below the minimum.
            Junk::Truncated => {
                let length = if random.below(2) == 0 { [0xff, 0xff] } else { [0, 8] };
                frame[UDP + 4..UDP + 6].copy_from_slice(&length);
            }
            Junk::BadIp => match random.below(3) {
                0 => frame[IP] = 0x46,
                1 => frame[IP] = 0x55,
                _ => frame[IP + 6] |= 0x20,
            },
            Junk::WrongIcrc => {
                let bit = 8 * length - 1 - random.below(32) as usize;
                frame[bit / 8] ^= 1 << (bit % 8);
            }
            Junk::UnknownOpcode => {
                // A selective acknowledge without negotiation is unknown if it has the right length.
                let agreed = Opcode::SELECTIVE_ACKNOWLEDGE;
                let is_unknown = |opcode: Option<Opcode>| opcode.is_none_or(|opcode| opcode == agreed);
                let unknown: Vec<u8> =
                    (0..=255).filter(|byte| is_unknown(Opcode::from_byte(*byte))).collect();
                let opcode = unknown[random.below(unknown.len() as u64) as usize];
                if opcode == agreed.byte() {
                    return sealed(&path, qpn, opcode, pkey, Sack::LEN, random);
                }
                frame[BTH] = opcode;
                reseal(&mut frame);
            }
            Junk::WrongVersion => {
                frame[BTH + 1] |= 1 + random.below(15) as u8;
                reseal(&mut frame);
            }
            _ => {}
        }
        frame
    }
}

/// A frame that is valid by itself.
fn sealed(
    path: &PathAddress,
    qpn: Qpn,
    opcode: u8,
    pkey: PKey,
    payload: usize,
    random: &mut Random,
) -> Vec<u8> {
    let Some(opcode) = Opcode::from_byte(opcode) else { return Vec::new() };
    // Everything needed to be processed, if it were genuine: a payload, or none.
    let payload = if opcode.payload().admits(payload, payload) { payload } else { 0 };
    let mut bth = Bth::new(opcode, qpn, Psn::new(random.below(1 << 24) as u32));
    bth.set_ack_req(true);
    bth.set_pkey(pkey);
    let (path, mut buffer) = (PathHeader::new(path), vec![0; 8192]);
    let Some(mut frame) = FrameBuilder::start(&mut buffer, &path, bth, payload) else { return Vec::new() };
    frame.payload().fill_with(|| random.below(256) as u8);
    let length = frame.finish();
    buffer.truncate(length);
    buffer
}
