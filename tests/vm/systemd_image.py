"""Build the guest with systemd: a Debian 13 root file system with a kernel of its backports, cached by content.

The machine's own apt says where a Debian archive is; mmdebstrap fills a tree from it, mke2fs makes that tree an image.
An initramfs of three files loads the one module that the kernel needs to find its disk. Python packages come as wheels
for the guest's interpreter, installed and compiled at once, since that takes minutes in the guest: what seedance
requires where `make install` would put it, beside that what the tests require.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from vm.cpio import InitramfsWriter
from vm.run import CACHE as GUESTS_CACHE
from vm.run import ROOT, Unavailable, private_apt

CACHE: Final = GUESTS_CACHE / "systemd"
HERE: Final = Path(__file__).resolve().parent

SUITE: Final = "trixie"
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PYTHON: Final = "3.13"
"""What the suite has as python3; the wheels are for it."""

GLIBC_MINOR: Final = 41
"""The suite's C library is 2.41: wheels for it and for older ones are taken."""

KERNEL: Final = f"linux-image-cloud-amd64/{SUITE}-backports"
PACKAGES: Final = (
    *("systemd", "systemd-sysv", "dbus", "kmod", "libbpf1", f"bpftool/{SUITE}-backports"),
    *("python3", "python3-pip", "iproute2", "iputils-ping", "procps", "psmisc", "curl", "libcap2-bin", "strace"),
    "busybox-static",
)
NO_INITRAMFS: Final = "tiny-initramfs"
"""The smallest package that satisfies the kernel's wish for a maker of initramfs images; it is never run."""

AS_ROOT: Final = ("sudo", "-n", "true")
MMDEBSTRAP: Final = (
    *("mmdebstrap", "--quiet", "--variant=minbase", "--format=null"),
    *("--aptopt=Acquire::Languages none", "--aptopt=APT::Install-Recommends false"),
    *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
    *("--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/etc/kernel/*.d/*"),
)
TEST_REQUIREMENTS: Final = ("pytest>=9,<10", "hypothesis>=6.140,<7", "h11>=0.16,<1", "websockets>=15,<18")
WHEELS: Final = "/opt/wheels"
TESTS_SITE: Final = "/opt/tests"
LIB: Final = "/usr/local/lib/seedance"
IMAGE_MIB: Final = 2048

UNUSED_UNITS: Final = (
    *("modprobe@configfs.service", "modprobe@drm.service", "modprobe@efi_pstore.service", "modprobe@fuse.service"),
    *("sys-kernel-config.mount", "sys-kernel-debug.mount", "kmod-static-nodes.service", "systemd-initctl.socket"),
    *("systemd-tmpfiles-setup-dev-early.service", "systemd-tmpfiles-setup-dev.service", "systemd-remount-fs.service"),
    *("systemd-update-done.service", "systemd-journal-flush.service", "systemd-sysext.socket", "systemd-creds.socket"),
    *("systemd-hostnamed.socket", "systemd-logind.service", "systemd-user-sessions.service"),
    *("getty@.service", "serial-getty@.service", "getty.target", "getty-static.service", "console-getty.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("systemd-tmpfiles-clean.timer", "e2scrub_reap.service", "systemd-update-utmp.service", "ldconfig.service"),
    *(
        "systemd-networkd.service",
        "systemd-networkd.socket",
        "systemd-pcrmachine.service",
        "systemd-hwdb-update.service",
    ),
    *("systemd-journal-catalog-update.service", "systemd-firstboot.service", "systemd-machine-id-commit.service"),
    *("systemd-random-seed.service", "systemd-boot-random-seed.service", "dev-hugepages.mount", "dev-mqueue.mount"),
    *("sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount", "proc-sys-fs-binfmt_misc.automount"),
    *("systemd-ask-password-console.path", "systemd-ask-password-wall.path", "systemd-sysusers.service"),
)


def find_image() -> Path:
    """Return the folder with `root.img`, `vmlinuz` and `initrd`, built if need be."""
    folder = CACHE / image_key()
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "lock"):
        if not folder.exists():
            say("building the image, once")
            build_image(folder)
        folder.touch()
    return folder


