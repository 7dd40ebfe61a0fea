"""What vLLM's messages look like, compared with others; what is said with them is in `test_vllm_connection`."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from seedance.engine import vllm_wire as wire
from seedance.engine.vllm_sampling import SamplingParams


class _Moved(msgspec.Struct, array_like=True):
    new_token_ids: list[int]
    request_id: str


class _Renamed(msgspec.Struct):
    presence_penalty: float = 0.0


class _Defaulted(SamplingParams):
    temperature: float = 0.7


def test_layout_differences_are_named() -> None:
    assert wire.layout_difference(wire.EngineCoreOutput, wire.EngineCoreOutput) is None
    assert wire.layout_difference(SamplingParams, SamplingParams) is None
    moved = wire.layout_difference(wire.EngineCoreOutput, _Moved)
    assert moved is not None
    assert moved.startswith("_Moved begins with ['new_token_ids', 'request_id'] instead of ['request_id'")
    assert wire.layout_difference(SamplingParams, _Renamed) == "_Renamed has no field 'frequency_penalty'"
    assert wire.layout_difference(SamplingParams, _Defaulted) == "_Defaulted.temperature defaults to 0.7 instead of 1.0"


def test_names_and_singles_are_what_the_other_end_reads() -> None:
    assert wire.parse_name("7.1099511627776") == (7, 1 << 40)
    pairs, serials = wire.pack_singles([((7, 1 << 40), 5), ((8, 2), 6)])
    assert memoryview(pairs).cast("I").tolist() == [7, 5, 8, 6]
    assert memoryview(serials).cast("Q").tolist() == [1 << 40, 2]


def test_the_fork_server_has_no_threads_of_ours() -> None:
    program = "import sys, seedance.engine.vllm_zygote; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "numpy's library of linear algebra starts threads, before their number is set"
