"""The vectors that ship with the protocol, and what they say in terms of our types."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any, Final

import msgspec

from seedance.daemon.protocol.fm_frame import frame, split_message
from seedance.daemon.protocol.fm_messages import KINDS, Message, decode_payload, encode_payload, is_numbered

_TYPES: Final = {kind.name: cls for cls, kind in KINDS.items()}
_HEX: Final = frozenset(("data", "opaque"))


def load(name: str) -> dict[str, Any]:
    """Return a file of vectors, as a client library finds it in the package."""
    path = importlib.resources.files("seedance.daemon.protocol").joinpath("vectors", name)
    vectors: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return vectors


def cases(name: str) -> list[dict[str, Any]]:
    """Return the cases of a file."""
    found: list[dict[str, Any]] = load(name)["cases"]
    return found


def described(frame_fields: dict[str, Any]) -> tuple[int, Message]:
    """Return the frame that a vector describes."""
    fields: dict[str, Any] = {
        name: bytes.fromhex(value) if name in _HEX else value for name, value in frame_fields.items()
    }
    seq_id, kind = fields.pop("seq_id"), fields.pop("kind")
    message: Message = msgspec.convert(fields, _TYPES[kind], builtin_types=(bytes,))
    return seq_id, message


def read(data: bytes, payload_bytes: int) -> list[tuple[int, Message]]:
    """Return all frames of a WebSocket message; raises RemoteProtocolError."""
    return [(seq_id, decode_payload(data, start, end)) for seq_id, start, end in split_message(data, payload_bytes)]


def write(frames: list[tuple[int, Message]]) -> bytes:
    """Return frames as one WebSocket message."""
    return b"".join(frame(seq_id if is_numbered(message) else 0, encode_payload(message)) for seq_id, message in frames)
