#!/usr/bin/env bash
# Puts seedance on a machine as a system service, or takes it away: packaging/install.sh stage|install|uninstall
#
#   stage      the files alone, below DESTDIR; what packages are made from
#   install    stage, then make user and folders and tell systemd; starts and enables nothing
#   uninstall  end the service and remove what install made; with PURGE=1 also configuration, keys and caches
#
# From the environment:
#
#   PREFIX         /usr/local; systemd also looks for units there
#   DESTDIR        put everything below this folder; nothing outside of it is touched
#   SYSTEM_PYTHON  the Python that runs seedance, 3.11 or newer; the system's own without it
#   INTERPRETER    its path on the machine that seedance is for, when that is another one
#   WHEEL          seedance itself; the one in dist/ without it
#   WHEELHOUSE     take requirements from this folder alone, and ask no package index
#   PIP_PYTHON     the Python whose pip does the work; that of .venv
#
# Its own Python packages lie in PREFIX/lib/seedance, a virtual environment: the system's are left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

PREFIX=${PREFIX:-/usr/local}
DESTDIR=${DESTDIR:-}
LIB=$PREFIX/lib/seedance
UNITS=$PREFIX/lib/systemd/system
SYSUSERS=$PREFIX/lib/sysusers.d/seedance.conf
TMPFILES=$PREFIX/lib/tmpfiles.d/seedance.conf
DOC=$PREFIX/share/doc/seedance
PIP=${PIP_PYTHON:-.venv/bin/python}

say() { printf '%s\n' "$*"; }
die() { printf 'cannot install seedance: %s\n' "$*" >&2; exit 1; }

has_systemd() { [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; }

# --- what it runs with --------------------------------------------------------------------------------------------

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))'; }

find_python() {
    local candidate
    for candidate in ${SYSTEM_PYTHON:-/usr/bin/python3 /usr/bin/python3.1[1-9]}; do
        if minor_of "$candidate" >/dev/null 2>&1; then
            realpath -- "$(command -v "$candidate")"
            return
        fi
    done
    die "it needs Python 3.11 or newer${SYSTEM_PYTHON:+, which $SYSTEM_PYTHON is not}; name one with SYSTEM_PYTHON=/path"
}

find_wheel() {
    local -a found
    mapfile -t found < <(compgen -G "${WHEEL:-dist/seedance-*.whl}")
    [ "${#found[@]}" = 1 ] || die "there are ${#found[@]} wheels at ${WHEEL:-dist/}; make one with 'make wheel'"
    printf '%s\n' "${found[0]}"
}

# install_packages PYTHON FOLDER: the wheel and what it needs, as that Python takes them.
install_packages() {
    local -a from=()
    [ -z "${WHEELHOUSE:-}" ] || from=(--no-index --find-links "$WHEELHOUSE")
    # PEP 668 has the system's Python refuse to be changed; with --target nothing of it is.
    "$PIP" -m pip --python "$1" --disable-pip-version-check --no-input install -qq --root-user-action ignore \
        --no-compile --only-binary :all: "${from[@]}" --target "$2" "$(find_wheel)"
    rm -rf "$2/bin" # other libraries' commands
}

# --- files --------------------------------------------------------------------------------------------------------

# launcher COMMAND: a command of ours; -I keeps the caller's PYTHON* variables and home out of a program that root runs.
launcher() {
    printf '#!%s/bin/python -I\nfrom seedance.daemon.entry import %s\n\n%s()\n' "$LIB" "$1" "$1"
}

# with_prefix FILE: a file of systemd/, in which everything is in /usr, as it must be for this prefix.
with_prefix() {
    sed -e "s#/usr/bin/seedance#$PREFIX/bin/seedance#g" -e "s#/usr/share/doc/seedance#$DOC#g" "systemd/$1"
}

# put MODE FILE: standard input becomes a file below DESTDIR.
put() {
    mkdir -p "$DESTDIR${2%/*}"
    cat >"$DESTDIR$2"
    chmod "$1" "$DESTDIR$2"
}

stage_packages() {
    local python=$1 interpreter=$2 minor site
    minor=$(minor_of "$python")
    site=$DESTDIR$LIB/lib/python$minor/site-packages
    rm -rf "$DESTDIR$LIB/lib" "$DESTDIR$LIB/bin"
    mkdir -p "$site" "$DESTDIR$LIB/bin"
    install_packages "$python" "$site"
    # An engine is installed beside all this, so that a new version of seedance leaves it alone.
    printf '%s/engine/python%s\n' "$LIB" "$minor" >"$site/seedance-engine.pth"
    printf 'home = %s\ninclude-system-site-packages = false\nversion = %s\n' "${interpreter%/*}" "$minor" \
        | put 644 "$LIB/pyvenv.cfg"
    ln -s "$interpreter" "$DESTDIR$LIB/bin/python"
    launcher seedanced | put 755 "$LIB/bin/seedanced"
    launcher seedancectl | put 755 "$LIB/bin/seedancectl"
    mkdir -p "$DESTDIR$PREFIX/bin"
    ln -sf ../lib/seedance/bin/seedanced ../lib/seedance/bin/seedancectl "$DESTDIR$PREFIX/bin/"
    put 755 "$LIB/install-engine" <packaging/install_engine.sh
    put 644 "$LIB/cpu_stubs.py" <packaging/cpu_stubs.py
    put 644 "$LIB/constraints-cpu.txt" <packaging/constraints-cpu.txt
}

