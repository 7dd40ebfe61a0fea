"""What a kept stream was asked for with."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from seedance.daemon.doors.errors import invalid

MAX_KEY_CHARACTERS: Final = 255


class RequestKey(msgspec.Struct, frozen=True):
    """A client's own name for a request: whoever sends the request again under it goes on with what it began."""

    key: str
    fingerprint: bytes

    @classmethod
    def of(cls, key: str, request: bytes) -> RequestKey:
        """Return the key of a request. Raises ApiError."""
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            message = f"cannot use an idempotency key of {len(key)} characters: it must have 1 to {MAX_KEY_CHARACTERS}"
            raise invalid(message, "idempotency_key")
        return cls(key, hashlib.sha256(request).digest())


class KeptRequest(msgspec.Struct, frozen=True):
    """What was asked, and what is in each event of the answer: another worker makes the same of it.

    `kind` is CHAT, COMPLETION or INFER.
    """

    kind: str
    body: bytes
    answer_id: str = ""
    created: int = 0


CHAT: Final = "chat"
COMPLETION: Final = "completion"
INFER: Final = "infer"
