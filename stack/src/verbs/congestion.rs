//! Congestion control and congestion notification (docs/protocol.md §7).

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use crate::verbs::Error;
use crate::verbs::number::decimal;

/// The congestion control of a queue pair's sender.
///
/// Its text is `off`, or the name of a preset of [`Dcqcn`], optionally followed by parameters:
///
/// ```
/// use ferroce::{CongestionControl, Dcqcn};
///
/// let control: CongestionControl = "mlx5,rpg_ai_rate=20".parse()?;
/// assert_eq!(control, CongestionControl::Dcqcn(Dcqcn::MLX5.rpg_ai_rate(20)));
/// assert_eq!("off".parse::<CongestionControl>()?, CongestionControl::Off);
/// # Ok::<(), ferroce::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CongestionControl {
    /// None: packets are sent as fast as the window allows, are not ECN-capable, and congestion notification packets (CNPs) are
    /// ignored.
    #[default]
    Off,
    /// The reaction point of DCQCN: packets are ECN-capable and paced, and CNPs lower the rate.
    Dcqcn(Dcqcn),
}

/// How a DCQCN reaction point handles CNPs, alpha periods, timers and byte counters: the published variants differ.
///
/// All of them start at the line rate. A cut multiplies the current rate by 1 − alpha/2, and each event of the timer or of the
/// byte counter halves its distance to the target rate, which grows after `rpg_threshold` events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DcqcnRules {
    /// SIGCOMM'15: each CNP cuts with the old alpha, then raises alpha; alpha starts at its highest.
    Paper,
    /// The paper's authors' simulator (ns3-rdma): alpha is raised before the cut, the target rate may exceed the line
    /// rate, and timer and byte counter are twice as fast in hyper increase.
    Zhu,
    /// "Mellanox" DCQCN of the HPCC and ns3-datacenter simulators: CNPs are noted, and the rate is cut at most once in
    /// each `rate_reduce_monitor_period`; alpha changes once in each `dce_tcp_rtt`.
    Mlx,
}

/// The parameters of DCQCN, with mlx5's names and units.
///
/// Begin with a preset, and change parameters with the setters. A value out of range is refused when the parameters are used.
/// `Display` prints all parameters, in a form that can be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Dcqcn {
    /// How events are answered.
    pub rules: DcqcnRules,
    /// How much of alpha is kept in each period, in 1/1024: g is 1 − this / 1024. 0 to 1023.
    pub dce_tcp_g: u16,
    /// The alpha period, in µs: after this time without a CNP alpha decays. At least 1.
    pub dce_tcp_rtt: u32,
    /// The period of the rate increase timer, in µs. At least 1.
    pub rpg_time_reset: u32,
    /// The period of the byte counter, in bytes sent; 0 for no byte counter.
    pub rpg_byte_reset: u64,
    /// Events of timer or byte counter before the target rate grows, 1 to 31.
    pub rpg_threshold: u8,
    /// Additive increase of the target rate, in Mb/s. At least 1.
    pub rpg_ai_rate: u32,
    /// Hyper increase of the target rate, in Mb/s. At least 1.
    pub rpg_hai_rate: u32,
    /// The lowest rate, in Mb/s. At least 1.
    pub rpg_min_rate: u32,
    /// The highest rate, in Mb/s; 0 for the line rate.
    pub rpg_max_rate: u32,
    /// Alpha at the start, in 1/1024. 0 to 1024.
    pub initial_alpha_value: u16,
    /// The minimum time between two cuts, in µs, at least 1; only with [`DcqcnRules::Mlx`].
    pub rate_reduce_monitor_period: u32,
    /// A cut reduces the rate by the part alpha · 1024 / 2ⁿ with n = this value: 11 is half of alpha. 0 to 15.
    pub rpg_gd: u8,
    /// The minimum rate after a cut, in percent of the rate before. 0 to 100.
    pub rpg_min_dec_fac: u8,
    /// The rate from the first CNP on, in Mb/s; 0 for no such rule.
    pub rate_to_set_on_first_cnp: u32,
    /// Whether each cut sets the target rate to the rate before it.
    pub clamp_tgt_rate: bool,
    /// Without `clamp_tgt_rate`: whether a cut sets the target rate if the timer has raised the rate since the last cut. It
    /// always does if the byte counter has.
    pub clamp_tgt_rate_after_time_inc: bool,
}

