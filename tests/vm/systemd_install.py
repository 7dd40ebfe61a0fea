"""Install this checkout in a guest: its wheel, where `make install` puts it, and the tests beside it."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vm.run import BUILD, ROOT, Unavailable
from vm.systemd_guest import Agent, Ended
from vm.systemd_image import LIB, PYTHON, locked

GUEST_ROOT: Final = "/srv/seedance"
CARRIED: Final = ("tests", "bench", "bpf", "systemd", "packaging", "pyproject.toml", "Makefile", "README.md")
"""What of the checkout goes along: tests and what they read, but not the package, which is tested as installed."""

_SOURCES: Final = ("bpf", "daemon", "engine", "qos", "src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
_LEFT_BEHIND: Final = frozenset(("__pycache__", "seedance.egg-info"))
_KEPT_WHEELS: Final = 3
_PREFIX: Final = "/usr/local"


def install(agent: Agent, scratch: Path) -> None:
    """Install the wheel and carry the tests over; `scratch` is a folder that no other run uses."""
    stage = stage_install(find_wheel(BUILD / "wheels"), scratch / "stage")
    put(agent, "/", [(stage, "")])
    agent.check(["rm", "-rf", GUEST_ROOT])
    put(agent, GUEST_ROOT, [(ROOT / name, name) for name in CARRIED])
    for command in (
        ("systemd-sysusers", f"{_PREFIX}/lib/sysusers.d/seedance.conf"),
        ("systemd-tmpfiles", "--create", f"{_PREFIX}/lib/tmpfiles.d/seedance.conf"),
        ("systemctl", "daemon-reload"),
        ("python3", "-m", "compileall", "-q", "-j0", f"{LIB}/lib/python{PYTHON}/site-packages/seedance"),
        ("sync",),  # else the disk is written while something is measured
    ):
        agent.check(command)


def put(agent: Agent, target: str, sources: Iterable[tuple[Path, str]]) -> None:
    """Unpack files and folders below a folder of the guest, as root's."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for source, name in sources:
            if source.exists():
                tar.add(source, name or ".", filter=_as_roots)
    archive.seek(0)
    agent.check(["mkdir", "-p", target])
    output = io.BytesIO()
    command = ["tar", "-x", "--no-same-owner", "--keep-directory-symlink", "--no-overwrite-dir", "-C", target]
    if agent.run(command, stdin=archive, stdout=output):
        raise Ended(f"cannot unpack in the guest: {output.getvalue().decode(errors='replace')}")


def _as_roots(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in _LEFT_BEHIND:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


# --- on this side --------------------------------------------------------------------------------------------------


def source_digest(root: Path, names: Iterable[str]) -> str:
    """Return a digest of the files that a wheel is made of, by name and content."""
    digest = hashlib.sha256()
    for name in names:
        place = root / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and not _LEFT_BEHIND.intersection(path.relative_to(root).parts):
                digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_wheel(cache: Path) -> Path:
    """Return the wheel of this checkout, built by way of the sdist unless one of the same sources is there."""
    folder = cache / source_digest(ROOT, _SOURCES)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(BUILD / "lock"):
        if not folder.exists():
            build_wheel(folder)
            for old in sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT_WHEELS]:
                shutil.rmtree(old)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_wheel(target: Path) -> None:
    if not any((ROOT / "bpf").glob("*.bpf.o")):
        raise Unavailable("the BPF programs are not built (make bpf)")
    staging = target.with_name("building")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    command = [sys.executable, "-m", "build", "--outdir", str(staging), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"cannot build the wheel: {(done.stdout + done.stderr).strip()[-2000:]}")
    staging.rename(target)


def stage_install(wheel: Path, target: Path) -> Path:
    """Lay out what `make install` installs, without what the wheel requires: the image has that already.

    The script asks the guest's Python for its version and installs by its pip; the wheel is plain Python, so a
    stand-in answers the one and leaves the other to the Python that runs this.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    python = target.parent / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {{ echo {PYTHON}; exit 0; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {
        "DESTDIR": str(target),
        "PREFIX": _PREFIX,
        "SYSTEM_PYTHON": str(python),
        "INTERPRETER": f"/usr/bin/python{PYTHON}",
        "WHEEL": str(wheel),
        "PIP_PYTHON": sys.executable,
        "PIP_NO_DEPS": "1",
    }
    command = [str(ROOT / "packaging" / "install.sh"), "stage"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"cannot lay out the installation: {(done.stdout + done.stderr).strip()[-2000:]}")
    return target
