//! perftest's ib_write_bw and ib_write_lat, if there is a verbs device.

use std::io;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::process::Stopped;

/// A result of one of its commands.
#[derive(Clone, Debug)]
pub struct Row {
    /// The command and the measured quantity.
    pub what: String,
    /// The value.
    pub value: f64,
    /// Of the value.
    pub unit: &'static str,
}

/// Runs both commands over the first verbs device of this machine, with server and client on it.
///
/// # Errors
/// There is no command or device, or a command fails.
pub fn run() -> Result<Vec<Row>, String> {
    let devices = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let device = devices.filter_map(|entry| entry.file_name().into_string().ok()).min();
    let device = device.ok_or("no verbs device here (nothing in /sys/class/infiniband)")?;
    let bandwidth = |bytes: &str| ["-s", bytes, "-D", "2", "--report_gbits"].map(str::to_owned);
    let latency = |bytes: &str| ["-s", bytes, "-n", "20000"].map(str::to_owned);
    let mut rows = Vec::new();
    // After bytes and iterations: peak, average, messages.
    for (bytes, column, unit, scale) in [("65536", 3, "Gb/s", 1.0), ("8", 4, "Mmsg/s", 1.0)] {
        let said = both("ib_write_bw", &device, &bandwidth(bytes))?;
        rows.push(Row {
            what: format!("ib_write_bw, {bytes} B, {device}"),
            ..row(&said, bytes, column, unit, scale)?
        });
    }
    // Minimum, maximum, typical: each half of a round trip.
    let said = both("ib_write_lat", &device, &latency("8"))?;
    rows.push(Row {
        what: format!("ib_write_lat, 8 B, {device}, there and back"),
        ..row(&said, "8", 4, "us", 2.0)?
    });
    Ok(rows)
}

/// Runs a command as server and as its client, and returns the client's output.
fn both(command: &str, device: &str, options: &[String]) -> Result<String, String> {
    const PORT: &str = "18915";
    let start = |peer: &[&str]| {
        let mut process = Command::new(command);
        process.args(["-d", device, "-p", PORT, "-F"]).args(options).args(peer);
        process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let none = |error: io::Error| {
        format!("there is the verbs device {device}, but {command} (package perftest): {error}")
    };
    let server = Stopped(start(&[]).map_err(none)?);
    // It listens soon; there is no signal for it.
    std::thread::sleep(Duration::from_millis(500));
    let client = start(&["127.0.0.1"]).map_err(none)?;
    let Output { status, stdout, stderr } = client.wait_with_output().map_err(none)?;
    drop(server);
    if !status.success() {
        return Err(format!("{command}: {}", String::from_utf8_lossy(&stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// The value in a column of the line for messages of `bytes`.
fn row(said: &str, bytes: &str, column: usize, unit: &'static str, scale: f64) -> Result<Row, String> {
    let lines = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut rows = lines.filter(|words| words.first() == Some(&bytes));
    let value = rows.find_map(|words| words.get(column)?.parse::<f64>().ok());
    let value = value.ok_or_else(|| format!("perftest printed no figures for {bytes} bytes"))?;
    Ok(Row { what: String::new(), value: value * scale, unit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_taken_from_their_columns() {
        let bandwidth = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
                         65536      5000             11.02              10.91              0.020812\n";
        assert_eq!(row(bandwidth, "65536", 3, "Gb/s", 1.0).unwrap().value, 10.91);
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
                       8       1000          1.50           9.10         1.75               1.80\n";
        assert_eq!(row(latency, "8", 4, "us", 2.0).unwrap().value, 3.5);
        assert!(row(latency, "16", 4, "us", 2.0).unwrap_err().contains("16 bytes"));
    }
}
