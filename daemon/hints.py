"""What to try first: one command for each door, with a real key where there is one."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from seedance.daemon.config import Config
from seedance.daemon.sockets import first_tcp

KEYS_FILE: Final = "keys.env"
KEY_PREFIX: Final = "SEEDANCE_KEY_"


def read_keys(config_path: str) -> dict[str, str]:
    """Return the keys by tenant that `seedancectl init` left beside a configuration file; none where it did not."""
    try:
        lines = (Path(config_path).parent / KEYS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in lines if line.startswith(KEY_PREFIX))
    return {name.removeprefix(KEY_PREFIX).lower().replace("_", "-"): key.strip() for name, _, key in pairs}


def typed(command: str) -> str:
    """Return a command of ours as it can be typed: by its path where the shell would not find this installation's."""
    ours = Path(sys.executable).with_name(command)
    found = shutil.which(command)
    if not ours.exists() or (found is not None and Path(found).samefile(ours)):
        return command
    return shlex.quote(str(ours))


def text(config: Config, model: str, listeners: Sequence[str], command: str = "seedancectl") -> str:
    """Return three commands that work as they stand where the keys of the example are at hand.

    `command` is `seedancectl` as it can be typed.
    """
    key = next(iter(read_keys(config.path).values()), "YOUR_KEY")
    address = first_tcp(listeners)
    if address is not None:
        where, url = "", f"http://{address}"
    else:
        where, url = f" --unix-socket {shlex.quote(config.listen.unix or '')}", "http://localhost"
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64, "stream": True}
    ctl = f"{command} --config {shlex.quote(config.path)}"
    return "\n".join(
        (
            "",
            "seedance is ready. Try:",
            "",
            f"  curl -N{where} {url}/v1/chat/completions -H 'Authorization: Bearer {key}'"
            f" -H 'Content-Type: application/json' -d {shlex.quote(msgspec.json.encode(body).decode())}",
            f"  {ctl} chat 'Hello!'          # server-sent events",
            f"  {ctl} infer 'Once upon'      # JSON over WebSocket",
            "",
        )
    )
