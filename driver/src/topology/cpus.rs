//! Sets of CPUs, in the kernel's list format.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::str::FromStr;

use crate::Error;

/// The greatest number accepted for a CPU or a NUMA node: Linux supports at most 8192 CPUs.
const MAX_CPU: u32 = 65_535;

/// CPUs by their numbers, or other numbers that the kernel lists in this format: `0-55,112-167`.
///
/// ```
/// use ferroce_driver::topology::CpuSet;
///
/// let cpus: CpuSet = "0-2,8".parse()?;
/// assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 8]);
/// assert_eq!(cpus.to_string(), "0-2,8");
/// # Ok::<(), ferroce_driver::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// The CPUs on which a process may run: `Cpus_allowed_list` in `/proc/PID/status`. `None` is this process.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such process.
    pub fn of_process(pid: Option<u32>) -> Result<CpuSet, Error> {
        let name = pid.map_or("self".to_owned(), |pid| pid.to_string());
        let invalid = |expected: String| Error::Invalid { parameter: "pid", value: name.clone(), expected };
        let status = fs::read(format!("/proc/{name}/status"));
        let status =
            status.map_err(|source: io::Error| invalid(format!("a process that runs ({source})")))?;
        let status = String::from_utf8_lossy(&status);
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        list.ok_or_else(|| invalid("a process whose CPUs the kernel reports".to_owned()))?.trim().parse()
    }

    /// All of them, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it contains this CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether the sets have a CPU in common.
    pub fn meets(&self, other: &CpuSet) -> bool {
        self.iter().any(|cpu| other.contains(cpu))
    }

    pub(super) fn insert(&mut self, cpu: u32) {
        self.0.insert(cpu);
    }
}

impl FromStr for CpuSet {
    type Err = Error;

    /// An empty list is an empty set, such as that of a NUMA node with memory only.
    fn from_str(text: &str) -> Result<CpuSet, Error> {
        let invalid = || Error::Invalid {
            parameter: "list of CPUs",
            value: text.chars().take(40).collect::<String>().escape_debug().to_string(),
            expected: format!("numbers and ranges as 0-3,8, none above {MAX_CPU}"),
        };
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| digits.trim().parse::<u32>().ok().filter(|cpu| *cpu <= MAX_CPU);
            let (Some(first), Some(last)) = (number(first), number(last)) else { return Err(invalid()) };
            if first > last {
                return Err(invalid());
            }
            cpus.extend(first..=last);
        }
        Ok(CpuSet(cpus))
    }
}

/// In the kernel's format.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while rest.next_if(|next| *next == last + 1).is_some() {
                last += 1;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_the_kernels_format() {
        for list in ["", "0", "0-1", "0-55,112-167", "3,5,7-9", "65535"] {
            assert_eq!(list.parse::<CpuSet>().unwrap().to_string(), list);
        }
        assert_eq!("0-3\n".parse::<CpuSet>().unwrap().len(), 4);
        for wrong in ["x", "1-", "-1", "3-1", "0-65536", "0-99999999999", "1,,2", ",", "0 1"] {
            let error = wrong.parse::<CpuSet>().unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("0-3,8"), "{error}");
        }
    }

    #[test]
    fn a_process_has_cpus() {
        assert!(!CpuSet::of_process(None).unwrap().is_empty());
        assert_eq!(CpuSet::of_process(Some(std::process::id())).unwrap(), CpuSet::of_process(None).unwrap());
        let error = CpuSet::of_process(Some(u32::MAX)).unwrap_err().to_string();
        assert!(error.contains("pid = 4294967295: a process that runs"), "{error}");
    }
}