/// The notification point: how the sender of marked packets is notified.
///
/// For a packet that a switch marked (ECN: Congestion Experienced) and that passes all checks, a congestion notification packet
/// (CNP) is sent to the queue pair that sent it, at most one per interval. The parameters have mlx5's names.
///
/// ```
/// use std::time::Duration;
/// use ferroce::{CnpScope, Config, CongestionNotification};
///
/// let notification = CongestionNotification::default().min_time_between_cnps(Duration::from_micros(4));
/// let config = Config::default().notification(notification.scope(CnpScope::Peer));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct CongestionNotification {
    /// The minimum time between two CNPs sent in the same scope; zero for one CNP per marked packet.
    pub min_time_between_cnps: Duration,
    /// The scope of that time.
    pub scope: CnpScope,
    /// DSCP of CNPs, 0 to 63. Switches should map it to a queue with priority over data.
    pub cnp_dscp: u8,
    /// Priority code point of CNPs if the path has an 802.1Q tag, 0 to 7.
    pub cnp_802p_prio: u8,
}

/// The scope of the minimum time between two congestion notification packets. Cards differ in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CnpScope {
    /// Each connected queue pair; for datagrams, each sender's queue pair as well.
    QueuePair,
    /// Each source address.
    Peer,
    /// The port.
    Port,
}

impl Default for CongestionNotification {
    /// One CNP per 50 µs for each queue pair, as in the paper; DSCP 48 and priority 6, as mlx5.
    fn default() -> CongestionNotification {
        CongestionNotification {
            min_time_between_cnps: Duration::from_micros(50),
            scope: CnpScope::QueuePair,
            cnp_dscp: 48,
            cnp_802p_prio: 6,
        }
    }
}

impl CongestionNotification {
    /// The minimum time between two CNPs; 50 µs by default.
    pub fn min_time_between_cnps(self, min_time_between_cnps: Duration) -> Self {
        CongestionNotification { min_time_between_cnps, ..self }
    }

    /// The scope of that time; each queue pair by default.
    pub fn scope(self, scope: CnpScope) -> Self {
        CongestionNotification { scope, ..self }
    }

    /// DSCP of CNPs, 0 to 63; 48 by default.
    pub fn cnp_dscp(self, cnp_dscp: u8) -> Self {
        CongestionNotification { cnp_dscp, ..self }
    }

