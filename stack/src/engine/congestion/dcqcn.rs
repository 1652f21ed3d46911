//! The reaction point of DCQCN (docs/protocol.md §7).

use std::time::Duration;

use ferroce_driver::Nanos;

use crate::verbs::{Dcqcn, DcqcnRules, Error};

/// The reaction point of DCQCN: a state machine whose inputs are congestion notification packets (CNPs) and the number of
/// bytes sent, and whose output is the rate to send at.
///
/// It has no clock and no timer. Each call passes the time and executes all events due before it; a time earlier than that
/// of a previous call counts as that one. The number of calls does not affect the results, with one exception: an event due
/// exactly at the time of a CNP is executed after it, unless another call has executed it before.
///
/// ```
/// use ferroce::{Dcqcn, Nanos, ReactionPoint};
///
/// let mut sender = ReactionPoint::new(Dcqcn::PAPER, 10_000_000_000)?;
/// sender.on_cnp(Nanos(1_000_000));
/// assert_eq!((sender.rate(), sender.target()), (5_000_000_000, 10_000_000_000));
/// sender.advance(Nanos(1_000_000 + 55_000));
/// assert_eq!(sender.rate(), 7_500_000_000);
/// # Ok::<(), ferroce::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReactionPoint {
    rules: DcqcnRules,
    /// The rates in bit/s.
    rate: u64,
    target: u64,
    highest: u64,
    lowest: u64,
    additive: u64,
    hyper: u64,
    /// The rate after the first CNP, if configured.
    first: Option<u64>,
    alpha: Alpha,
    /// The factor of a cut: multiplied by alpha.
    cut_part: f64,
    /// The least factor that remains after a cut.
    cut_least: f64,
    clamp: bool,
    clamp_after_timer: bool,
    threshold: u32,
    /// Events due by this time have been executed.
    now: Nanos,
    /// The first CNP was received.
    started: bool,
    timer_period: u64,
    /// The next expiry of the timer.
    timer: Nanos,
    timer_stage: u32,
    byte_period: u64,
    /// The remaining bytes of the byte counter.
    bytes_left: u64,
    byte_stage: u32,
    phase: Phase,
    cut_period: u64,
    /// The first time of the grid of cuts.
    cut_grid: Nanos,
    /// When the rate will be cut, if CNPs were received since the last cut.
    cut: Nanos,
}

/// The phase of the recovery after a cut with `DcqcnRules::Zhu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Fast,
    Active,
    Hyper,
}

/// The most teeth of a silent sender's target rate that are computed.
const TEETH_MAX: u32 = 1024;

/// The cause of an increase of the rate.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Increase {
    Timer,
    Bytes,
}

impl ReactionPoint {
    /// Starts at the highest rate: `line_rate` bit/s, or the maximum of the parameters if that is lower.
    ///
    /// # Errors
    /// If a parameter is out of its range.
    pub fn new(parameters: Dcqcn, line_rate: u64) -> Result<ReactionPoint, Error> {
        parameters.check(line_rate)?;
        let highest = parameters.highest(line_rate);
        let rate_of = |mbps: u32| u64::from(mbps) * 1_000_000;
        let period_of = |micros: u32| u64::from(micros) * 1000;
        Ok(ReactionPoint {
            rules: parameters.rules,
            rate: highest,
            target: highest,
            highest,
            lowest: rate_of(parameters.rpg_min_rate),
            additive: rate_of(parameters.rpg_ai_rate),
            hyper: rate_of(parameters.rpg_hai_rate),
            first: (parameters.rate_to_set_on_first_cnp > 0)
                .then(|| rate_of(parameters.rate_to_set_on_first_cnp).min(highest)),
            alpha: Alpha::new(&parameters),
            cut_part: 1024.0 / f64::from(1_u32 << parameters.rpg_gd),
            cut_least: f64::from(parameters.rpg_min_dec_fac) / 100.0,
            clamp: parameters.clamp_tgt_rate,
            clamp_after_timer: parameters.clamp_tgt_rate_after_time_inc,
            threshold: parameters.rpg_threshold.into(),
            now: Nanos::ZERO,
            started: false,
            timer_period: period_of(parameters.rpg_time_reset),
            timer: Nanos::NEVER,
            timer_stage: 0,
            byte_period: parameters.rpg_byte_reset,
            bytes_left: 0,
            byte_stage: 0,
            phase: Phase::Fast,
            cut_period: period_of(parameters.rate_reduce_monitor_period),
            cut_grid: Nanos::NEVER,
            cut: Nanos::NEVER,
        })
    }

