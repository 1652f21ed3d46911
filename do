#!/usr/bin/env bash
# The one entry: every job of the project, installing what it needs from Debian's packages first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./do JOB [ARGUMENT...]

  demo [ARG...]      all-reduce ResNet-50's tensors over 4 ranks: namespaces and AF_XDP as root,
                     one process otherwise (see ./do ferroce demo --help)
  test [ARG...]      every test there is: unit, conformance, AF_XDP between namespaces, the kernel's
                     rdma_rxe in a virtual machine; arguments go to cargo test
  bench [ARG...]     the benchmarks (cargo bench -p ferroce-benches ARG...)
  soak [BYTES]       BYTES (10^8) through SEND, WRITE and READ, and 10^5 atomics, over a bad link
  lint               rustfmt, clippy and rustdoc, warnings denied
  asan               the tests under the address sanitizer
  fuzz [SECONDS]     each fuzz target for SECONDS (300)
  ferroce ARG...     the command itself
TEXT
}

say() { echo "do: $*" >&2; }
die() { say "$*"; exit 1; }

# What the AF_XDP driver builds with, and what the commands call.
build_packages="gcc make pkg-config m4 clang libclang1-14 libelf-dev zlib1g-dev"
run_packages="iproute2"
# tshark judges frames beside us; the others make the guest of tools/interop/rxe.
test_packages="tshark util-linux procps perl cpio xz-utils binutils"

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

# Sets `features`: without the packages of the AF_XDP driver the rest is built all the same.
choose_features() {
    features=()
    command -v cargo >/dev/null || die "no cargo; install Rust (rustup, or your distribution's rust of 1.95 or later)"
    # shellcheck disable=SC2086
    if ! need $build_packages; then
        say "building without the AF_XDP driver"
        features=(--no-default-features)
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
    RUSTFLAGS="-Zsanitizer=address" unstable cargo test --target "$host" --target-dir target/asan \
        -p ferroce-wire -p ferroce-driver -p ferroce -p ferroce-collectives -p ferroce-tools "${features[@]}" "$@"
}

fuzz() {
    local seconds=${1:-300} target
    need g++ || true
    command -v cargo-fuzz >/dev/null || { say "installing cargo-fuzz"; cargo install --quiet --locked cargo-fuzz; }
    cargo run --quiet --manifest-path wire/fuzz/Cargo.toml --example seeds
    for target in $(cd wire && unstable cargo fuzz list); do
        say "fuzzing $target for $seconds s"
        (cd wire && unstable cargo fuzz run --sanitizer address "$target" -- -max_total_time="$seconds" -print_final_stats=1)
    done
}

job=${1:-}
shift || true
case $job in
demo) ferroce demo "$@" ;;
ferroce) ferroce "$@" ;;
test) tests "$@" ;;
bench) choose_features; cargo bench -p ferroce-benches "$@" ;;
soak) FERROCE_SOAK_BYTES=${1:-100000000} cargo test --release -p ferroce --no-default-features --test impairment -- --nocapture ;;
lint) lint ;;
asan) asan --lib --bins --tests "$@" ;;
fuzz) fuzz "$@" ;;
'' | -h | --help | help) usage ;;
*) usage >&2; die "no job '$job'" ;;
esac
