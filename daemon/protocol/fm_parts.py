"""Prompts in parts: an INFER with `more`, and what the PARTs behind it add to its prompt.

Text is UTF-8, and a character may be cut between two parts. Token ids are 32-bit big-endian numbers. Both go on with
the prompt that the INFER has, text also with the content of its last message; one that has none begins with the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from seedance.daemon.protocol.fm_messages import Infer, Modality, Part, encode_payload
from seedance.errors import LocalProtocolError

TOKEN_BYTES: Final = 4
_PART_OVERHEAD_BYTES: Final = 64
"""What a PART's payload has beside its data, at most."""


class Parts:
    """What has come of a prompt in parts: `take` each, then `whole` is the INFER that all of them make.

    `size_bytes` is what they hold.
    """

    __slots__ = ("_data", "_infer", "_modality", "_most_bytes", "is_complete")

    def __init__(self, infer: Infer, most_bytes: int) -> None:
        self._infer = infer
        self._most_bytes = most_bytes
        self._modality: Modality | None = None
        self._data = bytearray()
        self.is_complete = False

    @property
    def size_bytes(self) -> int:
        """Return how much is there."""
        return len(self._data)

    def take(self, part: Part) -> None:
        """Take the next part. Raises ValueError when it cannot be a part of this prompt."""
        if self._modality is None:
            self._modality = self._agreed(part.modality)
        elif part.modality is not self._modality:
            raise ValueError(f"cannot go on with a part of {part.modality}: the ones before are {self._modality}")
        if len(self._data) + len(part.data) > self._most_bytes:
            raise ValueError(f"cannot take more than {self._most_bytes} bytes of parts")
        self._data += part.data
        self.is_complete = not part.more

    def whole(self) -> Infer:
        """Return the request with all of its prompt. Raises ValueError when the parts make none."""
        infer = self._infer
        if self._modality is Modality.TOKENS:
            if len(self._data) % TOKEN_BYTES:
                raise ValueError(f"cannot read {len(self._data)} bytes as token ids, which take {TOKEN_BYTES} each")
            token_ids = [*(infer.token_ids or ()), *unpack_tokens(bytes(self._data))]
            return msgspec.structs.replace(infer, token_ids=token_ids, more=False)
        try:
            text = self._data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"cannot read the parts as UTF-8: {error}") from None
        if infer.messages is None:
            return msgspec.structs.replace(infer, prompt=(infer.prompt or "") + text, more=False)
        *before, last = infer.messages
        messages = [*before, {**last, "content": last["content"] + text}]
        return msgspec.structs.replace(infer, messages=messages, more=False)

    def _agreed(self, modality: Modality) -> Modality:
        """Return the modality of all parts, if the prompt can go on with it."""
        infer = self._infer
        if modality not in (Modality.TEXT, Modality.TOKENS):
            raise ValueError(f"cannot take {modality}: the model takes text")
        begun = infer.token_ids if modality is Modality.TEXT else (infer.prompt, infer.messages)
        if begun not in (None, (None, None)):
            raise ValueError(f"cannot go on with {modality}: the prompt began with something else")
        if infer.messages is not None and not (
            infer.messages and isinstance(infer.messages[-1].get("content", None), str)
        ):
            raise ValueError("cannot go on with the last message: its 'content' is no text")
        return modality


def in_parts(infer: Infer, payload_bytes: int) -> tuple[Infer, list[Part]]:
    """Return a request as an INFER and PARTs of at most so much payload; there are none if it fits as it is.

    Raises LocalProtocolError when what is no prompt is too long.
    """
    if len(encode_payload(infer)) <= payload_bytes:
        return infer, []
    head, modality, data = _taken_out(infer)
    if len(encode_payload(head)) > payload_bytes:
        raise LocalProtocolError(f"cannot ask in frames of {payload_bytes} bytes: the prompt's last part is not all")
    parts = [
        Part(stream=infer.stream, modality=modality, data=piece, more=True)
        for piece in _pieces(data, payload_bytes - _PART_OVERHEAD_BYTES)
    ]
    parts[-1] = msgspec.structs.replace(parts[-1], more=False)
    return head, parts


def _taken_out(infer: Infer) -> tuple[Infer, Modality, bytes]:
    """Return a request without what may follow in parts, and that."""
    if infer.token_ids is not None:
        return msgspec.structs.replace(infer, token_ids=None, more=True), Modality.TOKENS, pack_tokens(infer.token_ids)
    if infer.messages:
        *before, last = infer.messages
        content: Any = last.get("content", None)
        if not isinstance(content, str):
            raise LocalProtocolError("cannot cut the last message into parts: its 'content' is no text")
        messages = [*before, {**last, "content": ""}]
        return msgspec.structs.replace(infer, messages=messages, more=True), Modality.TEXT, content.encode()
    return msgspec.structs.replace(infer, prompt=None, more=True), Modality.TEXT, (infer.prompt or "").encode()


def pack_tokens(token_ids: list[int]) -> bytes:
    """Return token ids as a part holds them."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def unpack_tokens(data: bytes) -> list[int]:
    """Return the token ids of parts."""
    return list(struct.unpack(f">{len(data) // TOKEN_BYTES}I", data))


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data) or 1, size):
        yield data[at : at + size]
