//! Invariants for any CNPs and parameters.

use ferroce::{Dcqcn, DcqcnRules, Nanos, ReactionPoint};
use ferroce_driver_test_support::random::Random;

const GIGABIT: u64 = 1_000_000_000;
const SECOND: u64 = 1_000_000_000;

/// Any parameters, and the line rate of their port.
fn any_parameters(random: &mut Random) -> (Dcqcn, u64) {
    let line_rate = [1, 10, 25, 40, 100, 200, 400][random.below(7) as usize] * GIGABIT + random.below(2);
    // From the least to the greatest, with small numbers as often as large ones.
    fn pick(random: &mut Random, least: u64, most: u64) -> u32 {
        let scale = 1 << random.below(u64::from(most.ilog2()) + 1);
        (least + random.below(scale.min(most - least + 1))) as u32
    }
    let presets = [Dcqcn::PAPER, Dcqcn::ZHU25, Dcqcn::ZHU25P, Dcqcn::MLX25, Dcqcn::HPCC100, Dcqcn::MLX5];
    let preset = presets[random.below(6) as usize];
    if random.one_in(4) {
        return (preset, line_rate);
    }
    let parameters = preset
        .dce_tcp_g(pick(random, 0, 1023) as u16)
        .dce_tcp_rtt(pick(random, 1, 1000))
        .rpg_time_reset(pick(random, 1, 2000))
        .rpg_byte_reset(pick(random, 0, 1 << 24).into())
        .rpg_threshold(pick(random, 1, 31) as u8)
        .rpg_ai_rate(pick(random, 1, 4_000_000))
        .rpg_hai_rate(pick(random, 1, 4_000_000))
        .rpg_min_rate(pick(random, 1, 1000))
        .initial_alpha_value(pick(random, 0, 1024) as u16)
        .rate_reduce_monitor_period(pick(random, 1, 1000))
        .rpg_gd(pick(random, 0, 15) as u8)
        .rpg_min_dec_fac(pick(random, 0, 100) as u8)
        .rate_to_set_on_first_cnp(pick(random, 0, 400_000))
        .clamp_tgt_rate(random.one_in(2))
        .clamp_tgt_rate_after_time_inc(random.one_in(2));
    (parameters, line_rate)
}

/// Rates, alpha and stages.
fn state(point: &ReactionPoint, now: Nanos) -> (u64, u64, f64, u32, u32) {
    (point.rate(), point.target(), point.alpha(now), point.timer_stage(), point.byte_stage())
}

/// For trains of CNPs with bytes between them: the bounds hold all the time, the number of calls with the time does not
/// matter, and after enough silence the rate is the highest.
#[test]
fn rates_and_alpha_stay_in_their_bounds_and_recover() {
    let mut random = Random::from_env("FERROCE_DCQCN_SEED");
    for round in 0..400 {
        let (parameters, line_rate) = any_parameters(&mut random);
        let lowest = u64::from(parameters.rpg_min_rate) * 1_000_000;
        let says = || format!("round {round}, line rate {line_rate}: {parameters}");
        let mut point = ReactionPoint::new(parameters, line_rate).unwrap();
        // It is called only at the times of its events.
        let mut lazy = point.clone();
        let mut now = random.below(SECOND);
        let spacing = 1 << random.below(20);
        for _ in 0..500 {
            // Events due exactly at the time of a CNP depend on the calls before it.
            now += 1 + random.below(spacing);
            match random.below(4) {
                0 => {
                    point.on_cnp(Nanos(now));
                    lazy.on_cnp(Nanos(now));
                }
                1 | 2 => {
                    let bytes = 1 + random.below(1 << 16) as u32;
                    point.on_sent(bytes, Nanos(now));
                    lazy.on_sent(bytes, Nanos(now));
                }
                _ => point.advance(Nanos(now)),
            }
            let (rate, target, alpha, ..) = state(&point, Nanos(now));
            assert!((lowest..=line_rate).contains(&rate), "rate {rate}, {}", says());
            assert!((0.0..=1.0).contains(&alpha), "alpha {alpha}, {}", says());
            assert!(
                parameters.rules == DcqcnRules::Zhu || target <= line_rate,
                "target {target}, {}",
                says()
            );
            assert!(target >= lowest, "target {target}, {}", says());
        }
        // Events due exactly at the time of the last CNP have not been executed by either yet.
        point.advance(Nanos(now));
        lazy.advance(Nanos(now));
        assert_eq!(state(&point, Nanos(now)), state(&lazy, Nanos(now)), "{}", says());

        // In the worst case each timer event adds the lesser increase, after the fast ones.
        let least = u64::from(parameters.rpg_ai_rate.min(parameters.rpg_hai_rate));
        let steps = line_rate / (least * 1_000_000) + 100;
        let silence = steps * u64::from(parameters.rpg_time_reset) * 1000 + 1_000_000;
        let mut end = now;
        while end < now + silence && point.rate() < line_rate {
            end += 1 + random.below(silence / 3);
            point.advance(Nanos(end));
        }
        lazy.advance(Nanos(now + silence));
        assert_eq!((point.rate(), lazy.rate()), (line_rate, line_rate), "after {silence} ns, {}", says());
    }
}

