//! Pause frames, priorities and traffic classes of the port, and the settings that the switch needs; also for
//! `devinfo`.
//!
//! The kernel answers by DCB netlink and ethtool netlink (`driver/src/netlink/dcb.rs`, `pause.rs`). The queries concern
//! the interface, so packet drivers are not involved.

use ferroce::driver::netlink::{Dcb, Netlink, Pause, Selection};
use ferroce::driver::{Capabilities, Error};

use super::report::Check;
use crate::dscp::{DscpClass, cnp_dscp};

/// The port's settings, and a reminder of the switch's. A single line if there is no port.
pub(super) fn checks(capabilities: &Capabilities, data_dscp: u8) -> Vec<Check> {
    let Capabilities { interface: name, driver, .. } = capabilities;
    let none = |why| vec![Check::not_checked("port", why)];
    let told = Netlink::open().and_then(|netlink| netlink.interface(name)).and_then(|interface| {
        let (pause, dcb) = (Pause::of(&interface)?, Dcb::of(&interface)?);
        Ok((interface, pause, dcb))
    });
    match told {
        Ok((interface, ..)) if interface.loopback => {
            none(format!("'{name}' has no link: no pause frames, no traffic classes, no switch that marks"))
        }
        Ok((interface, pause, dcb)) => {
            Port { name, driver, line_rate: interface.speed, pause, dcb, data_dscp }.checks()
        }
        Err(Error::NoInterface { name, .. }) => none(format!("'{name}' is not an interface of the kernel")),
        Err(error) => none(error.to_string()),
    }
}

/// A port with a link.
struct Port<'a> {
    name: &'a str,
    driver: &'a str,
    /// In bit/s.
    line_rate: Option<u64>,
    pause: Option<Pause>,
    dcb: Option<Dcb>,
    data_dscp: u8,
}

