#!/usr/bin/env bash
# The entry point of all jobs of the project; it first installs the Debian packages that a job needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./do JOB [ARGUMENT...]

  demo [ARG...]      all-reduces the tensors of ResNet-50 over 4 ranks: in network namespaces over AF_XDP
                     as root, over UDP sockets otherwise (see ./do ferroce demo --help)
  test [ARG...]      the tests of all crates: unit, conformance, AF_XDP between namespaces, the kernel's
                     rdma_rxe in a virtual machine; arguments are passed to cargo test
  bench [ARG...]     the benchmarks (cargo bench -p ferroce-benches ARG...), or one of them:
                     --bench wire [-- --driver af_xdp,memif,shm,udp --only LINE,... --quick --rounds N
                     --json FILE --svg FILE], the whole system between two processes, compared with the bare
                     driver, a ring in shared memory, the kernel's TCP and UDP, and UCX;
                     --bench collectives [-- --place host,udp,af_xdp --ranks 2,4 --quick --json FILE --svg FILE],
                     all-reduce and all-gather, compared with Open MPI, and with gloo if python3 has torch;
                     --bench instructions [-- --update], instructions per packet; CI fails above the budget;
                     --bench device | engine | fabric | flood | frame | icrc | idle | loss | overlap | pacing |
                     queue_pairs | rails | reduction | rnic | simulators: see benches/README.md
  soak [BYTES]       sends BYTES (default 10^8) by SEND, WRITE and READ, and 10^5 atomics, over a simulated
                     link with loss, duplication, reordering and corruption
  model [BYTES]      random schedules against the reference model until BYTES (default 10^9) are transferred
  lint               rustfmt, clippy and rustdoc, warnings denied
  package            builds each crate as it would be published, with default features, and prints the sizes
  asan               the tests under the address sanitizer
  loom               the runner's sleep and wake-ups in every order that the memory model allows
  mutations [NAME...]
                     breaks one rule of the engine at a time, in a copy of the sources; each such mutation must
                     change a report of ferroce replay
  mutations cases [CASE or NAME...]
                     the same for congestion control and GPU memory; each mutation must make its conformance case
                     fail (case_101 to case_108, case_137 to case_139)
  fuzz [SECONDS] [TARGET...]
                     runs each fuzz target, or those named, for SECONDS (default 300)
  fuzz-replay TARGET FILE...
                     runs a fuzz target once on each FILE, for example on a finding
  fuzz-coverage [TARGET...]
                     the lines of the sources that the corpus reaches (after ./do fuzz)
  ferroce ARG...     builds the command and runs it
  man                writes man pages into target/man and shell completions into target/completions
  dpdk [FOLDER]      builds libferroce_dpdk.so, which the device dpdk:PORT needs, into target/release (or FOLDER)
TEXT
}

say() { echo "do: $*" >&2; }
die() { say "$*"; exit 1; }

# Runs a command with its output on standard error, and reports every 10 s without output that it is still running.
# On a terminal cargo and apt show their progress themselves.
aloud() { # WHAT COMMAND...
    if [ -t 2 ]; then "${@:2}" >&2; else "${@:2}" 2>&1 | narrate "$1" >&2; fi
}

# Forwards lines; after 10 s without one, reports that the command is still running.
narrate() { # WHAT
    local line='' part started=$SECONDS status
    while :; do
        status=0
        IFS= read -r -t 10 part || status=$?
        line+=$part
        if [ "$status" -gt 128 ]; then
            say "$1: at work for $((SECONDS - started)) s"
        else
            [ "$status" = 0 ] || [ -z "$line" ] || printf '%s' "$line"
            [ "$status" = 0 ] || return 0
            printf '%s\n' "$line"
            line=''
        fi
    done
}