    /// Priority code point of CNPs in a VLAN, 0 to 7; 6 by default.
    pub fn cnp_802p_prio(self, cnp_802p_prio: u8) -> Self {
        CongestionNotification { cnp_802p_prio, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        for (name, value, most) in [("cnp_dscp", self.cnp_dscp, 63), ("cnp_802p_prio", self.cnp_802p_prio, 7)]
        {
            if value > most {
                return Err(Error::invalid(name, value, format!("0 to {most}")));
            }
        }
        Ok(())
    }
}

/// The presets by name.
const PRESETS: [(&str, Dcqcn); 6] = [
    ("paper", Dcqcn::PAPER),
    ("zhu25", Dcqcn::ZHU25),
    ("zhu25p", Dcqcn::ZHU25P),
    ("mlx25", Dcqcn::MLX25),
    ("hpcc100", Dcqcn::HPCC100),
    ("mlx5", Dcqcn::MLX5),
];

/// One parameter by its name, and how it is read and written as a number.
struct Parameter {
    name: &'static str,
    unit: &'static str,
    /// The lowest and the highest valid value. Both fit into the field.
    range: (u64, u64),
    get: fn(&Dcqcn) -> u64,
    set: fn(&mut Dcqcn, u64),
}

/// The highest rate that can be set, in Mb/s: 4 Tb/s.
const MAX_RATE: u64 = 4_000_000;
/// The longest period, in µs: 100 s.
const MAX_PERIOD: u64 = 100_000_000;

/// Every parameter except the rules.
#[rustfmt::skip]
const PARAMETERS: [Parameter; 16] = [
    Parameter { name: "dce_tcp_g", unit: "/1024", range: (0, 1023), get: |d| d.dce_tcp_g.into(), set: |d, v| d.dce_tcp_g = v as u16 },
    Parameter { name: "dce_tcp_rtt", unit: "us", range: (1, MAX_PERIOD), get: |d| d.dce_tcp_rtt.into(), set: |d, v| d.dce_tcp_rtt = v as u32 },
    Parameter { name: "rpg_time_reset", unit: "us", range: (1, MAX_PERIOD), get: |d| d.rpg_time_reset.into(), set: |d, v| d.rpg_time_reset = v as u32 },
    Parameter { name: "rpg_byte_reset", unit: "bytes", range: (0, 1 << 40), get: |d| d.rpg_byte_reset, set: |d, v| d.rpg_byte_reset = v },
    Parameter { name: "rpg_threshold", unit: "events", range: (1, 31), get: |d| d.rpg_threshold.into(), set: |d, v| d.rpg_threshold = v as u8 },
    Parameter { name: "rpg_ai_rate", unit: "Mb/s", range: (1, MAX_RATE), get: |d| d.rpg_ai_rate.into(), set: |d, v| d.rpg_ai_rate = v as u32 },
    Parameter { name: "rpg_hai_rate", unit: "Mb/s", range: (1, MAX_RATE), get: |d| d.rpg_hai_rate.into(), set: |d, v| d.rpg_hai_rate = v as u32 },
    Parameter { name: "rpg_min_rate", unit: "Mb/s", range: (1, MAX_RATE), get: |d| d.rpg_min_rate.into(), set: |d, v| d.rpg_min_rate = v as u32 },
    Parameter { name: "rpg_max_rate", unit: "Mb/s", range: (0, MAX_RATE), get: |d| d.rpg_max_rate.into(), set: |d, v| d.rpg_max_rate = v as u32 },
    Parameter { name: "initial_alpha_value", unit: "/1024", range: (0, 1024), get: |d| d.initial_alpha_value.into(), set: |d, v| d.initial_alpha_value = v as u16 },
    Parameter { name: "rate_reduce_monitor_period", unit: "us", range: (0, MAX_PERIOD), get: |d| d.rate_reduce_monitor_period.into(), set: |d, v| d.rate_reduce_monitor_period = v as u32 },
    Parameter { name: "rpg_gd", unit: "(log2)", range: (0, 15), get: |d| d.rpg_gd.into(), set: |d, v| d.rpg_gd = v as u8 },
    Parameter { name: "rpg_min_dec_fac", unit: "%", range: (0, 100), get: |d| d.rpg_min_dec_fac.into(), set: |d, v| d.rpg_min_dec_fac = v as u8 },
    Parameter { name: "rate_to_set_on_first_cnp", unit: "Mb/s", range: (0, MAX_RATE), get: |d| d.rate_to_set_on_first_cnp.into(), set: |d, v| d.rate_to_set_on_first_cnp = v as u32 },
    Parameter { name: "clamp_tgt_rate", unit: "(off or on)", range: (0, 1), get: |d| d.clamp_tgt_rate.into(), set: |d, v| d.clamp_tgt_rate = v != 0 },
    Parameter { name: "clamp_tgt_rate_after_time_inc", unit: "(off or on)", range: (0, 1), get: |d| d.clamp_tgt_rate_after_time_inc.into(), set: |d, v| d.clamp_tgt_rate_after_time_inc = v != 0 },
];

impl Dcqcn {
    /// The rules of the paper with its authors' constants (docs/protocol.md §7): alpha 1 at the start, T 55 µs, B 10 MB.
    pub const PAPER: Dcqcn = Dcqcn { rules: DcqcnRules::Paper, initial_alpha_value: 1024, ..Dcqcn::ZHU25P };

