//! The rules, and the possible relations of a packet to one.

use serde::{Serialize, Serializer};

/// A rule for packets, or an allowed difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    // Of requesters.
    /// Each request packet has the next PSN; a READ uses as many PSNs as it has responses (docs/protocol.md §4).
    PsnStep,
    /// First, Middle, Last in order, and of one kind (§2).
    OpcodeOrder,
    /// First and Middle are full; the last packet completes the length of the RETH (§5).
    PayloadLength,
    /// A retransmitted packet has the same contents (§4).
    Repeat,
    /// A READ resumes where it stopped (§4, READ resume).
    ReadResume,
    /// After a sequence error NAK the missing PSN is sent first (§4).
    GoBackN,
    /// After an RNR NAK nothing is retransmitted before the wait is over (§4).
    RnrWait,
    // Of responders.
    /// One sequence error NAK for a gap (§5).
    NakOnce,
    /// A sequence error NAK names the first missing PSN (§5).
    NakPsn,
    /// Each gap gets a NAK (§5).
    NakMissing,
    /// An ACK is for received PSNs (§5).
    AckPsn,
    /// A READ is answered by READ responses, an atomic by its own ACK, the rest by ACKs (§2).
    AnswerKind,
    /// A request with AckReq gets an ACK (§5).
    AckMissing,
    /// The MSN counts the completed messages (§5).
    Msn,
    /// READ responses: one for each PSN, First to Last, with the requested length (§5).
    ReadResponse,
    /// A duplicate is answered, and not executed again (§5).
    Duplicate,
    /// The syndrome exists (§2).
    Syndrome,
    /// Credits do not exceed the posted receive WRs (§2).
    Credits,
    // Of both.
    /// Payload, pad and ICRC make up the packet (§1, §3).
    Pad,
    Icrc,
    /// Transport version, P_Key, solicited event (§1).
    Header,
    /// A CNP has the right format (§7).
    Cnp,
    // Of the connection manager.
    /// A MAD of 256 bytes on QP1 with valid contents (§2, GMP).
    CmMessage,
    /// The addresses in the private data are those of the packet (§2, IP-CM).
    CmAddresses,
    /// A retransmitted request is identical.
    CmRepeat,
    /// The ID and the transaction of an answer are those of its request.
    CmAnswer,
    // Of the engine compared with the recorded end.
    /// The packets match the posted work requests.
    Content,
    /// The received data are the sent data.
    Data,
    /// Work requests complete as their packets were answered.
    Completion,
    /// The NAKs are the recorded ones.
    Refusal,
    // Allowed differences.
    AckCoalescing,
    AckRequest,
    MigrationRequest,
    SourcePort,
    /// RoCE v1 or v2.
    Encapsulation,
    CreditCode,
    NakCode,
    ReadShape,
    Repeats,
    LocalChange,
    /// The packets show only roughly when receive WRs were posted.
    Receives,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Weight {
    /// The standard leaves it to the implementation.
    Lawful,
    /// The standard forbids it.
    Violation,
}

/// A packet that differs from the expected one.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) rule: Rule,
    pub(super) weight: Weight,
    /// The frame in the capture; for an engine's packet, the last frame before it.
    pub(super) frame: u64,
    pub(super) text: String,
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Rule {
    /// Its name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Rule::PsnStep => "psn-step",
            Rule::OpcodeOrder => "opcode-order",
            Rule::PayloadLength => "payload-length",
            Rule::Repeat => "repeat",
            Rule::ReadResume => "read-resume",
            Rule::GoBackN => "go-back-n",
            Rule::RnrWait => "rnr-wait",
            Rule::NakOnce => "nak-once",
            Rule::NakPsn => "nak-psn",
            Rule::NakMissing => "nak-missing",
            Rule::AckPsn => "ack-psn",
            Rule::AnswerKind => "answer-kind",
            Rule::AckMissing => "ack-missing",
            Rule::Msn => "msn",
            Rule::ReadResponse => "read-response",
            Rule::Duplicate => "duplicate",
            Rule::Syndrome => "syndrome",
            Rule::Credits => "credits",
            Rule::Pad => "pad",
            Rule::Icrc => "icrc",
            Rule::Header => "header",
            Rule::Cnp => "cnp",
            Rule::CmMessage => "cm-message",
            Rule::CmAddresses => "cm-addresses",
            Rule::CmRepeat => "cm-repeat",
            Rule::CmAnswer => "cm-answer",
            Rule::Content => "content",
            Rule::Data => "data",
            Rule::Completion => "completion",
            Rule::Refusal => "refusal",
            Rule::AckCoalescing => "ack-coalescing",
            Rule::AckRequest => "ack-request",
            Rule::MigrationRequest => "mig-req",
            Rule::SourcePort => "source-port",
            Rule::Encapsulation => "encapsulation",
            Rule::CreditCode => "credit-code",
            Rule::NakCode => "nak-code",
            Rule::ReadShape => "read-shape",
            Rule::Repeats => "repeats",
            Rule::LocalChange => "local-change",
            Rule::Receives => "receives",
        }
    }
}
