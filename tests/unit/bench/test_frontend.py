from __future__ import annotations

import msgspec

from bench.frontend import Round, body_of, infer_entries, summary
from seedance.daemon.protocol.fm_messages import Infer


def round_of(us: float) -> Round:
    return Round(
        streams=64,
        tokens=1000,
        wall_s=2.0,
        last_first_token_s=0.1,
        tokens_per_event=1.0,
        client_cpu_us_per_token=1.0,
        cpu_us_per_token={"worker": us * 0.75, "host": us * 0.25},
    )


def test_ratios_are_formed_within_rounds() -> None:
    rounds = {
        "seedance": [round_of(20.0), round_of(40.0), round_of(30.0)],
        "seedance-fm": [round_of(10.0), round_of(20.0), round_of(30.0)],
        "vllm-python": [round_of(200.0), round_of(200.0), round_of(300.0)],
        "vllm-rust": [round_of(20.0), round_of(20.0), round_of(20.0)],
    }
    result = summary([{"streams": 64, "rounds": rounds}])
    assert result["cpu_us_per_token"] == {"64": 30.0}
    assert result["cpu_us_per_token_fm"] == {"64": 20.0}
    assert result["cpu_us_per_token_vllm_rust"] == {"64": 20.0}
    assert result["cpu_ratio_vllm_python"] == {"64": 0.1}
    assert result["cpu_ratio_vllm_rust"] == {"64": 1.5}
    assert result["cpu_ratio_fm_sse"] == {"64": 0.5}
    assert "cpu_ratio_fm_16_sse" not in result
    assert result["by_server"]["seedance"]["64"]["cpu_us_per_token"] == {"host": 7.5, "worker": 22.5}


def test_a_request_to_the_fm_door_says_what_one_to_the_http_door_says() -> None:
    made = infer_entries(body_of("Once", 128, stream=True))
    stream = b"\xa6stream" + msgspec.msgpack.encode(70_000)
    body = bytes([0x80 | made[0]]) + stream + made[1:]
    assert msgspec.msgpack.decode(body, type=Infer) == Infer(
        stream=70_000,
        model="bench",
        prompt="Once",
        sampling={"max_tokens": 128, "temperature": 0.8, "ignore_eos": True},
    )
