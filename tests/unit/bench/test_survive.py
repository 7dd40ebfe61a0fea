from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from support.stall import Stall

from bench.survive import Found, summary
from bench.survive_clients import Kept, Resumes, journal_bytes
from bench.survive_engine import Sample, sample_of

SMAPS = """7f0000000000-7f0000400000 rw-s 00000000 00:01 77     /memfd:sessions-acme (deleted)
Size:               4096 kB
Rss:                  96 kB
Private_Dirty:        96 kB
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                 500 kB
7f0000500000-7f0000600000 rw-s 00400000 00:01 77     /memfd:sessions-acme (deleted)
Rss:                   4 kB
7f0000600000-7f0000700000 rw-s 00000000 00:01 78     /memfd:sessions-acme-2 (deleted)
Rss:                   8 kB
"""


def death(name: str, one_s: float, *, lost: int = 0, doubled: int = 0, frames_resent: int = 0) -> Sample:
    return Sample(name, 50, Stall(one_s / 2, one_s), lost, doubled, frames_resent)


def streams(**token_ids: list[int]) -> Any:
    came = defaultdict(list, {int(name[1:]): ids for name, ids in token_ids.items()})
    return SimpleNamespace(worker=SimpleNamespace(token_ids=came), stall=Stall(0.1, 0.2))


def test_stalls_are_medians_by_death_and_losses_are_counted() -> None:
    deaths = [death("standby", one_s, lost=lost) for one_s, lost in ((0.4, 0), (0.6, 2), (0.5, 0))]
    deaths += [death("worker", 1.0, frames_resent=3), death("worker", 1.0, doubled=1)]
    result = summary(Found(deaths))
    assert result["stall_s"] == {"standby": 0.5, "worker": 1.0}
    assert result["stall_s_quartiles"]["standby"] == [0.45, 0.55]
    assert result["first_stall_s"]["standby"] == 0.25
    assert result["frames_resent"] == {"worker": 1.5}
    assert (result["lost"], result["doubled"]) == (2, 1)
    assert result["streams"] == {"standby": 50, "worker": 50}


def test_what_was_not_run_is_no_figure() -> None:
    assert not {"stall_s", "resume_ms", "frames_resent", "bytes_per_stream", "absence"} & summary(Found()).keys()


def test_coming_back_and_what_is_kept_are_by_door_and_by_stream() -> None:
    found = Found(
        resumes=Resumes({"fm": [10.0, 20.0, 30.0], "sse": [5.0]}, [0, 3]), kept=Kept(200, 200_000, 40_000, 8000)
    )
    result = summary(found)
    assert result["resume_ms"] == {"fm": 20.0, "sse": 5.0}
    assert result["frames_resent"] == {"connection": 1.5}
    assert (result["bytes_per_stream"], result["journal_bytes_per_stream"], result["text_bytes_per_stream"]) == (
        1200,
        200,
        40,
    )


def test_a_journals_memory_is_that_of_all_its_mappings() -> None:
    assert journal_bytes(SMAPS, "acme") == 100 << 10


@pytest.mark.parametrize(("name", "lost", "doubled"), [("standby", 1, 1), ("cpu", 0, 0)])
def test_longer_streams_are_compared_as_far_as_both_go(name: str, lost: int, doubled: int) -> None:
    sample = sample_of(name, streams(s0=[1, 2, 3], s1=[5, 6, 7, 8]), {0: [1, 2, 3, 4], 1: [5, 6, 7]})
    assert (sample.lost, sample.doubled, sample.streams) == (lost, doubled, 2)


def test_what_never_came_is_lost() -> None:
    assert sample_of("cpu", streams(s0=[1, 9]), {0: [1, 2, 3]}).lost == 1