    /// The current rate, in bit/s.
    #[inline]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// The target rate of the recovery, in bit/s. [`DcqcnRules::Zhu`] does not limit it to the line rate.
    pub fn target(&self) -> u64 {
        self.target
    }

    /// The estimate of the congestion at `now`, not before the last call: 0 to 1.
    pub fn alpha(&self, now: Nanos) -> f64 {
        self.alpha.at(now)
    }

    /// How often the timer has raised the rate since the last cut.
    pub fn timer_stage(&self) -> u32 {
        self.timer_stage
    }

    /// How often the byte counter has raised the rate since the last cut.
    pub fn byte_stage(&self) -> u32 {
        self.byte_stage
    }

    /// When alpha or a rate changes next without a call.
    pub fn next_change(&self, now: Nanos) -> Nanos {
        self.timer.min(self.cut).min(self.alpha.next_change(now))
    }

    /// When the rate changes next without a call; never if it is at its maximum.
    #[inline]
    pub(crate) fn next_rate_change(&self) -> Nanos {
        if self.is_recovered() { self.cut } else { self.timer.min(self.cut) }
    }

    /// Executes all events due at `now` or before.
    #[inline]
    pub fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        if self.timer.min(self.cut) <= self.now {
            self.catch_up();
        }
    }

    /// A CNP was received.
    pub fn on_cnp(&mut self, now: Nanos) {
        self.advance(Nanos(now.0.saturating_sub(1)));
        let now = now.max(self.now);
        let is_first = !std::mem::replace(&mut self.started, true);
        if is_first {
            self.bytes_left = self.byte_period;
            self.rate = self.first.unwrap_or(self.rate).max(self.lowest);
        }
        match self.rules {
            DcqcnRules::Paper => {
                self.cut_at(now, self.alpha.at(self.now));
                self.alpha.raise(self.now, now);
            }
            DcqcnRules::Zhu => {
                self.alpha.raise(self.now, now);
                self.cut_at(now, self.alpha.value);
            }
            DcqcnRules::Mlx => {
                if is_first {
                    self.alpha.since = now;
                    self.cut_grid = now + Duration::from_nanos(self.cut_period + 1);
                } else {
                    self.alpha.mark(self.now);
                }
                self.cut = self.next_cut();
            }
        }
    }

    /// Bytes were sent, counted as on the wire. One call causes at most one event of the byte counter.
    #[inline]
    pub fn on_sent(&mut self, bytes: u32, now: Nanos) {
        self.advance(now);
        // Before the first cut there is no recovery.
        if self.byte_period == 0 || !self.started {
            return;
        }
        match self.bytes_left.checked_sub(bytes.into()) {
            Some(left) => self.bytes_left = left,
            None => self.on_bytes(),
        }
    }

    #[cold]
    fn catch_up(&mut self) {
        loop {
            // If both are due at once, the timer is first.
            let due = self.timer.min(self.cut);
            if due > self.now || due == Nanos::NEVER {
                return;
            }
            if self.timer == due {
                let last = self.now.min(self.cut);
                if self.is_recovered() {
                    self.skip_recovered(last);
                } else {
                    self.raise(last);
                }
            } else {
                self.cut = Nanos::NEVER;
                self.cut_at(due, self.alpha.at(due));
            }
        }
    }

    /// Whether this cut sets the target rate.
    fn clamps(&self) -> bool {
        self.clamp || self.byte_stage > 0 || self.clamp_after_timer && self.timer_stage > 0
    }

    fn cut_at(&mut self, now: Nanos, alpha: f64) {
        let clamps = self.clamps();
        if clamps {
            self.target = self.rate;
        }
        if clamps || self.rules != DcqcnRules::Zhu {
            self.bytes_left = self.byte_period;
        }
        let left = (1.0 - alpha * self.cut_part).max(self.cut_least);
        self.rate = ((self.rate as f64 * left) as u64).max(self.lowest);
        (self.timer_stage, self.byte_stage, self.phase) = (0, 0, Phase::Fast);
        self.restart_timer(now);
    }

    fn restart_timer(&mut self, now: Nanos) {
        self.timer = now + Duration::from_nanos(self.timer_period);
    }

    /// The next time of the grid of cuts.
    fn next_cut(&self) -> Nanos {
        let Some(gone) = self.now.0.checked_sub(self.cut_grid.0) else { return self.cut_grid };
        Nanos(self.now.0.saturating_add(self.cut_period - gone % self.cut_period))
    }

    fn on_timer(&mut self) {
        // A period that ends in hyper increase also started there.
        self.timer = self.timer + Duration::from_nanos(self.hastened(self.timer_period));
        self.increase(Increase::Timer);
    }

    fn on_bytes(&mut self) {
        self.bytes_left = self.hastened(self.byte_period);
        self.increase(Increase::Bytes);
    }

    /// A period of the timer or of the byte counter, which is halved in the hyper increase of the zhu rules.
    fn hastened(&self, period: u64) -> u64 {
        // Only those rules have that phase.
        if self.phase == Phase::Hyper { period / 2 } else { period }
    }

    fn increase(&mut self, by: Increase) {
        // The mlx rules compare before they count.
        let before = (self.timer_stage, self.byte_stage);
        let stage = if by == Increase::Timer { &mut self.timer_stage } else { &mut self.byte_stage };
        *stage = stage.saturating_add(1);
        let stages = if self.rules == DcqcnRules::Mlx { before } else { (self.timer_stage, self.byte_stage) };
        match self.rules {
            DcqcnRules::Paper => {
                let (least, most) = (stages.0.min(stages.1), stages.0.max(stages.1));
                let more = if most < self.threshold {
                    0
                } else if least >= self.threshold {
                    self.hyper.saturating_mul(u64::from(least - self.threshold + 1))
                } else {
                    self.additive
                };
                self.target = self.target.saturating_add(more).min(self.highest);
            }
            DcqcnRules::Zhu => self.raise_target(by),
            DcqcnRules::Mlx => {
                // Without a byte counter only the timer counts.
                let counted = if self.byte_period == 0 { (stages.0, stages.0) } else { stages };
                let more = if counted.0.max(counted.1) < self.threshold {
                    0
                } else if counted.0.min(counted.1) <= self.threshold {
                    self.additive
                } else {
                    self.hyper
                };
                self.target = self.target.saturating_add(more).min(self.highest);
            }
        }
        self.rate = (self.rate / 2 + self.target / 2).min(self.highest);
        // Each halving loses half a bit.
        if self.target >= self.highest && self.highest - self.rate <= 2 {
            self.rate = self.highest;
        }
    }

    /// The target rate of the zhu rules after an event.
    fn raise_target(&mut self, by: Increase) {
        let own = if by == Increase::Timer { self.timer_stage } else { self.byte_stage };
        let least = self.timer_stage.min(self.byte_stage);
        // In fast recovery an event compares its own stage; active increase is ended only by the timer.
        let selects = match self.phase {
            Phase::Fast => own >= self.threshold,
            Phase::Active => by == Increase::Timer,
            Phase::Hyper => false,
        };
        if selects {
            self.phase = if least >= self.threshold { Phase::Hyper } else { Phase::Active };
        }
        if (self.timer_stage == 1 || self.byte_stage == 1) && self.target > self.rate.saturating_mul(10) {
            self.target /= 8;
            return;
        }
        let more = match self.phase {
            Phase::Fast => 0,
            Phase::Active => self.additive,
            Phase::Hyper => self.hyper.saturating_mul(u64::from((least + 1).saturating_sub(self.threshold))),
        };
        self.target = self.target.saturating_add(more);
    }

    /// No further increase is possible.
    fn is_recovered(&self) -> bool {
        self.rate == self.highest && self.target >= self.highest
    }

    /// The timer events due by `last`.
    fn due(&self, last: Nanos) -> u64 {
        (last.0 - self.timer.0) / self.hastened(self.timer_period) + 1
    }

    /// Skips this many events of the timer.
    fn pass(&mut self, count: u64) {
        let period = self.hastened(self.timer_period);
        self.timer = Nanos(self.timer.0.saturating_add(count.saturating_mul(period)));
        self.timer_stage = self.timer_stage.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// The increase of the target rate by each further timer event, if it is the same for all of them.
    fn steady_increase(&self) -> Option<u64> {
        let (timer, bytes) = (self.timer_stage, self.byte_stage);
        match self.rules {
            DcqcnRules::Paper if bytes < self.threshold => {
                (timer.saturating_add(1) >= self.threshold).then_some(self.additive)
            }
            DcqcnRules::Paper => {
                let steps = u64::from(bytes - self.threshold + 1);
                (timer >= bytes).then(|| self.hyper.saturating_mul(steps))
            }
            DcqcnRules::Zhu => match self.phase {
                Phase::Active if bytes < self.threshold && timer > 0 => Some(self.additive),
                Phase::Hyper if timer >= bytes && timer > 0 => Some(
                    self.hyper.saturating_mul(bytes.saturating_add(1).saturating_sub(self.threshold).into()),
                ),
                _ => None,
            },
            DcqcnRules::Mlx => {
                let bytes = if self.byte_period == 0 { timer } else { bytes };
                match () {
                    () if timer > self.threshold && bytes > self.threshold => Some(self.hyper),
                    () if self.byte_period == 0 || bytes > self.threshold => None,
                    () => (timer.max(bytes) >= self.threshold).then_some(self.additive),
                }
            }
        }
    }

    /// Executes one timer event, and those up to `last` with the same effect: target and rate grow by the same amount, and
    /// their distance is constant. After some 40 equal events this is the case from any start, because each halves the
    /// deviation.
    fn raise(&mut self, last: Nanos) {
        let before = (self.target, self.target.wrapping_sub(self.rate));
        self.on_timer();
        let Some(more) = self.steady_increase().filter(|more| *more > 0) else { return };
        let after = (self.target.wrapping_sub(more), self.target.wrapping_sub(self.rate));
        if before != after || self.timer > last {
            return;
        }
        // Near the highest rate events are executed individually.
        let grows = if self.rules == DcqcnRules::Zhu { self.rate } else { self.target };
        let room = (self.highest.saturating_sub(grows) / more).saturating_sub(1);
        let count = self.due(last).min(room);
        self.pass(count);
        self.target += count * more;
        self.rate += count * more;
    }

    /// Skips the timer events up to `last` at the highest rate: they only change stage and target.
    fn skip_recovered(&mut self, last: Nanos) {
        let due = self.due(last);
        let (timer, bytes) = (self.timer_stage, self.byte_stage);
        let is_zhu = self.rules == DcqcnRules::Zhu;
        if !is_zhu {
            self.pass(due);
        } else if let Some(more) = self.steady_increase() {
            self.pass(due);
            self.target = if bytes == 1 {
                self.sawtooth(more, due)
            } else {
                self.target.saturating_add(more.saturating_mul(due))
            };
        } else if self.phase == Phase::Hyper && timer > 0 && timer.saturating_add(2) >= self.threshold {
            // Each stage of the timer up to that of the bytes adds one step more than the one before.
            let count = due.min(u64::from(bytes - timer));
            self.pass(count);
            let first = u128::from(timer + 2 - self.threshold);
            let steps = u128::from(count) * (first * 2 + u128::from(count - 1)) / 2;
            let more = u64::try_from(steps * u128::from(self.hyper)).unwrap_or(u64::MAX);
            self.target = self.target.saturating_add(more);
        } else {
            self.on_timer();
        }
    }

    /// The target rate of the zhu rules after this many timer events at the highest rate, if the byte counter has ended
    /// once: it grows by `more` until it is ten times the rate, and is then reduced to an eighth. The sequence soon becomes
    /// periodic.
    fn sawtooth(&self, more: u64, events: u64) -> u64 {
        let (mut target, mut left) = (self.target, events);
        let top = self.rate.saturating_mul(10);
        let (mut seen, mut teeth, mut next) = ((target, left), 0, 1);
        while left > 0 {
            if target <= top {
                let count = left.min((top - target).checked_div(more).map_or(left, |count| count + 1));
                target = target.saturating_add(more.saturating_mul(count));
                left -= count;
                continue;
            }
            target /= 8;
            left -= 1;
            teeth += 1;
            if target == seen.0 && seen.1 > left {
                left %= seen.1 - left;
            }
            if teeth == next {
                (seen, next) = ((target, left), 2 * next);
            }
            // If it does not, the target rate is approximate.
            if teeth == TEETH_MAX {
                return target;
            }
        }
        target
    }
}