/// One call after a silence leaves the same state as a call at each timer event.
#[test]
fn equal_events_are_combined_exactly() {
    let mut random = Random::from_env("FERROCE_DCQCN_SEED");
    let mut raised = 0;
    for round in 0..600 {
        let (parameters, line_rate) = any_parameters(&mut random);
        let rules = [DcqcnRules::Paper, DcqcnRules::Zhu, DcqcnRules::Mlx][random.below(3) as usize];
        let period = 1 + random.below(100) as u32;
        let parameters =
            parameters.rules(rules).rpg_time_reset(period).rpg_threshold(1 + random.below(5) as u8);
        let parameters = parameters.rpg_byte_reset([0, 1000, 100_000][random.below(3) as usize]);
        let parameters = parameters.rate_reduce_monitor_period(1 + random.below(50) as u32);
        let says = || format!("round {round}, line rate {line_rate}: {parameters}");
        let mut point = ReactionPoint::new(parameters, line_rate).unwrap();
        let mut now = 1_000_000;
        for _ in 0..1 + random.below(60) {
            now += random.below(u64::from(period) * 4000);
            point.on_cnp(Nanos(now));
        }
        for _ in 0..random.below(12) {
            now += random.below(u64::from(period) * 300);
            point.on_sent(2000, Nanos(now));
        }
        let start = point.clone();
        // In hyper increase of the zhu rules the timer's period is halved.
        for events in [3000, 20_000] {
            let end = now + events * u64::from(period) * 500;
            while now < end {
                now = (now + u64::from(period) * 500).min(end);
                point.advance(Nanos(now));
            }
            let mut once = start.clone();
            once.advance(Nanos(end));
            assert_eq!(state(&once, Nanos(end)), state(&point, Nanos(end)), "{events} events, {}", says());
        }
        raised += u32::from(point.rate() > start.rate() && point.rate() < line_rate);
    }
    assert!(raised > 20, "{raised} rates were between");
}

/// Twenty thousand calls after a silent day, for any parameters: event by event they would take hours.
#[test]
fn silences_of_any_length_are_fast() {
    const DAY: u64 = 86_400 * SECOND;
    let slow =
        |parameters: Dcqcn| parameters.rpg_ai_rate(1).rpg_hai_rate(1).rpg_min_rate(1).rpg_time_reset(1);
    for (parameters, line_rate) in [
        (Dcqcn::ZHU25P, 25),
        (Dcqcn::ZHU25P, 1),
        (Dcqcn::ZHU25P.rpg_ai_rate(400), 10),
        (Dcqcn::ZHU25P.rpg_ai_rate(1000).rpg_max_rate(1000), 100),
        (Dcqcn::ZHU25P.rpg_ai_rate(4_000_000).rpg_max_rate(1000), 100),
        (slow(Dcqcn::PAPER), 4000),
        (slow(Dcqcn::ZHU25P), 4000),
        (slow(Dcqcn::MLX5), 4000),
        (Dcqcn::MLX5, 400),
    ] {
        for bytes in [0, 1, 2, 7, 40] {
            let mut cut = ReactionPoint::new(parameters.rpg_byte_reset(1000), line_rate * GIGABIT).unwrap();
            let mut now = 1_000_000;
            for _ in 0..200 {
                cut.on_cnp(Nanos(now));
                now += 2000;
            }
            for _ in 0..bytes {
                cut.on_sent(2000, Nanos(now));
            }
            for look in 0..450 {
                let mut point = cut.clone();
                point.advance(Nanos(now + DAY + look));
                assert_eq!(point.rate(), point.rate().max(cut.rate()), "{parameters}");
            }
        }
    }
}

