from __future__ import annotations

import os
import tomllib

from bench.synthetic import Tables, kernel_bytes, parts, toml

MEMINFO = "MemTotal:       24000000 kB\nSlab:             100000 kB\nSReclaimable:      40000 kB\n"
SOCKSTAT = "sockets: used 16\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 25\nUDP: inuse 0 mem 3\n"


def test_the_kernels_part_is_slabs_and_tcp_buffers() -> None:
    assert kernel_bytes(MEMINFO, SOCKSTAT) == 100_000 * 1024 + 25 * os.sysconf("SC_PAGE_SIZE")


def test_parts_differ_by_one_at_most_and_are_the_whole() -> None:
    assert parts(10, 4) == [3, 3, 2, 2]
    assert sum(parts(100_000, 7)) == 100_000


def test_tables_are_toml() -> None:
    tables: Tables = {
        "listen": {"tcp": ["127.0.0.1:80"]},
        "engine.synthetic": {"tokens_per_s": 20, "tokenizer": "/a \\b"},
    }
    assert tomllib.loads(toml(tables)) == {
        "listen": {"tcp": ["127.0.0.1:80"]},
        "engine": {"synthetic": {"tokens_per_s": 20, "tokenizer": "/a \\b"}},
    }
