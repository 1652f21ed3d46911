//! Packets of the scripted peer: how a case writes them, and how it reads the engine's.

use std::fmt;

use ferroce::Nanos;
use ferroce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, FrameBuilder, Ieth, ImmDt, NetworkHeader, Opcode,
    PKEY_DEFAULT, PKey, Packet, PathHeader, Psn, Qpn, RKey, Reth, Sack, Syndrome, icrc,
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
    headers: Vec<Header>,
    payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Header {
    Deth(Deth),
    Reth(Reth),
    AtomicEth(AtomicEth),
    Aeth(Aeth),
    AtomicAckEth(AtomicAckEth),
    ImmDt(ImmDt),
    Ieth(Ieth),
    Feth(Feth),
}

/// A packet for the queue pair under test. Headers are added in wire order; those left out are
/// zero.
pub fn packet(opcode: Opcode, psn: u32) -> Script {
    Script {
        opcode,
        psn,
        ack_req: false,
        solicited: false,
        mig_req: true,
        pkey: PKEY_DEFAULT,
        dest_qpn: None,
        headers: Vec::new(),
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

/// An Atomic Acknowledge with the value that was there before.
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

    /// With this P_Key in place of the default one.
    pub fn pkey(self, pkey: u16) -> Script {
        Script { pkey: PKey(pkey), ..self }
    }

    /// With this PSN; its lower 24 bits count.
    pub fn psn(self, psn: u32) -> Script {
        Script { psn, ..self }
    }

    /// To this queue pair in place of the one under test.
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

    /// Adds a DETH.
    pub fn deth(self, qkey: u32, source: Qpn) -> Script {
        self.header(Header::Deth(Deth::new(qkey, source)))
    }

    /// Adds a RETH.
    pub fn reth(self, va: u64, rkey: RKey, length: u32) -> Script {
        self.header(Header::Reth(Reth::new(va, rkey, length)))
    }

    /// Adds an AtomicETH.
    pub fn atomic_eth(self, va: u64, rkey: RKey, swap_or_add: u64, compare: u64) -> Script {
        self.header(Header::AtomicEth(AtomicEth::new(va, rkey, swap_or_add, compare)))
    }

    /// `syndrome` may be a reserved one.
    pub fn aeth(self, syndrome: u8, msn: u32) -> Script {
        let [_, a, b, c] = msn.to_be_bytes();
        // An immediate has the same shape, and takes any bytes.
        let word = u32::from_be_bytes([syndrome, a, b, c]);
        match Syndrome::from_byte(syndrome) {
            Some(known) => self.header(Header::Aeth(Aeth::new(known, msn))),
            None => self.header(Header::ImmDt(ImmDt::new(word))),
        }
    }

    /// Adds an AtomicAckETH.
    pub fn original(self, value: u64) -> Script {
        self.header(Header::AtomicAckEth(AtomicAckEth::new(value)))
    }

    /// Adds an ImmDt.
    pub fn imm(self, value: u32) -> Script {
        self.header(Header::ImmDt(ImmDt::new(value)))
    }

    /// Adds an IETH.
    pub fn ieth(self, rkey: RKey) -> Script {
        self.header(Header::Ieth(Ieth::new(rkey)))
    }

    /// Adds a FETH.
    pub fn feth(self, feth: Feth) -> Script {
        self.header(Header::Feth(feth))
    }

    fn header(mut self, header: Header) -> Script {
        self.headers.push(header);
        self
    }

    /// The frame, to `qpn` unless the script names another.
    pub fn frame(&self, path: &PathHeader, qpn: Qpn) -> Vec<u8> {
        let mut bth = Bth::new(self.opcode, self.dest_qpn.unwrap_or(qpn), Psn::new(self.psn));
        bth.set_ack_req(self.ack_req);
        bth.set_solicited(self.solicited);
        bth.set_mig_req(self.mig_req);
        bth.set_pkey(self.pkey);
        let mut buffer = vec![0; 16384];
        let mut frame = FrameBuilder::start(&mut buffer, path, bth, self.payload.len()).unwrap();
        for header in &self.headers {
            match header {
                Header::Deth(header) => frame.put(header),
                Header::Reth(header) => frame.put(header),
                Header::AtomicEth(header) => frame.put(header),
                Header::Aeth(header) => frame.put(header),
                Header::AtomicAckEth(header) => frame.put(header),
                Header::ImmDt(header) => frame.put(header),
                Header::Ieth(header) => frame.put(header),
                Header::Feth(header) => frame.put(header),
            }
        }
        frame.payload().copy_from_slice(&self.payload);
        let length = frame.finish();
        buffer.truncate(length);
        buffer
    }
}

/// Puts the right ICRC behind a RoCEv2 frame that was changed by hand.
pub fn reseal(frame: &mut [u8]) {
    let ip = if frame[12..14] == [0x81, 0x00] { IP + 4 } else { IP };
    let network = if frame[ip] >> 4 == 6 { NetworkHeader::Ipv6 } else { NetworkHeader::Ipv4 };
    let (covered, tail) = frame[ip..].split_last_chunk_mut::<4>().unwrap();
    *tail = icrc::compute(network, covered).unwrap().to_le_bytes();
}

/// A packet of the engine, taken apart.
#[derive(Clone)]
pub struct Got {
    /// When it was sent.
    pub at: Nanos,
    /// All bytes, from the Ethernet header to the ICRC.
    pub frame: Vec<u8>,
    /// Of the BTH.
    pub opcode: Opcode,
    /// Of the BTH.
    pub psn: u32,
    /// Of the BTH.
    pub dest_qpn: Qpn,
    /// Of the BTH.
    pub ack_req: bool,
    /// The solicited event bit of the BTH.
    pub solicited: bool,
    /// Of the BTH.
    pub mig_req: bool,
    /// Of the BTH.
    pub pkey: PKey,
    /// Bytes of padding behind the payload.
    pub pad: usize,
    /// If its opcode has one, as the headers that follow.
    pub deth: Option<Deth>,
    /// See [`Reth`].
    pub reth: Option<Reth>,
    /// See [`AtomicEth`].
    pub atomic_eth: Option<AtomicEth>,
    /// See [`Aeth`].
    pub aeth: Option<Aeth>,
    /// What an AtomicAckETH says was there before.
    pub original: Option<u64>,
    /// See [`Sack`].
    pub sack: Option<Sack>,
    /// The value of an ImmDt.
    pub immediate: Option<u32>,
    /// The key of an IETH.
    pub invalidated: Option<RKey>,
    /// See [`Feth`].
    pub feth: Option<Feth>,
    /// Without the padding.
    pub payload: Vec<u8>,
}

impl Got {
    /// Takes a frame of the engine apart; it must be right in every length, and in its ICRC.
    #[track_caller]
    pub fn parse(at: Nanos, frame: Vec<u8>) -> Got {
        let packet = match Packet::parse(&frame) {
            Ok(packet) => packet,
            Err(error) => panic!("the engine sent a broken frame: {error}\n{frame:02x?}"),
        };
        Got {
            at,
            opcode: packet.opcode,
            psn: packet.bth.psn().value(),
            dest_qpn: packet.bth.dest_qpn(),
            ack_req: packet.bth.ack_req(),
            solicited: packet.bth.solicited(),
            mig_req: packet.bth.mig_req(),
            pkey: packet.bth.pkey(),
            pad: packet.bth.pad(),
            deth: packet.deth().copied(),
            reth: packet.reth().copied(),
            atomic_eth: packet.atomic_eth().copied(),
            aeth: packet.aeth().copied(),
            original: packet.atomic_ack_eth().map(|header| header.original()),
            sack: packet.sack().copied(),
            immediate: packet.immdt().map(|header| header.value()),
            invalidated: packet.ieth().map(|header| header.rkey()),
            feth: packet.feth().copied(),
            payload: packet.payload.to_vec(),
            frame,
        }
    }
}

impl fmt::Display for Got {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} psn {:#x}, {} bytes", self.opcode.name(), self.psn, self.payload.len())?;
        if self.ack_req {
            write!(f, ", AckReq")?;
        }
        if let Some(aeth) = self.aeth {
            write!(f, ", syndrome {:#04x} msn {}", aeth.syndrome_byte(), aeth.msn())?;
        }
        if let Some(deth) = self.deth {
            write!(f, ", Q_Key {:#x} from {}", deth.qkey(), deth.source_qpn())?;
        }
        if let Some(reth) = self.reth {
            write!(f, ", RETH {:#x} {} length {}", reth.va(), reth.rkey(), reth.length())?;
        }
        if let Some(feth) = self.feth {
            write!(f, ", FETH {:?} {:?}", feth.selectivity(), feth.flush_type())?;
        }
        if let Some(original) = self.original {
            write!(f, ", original {original:#x}")?;
        }
        write!(f, " at {:?}", std::time::Duration::from_nanos(self.at.0))
    }
}

/// The payloads of packets, one after the other.
pub fn payload(packets: &[Got]) -> Vec<u8> {
    packets.iter().flat_map(|packet| &packet.payload).copied().collect()
}
