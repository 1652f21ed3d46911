//! What holds for any CNPs and parameters.

use ferroce::{Dcqcn, DcqcnRules, Nanos, ReactionPoint};
use ferroce_driver_test_support::random::Random;

const GIGABIT: u64 = 1_000_000_000;
const SECOND: u64 = 1_000_000_000;

/// Any parameters, and the line rate of their port.
fn any_parameters(random: &mut Random) -> (Dcqcn, u64) {
    let line_rate = [1, 10, 25, 40, 100, 200, 400][random.below(7) as usize] * GIGABIT + random.below(2);
    // From the least to the most, and small numbers as often as large ones.
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

/// For trains of CNPs with bytes between them: the bounds hold all the time, it does not matter how often the time was
/// told, and after enough silence the rate is the highest.
#[test]
fn rates_and_alpha_stay_in_their_bounds_and_recover() {
    let mut random = Random::from_env("FERROCE_DCQCN_SEED");
    for round in 0..400 {
        let (parameters, line_rate) = any_parameters(&mut random);
        let lowest = u64::from(parameters.rpg_min_rate) * 1_000_000;
        let says = || format!("round {round}, line rate {line_rate}: {parameters}");
        let mut point = ReactionPoint::new(parameters, line_rate).unwrap();
        // It is told of the time at its events alone.
        let mut lazy = point.clone();
        let mut now = random.below(SECOND);
        let spacing = 1 << random.below(20);
        for _ in 0..500 {
            // What is due at the very time of a CNP depends on the calls before it.
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
        lazy.advance(Nanos(now));
        assert_eq!(state(&point, Nanos(now)), state(&lazy, Nanos(now)), "{}", says());

        // In the worst case each end of the timer adds the lesser increase, after the fast ones.
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

/// A silence of a day is over at once, and the last nanosecond there is can be told.
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
            // A time that was told stays told.
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
