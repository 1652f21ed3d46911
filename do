#!/usr/bin/env bash
# The one entry: every job of the project, installing what it needs from Debian's packages first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./do JOB [ARGUMENT...]

  demo [ARG...]      all-reduce ResNet-50's tensors over 4 ranks: namespaces and AF_XDP as root,
                     UDP sockets otherwise (see ./do ferroce demo --help)
  test [ARG...]      every test there is: unit, conformance, AF_XDP between namespaces, the kernel's
                     rdma_rxe in a virtual machine; arguments go to cargo test
  bench [ARG...]     the benchmarks (cargo bench -p ferroce-benches ARG...), or one of them:
                     --bench wire [-- --driver af_xdp,memif,udp --only LINE,... --quick --rounds N
                     --json FILE --svg FILE], the whole system beside its ceiling and its rivals;
                     --bench instructions [-- --update], the guard of CI;
                     --bench engine | loss | queue_pairs | flood | idle [-- --json FILE]; icrc | frame
  soak [BYTES]       BYTES (10^8) through SEND, WRITE and READ, and 10^5 atomics, over a bad link
  model [BYTES]      random schedules against the reference model until BYTES (10^9) of payload are through
  lint               rustfmt, clippy and rustdoc, warnings denied
  asan               the tests under the address sanitizer
  mutations [NAME...]
                     breaks the engine in a copy, one rule at a time; each must change a replay's report
  fuzz [SECONDS] [TARGET...]
                     each fuzz target, or those named, for SECONDS (300)
  fuzz-coverage      which lines of the sources the corpus reaches (after ./do fuzz)
  ferroce ARG...     the command itself
TEXT
}

say() { echo "do: $*" >&2; }
die() { say "$*"; exit 1; }

# What the AF_XDP driver builds with, and what the commands call.
build_packages="gcc make pkg-config m4 clang libclang1-14 libelf-dev zlib1g-dev"
# What the DPDK driver builds with beside these, and the drivers of its devices.
dpdk_packages="libdpdk-dev dpdk"
run_packages="iproute2"
# tshark judges frames beside us, ethtool turns offloads on and off, nftables spoils packets on their
# way; the others make the guest of tools/interop/rxe.
test_packages="tshark ethtool nftables util-linux procps perl cpio xz-utils binutils"
# valgrind counts instructions.
bench_packages="valgrind"

missing() { # PACKAGE...
    local p
    for p in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || printf '%s ' "$p"
    done
}

