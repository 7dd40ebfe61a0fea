#!/usr/bin/env bash
# Makes seedance_*.deb for Debian and Ubuntu releases with this Python: packaging/deb.sh
#
# It holds seedance and its requirements in /usr/lib/seedance, as `make install PREFIX=/usr` would, so it is for one minor
# version of Python: that of SYSTEM_PYTHON, else of this system. The engine (gigabytes) is no part of it.
#
#   SYSTEM_PYTHON, WHEEL, WHEELHOUSE, PIP_PYTHON   as for packaging/install.sh
#   OUT                                            where it is put; dist
#   DEBFULLNAME, DEBEMAIL                          who made it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

die() { printf 'cannot make the package: %s\n' "$*" >&2; exit 1; }
command -v dpkg-deb >/dev/null || die "there is no dpkg-deb; install it with: apt-get install dpkg"

python=${SYSTEM_PYTHON:-/usr/bin/python3}
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
next=${minor%.*}.$((${minor#*.} + 1))
OUT=${OUT:-dist}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
TREE=$SCRATCH/tree
DOC=$TREE/usr/share/doc/seedance
mkdir -p "$TREE/DEBIAN"

DESTDIR=$TREE PREFIX=/usr SYSTEM_PYTHON=$python INTERPRETER=/usr/bin/python$minor packaging/install.sh stage

info=$(compgen -G "$TREE/usr/lib/seedance/lib/python$minor/site-packages/seedance-*.dist-info/METADATA")
# A pre-release comes before its release in Debian's order too.
version=$(sed -nE 's/^Version: //p' "$info" | sed -E 's/(a|b|rc|\.dev)([0-9])/~\1\2/')+py${minor/./}
architecture=$(dpkg --print-architecture)

gzip -9n <"$DOC/CHANGELOG.md" >"$DOC/changelog.gz"
rm "$DOC/CHANGELOG.md"
cat >"$DOC/copyright" <<'TEXT'
Upstream-Name: seedance
Comment: The licences of the libraries in /usr/lib/seedance are in their *.dist-info folders there.

Files: *
Copyright: the authors of seedance
License: Apache-2.0
 On Debian systems, the text of the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0.
TEXT

# python3 itself and not only pythonX.Y, so that a release upgrade does not leave a Python without its library behind.
cat >"$TREE/DEBIAN/control" <<TEXT
Package: seedance
Version: $version
Architecture: $architecture
Maintainer: ${DEBFULLNAME:-seedance} <${DEBEMAIL:-root@localhost}>
Section: net
Priority: optional
Depends: python3 (>= $minor), python3 (<< $next), libbpf1, systemd (>= 252)
Recommends: python3-pip
Suggests: bpftool, iproute2
Installed-Size: $(du -sk --exclude=DEBIAN "$TREE" | cut -f1)
Description: LLM token streams for many tenants of one GPU machine
 seedanced serves a language model to many tenants of one machine: OpenAI's HTTP
 API and JSON over WebSocket, from a local vLLM engine. The kernel keeps every
 tenant within its quota: CPU and memory by control groups, network by eBPF.
 .
 The engine is not in this package; /usr/lib/seedance/install-engine gets it.
TEXT
echo /etc/seedance/seedanced.toml >"$TREE/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "packaging/deb/$script" "$TREE/DEBIAN/$script"
done
(cd "$TREE" && find . -path ./DEBIAN -prune -o -path ./etc -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) \
    >"$TREE/DEBIAN/md5sums"

# With the time of the last change, the same source makes the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
find "$TREE" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
mkdir -p "$OUT"
dpkg-deb --root-owner-group -Zzstd --build "$TREE" "$OUT/seedance_${version}_$architecture.deb" >/dev/null
echo "$OUT/seedance_${version}_$architecture.deb"
