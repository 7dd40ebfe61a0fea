#!/usr/bin/env bash
# Installs the Autobahn WebSocket suite into a directory of its own: packaging/install_autobahn.sh DIR
#
# The suite runs on Python 2.7 alone, which current systems no longer have. It is unpacked, not installed, from the
# packages of the last Debian release with it (bullseye), from the mirror that this system's own apt is set to use.
# Nothing outside DIR changes, and no privilege is needed. Afterwards: DIR/wstest -m fuzzingclient -s SPEC.json
set -euo pipefail

DIR=$(realpath -m "${1:?usage: packaging/install_autobahn.sh DIR}")
RELEASE=bullseye
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
DEBS=(python2.7 python2.7-minimal python2.7-dev libpython2.7 libpython2.7-minimal libpython2.7-stdlib libpython2.7-dev
    libssl1.1 libffi7 libdb5.3)

die() { echo "cannot install the Autobahn suite: $*" >&2; exit 1; }

[ ! -x "$DIR/wstest" ] || exit 0
for tool in apt-get dpkg-deb python3 gcc; do
    command -v "$tool" >/dev/null || die "$tool is missing; a Debian system with gcc is needed"
done
[ -r "$KEYRING" ] || die "$KEYRING is missing (package debian-archive-keyring)"
[ "$(dpkg --print-architecture)" = amd64 ] || die "its packages are for amd64"

# The mirror stands in one of two formats: "URIs: ..." lines (deb822) or "deb [options] URI suite ..." lines.
mirror() {
    { cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } \
        | awk '/^(URIs:|deb )/ { for (i = 2; i <= NF; i++) if (!found && $i ~ /:\/.*\/debian\/?$/) { found = 1; print $i } }
               END { exit !found }'
}

apt_in_dir() {
    apt-get -q -o Dir::Etc::SourceList="$DIR/apt/sources.list" -o Dir::Etc::SourceParts=- \
        -o Dir::State::Lists="$DIR/apt/lists" -o Dir::State::Status="$DIR/apt/status" -o Dir::Cache="$DIR/apt/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Check-Valid-Until=false "$@"
}

unpack_python() {
    local uri
    uri=$(mirror) || die "no Debian mirror is named in /etc/apt"
    mkdir -p "$DIR"/apt/lists/partial "$DIR"/apt/cache/archives/partial "$DIR"/debs
    : >"$DIR/apt/status"
    echo "deb [signed-by=$KEYRING] $uri $RELEASE main" >"$DIR/apt/sources.list"
    apt_in_dir update
    (cd "$DIR/debs" && apt_in_dir download "${DEBS[@]}")
    for deb in "$DIR"/debs/*.deb; do dpkg-deb -x "$deb" "$DIR/root"; done
}

# The last virtualenv that still makes environments for 2.7 brings its own pip for it.
make_environment() {
    python3 -m venv "$DIR/maker"
    "$DIR/maker/bin/pip" -q --disable-pip-version-check install 'virtualenv==20.21.1'
    "$DIR/maker/bin/virtualenv" -q --no-download -p "$DIR/root/usr/bin/python2.7" "$DIR/python27"
}

# Versions are the last that support 2.7 and work with autobahn 0.10.9, which is the one that the suite needs.
install_suite() {
    local -a pip=("$DIR/python27/bin/pip" -q --disable-pip-version-check install)
    export CFLAGS="-I$DIR/root/usr/include/python2.7 -I$DIR/root/usr/include"
    "${pip[@]}" setuptools==44.0.0 wheel==0.36.2 incremental==16.10.1
    "${pip[@]}" six==1.16.0 zope.interface==4.6.0 txaio==2.1.0 jinja2==2.11.3 markupsafe==1.1.1 Werkzeug==1.0.1 \
        cryptography==3.3.2 pyOpenSSL==19.1.0 service_identity==18.1.0 unittest2==1.1.0
    "${pip[@]}" --no-build-isolation Twisted==19.10.0 klein==17.10.0
    "${pip[@]}" --no-deps autobahn==0.10.9 wsaccel autobahntestsuite==25.10.1
}

echo "installing the Autobahn suite into $DIR (half a minute) …" >&2
rm -rf "$DIR"
mkdir -p "$DIR"
LIBRARIES=$DIR/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$LIBRARIES
{ LD_LIBRARY_PATH='' unpack_python && make_environment && install_suite; } >"$DIR/install.log" 2>&1 \
    || { tail -n 20 "$DIR/install.log" >&2; die "the whole output is in $DIR/install.log"; }
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$LIBRARIES" "$DIR/python27/bin/wstest" >"$DIR/wstest"
chmod +x "$DIR/wstest"