# Installs what is missing. As an ordinary user it says what that costs instead.
need() { # PACKAGE...
    local lacking; lacking=$(missing "$@")
    [ -n "$lacking" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        say "not root, so these packages stay missing: $lacking"
        return 1
    fi
    command -v apt-get >/dev/null || die "needs the packages $lacking and knows only apt-get to install them"
    say "installing $lacking"
    [ -n "$(find /var/lib/apt/lists -name '*_Packages*' -mmin -1440 -print -quit 2>/dev/null)" ] || apt-get -qq update
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $lacking >/dev/null
}

# Sets `features`: without the packages of a driver the rest is built all the same.
choose_features() {
    features=()
    command -v cargo >/dev/null || die "no cargo; install Rust (rustup, or your distribution's rust of 1.95 or later)"
    # shellcheck disable=SC2086
    if ! need $build_packages; then
        # Its bindings are translated with clang too.
        say "building without the drivers AF_XDP and DPDK"
        features=(--no-default-features)
        return
    fi
    # shellcheck disable=SC2086
    if need $dpdk_packages; then
        features=(--features dpdk)
    else
        say "building without the DPDK driver"
    fi
}

ferroce() {
    choose_features
    need $run_packages || true
    cargo build --release --quiet -p ferroce-tools "${features[@]}"
    exec "${CARGO_TARGET_DIR:-target}/release/ferroce" "$@"
}

tests() {
    choose_features
    # shellcheck disable=SC2086
    need $run_packages $test_packages || true
    if [ "$(id -u)" = 0 ] && [ "$(uname -m)" = x86_64 ]; then
        export FERROCE_RXE_CACHE=${FERROCE_RXE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ferroce/rxe}
        RXE_CACHE=$FERROCE_RXE_CACHE tools/interop/rxe build || die "the rdma_rxe guest can't be built"
    else
        say "not root on x86-64: no rdma_rxe guest, no network namespaces; the tests that need them say so"
    fi
    local log status=0; log=$(mktemp)
    # --show-output: a test that can't run here says why in its output.
    cargo test --workspace --no-fail-fast "${features[@]}" "$@" -- --show-output 2>&1 | tee "$log" || status=$?
    # One line for all the test programs together.
    awk '/^test result:/ {passed += $4; failed += $6; skipped += $8}
         /^skipped: / {skipped += 1; passed -= 1}
         END {printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped}' "$log"
    rm -f "$log"
    return "$status"
}

bench() {
    choose_features
    need $run_packages $bench_packages || true
    cargo bench -p ferroce-benches "${features[@]}" "$@"
}

lint() {
    choose_features
    cargo fmt --all --check
    cargo clippy --workspace --all-targets "${features[@]}" -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps "${features[@]}"
}

# The sanitizers and the fuzzer are unstable features; this makes the stable toolchain take them.
unstable() { RUSTC_BOOTSTRAP=1 "$@"; }

asan() {
    choose_features
    # The suppressions are by function, so somebody must know the functions.
    need llvm-14 || true
    local host; host=$(rustc -vV | awk '/^host/ {print $2}')
    export ASAN_OPTIONS=suppressions=$PWD/driver/asan.supp ASAN_SYMBOLIZER_PATH=/usr/bin/llvm-symbolizer-14
    export LSAN_OPTIONS=suppressions=$PWD/driver/lsan.supp:print_suppressions=0
    RUSTFLAGS="-Zsanitizer=address" unstable cargo test --target "$host" --target-dir target/asan \
        -p ferroce-wire -p ferroce-driver -p ferroce -p ferroce-collectives -p ferroce-tools "${features[@]}" "$@"
}

# Installs cargo-fuzz and sets `targets` to those named, or all.
fuzz_targets() { # [TARGET...]
    need g++ || true
    command -v cargo-fuzz >/dev/null || { say "installing cargo-fuzz"; cargo install --quiet --locked cargo-fuzz; }
    targets=("$@")
    # shellcheck disable=SC2207
    [ $# -gt 0 ] || targets=($(unstable cargo fuzz list --fuzz-dir tools/fuzz))
    cargo run --quiet --manifest-path tools/fuzz/Cargo.toml --example seeds
}

fuzz() {
    local seconds=${1:-300} target targets log table status=0
    [ $# -eq 0 ] || shift
    fuzz_targets "$@"
    log=$(mktemp) table=$(mktemp)
    # The code under test is safe Rust, and without the address sanitizer runs several times as often.
    local options=(--fuzz-dir tools/fuzz --sanitizer "${SANITIZER:-none}")
    unstable cargo fuzz build "${options[@]}"
    printf 'target\texecutions\tper s\tedges\tof\tcorpus\tresult\n' >"$table"
    for target in "${targets[@]}"; do
        say "fuzzing $target for $seconds s"
        local result="no finding"
        unstable cargo fuzz run "${options[@]}" "$target" -- \
            -max_total_time="$seconds" -max_len=4096 -timeout=10 -print_final_stats=1 >"$log" 2>&1 || {
            result=FINDING status=1
            # The reason, and how to see it again.
            grep -aE 'panicked at|^==[0-9]+==' -A 2 "$log" >&2 || tail -40 "$log" >&2
            sed -n "s|.*Test unit written to |replay: RUSTC_BOOTSTRAP=1 cargo fuzz run ${options[*]} $target |p" "$log" >&2
        }
        awk -v target="$target" -v seconds="$seconds" -v result="$result" '
            /Loaded 1 modules/ { gsub(/[^0-9 ]/, " "); split($0, n, " "); of = n[2] }
            / cov: / { for (i = 1; i < NF; i++) { if ($i == "cov:") cov = $(i + 1); if ($i == "corp:") corpus = $(i + 1) } }
            / INITED / { begun = 1 }
            /^#[0-9]+/ { runs = substr($1, 2) }
            /stat::number_of_executed_units/ { runs = $2 }
            /stat::average_exec_per_sec/ { rate = $2 }
            END { sub(/\/.*/, "", corpus)
                  printf "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", target, runs, rate ? rate : runs / seconds, cov, of, corpus, result }' \
            "$log" | tee -a "$table" >&2
    done
    awk -F '\t' '{ printf "%-18s %12s %8s %7s %7s %7s  %s\n", $1, $2, $3, $4, $5, $6, $7 }' "$table"
    rm -f "$log" "$table"
    return "$status"
}

# The lines that the corpora reach. The compiler's own LLVM tools must read what the compiler writes:
# Debian's are of another version.
fuzz_coverage() {
    local target targets tools host profiles=() objects=()
    fuzz_targets "$@"
    host=$(rustc -vV | awk '/^host/ {print $2}')
    tools=$(rustc --print sysroot)/lib/rustlib/$host/bin
    [ -x "$tools/llvm-cov" ] || rustup component add llvm-tools || die "needs the compiler's llvm-tools"
    for target in "${targets[@]}"; do
        say "coverage of $target"
        unstable cargo fuzz coverage --fuzz-dir tools/fuzz "$target" >/dev/null 2>&1 || die "no coverage of $target"
        profiles+=("tools/fuzz/coverage/$target/coverage.profdata")
        # cargo-fuzz builds these here, whatever CARGO_TARGET_DIR says.
        objects+=(-object "target/$host/coverage/$host/release/$target")
    done
    "$tools/llvm-profdata" merge -o tools/fuzz/coverage/all.profdata "${profiles[@]}"
    "$tools/llvm-cov" report "${objects[@]:1}" -instr-profile=tools/fuzz/coverage/all.profdata \
        -ignore-filename-regex='(registry|rustc|tools/fuzz)/' -show-region-summary=false -show-branch-summary=false
}

job=${1:-}
shift || true
case $job in
demo) ferroce demo "$@" ;;
ferroce) ferroce "$@" ;;
test) tests "$@" ;;
bench) bench "$@" ;;
soak) FERROCE_SOAK_BYTES=${1:-100000000} cargo test --release -p ferroce --no-default-features --test impairment -- --nocapture ;;
model) FERROCE_MODEL_BYTES=${1:-1000000000} cargo test --release -p ferroce --no-default-features --test model -- --nocapture ;;
lint) lint ;;
asan) asan --lib --bins --tests "$@" ;;
fuzz) fuzz "$@" ;;
mutations) tools/mutations "$@" ;;
fuzz-coverage) fuzz_coverage "$@" ;;
'' | -h | --help | help) usage ;;
*) usage >&2; die "no job '$job'" ;;
esac
