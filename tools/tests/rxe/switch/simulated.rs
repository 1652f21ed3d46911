//! The same setting in `ferroce fabric`: the engine at both ends, and a simulated switch.

use std::fmt;
use std::path::Path;
use std::process::Command;

use ferroce::CongestionControl;
use serde_json::Value;

/// A simulated run.
pub(crate) struct Simulated {
    control: &'static str,
    /// Mb/s of payload of each flow.
    goodputs: Vec<f64>,
    used: f64,
    fairness: f64,
    measures: Value,
}

impl Simulated {
    /// With a bottleneck of `rate` Mb/s, whose payload capacity is `capacity`.
    pub(crate) fn run(rate: u32, capacity: f64, control: CongestionControl) -> Simulated {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rxe/switch.toml");
        let ferroce = Command::new(env!("CARGO_BIN_EXE_ferroce"))
            .args(["fabric", "--json", &format!("--uplink-rate={rate}M"), &format!("--congestion={control}")])
            .arg(file)
            .output()
            .expect("ferroce runs");
        assert!(ferroce.status.success(), "{}", String::from_utf8_lossy(&ferroce.stderr));
        let report: Value = serde_json::from_slice(&ferroce.stdout).expect("it prints JSON");
        let run = &report["cases"][0]["runs"][0];
        let goodput = |flow: &Value| flow["goodput_gbps"].as_f64().expect("a rate") * 1000.0;
        let goodputs: Vec<f64> = run["flows"].as_array().expect("flows").iter().map(goodput).collect();
        Simulated {
            control: if control == CongestionControl::Off { "off" } else { "DCQCN" },
            used: goodputs.iter().sum::<f64>() / capacity,
            fairness: super::jain(&goodputs),
            measures: run["measures"].clone(),
            goodputs,
        }
    }

    fn measure(&self, name: &str) -> f64 {
        self.measures[name].as_f64().unwrap_or_else(|| panic!("{name}: {}", self.measures))
    }

    /// Whether the expected results in the guest, with and without congestion control, also apply here.
    pub(crate) fn check(&self) {
        let [marked, cnps, drops, retransmitted] =
            ["marked", "cnps", "drops", "retransmitted"].map(|name| self.measure(name));
        let is_right = if self.control == "off" {
            marked == 0.0 && drops > 0.0 && retransmitted > 0.0
        } else {
            let is_shared = self.used >= 0.9 && self.fairness >= 0.95;
            marked > 0.0 && cnps > 0.0 && drops == 0.0 && retransmitted == 0.0 && is_shared
        };
        assert!(is_right, "in ferroce fabric: {self}");
    }
}

impl fmt::Display for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let goodputs: Vec<String> = self.goodputs.iter().map(|rate| format!("{rate:.1}")).collect();
        let count = |name: &str| self.measure(name);
        write!(
            f,
            "{:<5} in ferroce fabric: {} Mb/s, used {:.3}, Jain {:.3}, queue {:.0} KB ({:.0} at most), {} marked, {} CNPs, \
             {} dropped, {} resent, {} timeouts",
            self.control,
            goodputs.join(" "),
            self.used,
            self.fairness,
            count("queue_mean_kb"),
            count("queue_max_kb"),
            count("marked"),
            count("cnps"),
            count("drops"),
            count("retransmitted"),
            count("timeouts")
        )
    }
}