/// The estimate of the congestion. It decays by a constant factor in each period without a CNP, and is computed only when
/// needed, because a period may be 1 µs.
#[derive(Clone, Debug)]
struct Alpha {
    /// The value at `since`.
    value: f64,
    /// The start of a period.
    since: Nanos,
    /// The factor per period.
    kept: f64,
    period: u64,
    /// For the mlx rules: a CNP was received in the period that started at `since`.
    marked: bool,
}

impl Alpha {
    fn new(parameters: &Dcqcn) -> Alpha {
        Alpha {
            value: f64::from(parameters.initial_alpha_value) / 1024.0,
            since: Nanos::NEVER,
            kept: f64::from(parameters.dce_tcp_g) / 1024.0,
            period: u64::from(parameters.dce_tcp_rtt) * 1000,
            marked: false,
        }
    }

    /// The value at `now`.
    fn at(&self, now: Nanos) -> f64 {
        let periods = self.periods(now);
        match (self.marked, periods) {
            (true, 1..) => decayed(self.raised(), self.kept, periods - 1),
            _ => decayed(self.value, self.kept, periods),
        }
    }

    /// The number of completed periods.
    fn periods(&self, now: Nanos) -> u64 {
        now.0.saturating_sub(self.since.0) / self.period
    }

    fn raised(&self) -> f64 {
        self.kept * self.value + (1.0 - self.kept)
    }

    /// A CNP at `now` raises it, and starts a period; periods up to `last` have ended.
    fn raise(&mut self, last: Nanos, now: Nanos) {
        self.value = self.at(last);
        self.value = self.raised();
        self.since = now;
    }

    /// A CNP was received in the current period; those up to `last` have ended.
    fn mark(&mut self, last: Nanos) {
        let periods = self.periods(last);
        if periods > 0 {
            (self.value, self.marked) = (self.at(last), false);
            self.since = Nanos(self.since.0 + periods * self.period);
        }
        self.marked = true;
    }

    fn next_change(&self, now: Nanos) -> Nanos {
        if self.since == Nanos::NEVER {
            return Nanos::NEVER;
        }
        Nanos(self.since.0.saturating_add((self.periods(now) + 1).saturating_mul(self.period)))
    }
}

/// `value` after this many periods, with the factor `kept` in each.
fn decayed(value: f64, kept: f64, periods: u64) -> f64 {
    let (mut value, mut power, mut rest) = (value, kept, periods);
    while rest > 0 {
        if rest & 1 == 1 {
            value *= power;
        }
        power *= power;
        rest >>= 1;
    }
    value
}
