#!/bin/sh
# Runs every check of the repository: ruff, mypy, then the tests, cheapest first. Installs what they need.
#
#   sh scripts/test.sh [--all | --slow K/N | --changed [BASE]] [PYTEST ARGUMENTS]
#
# --all includes the slow tests; --slow 1/8 runs only slow tests, the first of 8 parts; --changed runs mypy, ruff and,
# for a minute or two, the tests that are nearest by imports to the changes since BASE (default: the last commit). A
# path among the arguments replaces all test folders:
#   sh scripts/test.sh tests/unit -k ranktable
# The quick tests of clusters mostly wait, so mypy and the tests of one process run beside them. Slow tests, and all
# tests on a machine with a GPU or NPU, run in two halves, one after the other.
# Prints each group's time, then a line "N passed, N failed, N skipped"; exit status 0 if everything passed.

set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
# The caller's environment must not affect tests, and no test may use the network.
unset GLOBAL_RANK_TABLE_FILE_PATH RANK_TABLE_FILE_PATH NODE_PORTS USE_OPENAI PYTHONPATH PYTEST_ADDOPTS MYPYPATH PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE=1

together=yes
case "${1:-}" in
-h | --help)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
--all)
    shift
    together=""
    ;;
--slow)
    part=${2:?--slow: expected K/N, such as 1/8}
    shift 2
    set -- -m slow "--part=$part" "$@"
    together=""
    ;;
--changed)
    shift
    base=HEAD
    case "${1:-}" in
    "" | -*) ;;
    *)
        base=$1
        shift
        ;;
    esac
    set -- -m "not slow" "$@"
    ;;
*) set -- -m "not slow" "$@" ;;
esac

sh scripts/setup.sh test
python=$root/.venv/bin/python
failed=""
if [ -n "${base:-}" ]; then
    touched=$("$python" scripts/changed_tests.py "$base")
    # shellcheck disable=SC2086 # names of test files, none of which has a space
    set -- -n 2 --dist loadfile "$@" $touched
    export OMP_NUM_THREADS=1
fi

exec 3<&0 # the terminal: background jobs do not get it, but a debugger in a test needs it
reports=$(mktemp -d)
mypy=""
clusters="" # ids of test processes: one in the background, with output in a file, and one with visible output
seen=""
grace_s=0

runs() {
    for half in $clusters $seen; do
        ! kill -0 "$half" 2>/dev/null || return 0
    done
    return 1
}

# signal_after SECONDS SIGNAL: sends it to the tests that are still running
signal_after() {
    left_s=$1
    while runs && [ "$left_s" -gt 0 ]; do
        sleep 1
        left_s=$((left_s - 1))
    done
    # shellcheck disable=SC2086 # process ids, or nothing
    ! runs || kill -"$2" $clusters $seen 2>/dev/null || true
}

show_clusters() {
    echo "test: pytest clusters"
    cat "$reports/clusters.txt"
}

ended() {
    trap '' INT TERM
    [ -z "$mypy" ] || kill "$mypy" 2>/dev/null || true
    signal_after "$grace_s" INT
    signal_after 30 KILL
    [ -z "$clusters" ] || show_clusters || true
    rm -rf "$reports"
}
trap ended EXIT
trap 'grace_s=15; exit 130' INT # the terminal has sent it to the tests, too, and a second one would end their cleanup
trap 'exit 143' TERM

# mypy takes one core for a minute, beside tests that tolerate load; its result is printed after them.
nice -n 10 "$python" -m mypy >"$reports/mypy.txt" 2>&1 &
mypy=$!

# Compiles the kernels once, before several test processes would.
"$python" -c 'from pd_cluster.native import build; build.identity()' &
kernels=$!

# check NAME MODULE ARGUMENTS…
check() {
    name=$1
    shift
    echo "test: $name"
    "$python" -m "$@" || failed="$failed, $name"
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
wait "$kernels" || true # a test reports the reason

given=""
for argument in "$@"; do
    case "$argument" in
    -*) ;;
    *) [ ! -e "${argument%%::*}" ] || given=yes ;;
    esac
done

for device in /dev/nvidia[0-9]* /dev/davinci[0-9]*; do # two halves at a time would share its memory
    [ ! -e "$device" ] || together=""
done

end_of_mypy() {
    echo "test: mypy"
    wait "$mypy" || failed="$failed, mypy"
    mypy=""
    cat "$reports/mypy.txt"
}

# A shell's background jobs ignore Ctrl-C, and so would all processes that their tests start.
start='import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'

# run NAME ARGUMENTS…: replaces the calling process by pytest, at $priority
run() {
    name=$1
    shift
    # shellcheck disable=SC2086 # a command and its arguments, or nothing
    exec ${priority:-} "$python" -c "$start" -m pytest --junitxml="$reports/$name.xml" -o junit_family=xunit1 \
        -o cache_dir=".pytest_cache/$name" "$@"
}

# end_of_tests NAME STATUS
end_of_tests() {
    [ "$2" -eq 0 ] || [ "$2" -eq 5 ] || failed="$failed, pytest $1" # 5: no tests were selected
}

# tests NAME ARGUMENTS…
tests() {
    echo "test: pytest $1"
    status=0
    run "$@" <&3 3<&- & # in the background, so that this shell handles signals at once
    seen=$!
    wait "$seen" || status=$?
    seen=""
    end_of_tests "$1" "$status"
}

if [ -n "$given" ]; then
    end_of_mypy
    tests given "$@"
else
    # Each half runs two processes with one compute thread each; more threads would only wait for each other.
    export OMP_NUM_THREADS=1
    set -- --durations=10 --durations-min=1 "$@" # shows each half's slowest tests
    if [ -n "$together" ]; then
        run clusters -n 2 --dist loadfile "$@" tests/api tests/cluster >"$reports/clusters.txt" 2>&1 3<&- &
        clusters=$!
        priority="nice -n 10"
        tests one-process -n 2 --dist worksteal "$@" tests/unit tests/model
        status=0
        wait "$clusters" || status=$?
        clusters=""
        show_clusters
        end_of_tests clusters "$status"
        end_of_mypy
    else
        tests one-process -n 2 --dist worksteal "$@" tests/unit tests/model
        end_of_mypy
        tests clusters -n 2 --dist loadfile "$@" tests/api tests/cluster
    fi
fi

"$python" - "$reports"/*.xml <<'END' || failed="$failed, the report of pytest"
import sys
from collections import Counter
from xml.etree import ElementTree

try:
    cases = [case for path in sys.argv[1:] for case in ElementTree.parse(path).iter("testcase")]
except (ElementTree.ParseError, OSError):
    sys.exit("test: pytest ended before it wrote its report")
if not cases:
    sys.exit("test: no test was run")


def outcome(case):
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def line(counts):
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))


groups = {}
for case in cases:
    name = "/".join((case.get("file") or case.get("name") or "").replace(".", "/").split("/")[:2])
    counts, times_s = groups.setdefault(name, (Counter(), []))
    counts[outcome(case)] += 1
    times_s.append(float(case.get("time", 0)))
for name, (counts, times_s) in groups.items():
    print(f"test: {name:<14}{sum(times_s):7.1f} s  {line(counts)}")
print(line(sum((counts for counts, _ in groups.values()), Counter())))
END

if [ -n "$failed" ]; then
    echo "test: failed: ${failed#, }" >&2
    exit 1
fi
