#!/bin/sh
# Tests on an emulated aarch64: builds an arm64 Python from packages and runs it with qemu-aarch64.
#
#   sh scripts/aarch64_check.sh FOLDER [python] [rows] [units] [cluster]     without names: all stages in this order
#
# python: builds the Python in FOLDER (3 GB) unless it exists: Debian's for arm64, PyPI's wheels for aarch64 in the
# versions of constraints.txt, torch with stubs in place of CUDA's libraries, and a compiler without -march=native.
# rows: does a row's result in torch's linear layers depend on the other rows? units: unit tests. cluster: a prefill
# and two decode instances and their scheduler, over gloo and shared memory; this host's transformers checks the tokens.
# Needs Debian's qemu-user, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and debian-archive-keyring, apt-get, and .venv
# (scripts/setup.sh test). Takes more than half an hour on two cores. $QEMU_CPU: the processor, cortex-a76 by default.

set -eu

TORCH="torch==2.13.0"
DEBIAN=bookworm # its Python is 3.11
PYTHON=3.11
PACKAGES="python$PYTHON libstdc++6 libgomp1"
FOR_TESTS="pytest pytest-timeout hypothesis openai"
OF_TORCH="sympy networkx filelock fsspec typing-extensions"
CPU_PART=0xd0b # of cortex-a76
STAGES="python rows units cluster"
UNITS="test_ranktable_schema test_ranktable_merge test_ranktable_check test_ranktable_gen test_scheduler test_blocks test_wire
    test_handoff test_transport test_router test_routing test_fair_queue test_sampler test_sampler_reference
    test_fixed_point test_numerics test_vectors test_text test_pack"

say() {
    echo "aarch64_check: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

apt() {
    apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::lists="$folder/apt/lists" \
        -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt/cache" \
        -o Dir::Etc::sourcelist="$folder/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Debug::NoLocking=1 --no-install-recommends "$@"
}

# Unpacks Debian's packages into root/.
fetch_debian() {
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$root"
    : >"$folder/apt/status"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    for suite in "debian $DEBIAN" "debian-security $DEBIAN-security"; do
        echo "deb [signed-by=$keys] http://deb.debian.org/${suite%% *} ${suite#* } main"
    done >"$folder/apt/sources.list"
    apt update
    # shellcheck disable=SC2086
    apt -y --download-only install $PACKAGES
    for package in "$folder"/apt/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
}

# pip for aarch64: pip_for_aarch64 download|install ARGUMENTS...
pip_for_aarch64() {
    command=$1
    shift
    platforms=$(for glibc in 17 24 26 27 28 31 34; do echo "--platform manylinux_2_${glibc}_aarch64"; done)
    # shellcheck disable=SC2086
    "$python" -m pip "$command" -q --disable-pip-version-check --only-binary=:all: --platform manylinux2014_aarch64 $platforms \
        --python-version "$PYTHON" --implementation cp "$@"
}

# Prints the packages that pyproject.toml requires, except torch.
needs() {
    "$python" - <<'END'
import re, tomllib

with open("pyproject.toml", "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
print("\n".join(each.partition(";")[0].replace(" ", "") for each in wanted if re.match(r"[\w-]+", each)[0] != "torch"))
END
}

fetch_wheels() {
    # shellcheck disable=SC2046,SC2086
    pip_for_aarch64 install --no-compile --target "$site" -c constraints.txt $(needs) $FOR_TESTS $OF_TORCH
    pip_for_aarch64 download --no-deps -d "$folder/torch" "$TORCH"
    "$python" -m zipfile -e "$folder"/torch/torch-*.whl "$site"
    "$python" -m tests.support.cuda_stubs "$site/torch" "$root/usr/lib/aarch64-linux-gnu" --tools aarch64-linux-gnu- \
        --beside "$root/usr/lib/aarch64-linux-gnu" "$root/lib/aarch64-linux-gnu" "$root/lib"
    rm -rf "$folder/torch"
    "$python" -m compileall -q "$site" >"$folder/compileall.txt" || true # some packages have files for other versions
}

# Writes the files that describe the processor, and wrapper scripts for the interpreter and the compiler.
write_files() {
    for core in 0 1; do
        printf 'processor\t: %s\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: %s\nCPU revision\t: 1\n\n' "$core" "$CPU_PART"
        registers=$root/sys/devices/system/cpu/cpu$core/regs/identification
        mkdir -p "$registers"
        echo "0x00000000414f${CPU_PART#0x}1" >"$registers/midr_el1"
    done >"$folder/cpuinfo"
    mkdir -p "$root/proc" && mv "$folder/cpuinfo" "$root/proc/cpuinfo"
    cat >"$root/usr/bin/python3" <<END
#!/bin/sh
exec qemu-aarch64 -0 "\$0" -L "$root" "$root/usr/bin/python$PYTHON" "\$@"
END
    cat >"$folder/cc" <<'END'
#!/bin/sh
left=$#
while [ "$left" -gt 0 ]; do
    case "$1" in
    -march=native) set -- "$@" -mcpu=tsv110 ;; # a cross compiler has no native processor
    *) set -- "$@" "$1" ;;
    esac
    shift
    left=$((left - 1))
done
exec aarch64-linux-gnu-gcc "$@"
END
    chmod +x "$root/usr/bin/python3" "$folder/cc"
}

run_python() {
    if [ ! -e "$folder/whole" ]; then
        [ -e "$root/usr/bin/python$PYTHON" ] || fetch_debian
        fetch_wheels
        write_files
        : >"$folder/whole"
    fi
    emulated -c 'import platform, sys, torch
print(f"Python {platform.python_version()} on {platform.machine()}, torch {torch.__version__}, {sys.executable}")'
}

# Runs the emulated Python with the variables that it needs.
emulated() {
    PD_CLUSTER_TEST_AARCH64=$folder "$python" -m tests.support.aarch64_python "$@"
}

run_rows() {
    emulated -m pytest -q -s -p no:cacheprovider tests/support/aarch64_cases.py
}

run_units() {
    files=$(for each in $UNITS; do echo "tests/unit/$each.py"; done)
    # shellcheck disable=SC2086
    emulated -m pytest -q -p no:cacheprovider -m "not slow" --timeout 3000 --durations 5 $files
}

run_cluster() {
    PD_CLUSTER_TEST_AARCH64=$folder "$python" -m pytest -q -s -p no:cacheprovider tests/cluster/test_aarch64.py
}

case "${1:-}" in
"" | -h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
for program in qemu-aarch64 aarch64-linux-gnu-gcc apt-get dpkg-deb; do
    command -v "$program" >/dev/null || fail "no $program; Debian: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
done
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd -P)
shift
root=$folder/root
site=$folder/site
cd "$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)"
python=$(pwd -P)/.venv/bin/python
[ -x "$python" ] || fail "no .venv; run sh scripts/setup.sh test"
for stage in "$@"; do
    case " $STAGES " in *" $stage "*) ;; *) fail "unknown stage $stage; there are $STAGES" ;; esac
done
failed=""
# shellcheck disable=SC2086 # names of stages
[ $# -gt 0 ] || set -- $STAGES
for stage in "$@"; do
    say "$stage"
    "run_$stage" || failed="$failed $stage"
done
[ -z "$failed" ] || fail "failed:$failed"