impl Port<'_> {
    fn checks(&self) -> Vec<Check> {
        vec![self.pause_frames(), self.pfc(), self.traffic_classes(), self.switch()]
    }

    fn pause_frames(&self) -> Check {
        const NAME: &str = "pause frames";
        let Some(pause) = self.pause else { return self.untold(NAME) };
        let count = |frames: Option<u64>| frames.map_or("an unknown number".to_owned(), |n| n.to_string());
        let mut frames = format!("so far {} received, {} sent", count(pause.received), count(pause.sent));
        if pause.received.is_none() || pause.sent.is_none() {
            frames += &format!(" (`ethtool -S {} | grep -iE 'pause|flow_control'`)", self.name);
        }
        let on = match (pause.rx, pause.tx) {
            (false, false) => return Check::ok(NAME, format!("off; {frames}")),
            (true, false) => "obeyed (rx on)",
            (false, true) => "sent (tx on)",
            (true, true) => "obeyed and sent (rx on, tx on)",
        };
        let cure = format!("`ethtool -A {} autoneg off rx off tx off`", self.name);
        match self.priorities_with_pfc() {
            priorities if priorities.is_empty() => Check::note(
                NAME,
                format!("{on}: they stop all traffic of the port, CNPs too; {frames}"),
                format!("{cure}, unless both ends of the link carry only RoCE and need a lossless link"),
            ),
            priorities => Check::failed(
                NAME,
                format!(
                    "{on}, and PFC is on for {}: a link must have only one of the two; {frames}",
                    listed(&priorities)
                ),
                format!("{cure}, here and at the switch"),
            ),
        }
    }

    fn pfc(&self) -> Check {
        const NAME: &str = "PFC";
        let Some((dcb, pfc)) = self.dcb.as_ref().and_then(|dcb| Some((dcb, dcb.pfc?))) else {
            return self.untold(NAME);
        };
        let on = self.priorities_with_pfc();
        if on.is_empty() {
            return Check::ok(NAME, "off, as in a lossy fabric");
        }
        let frames: Vec<_> = on
            .iter()
            .map(|&p| {
                let (received, sent) = (pfc.received[usize::from(p)], pfc.sent[usize::from(p)]);
                format!("{received} pause frames received for priority {p}, {sent} sent")
            })
            .collect();
        let seen = format!("on for {}; so far {}", listed(&on), frames.join("; "));
        let Port { name, data_dscp, .. } = self;
        let (data, cnp) = (dcb.priority(*data_dscp), dcb.priority(cnp_dscp()));
        if !on.contains(&data) {
            return Check::note(
                NAME,
                format!("{seen}; data with DSCP {data_dscp} has priority {data}, without PFC"),
                format!(
                    "give --dscp if the DSCP of the data is not {data_dscp}; otherwise, for a lossless fabric `dcb \
                     app replace dev {name} dscp-prio {data_dscp}:{}`, for a lossy one `dcb pfc set dev {name} \
                     prio-pfc all:off`",
                    on[0]
                ),
            );
        }
        if data != cnp && on.contains(&cnp) {
            return Check::note(
                NAME,
                format!("{seen}; it stops CNPs too, of priority {cnp}"),
                format!("`dcb pfc set dev {name} prio-pfc {cnp}:off`, at the switch too"),
            );
        }
        Check::ok(NAME, format!("{seen}; data with DSCP {data_dscp} has priority {data}"))
    }

    fn traffic_classes(&self) -> Check {
        const NAME: &str = "traffic classes";
        let Port { name, driver, data_dscp, .. } = self;
        let Some(dcb) = &self.dcb else {
            let cure =
                format!("if the port has classes: `mlnx_qos -i {name} --trust dscp`, see docs/congestion.md");
            return Check { cure: Some(cure), ..self.untold(NAME) };
        };
        let (data, cnp) = (DscpClass::new(dcb, *data_dscp), DscpClass::new(dcb, cnp_dscp()));
        let mut seen = format!("data (DSCP {data_dscp}): {data}; CNPs (DSCP {}): {cnp}", cnp.dscp);
        if *driver != "udp" {
            seen = format!(
                "{seen}; {driver} has its own send queue, and all its packets are in the class of that queue"
            );
        }
        let behind = |cure: String| Check::note(NAME, format!("{seen}: CNPs wait behind data"), cure);
        if data.dscp == cnp.dscp {
            return behind(format!("use another DSCP than {} for the data", cnp.dscp));
        }
        if data.priority == cnp.priority {
            let free = if data.priority == 6 { 7 } else { 6 };
            let DscpClass { dscp, .. } = cnp;
            return behind(format!(
                "`dcb app replace dev {name} dscp-prio {dscp}:{free}`, or `mlnx_qos -i {name} --trust dscp --dscp2prio \
                 set,{dscp},{free}`; and a strict traffic class for priority {free}"
            ));
        }
        let is_behind = data.traffic_class == cnp.traffic_class
            || data.selection == Some(Selection::Strict) && data.traffic_class > cnp.traffic_class;
        let strict = format!("`dcb ets set dev {name} prio-tc {0}:{0} tc-tsa {0}:strict`", cnp.priority);
        match cnp.selection {
            None => Check::ok(NAME, seen),
            Some(_) if is_behind => behind(strict),
            Some(Selection::Strict) => Check::ok(NAME, seen),
            Some(_) => Check::note(NAME, format!("{seen}: CNPs share the link with data"), strict),
        }
    }

    /// Settings that a port can't show.
    fn switch(&self) -> Check {
        let rate = self.line_rate.unwrap_or(THRESHOLDS[0].gigabits * 1_000_000_000);
        let nearest = THRESHOLDS.iter().min_by_key(|row| rate.abs_diff(row.gigabits * 1_000_000_000));
        let Thresholds { gigabits, kmin, kmax, pmax } = nearest.unwrap_or(&THRESHOLDS[0]);
        let cure = format!(
            "ECN for the class of DSCP {}, to start with Kmin {kmin} KB, Kmax {kmax} KB, Pmax {pmax} % (published for \
             {gigabits} Gb/s); docs/congestion.md has all settings",
            self.data_dscp
        );
        let seen = "this port marks no packets; switches do, and their settings can't be read from here";
        Check { cure: Some(cure), ..Check::not_checked("switch", seen) }
    }

    fn priorities_with_pfc(&self) -> Vec<u8> {
        let enabled = self.dcb.as_ref().and_then(|dcb| dcb.pfc).map(|pfc| pfc.enabled).unwrap_or_default();
        (0..8).filter(|priority| enabled[usize::from(*priority)]).collect()
    }

    fn untold(&self, check: &'static str) -> Check {
        Check::not_checked(check, format!("the kernel's driver of '{}' does not report them", self.name))
    }
}

