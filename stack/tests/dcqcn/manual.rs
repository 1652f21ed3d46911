//! The tables of docs/congestion.md.

use std::str::FromStr;

use ferroce::{CongestionControl, CongestionNotification, Dcqcn, Nanos, ReactionPoint};

const PAGE: &str = include_str!("../../../docs/congestion.md");

/// The rows of the table whose first column has this heading, the heading first.
fn table(heading: &str) -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| -> Vec<&'static str> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect()
    };
    let rows = PAGE.lines().map(cells).skip_while(|row| row.len() == 1 || row[0] != heading);
    rows.take_while(|row| row.len() > 1).filter(|row| !row[0].starts_with("--")).collect()
}

fn refusal(control: &str) -> String {
    CongestionControl::from_str(control).unwrap_err().to_string()
}

/// Every preset is a column and every parameter a row, in the order of the code, with its unit, range and values.
#[test]
fn the_manual_has_every_parameter() {
    let rows = table("parameter");
    let (heading, rows) = rows.split_first().unwrap();
    assert_eq!(heading[..4], ["parameter", "unit", "range", "meaning"]);
    let refused = refusal("none");
    let (_, presets) = refused.split_once("a preset of DCQCN: ").unwrap();
    assert_eq!(heading[4..], presets.split(", ").collect::<Vec<_>>());
    for (name, column) in presets.split(", ").zip(4..) {
        let values: Vec<_> = rows.iter().map(|row| format!("{}={}", row[0], row[column])).collect();
        assert_eq!(values.join(","), Dcqcn::preset(name).unwrap().to_string(), "{name}");
    }
    for row in rows {
        let (name, unit, range, meaning) = (row[0], row[1], row[2], row[3]);
        let expected = format!("{range} {unit}");
        assert_eq!(refusal(&format!("{name}=-1")), format!("{name} = -1: {}", expected.trim_end()));
        assert!(!meaning.is_empty(), "{name}");
    }
}

#[test]
fn the_manual_has_the_defaults_of_the_notification_point() {
    let CongestionNotification { min_time_between_cnps, scope, cnp_dscp, cnp_802p_prio, .. } =
        CongestionNotification::default();
    let expected = [
        ("min_time_between_cnps", format!("{min_time_between_cnps:?}")),
        ("scope", format!("{scope:?}")),
        ("cnp_dscp", cnp_dscp.to_string()),
        ("cnp_802p_prio", cnp_802p_prio.to_string()),
    ];
    let rows = table("notification");
    let found: Vec<_> = rows[1..].iter().map(|row| (row[0], row[2].to_owned())).collect();
    assert_eq!(found, expected);
}

/// The page's recovery times: on a line of 25 Gb/s, a CNP every 50 µs until the rate is 1 Gb/s or less; then none, and
/// frames of 4162 bytes at the current rate until it is 90 % of the line's.
#[test]
fn the_manual_has_the_recovery_times() {
    const FRAME: u32 = 4162;
    let presets = table("parameter").remove(0);
    let measured = presets[4..].iter().map(|preset| {
        let mut point = ReactionPoint::new(Dcqcn::preset(preset).unwrap(), 25_000_000_000).unwrap();
        let mut now = Nanos(1_000_000);
        let mut next_cnp = now;
        let send = |point: &mut ReactionPoint, now: &mut Nanos| {
            point.on_sent(FRAME, *now);
            now.0 += u64::from(FRAME) * 8_000_000_000 / point.rate();
        };
        while point.rate() > 1_000_000_000 {
            if now >= next_cnp {
                point.on_cnp(now);
                next_cnp.0 += 50_000;
            }
            send(&mut point, &mut now);
        }
        let congested = now;
        while point.rate() < 22_500_000_000 {
            send(&mut point, &mut now);
        }
        (*preset, format!("{:.1}", (now.0 - congested.0) as f64 / 1e6))
    });
    let told: Vec<_> = table("preset")[1..].iter().map(|row| (row[0], row[1].to_owned())).collect();
    assert_eq!(told, measured.collect::<Vec<_>>());
}
