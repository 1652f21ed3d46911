//! The numbers of docs/protocol.md §7, and parameters as text.

use ferroce::{CongestionControl, Dcqcn, DcqcnRules, Nanos, ReactionPoint};

const GIGABIT: u64 = 1_000_000_000;
const MICROSECOND: u64 = 1000;

/// The time of the first CNP.
const START: Nanos = Nanos(1_000_000);

fn after(micros: u64) -> Nanos {
    Nanos(START.0 + micros * MICROSECOND)
}

/// §7, Validate: a line of 10 Gb/s, alpha 1, one CNP, then the timer.
#[test]
fn the_paper_cuts_with_alpha_1_and_recovers_by_halves() {
    let mut point = ReactionPoint::new(Dcqcn::PAPER, 10 * GIGABIT).unwrap();
    assert_eq!((point.rate(), point.target(), point.alpha(START)), (10 * GIGABIT, 10 * GIGABIT, 1.0));
    point.on_cnp(START);
    assert_eq!((point.rate(), point.target()), (5 * GIGABIT, 10 * GIGABIT));
    let rates = [7_500_000_000, 8_750_000_000, 9_375_000_000, 9_687_500_000];
    for (stage, rate) in (1..).zip(rates) {
        let end = after(u64::from(stage) * 55);
        point.advance(Nanos(end.0 - 1));
        assert_eq!(point.timer_stage(), stage - 1);
        point.advance(end);
        assert_eq!((point.rate(), point.timer_stage()), (rate, stage));
    }
    // The fifth event adds, but not above the line.
    point.advance(after(5 * 55));
    assert_eq!((point.rate(), point.target()), (9_843_750_000, 10 * GIGABIT));
}

/// §7: alpha after n idle periods is (255/256)ⁿ, half of it after 177, which is 9.7 ms.
#[test]
fn alpha_decays_by_a_256th_in_each_period() {
    let mut point = ReactionPoint::new(Dcqcn::PAPER, 10 * GIGABIT).unwrap();
    point.on_cnp(START);
    assert_eq!(point.alpha(START), 1.0);
    for periods in [1, 2, 177, 1000] {
        let expected = (255.0_f64 / 256.0).powi(periods);
        let alpha = point.alpha(after(55 * periods as u64));
        assert!((alpha / expected - 1.0).abs() < 1e-12, "{alpha} after {periods} periods");
    }
    assert!(point.alpha(after(55 * 176)) > 0.5 && point.alpha(after(55 * 177)) < 0.5021);
    assert_eq!(point.alpha(after(55 * 100_000_000)), 0.0);
}

/// Additive increase after five events of the timer, hyper increase after five of both.
#[test]
fn the_target_grows_by_the_stages() {
    let parameters = Dcqcn::PAPER.rpg_byte_reset(1000).initial_alpha_value(1024);
    let mut point = ReactionPoint::new(parameters, 100 * GIGABIT).unwrap();
    for _ in 0..4 {
        point.on_cnp(START);
    }
    let target = point.target();
    assert_eq!((point.rate(), target), (100 * GIGABIT / 16, 100 * GIGABIT / 8));
    point.advance(after(4 * 55));
    assert_eq!(point.target(), target);
    point.advance(after(5 * 55));
    assert_eq!(point.target(), target + 40_000_000);
    let now = after(5 * 55);
    for bytes in 1..5 {
        point.on_sent(1001, now);
        assert_eq!(
            (point.byte_stage(), point.target()),
            (bytes, target + (1 + u64::from(bytes)) * 40_000_000)
        );
    }
    // Both are 5: hyper increase by its first step, then min(stages) - F + 1 steps.
    point.on_sent(1001, now);
    assert_eq!(point.target(), target + 200_000_000 + 200_000_000);
    point.advance(after(6 * 55));
    assert_eq!(point.target(), target + 200_000_000 + 2 * 200_000_000);
    point.on_sent(1001, after(6 * 55));
    assert_eq!(point.target(), target + 200_000_000 + 4 * 200_000_000);
}

/// A byte counter ends when more than its number of bytes was sent.
#[test]
fn the_byte_counter_counts_what_was_sent_since_the_cut() {
    let mut point = ReactionPoint::new(Dcqcn::PAPER.rpg_byte_reset(3000), 10 * GIGABIT).unwrap();
    point.on_sent(1_000_000, START);
    assert_eq!(point.byte_stage(), 0);
    point.on_cnp(START);
    for (bytes, stage) in [(1500, 0), (1500, 0), (1, 1), (3000, 1), (1, 2)] {
        point.on_sent(bytes, START);
        assert_eq!(point.byte_stage(), stage);
    }
    point.on_sent(2000, START);
    point.on_cnp(START);
    point.on_sent(3000, START);
    assert_eq!(point.byte_stage(), 0);
}

/// Any number of CNPs in an interval of the mlx rules causes one cut.
#[test]
fn a_hundred_cnps_in_one_interval_make_one_cut() {
    let mut point = ReactionPoint::new(Dcqcn::MLX5, 100 * GIGABIT).unwrap();
    for cnp in 0..100 {
        point.on_cnp(Nanos(START.0 + cnp * 39));
    }
    assert_eq!(point.rate(), 100 * GIGABIT);
    point.advance(Nanos(START.0 + 4000));
    assert_eq!(point.rate(), 100 * GIGABIT);
    point.advance(Nanos(START.0 + 4001));
    let cut = point.rate();
    assert!(cut > 50 * GIGABIT && cut < 51 * GIGABIT, "{cut}");
    point.advance(Nanos(START.0 + 299_000));
    assert_eq!(point.rate(), cut);
}