    /// The sample configuration of ns3-rdma: T 60 µs, and a byte counter that hardly ever expires.
    pub const ZHU25: Dcqcn = Dcqcn { rpg_time_reset: 60, rpg_byte_reset: 300_000_000, ..Dcqcn::ZHU25P };

    /// ns3-rdma with the timer and the byte counter of the paper: T 55 µs, B 10 MB.
    pub const ZHU25P: Dcqcn = Dcqcn {
        rules: DcqcnRules::Zhu,
        dce_tcp_g: 1020,
        dce_tcp_rtt: 55,
        rpg_time_reset: 55,
        rpg_byte_reset: 10_000_000,
        rpg_threshold: 5,
        rpg_ai_rate: 40,
        rpg_hai_rate: 200,
        rpg_min_rate: 100,
        rpg_max_rate: 0,
        initial_alpha_value: 512,
        rate_reduce_monitor_period: 0,
        rpg_gd: 11,
        rpg_min_dec_fac: 0,
        rate_to_set_on_first_cnp: 0,
        clamp_tgt_rate: true,
        clamp_tgt_rate_after_time_inc: false,
    };

    /// The numbers of [`ZHU25`](Dcqcn::ZHU25) with the rules of "Mellanox" DCQCN, as in ns3-datacenter.
    pub const MLX25: Dcqcn = Dcqcn {
        rules: DcqcnRules::Mlx,
        rpg_byte_reset: 0,
        initial_alpha_value: 1024,
        rate_reduce_monitor_period: 50,
        ..Dcqcn::ZHU25
    };

    /// The sample parameters of the HPCC repository for 100 Gb/s.
    pub const HPCC100: Dcqcn = Dcqcn {
        dce_tcp_rtt: 1,
        rpg_time_reset: 900,
        rpg_threshold: 1,
        rpg_ai_rate: 50,
        rpg_hai_rate: 100,
        rate_reduce_monitor_period: 4,
        clamp_tgt_rate: false,
        clamp_tgt_rate_after_time_inc: true,
        ..Dcqcn::MLX25
    };

    /// NVIDIA's defaults for ConnectX.
    pub const MLX5: Dcqcn = Dcqcn {
        rules: DcqcnRules::Mlx,
        dce_tcp_g: 1019,
        dce_tcp_rtt: 1,
        rpg_time_reset: 300,
        rpg_byte_reset: 32_767,
        rpg_threshold: 1,
        rpg_ai_rate: 5,
        rpg_hai_rate: 50,
        rpg_min_rate: 1,
        rpg_max_rate: 0,
        initial_alpha_value: 1023,
        rate_reduce_monitor_period: 4,
        rpg_gd: 11,
        rpg_min_dec_fac: 50,
        rate_to_set_on_first_cnp: 0,
        clamp_tgt_rate: false,
        clamp_tgt_rate_after_time_inc: true,
    };

    /// A preset by its name: `paper`, `zhu25`, `zhu25p`, `mlx25`, `hpcc100` or `mlx5`.
    ///
    /// # Errors
    /// If there is no preset of that name.
    pub fn preset(name: &str) -> Result<Dcqcn, Error> {
        let found = PRESETS.iter().find(|(of, _)| *of == name);
        found.map(|(_, preset)| *preset).ok_or_else(|| {
            let names = PRESETS.map(|(name, _)| name).join(", ");
            Error::invalid("congestion control", name, format!("off, or a preset of DCQCN: {names}"))
        })
    }

    /// How events are answered.
    pub fn rules(self, rules: DcqcnRules) -> Self {
        Dcqcn { rules, ..self }
    }

    /// How much of alpha is kept in each period, in 1/1024; 0 to 1023.
    pub fn dce_tcp_g(self, dce_tcp_g: u16) -> Self {
        Dcqcn { dce_tcp_g, ..self }
    }

    /// The alpha period, in µs.
    pub fn dce_tcp_rtt(self, dce_tcp_rtt: u32) -> Self {
        Dcqcn { dce_tcp_rtt, ..self }
    }

