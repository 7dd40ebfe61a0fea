"""Frames that lie still."""

from __future__ import annotations

import array
import ctypes

from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.ring.frame_store import CHUNK_BYTES, FrameStore, StoredFrames

FRAMES = st.lists(st.binary(min_size=1, max_size=300) | st.integers(1, 2 * CHUNK_BYTES).map(bytes), max_size=20)


def stored(frames: list[bytes]) -> StoredFrames:
    store = FrameStore()
    addresses = array.array("L", map(store.add, frames))
    return StoredFrames(memoryview(addresses), memoryview(array.array("I", map(len, frames))), store)


@given(FRAMES)
def test_every_frame_stays_where_it_was_put(frames: list[bytes]) -> None:
    found = stored(frames)
    assert list(found.to(range(len(frames)))) == list(enumerate(frames))


def test_frames_are_put_side_by_side_until_a_chunk_is_full() -> None:
    store = FrameStore()
    first, second = store.add(b"a" * (CHUNK_BYTES - 2)), store.add(b"bc")
    assert second == first + CHUNK_BYTES - 2
    assert not first <= store.add(b"d") < first + CHUNK_BYTES
    assert ctypes.string_at(first, CHUNK_BYTES) == b"a" * (CHUNK_BYTES - 2) + b"bc"


def test_what_is_left_without_some_flows() -> None:
    found = stored([b"a", b"bb", b"ccc", b"dddd"])
    fds, left = found.without(memoryview(array.array("I", [3, 4, 5, 6])), {4, 6, 7})
    assert list(left.to(fds)) == [(3, b"a"), (5, b"ccc")]
    assert (fds.format, left.addresses.format, left.lengths.format) == ("I", "L", "I")
    assert left.store is found.store
