"""What a kept stream was asked for with."""

from __future__ import annotations

import pytest

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.kept_request import MAX_KEY_CHARACTERS, RequestKey


def test_the_key_of_a_request() -> None:
    assert RequestKey.of("k", b"a") == RequestKey.of("k", b"a")
    assert RequestKey.of("k", b"a") != RequestKey.of("k", b"b")
    for key in ("", "k" * (MAX_KEY_CHARACTERS + 1)):
        with pytest.raises(ApiError, match=r"^cannot use an idempotency key") as caught:
            RequestKey.of(key, b"")
        assert caught.value.param == "idempotency_key"
