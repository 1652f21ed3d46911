//! The rules, and the ways in which a packet can relate to one.

use serde::{Serialize, Serializer};

/// What a packet is held to, or may differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    // Of requesters.
    /// Each request packet has the next PSN; a READ takes as many as its responses (docs/protocol.md §4).
    PsnStep,
    /// First, Middle, Last in order, and of one kind (§2).
    OpcodeOrder,
    /// First and Middle are full, the last packet ends what the RETH announced (§5).
    PayloadLength,
    /// A packet that is sent again says the same (§4).
    Repeat,
    /// A READ goes on where it stopped (§4, READ resume).
    ReadResume,
    /// After a sequence error NAK the missing PSN comes first (§4).
    GoBackN,
    /// After an RNR NAK nothing is repeated before its time is over (§4).
    RnrWait,
    // Of responders.
    /// One sequence error NAK for a gap (§5).
    NakOnce,
    /// A sequence error NAK names the first missing PSN (§5).
    NakPsn,
    /// Each gap is told (§5).
    NakMissing,
    /// An ACK is for what has come (§5).
    AckPsn,
    /// A READ is answered by READ responses, an atomic by its own ACK, the rest by ACKs (§2).
    AnswerKind,
    /// What asks for an ACK gets one (§5).
    AckMissing,
    /// The MSN counts the messages that are done (§5).
    Msn,
    /// READ responses: one for each PSN, First to Last, as long as was asked (§5).
    ReadResponse,
    /// What came twice is answered, and not carried out again (§5).
    Duplicate,
    /// The syndrome is one that exists (§2).
    Syndrome,
    /// Credits are not more than receives are posted (§2).
    Credits,
    // Of both.
    /// Payload, pad and ICRC make up the packet (§1, §3).
    Pad,
    Icrc,
    /// Transport version, P_Key, solicited event (§1).
    Header,
    /// A CNP has its shape (§7).
    Cnp,
    // Of the connection manager.
    /// A MAD of 256 bytes over QP1 that can be read (§2, GMP).
    CmMessage,
    /// The addresses in the private data are those of the packet (§2, IP-CM).
    CmAddresses,
    /// A request that comes again is the same.
    CmRepeat,
    /// An answer names the id and the transaction of what it answers.
    CmAnswer,
    // Of the engine beside the record.
    /// What was posted is what is sent.
    Content,
    /// What was sent is what arrives.
    Data,
    /// Work requests end as their packets were answered.
    Completion,
    /// Each refusal is the recorded one.
    Refusal,
    // Of what may differ.
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
    /// When receives were posted is told by the packets only roughly.
    Receives,
}

/// How much a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Weight {
    /// The standard leaves it to the implementation.
    Lawful,
    /// It does not.
    Violation,
}

/// One packet that is not as it might have been.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) rule: Rule,
    pub(super) weight: Weight,
    /// The frame in the capture; of the engine's packets, the last frame before it.
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
