//! What ranks do together, as data.

use std::fmt;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// The elements of all ranks, reduced, at all ranks.
    AllReduce = 1,
    /// The elements of all ranks, reduced; a block of them at each rank.
    ReduceScatter = 2,
    /// The blocks of all ranks at all ranks.
    AllGather = 3,
    /// The elements of the root at all ranks.
    Broadcast = 4,
    /// The elements of all ranks, reduced, at the root.
    Reduce = 5,
    /// A block of each rank at each rank.
    AllToAll = 6,
    /// The blocks of all ranks at the root.
    Gather = 7,
    /// A block of the root's at each rank.
    Scatter = 8,
    /// Elements of this rank to a peer.
    Send = 9,
    /// Elements of a peer.
    Receive = 10,
    /// Nobody ends before all have begun.
    Barrier = 11,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 11] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
        Kind::Send,
        Kind::Receive,
        Kind::Barrier,
    ];

    /// Whether elements of several ranks become one.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce)
    }

    /// Whether a rank differs from the others.
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::AllReduce => "all_reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::AllToAll => "all_to_all",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::Barrier => "barrier",
        })
    }
}
