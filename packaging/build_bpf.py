"""Build the BPF objects: `python packaging/build_bpf.py` makes a `<name>.bpf.o` of each `<name>.bpf.c`, beside it.

The folders are `bpf`, whose objects are in the wheel, and `tests/bpf`, for programs that only tests load.

It needs no root, no libbpf headers and no kernel headers of the system: compiler and `linux/bpf.h` are those of the
package `ziglang`, so the objects are the same on every machine. With CLANG=clang that compiler takes its place, with
the system's headers. A digest over sources, compiler and flags, kept beside the objects, tells what is up to date.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BPF: Final = ROOT / "bpf"
FOLDERS: Final = (BPF, ROOT / "tests" / "bpf")
STAMP: Final = ROOT / "build" / "bpf.digest"

# v3 (32-bit jumps, atomics with a result) is what the floor kernel, 6.1, takes; v4 needs 6.6.
FLAGS: Final = (
    "-mcpu=v3", "-O2", "-g", "-c", "-std=gnu11", "-fno-stack-protector", "-fno-sanitize=undefined", "-ffreestanding",
    "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-unused-variable",
)  # fmt: skip


def compiler() -> tuple[list[str], str]:
    """Return the command that compiles, and what names its version."""
    machine = platform.machine()
    if clang := os.environ.get("CLANG"):
        where = shutil.which(clang)
        if where is None:
            sys.exit(f"build_bpf: cannot find CLANG='{clang}'; without the variable the package ziglang is used")
        version = subprocess.run([where, "--version"], check=True, capture_output=True, text=True).stdout
        return [where, "-target", "bpfel", "-idirafter", f"/usr/include/{machine}-linux-gnu"], version
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        sys.exit("build_bpf: cannot find a compiler: `pip install ziglang`, or name a clang with CLANG=clang")
    zig = Path(spec.origin).parent
    headers = zig / "lib" / "libc" / "include"
    architecture = {"x86_64": "x86"}.get(machine, machine)
    # `libc/include` is zig's copy of the kernel's own headers for user space.
    include = [f"-isystem{headers / folder}" for folder in (f"{architecture}-linux-any", "any-linux-any")]
    version = subprocess.run([zig / "zig", "version"], check=True, capture_output=True, text=True).stdout
    return [str(zig / "zig"), "cc", "-target", "bpfel-freestanding-none", *include], version


def sources() -> list[Path]:
    """Return the sources, one for each object."""
    return sorted(path for folder in FOLDERS for path in folder.glob("*.bpf.c"))


def digest(version: str) -> str:
    """Digest everything that shapes the objects."""
    state = hashlib.sha256(repr((version, FLAGS, platform.machine())).encode())
    for path in sorted([*sources(), *BPF.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def compile_object(command: list[str], source: Path, target: Path) -> bool:
    """Compile one object, and put it in place only when it is whole; return whether the compiler took it."""
    draft = target.with_suffix(f".{os.getpid()}.draft")
    define = {"x86_64": "x86", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    arguments = [*command, *FLAGS, f"-D__TARGET_ARCH_{define}", f"-I{BPF}", str(source), "-o", str(draft)]
    # Paths would get into the debug information, and with them the place where it was built.
    result = subprocess.run([*arguments, f"-ffile-prefix-map={ROOT}=."], check=False)
    if result.returncode:
        draft.unlink(missing_ok=True)
        return False
    draft.replace(target)
    return True


def stale(objects: list[Path], version: str) -> Iterator[str]:
    """Yield why the objects have to be built, if they have to be."""
    if not STAMP.exists() or STAMP.read_text() != digest(version):
        yield "sources or compiler changed"
    yield from (f"{path.name} is not there" for path in objects if not path.exists())


def main() -> None:
    """Build what is not up to date, and remove objects whose source is gone."""
    command, version = compiler()
    targets = {source: source.with_suffix(".o") for source in sources()}
    for orphan in {path for folder in FOLDERS for path in folder.glob("*.bpf.o")} - set(targets.values()):
        orphan.unlink()
    if not any(stale(list(targets.values()), version)):
        return
    if refused := [source.name for source, target in targets.items() if not compile_object(command, source, target)]:
        sys.exit(f"build_bpf: cannot compile {', '.join(refused)}")
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(digest(version))
    print(f"built {len(targets)} BPF objects", file=sys.stderr)


if __name__ == "__main__":
    main()
