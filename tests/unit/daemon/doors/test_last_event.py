from __future__ import annotations

import pytest

from seedance.daemon.doors import last_event
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.last_event import LastEvent

TOKEN = "AbC-_09.xY-_"


def test_the_id_of_an_event() -> None:
    assert last_event.parse(f"{TOKEN}:12") == LastEvent(TOKEN, 12)
    assert last_event.id_prefix(TOKEN) + b"12" == b"id: " + f"{TOKEN}:12".encode()


@pytest.mark.parametrize(
    "id", ["", ":1", "a", "a:", "a:-1", "a:1 ", "a:1, a:2", "a b:1", "é:1", "a:1\n", "a:" + "9" * 19, "a" * 257 + ":1"]
)
def test_what_is_none(id: str) -> None:
    with pytest.raises(ApiError, match=r"^cannot go on") as caught:
        last_event.parse(id)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "Last-Event-ID")


@pytest.mark.parametrize(
    ("name", "id", "seq"),
    [(TOKEN, None, 0), (f"{TOKEN}:7", None, 7), (f"{TOKEN}:7", f"{TOKEN}:9", 9), (TOKEN, f"{TOKEN}:9", 9)],
)
def test_the_path_or_what_a_browser_has_seen_since(name: str, id: str | None, seq: int) -> None:
    assert last_event.of_path(name, id) == LastEvent(TOKEN, seq)


@pytest.mark.parametrize(
    ("name", "id", "code"),
    [
        ("", None, "not_found"),
        ("a b", None, "not_found"),
        (TOKEN, "x", "invalid_request"),
        (TOKEN, "a:1", "invalid_request"),
    ],
)
def test_paths_that_lead_nowhere(name: str, id: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        last_event.of_path(name, id)
    assert caught.value.code == code