fn listed(priorities: &[u8]) -> String {
    let all: Vec<_> = priorities.iter().map(u8::to_string).collect();
    format!("priority {}", all.join(", "))
}

/// ECN thresholds that were published for a line rate.
struct Thresholds {
    gigabits: u64,
    /// Kmin and Kmax in KB, Pmax in percent.
    kmin: u32,
    kmax: u32,
    pmax: u32,
}

/// As in docs/congestion.md.
const THRESHOLDS: [Thresholds; 3] = [
    Thresholds { gigabits: 25, kmin: 41, kmax: 1030, pmax: 100 },
    Thresholds { gigabits: 40, kmin: 5, kmax: 200, pmax: 1 },
    Thresholds { gigabits: 100, kmin: 400, kmax: 1600, pmax: 20 },
];

#[cfg(test)]
mod tests {
    use ferroce::driver::netlink::{Ets, Pfc};

    use super::super::report::CheckVerdict;
    use super::*;

    /// DSCP 26 in priority 3, DSCP 48 in priority 6; one traffic class per priority, with 6 and 7 strict.
    fn dcb() -> Dcb {
        let mut ets = Ets::default();
        (ets.classes, ets.class) = (8, [0, 1, 2, 3, 4, 5, 6, 7]);
        ets.selection[..6].fill(Selection::Share);
        ets.share = [40, 0, 0, 60, 0, 0, 0, 0];
        let mut dcb = Dcb::default();
        (dcb.ets, dcb.dscp, dcb.pfc) = (Some(ets), vec![(26, 3), (48, 6)], Some(Pfc::default()));
        dcb
    }

    fn with_pfc(priorities: &[usize]) -> Dcb {
        let mut pfc = Pfc::default();
        priorities.iter().for_each(|priority| pfc.enabled[*priority] = true);
        (pfc.received[3], pfc.sent[3]) = (5, 7);
        let mut dcb = dcb();
        dcb.pfc = Some(pfc);
        dcb
    }

    fn with_ets(change: impl FnOnce(&mut Ets)) -> Dcb {
        let mut dcb = dcb();
        change(dcb.ets.as_mut().unwrap());
        dcb
    }