stage_files() {
    local unit
    for unit in seedanced.service seedanced.socket seedance.slice; do
        with_prefix "$unit" | put 644 "$UNITS/$unit"
    done
    put 644 "$SYSUSERS" <systemd/seedance.sysusers
    put 644 "$TMPFILES" <systemd/seedance.tmpfiles
    put 644 "$DOC/README.md" <README.md
    put 644 "$DOC/DESIGN.md" <DESIGN.md
    put 644 "$DOC/CHANGELOG.md" <CHANGELOG.md
    put 644 "$DOC/examples/acme.toml" <systemd/tenants.d/acme.toml
    put 644 "$DOC/examples/seedanced-cuda.conf" <systemd/seedanced-cuda.conf
    # What is there is the administrator's.
    [ -e "$DESTDIR/etc/seedance/seedanced.toml" ] || put 644 /etc/seedance/seedanced.toml <systemd/seedanced.toml
}

stage() {
    local python interpreter
    python=$(find_python)
    interpreter=${INTERPRETER:-$python}
    case $interpreter in
        /root/* | /home/*) die "user seedance cannot reach $interpreter; name another with SYSTEM_PYTHON=/path" ;;
    esac
    stage_packages "$python" "$interpreter"
    stage_files
}

# --- the system ---------------------------------------------------------------------------------------------------

need_root() { [ -n "$DESTDIR" ] || [ "$(id -u)" = 0 ] || die "run this as root, or below a folder of yours: DESTDIR=/path"; }

tell_system() {
    "$LIB/bin/python" -m compileall -q -j 0 "$LIB/lib" >/dev/null || true # a library may carry files of newer Pythons
    if command -v systemd-sysusers >/dev/null; then
        systemd-sysusers "$SYSUSERS"
        systemd-tmpfiles --create "$TMPFILES"
    else
        say "There is no systemd here: make user seedance and what $TMPFILES lists by hand."
    fi
    ! has_systemd || systemctl daemon-reload
}

next_steps() {
    cat <<TEXT
seedance $("$LIB/bin/seedanced" --version | sed 's/.* //') is installed; nothing has been started. Next:

  1. An engine:     $LIB/install-engine          (vLLM; not for kind = "synthetic")
  2. The model:     /etc/seedance/seedanced.toml, [engine] model
  3. A tenant:      cp $DOC/examples/acme.toml /etc/seedance/tenants.d/
                    seedancectl key new acme
  4. Check, start:  seedancectl check && systemctl enable --now seedanced
TEXT
    if has_systemd && systemctl --quiet is-active seedanced.service; then
        say "" "The running service is still the old version: systemctl restart seedanced"
    fi
}

uninstall() {
    if has_systemd; then
        systemctl --quiet disable --now seedanced.socket seedanced.service 2>/dev/null || true
        systemctl --quiet stop seedance.slice 2>/dev/null || true
    fi
    # After a crash the kernel still has the limits.
    [ -n "$DESTDIR" ] || ! "$LIB/bin/seedancectl" limits remove >/dev/null 2>&1 || true
    rm -rf "${DESTDIR:?}$LIB" "$DESTDIR$DOC"
    rm -f "$DESTDIR$PREFIX"/bin/{seedanced,seedancectl} "$DESTDIR$UNITS"/{seedanced.service,seedanced.socket,seedance.slice} \
        "$DESTDIR$SYSUSERS" "$DESTDIR$TMPFILES"
    ! has_systemd || systemctl daemon-reload
    if [ -n "${PURGE:-}" ]; then
        rm -rf "$DESTDIR/etc/seedance" "$DESTDIR/var/lib/seedance" "$DESTDIR/var/cache/seedance"
        say "seedance is gone, with its configuration; user and group seedance and group seedance-admin stay."
    else
        say "seedance is gone; configuration and keys stay in /etc/seedance and /var/lib/seedance (PURGE=1 removes them)."
    fi
}

case ${1:-} in
    stage) stage ;;
    install)
        need_root
        stage
        if [ -n "$DESTDIR" ]; then
            say "seedance lies below $DESTDIR. On its machine: systemd-sysusers, systemd-tmpfiles --create, systemctl daemon-reload."
        else
            tell_system
            next_steps
        fi
        ;;
    uninstall)
        need_root
        DESTDIR=${DESTDIR%/}
        uninstall
        ;;
    *) die "say what to do: packaging/install.sh stage|install|uninstall" ;;
esac
