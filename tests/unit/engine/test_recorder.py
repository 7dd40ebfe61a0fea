"""What is recorded of requests: in order, whole lines, within the bytes granted."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from support.virtual_time import run_in_virtual_time

from seedance.engine.recorder import NAME, OLDER_NAME, Recorder, Recording, TraceFile
from seedance.engine.request import NOT_URGENT, Urgency
from seedance.engine.trace import Arrival, parse


def arrivals(lines: list[bytes]) -> list[Arrival]:
    return list(parse([b'{"format":"seedance-trace","version":1}', *lines], "t"))


def read(path: Path) -> list[Arrival]:
    with path.open("rb") as file:
        return list(parse(file, str(path)))


def test_lines_are_in_order_of_arrival_and_have_what_came_out() -> None:
    recording = Recording(100.0)
    long: list[int] = []
    recording.begun(7, "acme", 10, 500, NOT_URGENT, long, 100.5)
    recording.begun(8, "globex", 20, 30, Urgency(101.5, 0.25, 0.0125), [1, 2, 3], 101.0)
    recording.ended(8)
    recording.ended(99)
    assert recording.take() == []
    long += range(40)
    recording.ended(7)
    assert arrivals(recording.take()) == [
        Arrival(at_s=0.5, tenant="acme", prompt_tokens=10, output_tokens=40, max_tokens=500),
        Arrival(
            at_s=1.0,
            tenant="globex",
            prompt_tokens=20,
            output_tokens=3,
            max_tokens=30,
            rtt_s=0.25,
            rtt_variance_s=0.0125,
            deadline_s=0.5,
        ),
    ]
    assert not recording.is_pending


def test_a_key_may_be_used_again_and_a_deadline_that_has_passed_is_now() -> None:
    recording = Recording(0.0)
    for at_s in (1.0, 2.0):
        recording.begun(1, "acme", 10, 5, Urgency(1.5), [], at_s)
        recording.ended(1)
    assert [(a.at_s, a.deadline_s, a.output_tokens) for a in arrivals(recording.take())] == [
        (1.0, 0.5, 1),
        (2.0, 0.0, 1),
    ]


def test_a_long_stream_does_not_hold_up_more_than_so_many() -> None:
    recording = Recording(0.0, most_held=3)
    long = [1] * 5
    recording.begun(1, "long", 10, 1_000, NOT_URGENT, long, 0.0)
    for key in (2, 3):
        recording.begun(key, "short", 10, 5, NOT_URGENT, [1], float(key))
        recording.ended(key)
    assert recording.take() == []
    recording.begun(4, "short", 10, 5, NOT_URGENT, [1], 4.0)
    assert [(a.tenant, a.output_tokens) for a in arrivals(recording.take())] == [
        ("long", 5),
        ("short", 1),
        ("short", 1),
    ]
    recording.ended(1)
    assert recording.take() == []
    assert [a.at_s for a in arrivals(recording.take(everything=True))] == [4.0]


def test_what_a_long_stream_held_up_is_not_written_all_at_once(tmp_path: Path) -> None:
    recording = Recording(0.0)
    recording.begun(0, "long", 10, 1_000, NOT_URGENT, [1], 0.0)
    for key in range(1, 501):
        recording.begun(key, "short", 10, 5, NOT_URGENT, [1], float(key))
        recording.ended(key)
    recording.ended(0)
    assert [len(recording.take(200)) for _ in range(4)] == [200, 200, 101, 0]


def test_two_files_have_no_more_than_was_granted_and_the_latest(tmp_path: Path) -> None:
    granted = 4_000
    recording = Recording(0.0)
    file = TraceFile(str(tmp_path), granted)
    for key in range(200):
        recording.begun(key, "acme", 10, 5, NOT_URGENT, [1], float(key))
        recording.ended(key)
        file.write(recording.take())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= granted
    file.close()
    times = [a.at_s for name in (OLDER_NAME, NAME) for a in read(tmp_path / name)]
    assert times == [float(n) for n in range(200 - len(times), 200)]
    assert len(times) > 15


def test_a_start_keeps_the_trace_of_before(tmp_path: Path) -> None:
    for tenant in ("before", "after"):
        recording = Recording(0.0)
        recording.begun(1, tenant, 10, 5, NOT_URGENT, [1], 0.0)
        file = TraceFile(str(tmp_path), 1 << 20)
        file.write(recording.take(everything=True))
        file.close()
        file.close()
    assert [read(tmp_path / name)[0].tenant for name in (OLDER_NAME, NAME)] == ["before", "after"]


def test_what_is_recorded_is_written_within_a_second_or_two(tmp_path: Path) -> None:
    async def main() -> None:
        recorder = Recorder(str(tmp_path), 1 << 20, asyncio.get_running_loop())
        recorder.begun(1, "acme", 10, 5, NOT_URGENT, [1, 2])
        await asyncio.sleep(5)
        assert read(tmp_path / NAME) == []
        recorder.ended(1)
        await asyncio.sleep(1.5)
        assert [a.output_tokens for a in read(tmp_path / NAME)] == [2]
        recorder.begun(2, "acme", 10, 5, NOT_URGENT, [1])
        recorder.close()
        assert [a.at_s for a in read(tmp_path / NAME)] == [0.0, 6.5]
        recorder.ended(2)
        recorder.begun(3, "acme", 10, 5, NOT_URGENT, [1])
        recorder.close()

    run_in_virtual_time(main())


def test_a_folder_that_takes_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        recorder = Recorder(str(tmp_path / "none"), 1 << 20, asyncio.get_running_loop())
        recorder.begun(1, "acme", 10, 5, NOT_URGENT, [1])
        recorder.ended(1)
        await asyncio.sleep(5)
        recorder.close()

    run_in_virtual_time(main())
    assert [record.message.partition(":")[0] for record in caplog.records] == ["cannot record the trace any longer"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    recording = Recording(0.0)
    file = TraceFile(str(tmp_path), 1 << 20)
    for key in range(2):
        recording.begun(key, "acme", 10, 5, NOT_URGENT, [1], float(key))
        recording.ended(key)
    first, second = recording.take()
    file.write([first])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._fd)
    os.close(full)
    with pytest.raises(OSError) as caught:
        file.write([second])
    file.close()
    assert caught.value.errno == errno.ENOSPC
    assert [a.at_s for a in read(tmp_path / NAME)] == [0.0]