#[test]
fn the_first_cnp_can_set_a_rate_and_a_cut_leaves_a_part() {
    let parameters = Dcqcn::PAPER.rate_to_set_on_first_cnp(4000).rpg_min_dec_fac(75);
    let mut point = ReactionPoint::new(parameters, 10 * GIGABIT).unwrap();
    point.on_cnp(START);
    assert_eq!(point.rate(), 3 * GIGABIT);
    // A quarter of alpha, and the lowest rate.
    let mut point = ReactionPoint::new(Dcqcn::PAPER.rpg_gd(12).rpg_min_rate(6000), 10 * GIGABIT).unwrap();
    point.on_cnp(START);
    assert_eq!(point.rate(), 7_500_000_000);
    point.on_cnp(START);
    assert_eq!(point.rate(), 6 * GIGABIT);
}

#[test]
fn the_highest_rate_is_the_lines_or_that_of_the_parameters() {
    let rate = |max| ReactionPoint::new(Dcqcn::PAPER.rpg_max_rate(max), 10 * GIGABIT).unwrap().rate();
    assert_eq!([rate(0), rate(2500), rate(10_001)], [10 * GIGABIT, 2_500_000_000, 10 * GIGABIT]);
}

#[test]
fn controls_parse_back() {
    let presets = ["paper", "zhu25", "zhu25p", "mlx25", "hpcc100", "mlx5"];
    for name in presets {
        let preset = Dcqcn::preset(name).unwrap();
        assert_eq!(name.parse::<CongestionControl>().unwrap(), CongestionControl::Dcqcn(preset));
        assert_eq!(
            preset.to_string().parse::<CongestionControl>().unwrap(),
            CongestionControl::Dcqcn(preset)
        );
    }
    assert_eq!(
        Dcqcn::MLX5.to_string(),
        "rules=mlx,dce_tcp_g=1019,dce_tcp_rtt=1,rpg_time_reset=300,rpg_byte_reset=32767,rpg_threshold=1,\
         rpg_ai_rate=5,rpg_hai_rate=50,rpg_min_rate=1,rpg_max_rate=0,initial_alpha_value=1023,\
         rate_reduce_monitor_period=4,rpg_gd=11,rpg_min_dec_fac=50,rate_to_set_on_first_cnp=0,clamp_tgt_rate=0,\
         clamp_tgt_rate_after_time_inc=1"
    );
    assert_eq!("off".parse::<CongestionControl>().unwrap(), CongestionControl::Off);
    assert_eq!(CongestionControl::default().to_string(), "off");
    let changed = "zhu25,rules=paper,rpg_threshold=1".parse::<CongestionControl>().unwrap();
    let expected = Dcqcn::ZHU25.rules(DcqcnRules::Paper).rpg_threshold(1);
    assert_eq!(changed, CongestionControl::Dcqcn(expected));
}

#[test]
fn errors_name_the_invalid_parameter() {
    let refusals = [
        (
            "dcqcn",
            "congestion control = dcqcn: off, or a preset of DCQCN: paper, zhu25, zhu25p, mlx25, hpcc100, mlx5",
        ),
        ("", "congestion control = : off, or a preset of DCQCN: paper, zhu25, zhu25p, mlx25, hpcc100, mlx5"),
        ("mlx5,rpg_threshold=0", "rpg_threshold = 0: 1 to 31 events"),
        ("mlx5,rpg_threshold=32", "rpg_threshold = 32: 1 to 31 events"),
        ("mlx5,rpg_ai_rate", "rpg_ai_rate = : 1 to 4000000 Mb/s"),
        ("mlx5,rpg_ai_rate=+5", "rpg_ai_rate = +5: 1 to 4000000 Mb/s"),
        ("mlx5,clamp_tgt_rate=2", "clamp_tgt_rate = 2: 0 to 1 (off or on)"),
        ("rules=cubic", "rules = cubic: paper, zhu or mlx"),
        ("off,rpg_gd=1", "congestion control = off,rpg_gd=1: off has no parameters; a preset has"),
        ("off,", "congestion control = off,: off has no parameters; a preset has"),
        ("mlx5,rpg_gd=1,rpg_gd=2", "congestion control = mlx5,rpg_gd=1,rpg_gd=2: rpg_gd once"),
    ];
    for (text, expected) in refusals {
        assert_eq!(text.parse::<CongestionControl>().unwrap_err().to_string(), expected);
    }
    let unknown = "mlx5,alpha=3".parse::<CongestionControl>().unwrap_err().to_string();
    assert!(unknown.starts_with(
        "congestion control = alpha=3: NAME=VALUE with a parameter of DCQCN: rules, dce_tcp_g, "
    ));
    let refused = |dcqcn: Dcqcn| ReactionPoint::new(dcqcn, 10 * GIGABIT).unwrap_err().to_string();
    assert_eq!(refused(Dcqcn::MLX5.dce_tcp_rtt(0)), "dce_tcp_rtt = 0: 1 to 100000000 us");
    assert_eq!(
        refused(Dcqcn::MLX5.rate_reduce_monitor_period(0)),
        "rate_reduce_monitor_period = 0: 1 to 100000000 us with the rules mlx"
    );
    assert_eq!(
        refused(Dcqcn::MLX5.rpg_min_rate(10_001)),
        "rpg_min_rate = 10001: at most the highest rate, 10000 Mb/s"
    );
}
