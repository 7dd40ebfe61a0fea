"""Run tests in a machine of our own under QEMU: a processor without any extension, and a kernel of Debian's.

    PYTHONPATH=tests python -m vm.run [--kernel PACKAGE] [--cpu MODEL] [TEST...]

The guest is an initramfs of what is here: this interpreter with its standard library, the shared libraries that it
and the wheels use, the installed requirements of seedance and pytest, and the checkout. So what is tested are the very
wheels that users get, on a processor that may be older than any of ours. Nothing is installed: the kernel's package
is only unpacked, into the cache.

Exit status: pytest's own; 1 also when the kernel complained in its log; 77 when this machine cannot do it, with the
reason; 69 when the machine did not start or ended without a report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from vm.cpio import InitramfsWriter

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedance" / "vm"
BUILD: Final = ROOT / "build" / "vm"
GUEST_ROOT: Final = "/seedance"
GUEST_SITE: Final = "/site"

DEFAULT_TESTS: Final = ("tests/vm/guest", "tests/component/ring", "tests/unit/daemon/ring")
KERNELS: Final = ("linux-image-cloud-amd64", "linux-image-virtual")
"""The small kernel of Debian and that of Ubuntu; the first that apt knows is taken."""

OLDEST_KERNEL: Final = (6, 1)
DISTRIBUTIONS: Final = ("pytest", "hypothesis")
UNUSED: Final = frozenset(("huggingface-hub", "huggingface_hub"))
NOT_IN_GUEST: Final = frozenset(
    ("config", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test",
     "tests", "tkinter", "turtledemo")
)  # fmt: skip
TIMEOUT_S: Final = 420
MEMORY_MIB: Final = 1024

EX_UNAVAILABLE: Final = 69
EX_SKIP: Final = 77


class Unavailable(Exception):
    """This machine cannot run the guest; the text says why."""


def main() -> int:
    """Boot, test, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(DEFAULT_TESTS), metavar="TEST")
    parser.add_argument("--kernel", metavar="PACKAGE", help=f"a kernel's package; without it, of {', '.join(KERNELS)}")
    parser.add_argument("--cpu", default="qemu64", help="QEMU's processor model (default: the plainest)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    options = parser.parse_args()
    try:
        qemu = find_qemu()
        kernel = find_kernel(options.kernel)
    except Unavailable as exc:
        print(f"cannot run the virtual machine here: {exc}")
        return EX_SKIP
    BUILD.mkdir(parents=True, exist_ok=True)
    initramfs = BUILD / "initramfs.cpio"
    write_initramfs(initramfs, options.tests)
    began = time.monotonic()
    report = boot(qemu, kernel, initramfs, options.cpu, options.timeout)
    if report is None:
        console = (BUILD / "console.log").read_text(errors="replace").splitlines()
        print("cannot tell how the tests went: the machine ended without a report; its console's end:")
        print(*console[-15:], sep="\n")
        return EX_UNAVAILABLE
    print(f"guest: {report['seconds']:.1f} s up to pytest's start")
    print(f"kernel {report['kernel']}, processor {options.cpu}: {time.monotonic() - began:.1f} s with boot")
    for line in report["bad_log"]:
        print(f"the kernel's log has: {line}")
    return int(report["status"]) or int(bool(report["bad_log"]))


# --- what the machine is made of -----------------------------------------------------------------------------------


def find_qemu() -> str:
    if platform.machine() != "x86_64":
        raise Unavailable(f"the wheels of this machine are for {platform.machine()}, the guest is x86-64")
    if found := shutil.which("qemu-system-x86_64"):
        return found
    raise Unavailable("qemu-system-x86_64 is missing (Debian package qemu-system-x86)")


def find_kernel(wanted: str | None) -> Path:
    """Return a kernel image out of the cache, put there from its package if need be."""
    names = (wanted,) if wanted else KERNELS
    for name in names:
        if (cached := CACHE / "kernels" / name / "vmlinuz").exists():
            return cached
    with tempfile.TemporaryDirectory() as scratch:
        apt, complaint = private_apt(Path(scratch))
        for name in names:
            if package := resolve(name, apt):
                return unpack_kernel(name, package, apt, Path(scratch))
    raise Unavailable(f"apt knows none of these kernels: {', '.join(names)}{complaint}")


def private_apt(scratch: Path) -> tuple[list[str], str]:
    """Return apt options that use this system's sources and keys, and a package list of our own: no root needed.

    The second value is what apt complained of while it fetched the list: one source of several may be out of reach.
    """
    if not shutil.which("apt-get"):
        raise Unavailable("there is no apt-get to get a kernel's package with")
    for folder in ("lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    settings = {
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": os.environ.get("USER", "root"),
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    update = subprocess.run(["apt-get", *options, "-q", "update"], capture_output=True, text=True, check=False)
    return options, f"; apt-get update: {update.stderr.strip()[-200:]}" if update.returncode else ""


def resolve(name: str, apt: list[str]) -> str:
    """Return the package that holds the image: `name` itself, or what a meta-package of that name stands for."""
    shown = subprocess.run(["apt-cache", *apt, "depends", name], capture_output=True, text=True, check=False)
    if shown.returncode:
        return ""
    real = re.search(r"Depends: (linux-image-\d\S+)", shown.stdout)
    package = real[1] if real else name
    version = re.search(r"linux-image-(\d+)\.(\d+)", package)
    if version and (int(version[1]), int(version[2])) < OLDEST_KERNEL:
        raise Unavailable(f"the newest kernel here is {package}, and seedance needs 6.1")
    return package


def unpack_kernel(name: str, package: str, apt: list[str], scratch: Path) -> Path:
    got = subprocess.run(
        ["apt-get", *apt, "-q", "download", package], cwd=scratch, capture_output=True, text=True, check=False
    )
    debs = list(scratch.glob("*.deb"))
    if got.returncode or not debs:
        raise Unavailable(f"cannot download {package}: {got.stderr.strip()[-200:]}")
    subprocess.run(["dpkg-deb", "-x", str(debs[0]), "root"], cwd=scratch, check=True)
    (image,) = (scratch / "root" / "boot").glob("vmlinuz-*")
    target = CACHE / "kernels" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    shutil.copy(image, staging / "vmlinuz")
    (staging / "package").write_text(package + "\n")
    staging.rename(target)
    return target / "vmlinuz"


def write_initramfs(path: Path, tests: list[str]) -> None:
    """Write the guest's files: interpreter, libraries, installed packages, checkout."""
    interpreter = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    binaries = [interpreter, *stdlib.joinpath("lib-dynload").glob("*.so")]
    with InitramfsWriter(path) as out:
        for folder in ("/proc", "/sys", "/dev", "/tmp", "/run"):
            out.directory(folder)
        # The interpreter wants these two before anything is mounted: random numbers, and where to complain.
        out.device("/dev/urandom", 1, 9)
        out.device("/dev/console", 5, 1)
        init = Path(__file__).with_name("guest_init.py").read_text()
        out.data("/init", f"#!{interpreter}\n{init}".encode(), 0o755)
        out.data("/pytest.json", json.dumps(plan(tests)).encode())
        out.file(str(interpreter), interpreter)
        out.tree(str(stdlib), stdlib, NOT_IN_GUEST)
        for name in needed_distributions():
            for source, where in installed_files(name):
                out.file(f"{GUEST_SITE}/{where}", source)
                if ".so" in source.suffixes:
                    binaries.append(source)
        for library in shared_libraries(binaries):
            out.file(str(library), library)
        for folder in ("daemon", "bpf", "qos", "engine", "src", "tests"):
            out.tree(f"{GUEST_ROOT}/{folder}", ROOT / folder, frozenset(("__pycache__", "seedance.egg-info")))
        out.file(f"{GUEST_ROOT}/pyproject.toml", ROOT / "pyproject.toml")


def plan(tests: list[str]) -> dict[str, Any]:
    """Return what pytest is to do in the guest; the ring's epoll twin is Python alone, and slow under emulation."""
    return {
        "cwd": GUEST_ROOT,
        "arguments": ["-q", "-rs", "--durations=12", "-p", "no:cacheprovider", "--color=no", "-k", "not epoll", *tests],
        "environment": {"PYTHONPATH": f"{GUEST_ROOT}/src:{GUEST_SITE}", "SEEDANCE_GUEST": "1"},
    }


def needed_distributions() -> list[str]:
    """Return what seedance and the test runner require, and what that requires, as it is installed here.

    tokenizers names the hub's client for a method that the daemon never calls; it would bring half of what is there.
    """
    seen: dict[str, None] = {}
    waiting = [*runtime_requirements(), *DISTRIBUTIONS]
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen and requirement.name not in UNUSED:
            seen[requirement.name] = None
            waiting += metadata.requires(requirement.name) or []
    return list(seen)


def runtime_requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["dependencies"])


def installed_files(name: str) -> list[tuple[Path, str]]:
    """Return the files of a distribution, each with its place below the folder of them all.

    Those that set-up has compiled are among them, which no list has: to compile takes its time under emulation.
    """
    listed = [Path(file) for file in metadata.files(name) or [] if ".." not in file.parts]
    compiled = [compiled_of(file) for file in listed if file.suffix == ".py"]
    folder = Path(str(metadata.distribution(name).locate_file("")))
    return [(folder / file, str(file)) for file in [*listed, *compiled] if (folder / file).is_file()]


def compiled_of(source: Path) -> Path:
    return source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"


def shared_libraries(binaries: list[Path]) -> set[Path]:
    """Return the libraries that the loader would take, loader included, by their absolute paths."""
    listing = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    return {Path(found) for found in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listing, re.MULTILINE)}


# --- running it ----------------------------------------------------------------------------------------------------


def boot(qemu: str, kernel: Path, initramfs: Path, cpu: str, timeout_s: float) -> dict[str, Any] | None:
    """Run the machine until it switches itself off; return its report, or None when there is none."""
    result = BUILD / "report.json"
    result.unlink(missing_ok=True)
    command = [
        *(qemu, "-accel", "tcg,thread=multi", "-cpu", cpu, "-smp", "2", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 panic=-1 reboot=t mitigations=off norandmaps random.trust_cpu=on"),
        *("-serial", f"file:{BUILD / 'console.log'}", "-serial", "stdio", "-serial", f"file:{result}"),
    ]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"the machine took longer than {timeout_s:.0f} s")
        return None
    try:
        report: dict[str, Any] = json.loads(result.read_text())
    except (OSError, ValueError):
        return None
    return report


if __name__ == "__main__":
    sys.exit(main())