    fn port(pause: Option<Pause>, dcb: Option<Dcb>, data_dscp: u8) -> Port<'static> {
        Port { name: "eth0", driver: "udp", line_rate: Some(100_000_000_000), pause, dcb, data_dscp }
    }

    fn pause(rx: bool, tx: bool) -> Option<Pause> {
        let mut pause = Pause::default();
        (pause.rx, pause.tx, pause.received) = (rx, tx, Some(12));
        Some(pause)
    }

    /// Asserts a check's result and the words in its text.
    fn says(check: Check, result: CheckVerdict, words: &[&str]) {
        let text = format!("{} / {}", check.seen, check.cure.as_deref().unwrap_or_default());
        assert_eq!(check.result, result, "{text}");
        words.iter().for_each(|word| assert!(text.contains(word), "no '{word}' in {text}"));
    }

    use CheckVerdict::{Failed, NotChecked, Note, Ok};

    #[test]
    fn pause_frames_are_off_or_worth_a_word() {
        let off = port(pause(false, false), Some(dcb()), 26);
        let unknown = "off; so far 12 received, an unknown number sent (`ethtool -S eth0 | grep";
        says(off.pause_frames(), Ok, &[unknown]);
        let on = port(pause(true, true), None, 26);
        let cure = "`ethtool -A eth0 autoneg off rx off tx off`";
        says(on.pause_frames(), Note, &["obeyed and sent", "CNPs too", cure]);
        let both = port(pause(false, true), Some(with_pfc(&[3])), 26);
        says(both.pause_frames(), Failed, &["sent (tx on), and PFC is on for priority 3", cure]);
    }

    #[test]
    fn pfc_protects_the_data_and_nothing_else() {
        let pfc = |dcb, dscp| port(None, Some(dcb), dscp).pfc();
        says(pfc(dcb(), 26), Ok, &["off"]);
        let frames = "on for priority 3; so far 5 pause frames received for priority 3, 7 sent";
        says(pfc(with_pfc(&[3]), 26), Ok, &[frames, "DSCP 26 has priority 3"]);
        let other = ["DSCP 0 has priority 0, without PFC", "dscp-prio 0:3", "prio-pfc all:off"];
        says(pfc(with_pfc(&[3]), 0), Note, &other);
        says(pfc(with_pfc(&[3, 6]), 26), Note, &["stops CNPs too", "`dcb pfc set dev eth0 prio-pfc 6:off`"]);
    }

    #[test]
    fn cnps_go_before_data_or_it_is_said() {
        let classes = |dcb, dscp| port(None, Some(dcb), dscp).traffic_classes();
        let row = "data (DSCP 26): priority 3, traffic class 3 (share 60 %); CNPs (DSCP 48): priority 6, traffic class \
                   6 (strict)";
        let well = classes(dcb(), 26);
        assert_eq!((well.result, well.seen.as_str()), (Ok, row));
        let behind = "CNPs wait behind data";
        let mut bare = dcb();
        (bare.dscp, bare.ets) = (vec![], None);
        let cures = ["dscp-prio 48:6", "--dscp2prio set,48,6"];
        says(classes(bare, 26), Note, &[behind, cures[0], cures[1]]);
        says(classes(dcb(), 48), Note, &[behind, "another DSCP than 48"]);
        let strict = "`dcb ets set dev eth0 prio-tc 6:6 tc-tsa 6:strict`";
        says(classes(with_ets(|ets| ets.class[6] = 3), 26), Note, &[behind, strict]);
        let all_strict = with_ets(|ets| {
            ets.selection = [Selection::Strict; 8];
            ets.class[3] = 7;
        });
        says(classes(all_strict, 26), Note, &[behind, strict]);
        let shared = with_ets(|ets| ets.selection[6] = Selection::Share);
        says(classes(shared, 26), Note, &["CNPs share the link with data", strict]);
        let raw = Port { driver: "af_xdp", ..port(None, Some(dcb()), 26) };
        says(raw.traffic_classes(), Ok, &["af_xdp has its own send queue"]);
    }

    #[test]
    fn a_port_that_tells_nothing_says_so() {
        let checks = port(None, None, 26).checks();
        let (switch, own) = checks.split_last().unwrap();
        for check in own {
            says(check.clone(), NotChecked, &["the kernel's driver of 'eth0' does not report them"]);
        }
        let switch = switch.clone();
        says(switch, NotChecked, &["DSCP 26", "Kmin 400 KB, Kmax 1600 KB, Pmax 20 %"]);
        assert_eq!(port(None, Some(Dcb::default()), 0).pfc().result, NotChecked);
    }

    #[test]
    fn the_thresholds_are_those_of_the_manual() {
        let page = include_str!("../../../docs/congestion.md");
        for Thresholds { gigabits, kmin, kmax, pmax } in THRESHOLDS {
            let row = format!("| {gigabits} Gb/s | {kmin} KB | {kmax} KB | {pmax} % |");
            assert!(page.contains(&row), "{row}");
        }
    }
}