# For building the AF_XDP driver.
build_packages="gcc libc6-dev libxdp-dev"
# For building the shim over DPDK, and the drivers of DPDK's devices.
dpdk_packages="gcc pkg-config libdpdk-dev dpdk"
run_packages="iproute2"
# tshark checks frames independently, ethtool turns offloads on and off, nftables modifies packets on their path; PoCL is an
# OpenCL device on the CPU; the others build the guest of tools/interop/rxe.
test_packages="tshark ethtool nftables util-linux procps perl cpio xz-utils binutils pocl-opencl-icd ocl-icd-libopencl1"
# valgrind counts instructions; ucx-utils has ucx_perftest, which `wire` compares with, and Open MPI is what `collectives`
# compares with; taskset is in util-linux.
bench_packages="valgrind ucx-utils openmpi-bin libopenmpi-dev util-linux"

missing() { # PACKAGE...
    local p
    for p in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || printf '%s ' "$p"
    done
}

install_command=(apt-get install --yes --no-install-recommends)

# Installs missing packages. If that fails, less is built and tested; in CI (CI=true) it is an error.
need() { # PACKAGE...
    local lacking; lacking=$(missing "$@")
    [ -n "$lacking" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        say "not root, so these packages stay missing; as root: ${install_command[*]} $lacking"
    elif install_packages "$lacking"; then
        return 0
    fi
    [ "${CI:-}" != true ] || die "CI tests everything, and these packages are missing: $lacking"
    return 1
}

install_packages() { # "PACKAGE..."
    local lacking=$1
    command -v apt-get >/dev/null || die "needs the packages $lacking and knows only apt-get to install them"
    say "installing $lacking"
    [ -n "$(find /var/lib/apt/lists -name '*_Packages*' -mmin -1440 -print -quit 2>/dev/null)" ] ||
        aloud "apt-get update" apt-get update
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive aloud "installing packages" "${install_command[@]}" $lacking
}

# Whether the compiler for libFuzzer is available.
has_cxx() { command -v g++ >/dev/null || need g++; }

# Sets `features`: without the packages for AF_XDP, the rest is built without that driver.
choose_features() {
    features=()
    command -v cargo >/dev/null || die "no cargo; install Rust (rustup, or your distribution's rust of 1.89 or later)"
    # shellcheck disable=SC2086
    if need $build_packages; then
        features=(--features af_xdp)
    else
        say "building without the driver AF_XDP"
        command -v cc >/dev/null || die "no C compiler, which Rust links with; as root: ${install_command[*]} gcc libc6-dev"
    fi
}

# Builds the shim over the system's DPDK; the driver loads it.
dpdk_shim() { # FOLDER
    # shellcheck disable=SC2086
    need $dpdk_packages || return 1
    say "building $1/libferroce_dpdk.so"
    driver/dpdk-sys/build-shim "$1"
}

# The same, for all programs of this checkout.
with_dpdk() {
    local folder=${CARGO_TARGET_DIR:-$PWD/target}/dpdk
    if dpdk_shim "$folder"; then
        export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    else
        say "without DPDK"
    fi
}

ferroce() {
    choose_features
    need $run_packages || true
    aloud "building ferroce" cargo build --release -p ferroce-tools "${features[@]}"
    exec "${CARGO_TARGET_DIR:-target}/release/ferroce" "$@"
}

tests() {
    choose_features
    with_dpdk
    # shellcheck disable=SC2086
    need $run_packages $test_packages || true
    if [ "$(id -u)" = 0 ] && [ "$(uname -m)" = x86_64 ]; then
        export FERROCE_RXE_CACHE=${FERROCE_RXE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ferroce/rxe}
        RXE_CACHE=$FERROCE_RXE_CACHE aloud "making the guest" tools/interop/rxe build || die "the rdma_rxe guest can't be built"
    else
        say "not root on x86-64: no rdma_rxe guest, no network namespaces; the tests that need them say so"
    fi
    # Separately, so that cargo shows its progress.
    aloud "building the tests" cargo test --workspace "${features[@]}" --no-run "$@"
    local log status=0; log=$(mktemp)
    # --show-output: a test that can't run here prints the reason.
    cargo test --workspace --no-fail-fast "${features[@]}" "$@" -- --show-output 2>&1 | narrate "testing" | tee "$log" || status=$?
    # Repeats the last lines of each failed test's output at the end.
    awk '/^failures:$/ {in_failures = !in_failures; next}
         /^test result:/ {in_failures = 0}
         !in_failures {next}
         /^---- .* stdout ----$/ {tests += 1; lines[tests] = 0}
         tests {text[tests, lines[tests]++] = $0}
         END {for (t = 1; t <= tests; t++)
                  for (l = 0; l < lines[t]; l++)
                      if (l == 0 || l >= lines[t] - 60) print text[t, l]}' "$log"
    # One line for all test programs together.
    awk '/^test result:/ {passed += $4; failed += $6; skipped += $8}
         /^skipped: / {skipped += 1; passed -= 1}
         END {printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped}' "$log"
    rm -f "$log"
    return "$status"
}

bench() {
    choose_features
    with_dpdk
    need $run_packages $bench_packages || true
    cargo bench -p ferroce-benches "${features[@]}" "$@"
}

# Checks the minimum Rust version in Cargo.toml. clippy (incompatible_msrv) checks the use of std; if rustup has that
# toolchain, everything is also compiled with it.
msrv() {
    local version; version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if rustup run "$version" rustc --version >/dev/null 2>&1; then
        cargo "+$version" check --workspace --target-dir target/msrv "${features[@]}"
    else
        say "Rust $version is not installed (rustup toolchain install $version): what std had then is checked by clippy alone"
    fi
}

lint() {
    choose_features
    cargo fmt --all --check
    cargo clippy --workspace --all-targets "${features[@]}" -- -D warnings
    # The configuration that needs no package.
    cargo clippy -p ferroce-tools -- -D warnings
    msrv
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps "${features[@]}"
    cargo fmt --manifest-path tools/fuzz/Cargo.toml --check
    cargo fmt --manifest-path stack/loom/Cargo.toml --check
    loom_cargo clippy --all-targets -- -D warnings
    if has_cxx; then
        fuzz_cargo clippy --all-targets -- -D warnings
    else
        say "without g++ the fuzz targets are not linted"
    fi
}

# The sanitizers and the fuzzer are unstable features; this makes the stable toolchain accept them.
unstable() { RUSTC_BOOTSTRAP=1 "$@"; }

# Unpacks and builds each package by itself, as users get it: without this workspace and its patches.
package() {
    local build=${CARGO_TARGET_DIR:-target}/packages file
    # cargo assumes that a version never changes, so previously unpacked and built packages of these crates are removed.
    rm -rf "$build" "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/ferroce{,-*}-[0-9]*
    # The tests are not packaged; cargo warns about each of them.
    cargo package --workspace --allow-dirty --target-dir "$build" --exclude ferroce-benches \
        --exclude ferroce-driver-test-support --exclude ferroce-test-support --exclude libxdp-sys 2>&1 |
        grep --line-buffered -v '^warning: ignoring test ' >&2
    printf '%-40s %6s %12s %12s\n' package files unpacked compressed
    for file in "$build"/package/*.crate; do
        tar -tvzf "$file" | awk -v name="$(basename "$file")" -v compressed="$(stat -c %s "$file")" \
            '{bytes += $3} END {printf "%-40s %6d %8d KiB %8d KiB\n", name, NR, bytes / 1024, compressed / 1024}'
    done
}

asan() {
    choose_features
    with_dpdk
    # The suppressions name functions, so a symbolizer is needed.
    need llvm-14 || true
    export ASAN_OPTIONS=suppressions=$PWD/driver/asan.supp ASAN_SYMBOLIZER_PATH=/usr/bin/llvm-symbolizer-14
    export LSAN_OPTIONS=suppressions=$PWD/driver/lsan.supp:print_suppressions=0
    RUSTFLAGS="-Zsanitizer=address" unstable cargo test --target "$(host)" --target-dir target/asan \
        -p ferroce-wire -p ferroce-driver -p ferroce -p ferroce-collectives -p ferroce-tools "${features[@]}" "$@"
}

# cargo in the workspace of the loom tests.
loom_cargo() { # SUBCOMMAND [ARGUMENT...]
    local subcommand=$1
    shift
    cargo "$subcommand" --locked --release --manifest-path stack/loom/Cargo.toml --target-dir target/loom "$@"
}

# cargo in the fuzzer's workspace, with the flags that libFuzzer requires: those of cargo-fuzz, which need not be
# installed. The code under test is safe Rust; without the address sanitizer (SANITIZER=address) it runs several times as
# fast.
fuzz_cargo() { # SUBCOMMAND [ARGUMENT...]
    local flags="-Cpasses=sancov-module --cfg fuzzing -Cdebug-assertions -Ccodegen-units=1" option subcommand=$1
    for option in level=4 inline-8bit-counters pc-table trace-compares; do
        flags+=" -Cllvm-args=-sanitizer-coverage-$option"
    done
    [ "${SANITIZER:-none}" = none ] || flags+=" -Zsanitizer=$SANITIZER"
    shift
    RUSTFLAGS="$flags ${FUZZ_FLAGS:-}" unstable cargo "$subcommand" --locked --release \
        --manifest-path tools/fuzz/Cargo.toml --target "$(host)" --target-dir "${FUZZ_DIR:-target/fuzz}" "$@"
}

host() { rustc -vV | awk '/^host/ {print $2}'; }

# Builds the targets and their first corpora. Sets `targets` to the named ones, or to all, and `programs` to their folder.
fuzz_build() { # [TARGET...]
    has_cxx || die "libFuzzer is built with g++"
    fuzz_cargo build --bins --examples
    programs=${FUZZ_DIR:-target/fuzz}/$(host)/release
    local known target
    known=$(cargo metadata --no-deps --locked --format-version 1 --manifest-path tools/fuzz/Cargo.toml |
        grep -o '"kind":\["bin"\][^}]*"name":"[a-z_]*"' | sed 's/.*"name":"\(.*\)"/\1/') || true
    [ -n "$known" ] || die "no fuzz targets in tools/fuzz/Cargo.toml"
    targets=("$@")
    # shellcheck disable=SC2206
    [ $# -gt 0 ] || targets=($known)
    for target in "${targets[@]}"; do
        grep -qx "$target" <<<"$known" || die "no fuzz target '$target'; there are: ${known//$'\n'/ }"
    done
    "$programs/examples/seeds" >/dev/null
}

fuzz() {
    local seconds=${1:-300} targets programs target log table finding status=0
    [ $# -eq 0 ] || shift
    [[ $seconds =~ ^[1-9][0-9]*$ ]] || die "fuzz for '$seconds' s: SECONDS is a number from 1 on"
    fuzz_build "$@"
    log=$(mktemp) table=$(mktemp)
    printf 'target\texecutions\tper s\tedges\tof\tcorpus\tresult\n' >"$table"
    for target in "${targets[@]}"; do
        say "fuzzing $target for $seconds s"
        local result="no finding" artifacts=tools/fuzz/artifacts/$target
        mkdir -p "$artifacts"
        "$programs/$target" "tools/fuzz/corpus/$target" -artifact_prefix="$artifacts/" \
            -max_total_time="$seconds" -max_len=4096 -timeout=10 -print_final_stats=1 >"$log" 2>&1 || {
            result=FINDING status=1
            # The reason, and how to reproduce it.
            grep -aE 'panicked at|^==[0-9]+==' -A 2 "$log" >&2 || tail -40 "$log" >&2
            finding=$(sed -n 's|.*Test unit written to ||p' "$log" | tail -1)
            if [ -n "$finding" ]; then
                say "replay: ./do fuzz-replay $target $finding"
                say "or elsewhere, with this in FILE: base64 -d <<<$(base64 -w 0 "$finding") >FILE"
            fi
        }
        awk -v target="$target" -v seconds="$seconds" -v result="$result" '
            /Loaded 1 modules/ { gsub(/[^0-9 ]/, " "); split($0, n, " "); of = n[2] }
            / cov: / { for (i = 1; i < NF; i++) { if ($i == "cov:") cov = $(i + 1); if ($i == "corp:") corpus = $(i + 1) } }
            /^#[0-9]+/ { runs = substr($1, 2) }
            /stat::number_of_executed_units/ { runs = $2 }
            /stat::average_exec_per_sec/ { rate = $2 }
            END { sub(/\/.*/, "", corpus)
                  printf "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", target, runs, rate ? rate : runs / seconds, cov, of, corpus, result }' \
            "$log" | tee -a "$table" >&2
    done
    awk -F '\t' '{ printf "%-18s %12s %8s %7s %7s %7s  %s\n", $1, $2, $3, $4, $5, $6, $7 }
         NR > 1 { runs += $2; reached += $4; of += $5; found += $7 == "FINDING" }
         END { printf "fuzz: %d targets, %d executions, %d of %d edges, %d findings\n", NR - 1, runs, reached, of, found }' \
        "$table"
    rm -f "$log" "$table"
    return "$status"
}

