//! Packets of the scripted peer: how a case writes them, and how it reads the engine's.

use std::fmt;
use std::ops::Deref;

use ferroce::Nanos;
use ferroce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extensions, Feth, FrameBuilder, Ieth, ImmDt, NetworkHeader,
    Opcode, OwnedPacket, PKEY_DEFAULT, PKey, PathHeader, Psn, Qpn, RKey, Reth, Sack, Syndrome, icrc,
};

/// Where the IP header of an untagged frame starts.
pub const IP: usize = 14;
/// Where the UDP header of an untagged IPv4 frame starts.
pub const UDP: usize = IP + 20;
/// Where the BTH of an untagged IPv4 frame starts.
pub const BTH: usize = UDP + 8;

/// NAK: PSN sequence error. The byte is an AETH's syndrome, as with those that follow.
pub const NAK_SEQUENCE: u8 = 0x60;
/// NAK: invalid request.
pub const NAK_INVALID: u8 = 0x61;
/// NAK: remote access error.
pub const NAK_ACCESS: u8 = 0x62;
/// NAK: remote operational error.
pub const NAK_OPERATIONAL: u8 = 0x63;
/// The bits of an RNR NAK's syndrome above its timer code.
pub const NAK_RNR: u8 = 0x20;

/// A packet to be injected.
#[derive(Clone, Debug)]
pub struct Script {
    opcode: Opcode,
    psn: u32,
    ack_req: bool,
    solicited: bool,
    mig_req: bool,
    pkey: PKey,
    dest_qpn: Option<Qpn>,
    extensions: Extensions,
    payload: Vec<u8>,
}

/// A packet for the queue pair under test. Headers that are not set are zero.
pub fn packet(opcode: Opcode, psn: u32) -> Script {
    Script {
        opcode,
        psn,
        ack_req: false,
        solicited: false,
        mig_req: true,
        pkey: PKEY_DEFAULT,
        dest_qpn: None,
        extensions: Extensions::default(),
        payload: Vec::new(),
    }
}

/// An ACK of everything up to `psn`, without credit accounting.
pub fn ack(psn: u32, msn: u32) -> Script {
    packet(Opcode::RC_ACKNOWLEDGE, psn).aeth(Syndrome::ACK.byte(), msn)
}

/// An Acknowledge with this syndrome byte.
pub fn nak(syndrome: u8, psn: u32, msn: u32) -> Script {
    packet(Opcode::RC_ACKNOWLEDGE, psn).aeth(syndrome, msn)
}

/// A selective acknowledge: `psn` is missing, `held` are held.
pub fn sack(psn: u32, msn: u32, held: &[u32]) -> Script {
    let mut bits = [0; Sack::SPAN as usize / 64];
    for psn in held {
        let bit = psn % Sack::SPAN;
        bits[bit as usize / 64] |= 1 << (bit % 64);
    }
    let script = packet(Opcode::SELECTIVE_ACKNOWLEDGE, psn).aeth(Syndrome::ACK.byte(), msn);
    script.payload(Sack::new(&bits).bytes())
}

/// A READ response; First, Last and Only get their AETH.
pub fn read_response(opcode: Opcode, psn: u32, payload: &[u8]) -> Script {
    let response = packet(opcode, psn).payload(payload);
    match opcode {
        Opcode::RC_READ_RESPONSE_MIDDLE => response,
        _ => response.aeth(Syndrome::ACK.byte(), 0),
    }
}

/// An Atomic Acknowledge with the previous value.
pub fn atomic_ack(psn: u32, original: u64) -> Script {
    packet(Opcode::RC_ATOMIC_ACKNOWLEDGE, psn).aeth(Syndrome::ACK.byte(), 0).original(original)
}

impl Script {
    /// With AckReq set.
    pub fn ack_req(self) -> Script {
        Script { ack_req: true, ..self }
    }

    /// With this MigReq; it is set otherwise.
    pub fn mig_req(self, on: bool) -> Script {
        Script { mig_req: on, ..self }
    }

    /// With this P_Key instead of the default one.
    pub fn pkey(self, pkey: u16) -> Script {
        Script { pkey: PKey(pkey), ..self }
    }

    /// With this PSN; its lower 24 bits count.
    pub fn psn(self, psn: u32) -> Script {
        Script { psn, ..self }
    }

    /// To this queue pair instead of the one under test.
    pub fn dest_qpn(self, qpn: Qpn) -> Script {
        Script { dest_qpn: Some(qpn), ..self }
    }

    /// With this payload.
    pub fn payload(self, payload: &[u8]) -> Script {
        Script { payload: payload.to_vec(), ..self }
    }

    /// With the solicited event bit set.
    pub fn solicited(self) -> Script {
        Script { solicited: true, ..self }
    }

    /// With this DETH.
    pub fn deth(mut self, qkey: u32, source: Qpn) -> Script {
        self.extensions.deth = Some(Deth::new(qkey, source));
        self
    }

    /// With this RETH.
    pub fn reth(mut self, va: u64, rkey: RKey, length: u32) -> Script {
        self.extensions.reth = Some(Reth::new(va, rkey, length));
        self
    }

