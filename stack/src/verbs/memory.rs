use ferroce_wire::RKey;

/// What a peer must know to reach a region or a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Virtual address of the first byte.
    pub addr: u64,
    /// The key.
    pub rkey: RKey,
    /// Bytes.
    pub length: u64,
}