fuzz_replay() { # TARGET FILE...
    [ $# -ge 2 ] || die "fuzz-replay needs a target and the files to run"
    local targets programs target=$1
    shift
    fuzz_build "$target"
    exec "$programs/$target" "$@"
}

# The lines that the corpora reach. The coverage data needs the compiler's own LLVM tools: Debian's have another version.
fuzz_coverage() {
    local target targets programs tools profiles objects=()
    tools=$(rustc --print sysroot)/lib/rustlib/$(host)/bin
    [ -x "$tools/llvm-cov" ] || rustup component add llvm-tools || die "needs the compiler's llvm-tools"
    FUZZ_FLAGS=-Cinstrument-coverage FUZZ_DIR=target/fuzz-coverage fuzz_build "$@"
    profiles=$(mktemp -d)
    for target in "${targets[@]}"; do
        say "coverage of $target"
        LLVM_PROFILE_FILE="$profiles/$target.profraw" "$programs/$target" "tools/fuzz/corpus/$target" -runs=0 \
            >/dev/null 2>&1 || die "no coverage of $target"
        objects+=(-object "$programs/$target")
    done
    "$tools/llvm-profdata" merge -o "$profiles/all.profdata" "$profiles"/*.profraw
    "$tools/llvm-cov" report "${objects[@]:1}" -instr-profile="$profiles/all.profdata" \
        -ignore-filename-regex='(registry|rustc|tools/fuzz)/' -show-region-summary=false -show-branch-summary=false
    rm -r "$profiles"
}

# The text of `ferroce --help`, as man pages and shell completions. This needs no driver.
man_pages() {
    local folder=${CARGO_TARGET_DIR:-$PWD/target}
    aloud "building the manual" cargo build -p ferroce-tools --example manual
    "$folder/debug/examples/manual" "$folder/man/man1" "$folder/completions"
    say "man pages: MANPATH=$folder/man: man ferroce, man ferroce-perf, ..."
    say "completions: source $folder/completions/ferroce.bash; or _ferroce for zsh, ferroce.fish for fish"
}

job=${1:-}
shift || true
case $job in
demo) ferroce demo "$@" ;;
ferroce) ferroce "$@" ;;
man) man_pages ;;
test) tests "$@" ;;
dpdk) dpdk_shim "${1:-${CARGO_TARGET_DIR:-target}/release}" || die "no shim was built" ;;
bench) bench "$@" ;;
soak) FERROCE_SOAK_BYTES=${1:-100000000} cargo test --release -p ferroce --test impairment -- --nocapture ;;
model) FERROCE_MODEL_BYTES=${1:-1000000000} cargo test --release -p ferroce --test model -- --nocapture ;;
lint) lint ;;
package) package ;;
asan) asan --lib --bins --tests "$@" ;;
loom) loom_cargo test -- --show-output "$@" ;;
fuzz) fuzz "$@" ;;
fuzz-replay) fuzz_replay "$@" ;;
mutations) if [ "${1:-}" = cases ]; then tools/mutations-cases "${@:2}"; else tools/mutations "$@"; fi ;;
fuzz-coverage) fuzz_coverage "$@" ;;
'' | -h | --help | help) usage ;;
*) usage >&2; die "no job '$job'" ;;
esac
