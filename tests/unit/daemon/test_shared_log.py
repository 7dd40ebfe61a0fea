"""The bytes of a log, cut anywhere: what was appended before is there, and nothing that was not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedance.daemon import shared_log
from seedance.daemon.shared_log import HALF_BYTES, LOG_BYTES, SharedLog
from seedance.errors import EngineError

HALVES = (4096, 4096 + HALF_BYTES)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = shared_log.create("test")
    yield fd
    os.close(fd)


def opened(fd: int, half_bytes: int = HALF_BYTES) -> SharedLog:
    return SharedLog(os.dup(fd), half_bytes)


def entries(fd: int) -> list[bytes]:
    log = opened(fd)
    try:
        return log.read()
    finally:
        log.close()


def test_what_was_appended_is_read_by_the_next(fd: int) -> None:
    log = opened(fd)
    assert (log.read(), log.append(b"too early")) == ([], False)
    assert log.replace([b"first", b"x" * 100_000])
    assert log.append(b"second")
    log.set_count(7)
    log.close()
    log.close()
    assert shared_log.count(fd) == 7
    successor = opened(fd)
    assert successor.read() == [b"first", b"x" * 100_000, b"second"]
    assert successor.append(b"third")
    successor.close()
    assert entries(fd)[-2:] == [b"second", b"third"]


def test_a_full_half_is_replaced_by_what_is_true_now(fd: int) -> None:
    log = opened(fd, 64 << 10)
    assert log.replace([])
    appended = 0
    while log.append(b"entry"):
        appended += 1
    assert appended > 1000
    assert log.used_bytes <= 64 << 10
    for generation in range(5):
        assert log.replace([b"all", b"of it %d" % generation])
        assert log.append(b"and more")
        assert entries(fd) == [b"all", b"of it %d" % generation, b"and more"]
    assert not log.replace([b"x" * 30_000] * 3)
    assert entries(fd)[0] == b"all"
    log.clear()
    assert (entries(fd), log.append(b"x")) == ([], False)
    log.close()


def test_a_half_that_has_no_use_takes_no_memory(fd: int) -> None:
    log = opened(fd)
    assert log.replace([b"x" * (1 << 20)] * 8)
    used_blocks = os.fstat(fd).st_blocks
    assert log.replace([b"little"])
    assert os.fstat(fd).st_blocks < used_blocks / 8
    log.close()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8),
    st.data(),
)
def test_a_write_that_was_cut_off_anywhere_leaves_all_before_it(appended: list[bytes], data: st.DataObject) -> None:
    """An entry goes in before its length; so does the whole of a half before its header."""
    fd = shared_log.create("test")
    try:
        log = opened(fd)
        assert log.replace(appended[:1])
        sizes = [log.used_bytes]
        for entry in appended[1:]:
            assert log.append(entry)
            sizes.append(log.used_bytes)
        log.close()
        start = HALVES[1] + 64
        cut = data.draw(st.integers(0, sizes[-1]))
        os.pwrite(fd, bytes(sizes[-1] - cut), start + cut)
        left = entries(fd)
        assert left == appended[: len(left)]
        whole = sum(size <= cut for size in sizes)
        assert len(left) in (whole, whole + 1)  # an entry may end in zeros
        successor = opened(fd)
        successor.read()
        assert successor.append(b"more")
        successor.close()
        assert entries(fd) == [*left, b"more"]
    finally:
        os.close(fd)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 11), st.binary(min_size=1, max_size=12))
def test_a_half_counts_once_its_header_is_whole(at: int, junk: bytes) -> None:
    fd = shared_log.create("test")
    try:
        log = opened(fd)
        assert log.replace([b"old"])
        before = os.pread(fd, 100, HALVES[1])
        assert log.replace([b"new"])
        log.close()
        os.pwrite(fd, before, HALVES[1])  # as it was before the old half was given back
        assert entries(fd) == [b"new"]
        header = bytearray(os.pread(fd, 12, HALVES[0]))
        header[at : at + len(junk)] = junk[: 12 - at]
        is_whole = bytes(header) == os.pread(fd, 12, HALVES[0])
        os.pwrite(fd, header, HALVES[0])
        assert entries(fd) == ([b"new"] if is_whole else [b"old"])
    finally:
        os.close(fd)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_junk_is_no_entry_and_no_error(junk: bytes, at: int) -> None:
    fd = shared_log.create("test")
    try:
        log = opened(fd)
        assert log.replace([b"one", b"two", b"three"])
        log.close()
        os.pwrite(fd, junk, HALVES[1] + at)
        known = [b"one", b"two", b"three"]
        assert all(entry in known for entry in entries(fd))
    finally:
        os.close(fd)


def test_what_is_no_log_of_ours_is_refused(fd: int) -> None:
    os.pwrite(fd, b"another", 0)
    with pytest.raises(EngineError, match="another version"):
        opened(fd)
    assert shared_log.count(fd) == 0
    with open("/dev/null", "rb") as file:
        with pytest.raises(EngineError, match=str(LOG_BYTES)):
            SharedLog(os.dup(file.fileno()))
        assert shared_log.count(file.fileno()) == 0


def test_nobody_can_change_its_size(fd: int) -> None:
    for size in (0, 2 * LOG_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