def image_key() -> str:
    """Return a digest of all that shapes the image, but for what the archives had when it was built."""
    parts = (
        *(*MMDEBSTRAP, *PACKAGES, KERNEL, NO_INITRAMFS, INITRAMFS_SCRIPT, finish_script(Path("/"))),
        *(text for item in overlay().items() for text in item),
        *(*requirements(), *TEST_REQUIREMENTS),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file: two that want the same image make it once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Tell the person at the terminal; output proper stays clean."""
    print(f"vm: {text}", file=sys.stderr, flush=True)


def requirements() -> list[str]:
    """Return what the wheel requires."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["dependencies"])


# --- where things come from ----------------------------------------------------------------------------------------


def debian_sources(listing: str) -> list[str]:
    """Return apt source lines of the guest's suites, for each archive of `apt-get indextargets` lines that is Debian's.

    A line is `uri|origin|label`; Debian's security archive has a label of its own.
    """
    uris = dict.fromkeys(
        uri for uri, origin, label in (line.split("|") for line in listing.splitlines()) if origin == label == "Debian"
    )
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    return [f"deb {signed}{uri} {suite} main" for uri in uris for suite in (SUITE, f"{SUITE}-backports")]


def find_sources() -> list[str]:
    """Return source lines from what apt here is set up with; it knows whose an archive is once it has fetched lists."""
    if not shutil.which("apt-get"):
        raise Unavailable("there is no apt-get to say where a Debian archive is")
    if sources := debian_sources(index_targets([])):
        return sources
    with tempfile.TemporaryDirectory() as scratch:
        options, complaint = private_apt(Path(scratch))
        if sources := debian_sources(index_targets(options)):
            return sources
    raise Unavailable(f"apt here knows no Debian archive{complaint}")


def index_targets(options: list[str]) -> str:
    form = "$(REPO_URI)|$(ORIGIN)|$(LABEL)"
    command = ["apt-get", *options, "indextargets", "--format", form, "Created-By: Packages"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def download_wheels(folder: Path) -> None:
    """Fetch wheels for the guest's interpreter and C library."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "download"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "-d", str(folder)),
        *(word for platform in platforms for word in ("--platform", platform)),
        *requirements(),
        *TEST_REQUIREMENTS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"cannot download the guest's wheels: {done.stderr.strip()[-400:]}")


# --- making it -----------------------------------------------------------------------------------------------------


def build_image(target: Path) -> None:
    """Build the image next to `target` and move it there; of images that other sources shaped, the last one stays."""
    if not shutil.which("mmdebstrap"):
        raise Unavailable("mmdebstrap is missing (Debian package mmdebstrap)")
    if os.geteuid() and subprocess.run(AS_ROOT, capture_output=True, check=False).returncode:
        raise Unavailable("building its image needs root, or a sudo that asks nothing")
    sources = find_sources()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as name:
        staging = Path(name)
        download_wheels(staging / "wheels")
        write_overlay(staging / "overlay")
        (staging / "finish").write_text(finish_script(staging))
        (staging / "finish").chmod(0o755)
        result = staging / "result"
        result.mkdir()
        run_mmdebstrap(staging, sources)
        write_initramfs(result)
        old = [entry for entry in target.parent.iterdir() if re.fullmatch("[0-9a-f]{16}", entry.name)]
        result.rename(target)
    for entry in sorted(old, key=lambda entry: entry.stat().st_mtime)[:-1]:
        shutil.rmtree(entry)


def run_mmdebstrap(staging: Path, sources: Iterable[str]) -> None:
    command = [
        *(AS_ROOT[:-1] if os.geteuid() else ()),
        *MMDEBSTRAP,
        f"--include={','.join((*PACKAGES, KERNEL, NO_INITRAMFS))}",
        f"--customize-hook={staging / 'finish'}",
        *(SUITE, "/dev/null", *sources),
    ]
    with (staging / "build.log").open("w+") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            log.seek(0)
            raise Unavailable(f"mmdebstrap failed:\n{log.read()[-3000:]}")


def finish_script(staging: Path) -> str:
    """Return the shell script that makes a filled tree an image: mmdebstrap calls it with the tree."""
    pip = (
        f"python3 -m pip --disable-pip-version-check -q install --no-compile --no-index --find-links {WHEELS} --target"
    )
    site = f"{LIB}/lib/python{PYTHON}/site-packages"
    return f"""#!/bin/sh
set -eu
export PIP_ROOT_USER_ACTION=ignore
tree=$1
cp -r --no-preserve=ownership {staging}/overlay/. "$tree"
cp -r --no-preserve=ownership {staging}/wheels "$tree{WHEELS}"
chroot "$tree" systemctl --quiet mask {" ".join(UNUSED_UNITS)}
chroot "$tree" systemctl --quiet enable vm-agent.service
chroot "$tree" systemctl --quiet set-default multi-user.target
chroot "$tree" {pip} {site} {quoted(requirements())}
chroot "$tree" {pip} {TESTS_SITE} {quoted(TEST_REQUIREMENTS)}
rm -rf "$tree{site}/bin" "$tree{TESTS_SITE}/bin"
# A library may carry files of newer Pythons.
chroot "$tree" python3 -m compileall -q {site} {TESTS_SITE} /usr/lib/python{PYTHON} /usr/local/lib/vm >/dev/null || true
rm -rf "$tree/var/cache/apt" "$tree/var/lib/apt/lists" "$tree/boot"/initrd*
find "$tree/boot" "$tree/usr/lib/modules" -name 'vmlinuz*' -exec cp {{}} {staging}/result/vmlinuz \\; -exec rm {{}} \\;
find "$tree/usr/lib/modules" -name virtio_blk.ko.xz -exec cp {{}} {staging}/result/ \\;
cp "$tree/usr/bin/busybox" {staging}/result/busybox
chroot "$tree" dpkg-query -W >{staging}/result/packages
# mmdebstrap has /proc and /sys mounted in the tree; a bind mount leaves behind what is mounted below.
mkdir {staging}/tree
mount --bind "$tree" {staging}/tree
mke2fs -q -t ext4 -O ^has_journal -m 0 -E lazy_itable_init=1,root_owner=0:0 \\
    -d {staging}/tree {staging}/result/root.img {IMAGE_MIB}M
umount {staging}/tree
"""


def quoted(words: Iterable[str]) -> str:
    return " ".join(f"'{word}'" for word in words)


def write_initramfs(folder: Path) -> None:
    """Write an initramfs that loads the disk's driver and hands over to the image."""
    module, busybox = folder / "virtio_blk.ko.xz", folder / "busybox"
    with InitramfsWriter(folder / "initrd") as out:
        out.directory("/dev")
        out.directory("/root")
        out.device("/dev/console", 5, 1)
        out.file("/busybox", busybox)
        out.data("/virtio_blk.ko", lzma.decompress(module.read_bytes()))
        out.data("/init", INITRAMFS_SCRIPT.encode(), 0o755)
    module.unlink()
    busybox.unlink()


def overlay() -> dict[str, str]:
    """Return the files that are ours in the guest."""
    return {
        "usr/local/lib/vm/agent.py": (HERE / "agent.py").read_text(),
        "etc/systemd/system/vm-agent.service": AGENT_UNIT,
        "etc/systemd/journald.conf.d/vm.conf": "[Journal]\nStorage=volatile\nRateLimitBurst=0\n",
        "usr/local/lib/vm/keep-core": CORE_KEEPER,
        "etc/sysctl.d/vm.conf": "kernel.core_pattern=|/bin/sh /usr/local/lib/vm/keep-core %e %p\nfs.suid_dumpable=2\n",
        "etc/hostname": "guest\n",
        "etc/hosts": "127.0.0.1 localhost guest\n::1 localhost guest\n",
        "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
        "var/crash/.keep": "",
    }


def write_overlay(folder: Path) -> None:
    for name, text in overlay().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


INITRAMFS_SCRIPT: Final = """#!/busybox sh
/busybox mount -t devtmpfs none /dev
/busybox insmod /virtio_blk.ko
while [ ! -b /dev/vda ]; do /busybox usleep 10000; done
/busybox mount -t ext4 -o noatime /dev/vda /root
/busybox umount /dev
exec /busybox switch_root /root /usr/lib/systemd/systemd
"""

CORE_KEEPER: Final = "exec /usr/bin/head --bytes=64MiB >/var/crash/core.$1.$2\n"
"""Keeps core dumps, of processes too that see no writable folder or have changed their user."""

AGENT_UNIT: Final = """[Unit]
Description=Runs what the host asks for
After=multi-user.target

[Service]
ExecStart=/usr/bin/python3 /usr/local/lib/vm/agent.py
Restart=always
RestartSec=0
StartLimitIntervalSec=0
OOMScoreAdjust=-1000
KillMode=process

[Install]
WantedBy=multi-user.target
"""
