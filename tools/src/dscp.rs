//! The priority and traffic class that a port gives packets of a DSCP.

use std::fmt;

use ferroce::CongestionNotification;
use ferroce::driver::netlink::{Dcb, Selection};
use serde::Serialize;

/// The handling of packets with a DSCP by a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DscpClass {
    pub(crate) dscp: u8,
    pub(crate) priority: u8,
    /// Null if the driver does not report it, as are the following fields.
    pub(crate) traffic_class: Option<u8>,
    #[serde(serialize_with = "as_word")]
    pub(crate) selection: Option<Selection>,
    /// In percent, if the class has a share.
    share: Option<u8>,
}

impl DscpClass {
    pub(crate) fn new(dcb: &Dcb, dscp: u8) -> DscpClass {
        let priority = dcb.priority(dscp);
        let traffic_class = dcb.ets.map(|ets| ets.class[usize::from(priority)]);
        let of_class = dcb.ets.zip(traffic_class).map(|(ets, class)| {
            let class = usize::from(class);
            (ets.selection[class], ets.share[class])
        });
        DscpClass {
            dscp,
            priority,
            traffic_class,
            selection: of_class.map(|(selection, _)| selection),
            share: of_class.filter(|(selection, _)| *selection == Selection::Share).map(|(_, share)| share),
        }
    }
}

/// The DSCP of congestion notification packets, unless a program sets another.
pub(crate) fn cnp_dscp() -> u8 {
    CongestionNotification::default().cnp_dscp
}

impl fmt::Display for DscpClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "priority {}", self.priority)?;
        let (Some(class), Some(selection)) = (self.traffic_class, self.selection) else { return Ok(()) };
        write!(f, ", traffic class {class} ({}", word(selection))?;
        self.share.map_or(Ok(()), |share| write!(f, " {share} %"))?;
        write!(f, ")")
    }
}

fn word(selection: Selection) -> &'static str {
    match selection {
        Selection::Strict => "strict",
        Selection::Shaper => "shaper",
        Selection::Share => "share",
        _ => "vendor's rule",
    }
}

fn as_word<S: serde::Serializer>(selection: &Option<Selection>, serializer: S) -> Result<S::Ok, S::Error> {
    selection.map(word).serialize(serializer)
}
