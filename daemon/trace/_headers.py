"""Kernel headers for BCC: it includes some in every program.

The tracing programs take nothing from them that differs between kernels, for offsets come from the running kernel's
BTF. So the headers of another kernel do where those of the running one are not to be had.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MODULES: Final = Path("/lib/modules")
BUILT_IN: Final = Path("/sys/kernel/kheaders.tar.xz")
"""Headers that the kernel itself holds (CONFIG_IKHEADERS)."""


class Headers(NamedTuple):
    """A release and its folders: what was made when it was built, and its sources, which may be the same folder."""

    release: str
    build: Path
    source: Path


def find(release: str, modules: Path = MODULES) -> Headers | None:
    """Return installed headers: of the release, or else of the newest one there; None without any."""
    found = {}
    for build in modules.glob("*/build"):
        source = build.with_name("source")
        if (build / "include/generated").is_dir():
            found[build.parent.name] = Headers(build.parent.name, build, source if source.is_dir() else build)
    return found.get(release) or max(found.values(), key=_age, default=None)


def merge(headers: Headers, folder: Path) -> None:
    """Fill a folder with links, so that it looks like one tree in which a kernel was built: BCC takes no other."""
    _link(folder / "include", headers.source / "include", headers.build / "include")
    for built in headers.build.glob("arch/*/include"):
        inside = built.relative_to(headers.build)
        _link(folder / inside, headers.source / inside, built)


def _link(folder: Path, *sources: Path) -> None:
    """Link what is in several folders into one; of what has the same name, the last."""
    folder.mkdir(parents=True)
    for name, path in {path.name: path for source in sources for path in source.iterdir()}.items():
        os.symlink(path.resolve(), folder / name)


def _age(headers: Headers) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", headers.release)]
