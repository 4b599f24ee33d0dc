#!/bin/sh
# Makes .venv in the repository's root and installs pd-cluster into it.
#
#   sh scripts/setup.sh [EXTRAS]        EXTRAS: such as test, or test,cuda
#
# Keeps a torch that fits pyproject.toml, in .venv or in the Python that .venv is made from, such as a build for CUDA.
# Without one, installs exactly $TORCH, first and separately. A second run ends at once if nothing has changed.
# PYTHON=/path/to/python3.12 chooses the interpreter.

set -eu

TORCH="torch==2.13.0" # deploy/Dockerfile.cpu has the same
UV="uv>=0.9,<1" # only an installer; pd-cluster does not import it
TRITON="triton==3.6.0" # for tests without a GPU, which need this version's interpreter
LOCK_TIMEOUT_S=1800

say() {
    echo "setup: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# Prints the Python, 3.11 or newer, from which .venv is made.
find_python() {
    for name in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        elif [ "$name" = "${PYTHON:-}" ]; then
            fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3.11 sh scripts/setup.sh"
}

# Checks that the Python $1 has a torch that fits pyproject.toml; prints its version.
has_torch() {
    "$1" - pyproject.toml 2>/dev/null <<'END'
import re, sys, tomllib
from importlib.metadata import version

with open(sys.argv[1], "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
least, below = next(re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", each).groups() for each in wanted if "torch>" in each)
parts = lambda text: [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:2]]
found = version("torch")
if not parts(least) <= parts(found) < parts(below):
    sys.exit(1)
print(found)
END
}

# Prints a fingerprint of all that .venv is made from, except the extras.
fingerprint() {
    cksum pyproject.toml constraints.txt
    pwd -P
    .venv/bin/python -V
}

# Checks that .venv has all $extras and that its fingerprint has not changed.
up_to_date() {
    [ -f "$stamp" ] && [ -x .venv/bin/pd-cluster ] || return 1
    { read -r have && found=$(cat); } <"$stamp"
    [ "$found" = "$(fingerprint 2>/dev/null)" ] || return 1
    for extra in $(echo "$extras" | tr ',' ' '); do
        case ",$have," in
        *",$extra,"*) ;;
        *) return 1 ;;
        esac
    done
}

# Lets one setup run at a time. The lock is this shell's open file 9, so any end of the shell releases it.
lock() {
    mkdir -p .venv
    exec 9>.venv/pd-cluster.lock
    "$python" - "$LOCK_TIMEOUT_S" <<'END' || fail "another setup in $(pwd) did not end within $LOCK_TIMEOUT_S s"
import fcntl, sys, time

deadline_s = time.monotonic() + float(sys.argv[1])
told = False
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        if time.monotonic() > deadline_s:
            sys.exit(1)
    if not told:
        print("setup: waiting for another setup to end", file=sys.stderr)
        told = True
    time.sleep(0.2)
END
}

make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail ".venv has $(.venv/bin/python -V), 3.11 or newer is needed; remove .venv and run this again"
        return
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian and Ubuntu: the package python3-venv)"
    .venv/bin/python -V >/dev/null 2>&1 || rm -f .venv/bin/python* # links to a deleted interpreter
    if torch=$(has_torch "$python"); then
        say "making .venv, with torch $torch of $python"
        "$python" -m venv --system-site-packages .venv
        share_environment
    else
        say "making .venv with $("$python" -V)"
        "$python" -m venv .venv
    fi
}

# A virtual environment's packages do not count as "system" packages, so .venv gets their path.
share_environment() {
    ! has_torch .venv/bin/python >/dev/null || return 0
    get='import sysconfig; print(sysconfig.get_path("platlib"))'
    "$python" -c "$get" >"$(.venv/bin/python -c "$get")/zz-base-environment.pth"
}

# Finds or installs uv, which needs a quarter of pip's time. pip is used if uv fails, and always for a .venv that shares
# another Python's packages (such as a torch for CUDA), because uv does not see these.
get_uv() {
    uv=
    ! grep -q 'site-packages = true' .venv/pyvenv.cfg || return 0
    uv=$(command -v uv || true)
    if [ -z "$uv" ] && .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-compile \
        --only-binary :all: "$UV" 2>/dev/null; then
        uv=$PWD/.venv/bin/uv
    fi
}

# Runs uv with pip's settings, which uv does not read. Like pip, it must treat all indexes alike, without an order.
uv_install() {
    [ -n "$uv" ] || return 1
    .venv/bin/python - "$uv" pip install -q --python .venv/bin/python "$@" 2>/dev/null <<'END'
import ast, os, subprocess, sys

NAMES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
         "constraint": "UV_CONSTRAINT", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE"}
ORDER = ("global", "install", ":env:")  # as in pip, the last one wins
found = []
for line in subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout.splitlines():
    key, _, value = line.partition("=")
    section, _, option = key.rpartition(".")
    if section in ORDER and option in NAMES:
        found.append((ORDER.index(section), NAMES[option], ast.literal_eval(value).split()))
for _, name, values in sorted(found):
    os.environ[name] = ("," if name == "UV_FIND_LINKS" else " ").join(values)
os.environ |= {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CACHE": "1"}
os.execv(sys.argv[1], sys.argv[1:])
END
}

pip_install() {
    ! uv_install "$@" || return 0
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-compile "$@" ||
        fail "pip could not install $*; see its messages above"
}

install() {
    if torch=$(has_torch .venv/bin/python); then
        say "keeping torch $torch"
    else
        say "installing $TORCH"
        pip_install "$TORCH"
    fi
    case ",$extras," in
    *,test,*) .venv/bin/python -c 'import triton' 2>/dev/null || pip_install "$TRITON" ;; # a torch for CUDA has its own
    esac
    say "installing pd-cluster${extras:+ with extras: $extras}"
    pip_install -c constraints.txt -e ".${extras:+[$extras]}"
}

# Compiles to bytecode the few thousand files in use, of twenty thousand, so that the first start does not have to.
first_import() {
    env -u PYTHONDONTWRITEBYTECODE TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
        .venv/bin/python -c 'import pd_cluster.engine.assembly.build_worker, pd_cluster.api.scheduler_app, pd_cluster.api.worker_app' ||
        fail "pd-cluster cannot be imported; see Python's message above"
}

case "${1:-}" in
-h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
-*) fail "unknown option $1; usage: sh scripts/setup.sh [EXTRAS]" ;;
esac
[ $# -le 1 ] || fail "extras are separated by commas: sh scripts/setup.sh test,cuda"
extras=$(printf '%s' "${1:-}" | tr -d ' []')

cd "$(dirname "$0")/.."
stamp=.venv/pd-cluster.stamp
if up_to_date; then
    exit 0
fi
python=$(find_python)
lock
if up_to_date; then # another setup held the lock and did the work
    exit 0
fi
if [ -f "$stamp" ]; then # installed extras stay, even if this setup names none
    read -r have <"$stamp" || have=
    extras=$(printf '%s,%s' "$have" "$extras" | tr ',' '\n' | sed '/^$/d' | sort -u | paste -s -d , -)
fi
rm -f "$stamp"
make_venv
get_uv
install
first_import
{
    echo "$extras"
    fingerprint
} >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done"