    /// The period of the rate increase timer, in µs.
    pub fn rpg_time_reset(self, rpg_time_reset: u32) -> Self {
        Dcqcn { rpg_time_reset, ..self }
    }

    /// The period of the byte counter, in bytes; 0 for none.
    pub fn rpg_byte_reset(self, rpg_byte_reset: u64) -> Self {
        Dcqcn { rpg_byte_reset, ..self }
    }

    /// Events of timer or byte counter before the target rate grows; 1 to 31.
    pub fn rpg_threshold(self, rpg_threshold: u8) -> Self {
        Dcqcn { rpg_threshold, ..self }
    }

    /// Additive increase, in Mb/s.
    pub fn rpg_ai_rate(self, rpg_ai_rate: u32) -> Self {
        Dcqcn { rpg_ai_rate, ..self }
    }

    /// Hyper increase, in Mb/s.
    pub fn rpg_hai_rate(self, rpg_hai_rate: u32) -> Self {
        Dcqcn { rpg_hai_rate, ..self }
    }

    /// The lowest rate, in Mb/s.
    pub fn rpg_min_rate(self, rpg_min_rate: u32) -> Self {
        Dcqcn { rpg_min_rate, ..self }
    }

    /// The highest rate, in Mb/s; 0 for the line rate.
    pub fn rpg_max_rate(self, rpg_max_rate: u32) -> Self {
        Dcqcn { rpg_max_rate, ..self }
    }

    /// Alpha at the start, in 1/1024; 0 to 1024.
    pub fn initial_alpha_value(self, initial_alpha_value: u16) -> Self {
        Dcqcn { initial_alpha_value, ..self }
    }

    /// The minimum time between two cuts, in µs; only with [`DcqcnRules::Mlx`].
    pub fn rate_reduce_monitor_period(self, rate_reduce_monitor_period: u32) -> Self {
        Dcqcn { rate_reduce_monitor_period, ..self }
    }

    /// A cut reduces the rate by the part alpha · 1024 / 2ⁿ with n = this value, 0 to 15.
    pub fn rpg_gd(self, rpg_gd: u8) -> Self {
        Dcqcn { rpg_gd, ..self }
    }

    /// The minimum rate after a cut, in percent of the rate before.
    pub fn rpg_min_dec_fac(self, rpg_min_dec_fac: u8) -> Self {
        Dcqcn { rpg_min_dec_fac, ..self }
    }

    /// The rate from the first CNP on, in Mb/s; 0 for no such rule.
    pub fn rate_to_set_on_first_cnp(self, rate_to_set_on_first_cnp: u32) -> Self {
        Dcqcn { rate_to_set_on_first_cnp, ..self }
    }

    /// Whether each cut sets the target rate to the rate before it.
    pub fn clamp_tgt_rate(self, clamp_tgt_rate: bool) -> Self {
        Dcqcn { clamp_tgt_rate, ..self }
    }

    /// Whether a cut sets the target rate if the timer has raised the rate since the last one.
    pub fn clamp_tgt_rate_after_time_inc(self, clamp_tgt_rate_after_time_inc: bool) -> Self {
        Dcqcn { clamp_tgt_rate_after_time_inc, ..self }
    }

    /// Fails on the first parameter out of range, for a port of `line_rate` bit/s.
    pub(crate) fn check(&self, line_rate: u64) -> Result<(), Error> {
        check_line_rate(line_rate)?;
        for Parameter { name, unit, get, range: (least, most), .. } in PARAMETERS {
            let value = get(self);
            if value < least || value > most {
                return Err(Error::invalid(name, value, format!("{least} to {most} {unit}")));
            }
        }
        if self.rules == DcqcnRules::Mlx && self.rate_reduce_monitor_period == 0 {
            return Err(Error::invalid(
                "rate_reduce_monitor_period",
                0,
                format!("1 to {MAX_PERIOD} us with the rules mlx"),
            ));
        }
        let highest = self.highest(line_rate);
        if highest < u64::from(self.rpg_min_rate) * 1_000_000 {
            let expected = format!("at most the highest rate, {} Mb/s", highest / 1_000_000);
            return Err(Error::invalid("rpg_min_rate", self.rpg_min_rate, expected));
        }
        Ok(())
    }

