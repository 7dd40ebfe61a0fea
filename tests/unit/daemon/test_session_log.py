"""What is kept for clients that left: whose it is, how long, and how much."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from seedance.daemon.protocol.fm_messages import Hello
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.session_log import NEVER, REMEMBERED, Absent, Kept, SessionLog

KEY = b"k" * 32


class Item:
    def __init__(self, held_bytes: int = 10, oldest_seq: int = 1) -> None:
        self.held_bytes = held_bytes
        self.oldest_seq = oldest_seq


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def log(key: bytes = KEY, *, resume_for_s: float = 10.0, bound_bytes: int = 1000) -> SessionLog[Item]:
    count = numbers()
    return SessionLog(key, resume_for_s, bound_bytes, lambda size: next(count).to_bytes(size, "big"))


def add(log: SessionLog[Item], held_bytes: int = 10, oldest_seq: int = 1) -> Kept[Item]:
    return log.add("client", lambda name, token: Item(held_bytes, oldest_seq))


def test_a_client_finds_what_is_its() -> None:
    kept_log = log()
    kept = add(kept_log)
    assert kept_log.find(kept.token, "client", 0.0) is kept
    assert kept_log.find_by_name(kept.name, 0.0) is kept
    assert base64.urlsafe_b64decode(kept.name + "==") == (1).to_bytes(16, "big")


def test_a_token_is_of_one_tenant_and_one_client() -> None:
    ours, theirs = log(), log(b"j" * 32)
    kept, other = add(ours), add(theirs)
    assert kept.name == other.name
    assert kept.token != other.token
    for token, client in ((other.token, "client"), (kept.token, "another"), (kept.token[:-1], "client")):
        absent = ours.find(token, client, 0.0)
        assert absent == Absent("not_found")
        assert isinstance(absent, Absent)
        assert absent.is_suspicious


@pytest.mark.parametrize("token", ["", ".", "é.\udc80", "x" * 256, "AAAAAAAAAAAAAAAAAAAAAQ", "AAAAAAAAAAAAAAAAAAAAAQ."])
def test_tokens_that_are_none(token: str) -> None:
    kept_log = log()
    add(kept_log)
    assert kept_log.find(token, "client", 0.0) == Absent("not_found")


def test_a_token_outlives_the_log_but_not_what_it_stood_for() -> None:
    token = add(log()).token
    absent = log().find(token, "client", 0.0)
    assert absent == Absent("gone")
    assert isinstance(absent, Absent)
    assert not absent.is_suspicious


def test_what_was_left_is_kept_for_its_time() -> None:
    kept_log = log()
    kept = add(kept_log, oldest_seq=7)
    assert kept_log.next_expiry() == NEVER
    kept_log.left(kept, 100.0)
    kept_log.left(kept, 105.0)
    assert kept_log.next_expiry() == 110.0
    assert kept_log.find(kept.token, "client", 109.0) is kept
    assert kept_log.expire(109.0) == []
    assert kept_log.find(kept.token, "client", 111.0) == Absent("gone", 7)
    assert kept_log.expire(111.0) == [kept]
    assert kept_log.expire(111.0) == []
    assert kept_log.find_by_name(kept.name, 111.0) == Absent("gone", 7)


def test_what_was_found_to_be_too_old_is_to_be_let_go_of_at_once() -> None:
    kept_log = log()
    kept = add(kept_log)
    kept_log.left(kept, 0.0)
    assert isinstance(kept_log.find(kept.token, "client", 1e6), Absent)
    assert kept_log.next_expiry() <= 1e6
    assert kept_log.expire(1e6) == [kept]
    assert kept_log.next_expiry() == NEVER


def test_who_returns_stays() -> None:
    kept_log = log()
    kept = add(kept_log)
    kept_log.left(kept, 0.0)
    kept_log.returned(kept)
    assert (kept_log.expire(1000.0), kept_log.next_expiry(), len(kept_log)) == ([], NEVER, 1)
    kept_log.left(kept, 1000.0)
    assert kept_log.next_expiry() == 1010.0


def test_without_room_the_one_left_longest_goes() -> None:
    kept_log = log(bound_bytes=100)
    there, first, second = add(kept_log, 40), add(kept_log, 40), add(kept_log, 40)
    kept_log.left(first, 1.0)
    kept_log.left(second, 2.0)
    assert kept_log.expire(3.0) == [first]
    assert kept_log.held_bytes() == 80
    there.item.held_bytes = 400
    assert kept_log.expire(3.0) == [second]
    assert kept_log.expire(3.0) == []  # who is there bounds itself
    assert kept_log.find(there.token, "client", 3.0) is there


def test_what_is_finished_is_kept_no_longer() -> None:
    kept_log = log()
    kept = add(kept_log)
    kept_log.left(kept, 0.0)
    kept_log.remove(kept)
    kept_log.left(kept, 1.0)
    assert (len(kept_log), kept_log.next_expiry()) == (0, NEVER)
    assert kept_log.find(kept.token, "client", 1.0) == Absent("gone")
    assert kept_log.find_by_name(kept.name, 1.0) == Absent("not_found")


def test_only_so_many_that_are_gone_are_remembered() -> None:
    kept_log = log()
    lost = [add(kept_log, oldest_seq=5) for _ in range(REMEMBERED + 1)]
    for kept in lost:
        kept_log.left(kept, 0.0)
    assert kept_log.expire(10.0) == lost
    assert kept_log.find(lost[0].token, "client", 10.0) == Absent("gone")
    assert kept_log.find(lost[1].token, "client", 10.0) == Absent("gone", 5)


def test_a_session_of_fm_is_kept() -> None:
    sessions: SessionLog[ServerSession] = SessionLog(KEY, 10.0, 1000, lambda size: b"r" * size)
    kept = sessions.add("c", lambda name, token: ServerSession(name, token, 10_000))
    kept.item.connect(Hello(client_id="c"), 0.0)
    kept.item.receive_eof()
    sessions.left(kept, 0.0)
    assert (kept.item.held_bytes, kept.item.oldest_seq) == (0, 1)
    assert sessions.find(kept.item.resume_token, "c", 9.0) is kept