/// A silence of a day is processed immediately, and the greatest time is accepted.
#[test]
fn a_long_silence_costs_little_and_nothing_overflows() {
    const DAY: u64 = 86_400 * SECOND;
    let presets = [Dcqcn::PAPER, Dcqcn::ZHU25, Dcqcn::ZHU25P, Dcqcn::MLX25, Dcqcn::HPCC100, Dcqcn::MLX5];
    for parameters in presets {
        for bytes in [0, 1, 5, 40] {
            let parameters = parameters.rpg_byte_reset(1000);
            let mut point = ReactionPoint::new(parameters, 400 * GIGABIT).unwrap();
            let start = u64::MAX - 2 * DAY;
            point.on_cnp(Nanos(start));
            point.advance(Nanos(start + 2_000_000));
            for _ in 0..bytes {
                point.on_sent(2000, Nanos(start + 2_000_000));
            }
            for now in [start + DAY, u64::MAX - 1, u64::MAX] {
                point.advance(Nanos(now));
                assert_eq!(point.rate(), 400 * GIGABIT, "{parameters} at {now}");
            }
            point.on_cnp(Nanos(u64::MAX));
            point.on_sent(u32::MAX, Nanos(u64::MAX));
            // Time does not go back.
            point.on_sent(u32::MAX, Nanos(5));
            assert!(point.rate() <= 400 * GIGABIT && point.rate() >= 1_000_000, "{parameters}");
        }
    }
}

#[test]
fn a_reaction_point_without_cnps_sends_at_the_highest_rate() {
    let mut point = ReactionPoint::new(Dcqcn::ZHU25, 25 * GIGABIT).unwrap();
    for packet in 0..1000_u64 {
        point.on_sent(u32::MAX, Nanos(packet * 1_000_000));
    }
    let expected = (25 * GIGABIT, 25 * GIGABIT, 0.5, 0, 0);
    assert_eq!(state(&point, Nanos(SECOND)), expected);
    assert_eq!(point.next_change(Nanos(SECOND)), Nanos::NEVER);
}

/// Every parameter, with any valid value.
#[test]
fn bounds_hold_for_any_parameters() {
    let all = [DcqcnRules::Paper, DcqcnRules::Zhu, DcqcnRules::Mlx];
    let mut random = Random::from_env("FERROCE_DCQCN_SEED");
    let ends = |random: &mut Random, least: u64, most: u64| match random.below(4) {
        0 => least,
        1 => most,
        2 => least + random.below(most - least + 1),
        _ => least + random.below((most - least + 1).min(20)),
    };
    for round in 0..3000 {
        let line = ends(&mut random, 1_000_000, 4_000_000_000_000);
        let rules = all[random.below(all.len() as u64) as usize];
        let d = Dcqcn::PAPER
            .rules(rules)
            .dce_tcp_g(ends(&mut random, 0, 1023) as u16)
            .dce_tcp_rtt(ends(&mut random, 1, 100_000_000) as u32)
            .rpg_time_reset(ends(&mut random, 1, 100_000_000) as u32)
            .rpg_byte_reset(ends(&mut random, 0, 1 << 40))
            .rpg_threshold(ends(&mut random, 1, 31) as u8)
            .rpg_ai_rate(ends(&mut random, 1, 4_000_000) as u32)
            .rpg_hai_rate(ends(&mut random, 1, 4_000_000) as u32)
            .rpg_min_rate(1 + random.below(line / 1_000_000) as u32)
            .initial_alpha_value(ends(&mut random, 0, 1024) as u16)
            .rate_reduce_monitor_period(ends(&mut random, 1, 100_000_000) as u32)
            .rpg_gd(ends(&mut random, 0, 15) as u8)
            .rpg_min_dec_fac(ends(&mut random, 0, 100) as u8)
            .rate_to_set_on_first_cnp(ends(&mut random, 0, 4_000_000) as u32)
            .clamp_tgt_rate(random.one_in(2))
            .clamp_tgt_rate_after_time_inc(random.one_in(2));
        let says = || format!("round {round}, line {line}: {d}");
        let mut point = ReactionPoint::new(d, line).unwrap();
        let lowest = u64::from(d.rpg_min_rate) * 1_000_000;
        let mut now = if random.one_in(3) { u64::MAX - random.below(1 << 40) } else { random.below(1 << 40) };
        for _ in 0..200 {
            let step = 1_u64 << random.below(44);
            now = now.saturating_add(random.below(step));
            match random.below(4) {
                0 => point.on_cnp(Nanos(now)),
                1 => point.on_sent(random.below(1 << 32) as u32, Nanos(now)),
                2 => {
                    for _ in 0..3 {
                        point.on_cnp(Nanos(now));
                    }
                }
                _ => point.advance(Nanos(now)),
            }
            let alpha = point.alpha(Nanos(now));
            assert!((0.0..=1.0).contains(&alpha), "alpha {alpha}, {}", says());
            assert!((lowest..=line).contains(&point.rate()), "rate {}, {}", point.rate(), says());
            assert!(point.target() >= lowest.min(line), "target {}, {}", point.target(), says());
            assert!(
                rules == DcqcnRules::Zhu || point.target() <= line,
                "target {}, {}",
                point.target(),
                says()
            );
            let next = point.next_change(Nanos(now));
            assert!(next.0 >= now, "next change {} at {now}, {}", next.0, says());
        }
    }
}
