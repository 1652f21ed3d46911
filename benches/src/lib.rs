//! Benchmarks of ferroce; `cargo bench -p ferroce-benches` runs them all. Each prints ratios beside
//! absolute times, because on a shared machine only a ratio within one run means much.