    /// The highest rate on a port of `line_rate`, both in bit/s.
    pub(crate) fn highest(&self, line_rate: u64) -> u64 {
        match self.rpg_max_rate {
            0 => line_rate,
            rate => line_rate.min(u64::from(rate) * 1_000_000),
        }
    }

    fn set(&mut self, setting: &str) -> Result<(), Error> {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        if name == "rules" {
            self.rules = value.parse()?;
            return Ok(());
        }
        let Some(Parameter { name, unit, set, range: (least, most), .. }) =
            PARAMETERS.into_iter().find(|parameter| parameter.name == name)
        else {
            let names = PARAMETERS.map(|parameter| parameter.name).join(", ");
            let expected = format!("NAME=VALUE with a parameter of DCQCN: rules, {names}");
            return Err(Error::invalid("congestion control", setting, expected));
        };
        let Some(number) = decimal::<u64>(value).filter(|number| (least..=most).contains(number)) else {
            return Err(Error::invalid(name, value, format!("{least} to {most} {unit}")));
        };
        set(self, number);
        Ok(())
    }
}

impl fmt::Display for DcqcnRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DcqcnRules::Paper => "paper",
            DcqcnRules::Zhu => "zhu",
            DcqcnRules::Mlx => "mlx",
        })
    }
}

impl FromStr for DcqcnRules {
    type Err = Error;

    fn from_str(text: &str) -> Result<DcqcnRules, Error> {
        let rules = [DcqcnRules::Paper, DcqcnRules::Zhu, DcqcnRules::Mlx];
        let found = rules.into_iter().find(|rules| rules.to_string() == text);
        found.ok_or_else(|| Error::invalid("rules", text, "paper, zhu or mlx"))
    }
}

/// `rules=zhu,dce_tcp_g=1020,...`: every parameter.
impl fmt::Display for Dcqcn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rules={}", self.rules)?;
        PARAMETERS.iter().try_for_each(|Parameter { name, get, .. }| write!(f, ",{name}={}", get(self)))
    }
}

impl fmt::Display for CongestionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CongestionControl::Off => f.write_str("off"),
            CongestionControl::Dcqcn(dcqcn) => dcqcn.fmt(f),
        }
    }
}

impl FromStr for CongestionControl {
    type Err = Error;

    /// `off`; or a preset and changes to it; or only changes, to the preset `paper`.
    fn from_str(text: &str) -> Result<CongestionControl, Error> {
        if text == "off" {
            return Ok(CongestionControl::Off);
        }
        if text.starts_with("off,") {
            return Err(Error::invalid("congestion control", text, "off has no parameters; a preset has"));
        }
        let mut settings = text.split(',').peekable();
        let preset = settings.next_if(|setting| !setting.contains('='));
        let mut dcqcn = preset.map_or(Ok(Dcqcn::PAPER), Dcqcn::preset)?;
        let mut names = Vec::new();
        for setting in settings {
            let name = setting.split('=').next().unwrap_or_default();
            if names.contains(&name) {
                return Err(Error::invalid("congestion control", text, format!("{name} once")));
            }
            names.push(name);
            dcqcn.set(setting)?;
        }
        Ok(CongestionControl::Dcqcn(dcqcn))
    }
}

/// Line rates in bit/s.
const LINE_RATES: RangeInclusive<u64> = 1_000_000..=4_000_000_000_000;

pub(crate) fn check_line_rate(rate: u64) -> Result<(), Error> {
    if LINE_RATES.contains(&rate) {
        return Ok(());
    }
    let (least, most) = (LINE_RATES.start(), LINE_RATES.end());
    Err(Error::invalid("line_rate", rate, format!("{least} to {most} bit/s")))
}