    /// With this AtomicETH.
    pub fn atomic_eth(mut self, va: u64, rkey: RKey, swap_or_add: u64, compare: u64) -> Script {
        self.extensions.atomic_eth = Some(AtomicEth::new(va, rkey, swap_or_add, compare));
        self
    }

    /// With this AETH; `syndrome` may be a reserved one.
    pub fn aeth(mut self, syndrome: u8, msn: u32) -> Script {
        self.extensions.aeth = Some(Aeth::with_syndrome_byte(syndrome, msn));
        self
    }

    /// With this AtomicAckETH.
    pub fn original(mut self, value: u64) -> Script {
        self.extensions.atomic_ack_eth = Some(AtomicAckEth::new(value));
        self
    }

    /// With this ImmDt.
    pub fn imm(mut self, value: u32) -> Script {
        self.extensions.immdt = Some(ImmDt::new(value));
        self
    }

    /// With this IETH.
    pub fn ieth(mut self, rkey: RKey) -> Script {
        self.extensions.ieth = Some(Ieth::new(rkey));
        self
    }

    /// With this FETH.
    pub fn feth(mut self, feth: Feth) -> Script {
        self.extensions.feth = Some(feth);
        self
    }

    /// The frame, to `qpn` unless the script sets another.
    pub fn frame(&self, path: &PathHeader, qpn: Qpn) -> Vec<u8> {
        let mut bth = Bth::new(self.opcode, self.dest_qpn.unwrap_or(qpn), Psn::new(self.psn));
        bth.set_ack_req(self.ack_req);
        bth.set_solicited(self.solicited);
        bth.set_mig_req(self.mig_req);
        bth.set_pkey(self.pkey);
        let mut buffer = vec![0; 16384];
        let mut frame = FrameBuilder::start(&mut buffer, path, bth, self.payload.len()).unwrap();
        frame.put_extensions(&self.extensions);
        frame.payload().copy_from_slice(&self.payload);
        let length = frame.finish();
        buffer.truncate(length);
        buffer
    }
}

/// Updates the ICRC of a RoCEv2 frame that was changed.
pub fn reseal(frame: &mut [u8]) {
    let ip = if frame[12..14] == [0x81, 0x00] { IP + 4 } else { IP };
    let network = if frame[ip] >> 4 == 6 { NetworkHeader::Ipv6 } else { NetworkHeader::Ipv4 };
    let (covered, tail) = frame[ip..].split_last_chunk_mut::<4>().unwrap();
    *tail = icrc::compute(network, covered).unwrap().to_le_bytes();
}

/// A parsed packet of the engine.
#[derive(Clone)]
pub struct Got {
    /// When it was sent.
    pub at: Nanos,
    /// All bytes, from the Ethernet header to the ICRC.
    pub frame: Vec<u8>,
    packet: OwnedPacket,
}

impl Deref for Got {
    type Target = OwnedPacket;

    fn deref(&self) -> &OwnedPacket {
        &self.packet
    }
}

impl Got {
    /// Parses a frame of the engine, which must be valid in every length, and in its ICRC.
    #[track_caller]
    pub fn parse(at: Nanos, frame: Vec<u8>) -> Got {
        match OwnedPacket::parse(&frame) {
            Ok(packet) => Got { at, frame, packet },
            Err(error) => panic!("the engine sent a broken frame: {error}\n{frame:02x?}"),
        }
    }

    /// The PSN of the BTH, as cases write it.
    pub fn psn(&self) -> u32 {
        self.bth.psn().value()
    }

    /// The previous value in an AtomicAckETH.
    pub fn original(&self) -> Option<u64> {
        self.extensions.atomic_ack_eth.map(|header| header.original())
    }

    /// The value of an ImmDt.
    pub fn immediate(&self) -> Option<u32> {
        self.extensions.immdt.map(|header| header.value())
    }

    /// The key of an IETH.
    pub fn invalidated(&self) -> Option<RKey> {
        self.extensions.ieth.map(|header| header.rkey())
    }
}

impl fmt::Display for Got {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} psn {:#x}, {} bytes", self.opcode.name(), self.psn(), self.payload.len())?;
        if self.bth.ack_req() {
            write!(f, ", AckReq")?;
        }
        if let Some(aeth) = self.extensions.aeth {
            write!(f, ", syndrome {:#04x} msn {}", aeth.syndrome_byte(), aeth.msn())?;
        }
        if let Some(deth) = self.extensions.deth {
            write!(f, ", Q_Key {:#x} from {}", deth.qkey(), deth.source_qpn())?;
        }
        if let Some(reth) = self.extensions.reth {
            write!(f, ", RETH {:#x} {} length {}", reth.va(), reth.rkey(), reth.length())?;
        }
        if let Some(feth) = self.extensions.feth {
            write!(f, ", FETH {:?} {:?}", feth.selectivity(), feth.flush_type())?;
        }
        if let Some(original) = self.original() {
            write!(f, ", original {original:#x}")?;
        }
        write!(f, " at {:?}", std::time::Duration::from_nanos(self.at.0))
    }
}

/// The payloads of packets, one after the other.
pub fn payload(packets: &[Got]) -> Vec<u8> {
    packets.iter().flat_map(|packet| &packet.payload).copied().collect()
}
