#!/usr/bin/env bash
# Installs vLLM for an installed seedance: install-engine [gpu|cpu] [PIP-ARGUMENT...]
#
# Without a word, the GPU build where there is an NVIDIA device (about 9 GB), else the CPU build (about 3.4 GB). It lies
# in engine/ beside this file, stays when seedance gets a new version, and goes with seedance. Needs pip (Debian package
# python3-pip) and a package index; the CPU build needs torch's own index too, to be given as --extra-index-url if pip
# is not set up for it.
set -euo pipefail
HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
PYTHON=$HERE/bin/python

die() { printf 'cannot install the engine: %s\n' "$*" >&2; exit 1; }

build=cpu
[ ! -c /dev/nvidia0 ] || build=gpu
case ${1:-} in gpu | cpu) build=$1; shift ;; esac

[ -w "$HERE" ] || die "run this as root"
python3 -m pip --version >/dev/null 2>&1 || die "there is no pip; install it with: apt-get install python3-pip"

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
umask 022
# What seedance has comes first among the places that modules are imported from, so the engine has to agree with it.
python3 -m pip --python "$PYTHON" list --format freeze --exclude seedance >"$SCRATCH/constraints.txt"
arguments=(-c "$SCRATCH/constraints.txt" "$@")
if [ "$build" = cpu ]; then
    "$PYTHON" "$HERE/cpu_stubs.py" "$SCRATCH" >/dev/null
    arguments+=(--find-links "$SCRATCH" -c "$HERE/constraints-cpu.txt")
fi
requirement=$("$PYTHON" -c 'import importlib.metadata, sys
for line in importlib.metadata.requires("seedance"):
    name, _, marker = line.partition(";")
    if marker.split("==")[-1].strip(" \"\x27") == sys.argv[1]:
        print(name.strip())' "$build")
minor=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
python3 -m pip --python "$PYTHON" --no-input install --upgrade --root-user-action ignore \
    --target "$HERE/engine/python$minor" "${arguments[@]}" "$requirement"
