//! The congestion control of an RNIC, if the kernel shows it. RNICs have no common interface for that: mlx5 shows the
//! settings of DCQCN in debugfs (`cc_params`), its out-of-tree driver in the interface's folder in sysfs (`ecn`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::Serialize;

use crate::failure::legible;

/// Settings by their names in the kernel, as it shows them.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct CardCongestion {
    /// The folder that they were read from.
    source: String,
    settings: BTreeMap<String, String>,
}

/// The most settings of a folder, and the most bytes of a file.
const MOST_SETTINGS: usize = 256;
const MOST_BYTES: u64 = 256;

impl CardCongestion {
    /// For the RNIC `device`, whose port is the interface `interface`. `sys` is the path of sysfs: `/sys`.
    pub(super) fn read(sys: &Path, device: &str, interface: Option<&str>) -> Option<CardCongestion> {
        if let Some(interface) = interface {
            let folder = sys.join("class/net").join(interface).join("ecn");
            let mut settings = BTreeMap::new();
            for side in ["roce_np", "roce_rp"] {
                collect(&folder.join(side), side, &mut settings);
                collect(&folder.join(side).join("enable"), &format!("{side}/enable"), &mut settings);
            }
            if !settings.is_empty() {
                return Some(CardCongestion { source: folder.display().to_string(), settings });
            }
        }
        let bus = fs::read_link(sys.join("class/infiniband").join(device).join("device")).ok()?;
        let folder = sys.join("kernel/debug/mlx5").join(bus.file_name()?).join("cc_params");
        let mut settings = BTreeMap::new();
        collect(&folder, "", &mut settings);
        (!settings.is_empty()).then(|| CardCongestion { source: folder.display().to_string(), settings })
    }

    /// One line of text.
    pub(super) fn line(told: Option<&CardCongestion>) -> String {
        let Some(CardCongestion { source, settings }) = told else {
            return "congestion control of the card: not reported".to_owned();
        };
        let all: Vec<_> = settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        format!("congestion control of the card, by {}: {}", legible(source), all.join(", "))
    }
}

/// Reads the files of a folder; their names get `prefix`.
fn collect(folder: &Path, prefix: &str, settings: &mut BTreeMap<String, String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten().take(MOST_SETTINGS) {
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let mut text = String::new();
        let opened = File::open(entry.path());
        if opened.and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text)).is_ok() {
            let name = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
            settings.insert(legible(&name), legible(text.trim()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    /// A tree of files in place of /sys, until it is dropped.
    struct Sys(PathBuf);

    impl Sys {
        fn new(name: &str, files: &[(&str, &str)]) -> Sys {
            let root = std::env::temp_dir().join(format!("ferroce-sys-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            let card = root.join("class/infiniband/mlx5_0");
            fs::create_dir_all(&card).unwrap();
            symlink("../../../0000:3b:00.0", card.join("device")).unwrap();
            Sys(root)
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn settings_are_read_where_a_driver_shows_them() {
        let debugfs = "kernel/debug/mlx5/0000:3b:00.0/cc_params";
        let (dscp, rate) = (format!("{debugfs}/np_cnp_dscp"), format!("{debugfs}/rp_min_rate"));
        let sys = Sys::new("debugfs", &[(&dscp, "48\n"), (&rate, "1\n")]);
        let told = CardCongestion::read(&sys.0, "mlx5_0", Some("eth0")).unwrap();
        assert!(told.source.ends_with(debugfs), "{told:?}");
        let line = CardCongestion::line(Some(&told));
        assert!(line.ends_with("cc_params: np_cnp_dscp 48, rp_min_rate 1"), "{line}");

        // The interface's folder has the state of the port itself, so it takes precedence.
        let sys = Sys::new(
            "ecn",
            &[
                (&dscp, "48\n"),
                ("class/net/eth0/ecn/roce_np/cnp_dscp", "46\n"),
                ("class/net/eth0/ecn/roce_np/enable/3", "1\n"),
                ("class/net/eth0/ecn/roce_rp/enable/3", "0\n"),
            ],
        );
        let told = CardCongestion::read(&sys.0, "mlx5_0", Some("eth0")).unwrap();
        let line = CardCongestion::line(Some(&told));
        let expected = "ecn: roce_np/cnp_dscp 46, roce_np/enable/3 1, roce_rp/enable/3 0";
        assert!(line.ends_with(expected), "{line}");
        // Another interface has no such folder.
        let told = CardCongestion::read(&sys.0, "mlx5_0", Some("eth1")).unwrap();
        assert!(told.source.ends_with(debugfs), "{told:?}");
    }

    #[test]
    fn missing_settings_are_not_shown() {
        let sys = Sys::new("none", &[]);
        for device in ["mlx5_0", "rxe0"] {
            let told = CardCongestion::read(&sys.0, device, Some("eth0"));
            assert_eq!(told, None);
            assert_eq!(CardCongestion::line(told.as_ref()), "congestion control of the card: not reported");
        }
    }

    #[test]
    fn a_file_that_never_ends_or_moves_a_terminal_is_harmless() {
        let path = "kernel/debug/mlx5/0000:3b:00.0/cc_params/rp_x";
        let sys = Sys::new("long", &[(path, &format!("\u{1b}[2J{}", "9".repeat(100_000)))]);
        let told = CardCongestion::read(&sys.0, "mlx5_0", None).unwrap();
        let line = CardCongestion::line(Some(&told));
        assert!(line.len() < 1000 && !line.contains('\u{1b}'), "{line}");
    }
}
