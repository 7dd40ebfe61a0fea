"""FM on a link that drops, doubles, reorders, delays and is cut: all is delivered once, in order, within bounds."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fm_invariants import IS_CLIENT, IS_LOSSY, SCORED, check_fm_input, pack
from support.fm_link import Faults, Script, Simulation, check_run

from seedance.daemon.protocol.fm_frame import frame
from seedance.daemon.protocol.fm_logprobs import encode_scored
from seedance.daemon.protocol.fm_messages import (
    Accept,
    Ack,
    Cancel,
    End,
    Error,
    Hello,
    Infer,
    Message,
    Modality,
    Nack,
    Note,
    Part,
    Ping,
    Pong,
    Tokens,
    Welcome,
    encode_payload,
    is_numbered,
)
from seedance.daemon.protocol.fm_session import Options

# No deadline per example: other work on the machine says nothing about the code.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
DELTAS = st.binary(min_size=1, max_size=40) | st.binary(min_size=100, max_size=3000)
SCRIPTS = st.builds(Script, st.lists(st.binary(max_size=200), max_size=20), st.lists(DELTAS, max_size=60))
DELAYS = st.sampled_from([(0.001, 0.001), (0.01, 0.05), (0.05, 0.4)])
FIRST_SEQS = st.sampled_from([1, 2**32 - 20, 5 * 2**32 - 1])  # the 32 bits on the wire begin again within a run
LOSSY = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.05, 0.3]),
    double=st.sampled_from([0.0, 0.1, 0.5]),
    delay_s=DELAYS,
    cut_s=st.sampled_from([0.0, 0.5, 5.0]),
    overtakes=st.just(True),
    first_seq=FIRST_SEQS,
)
CUT = st.builds(Faults, delay_s=DELAYS, cut_s=st.sampled_from([0.05, 0.5, 5.0]), first_seq=FIRST_SEQS)
WINDOWS = st.lists(st.tuples(st.floats(0, 5), st.sampled_from([0, 1, 5, 128])), max_size=6)


def simulate(scripts: list[Script], faults: Faults, seed: int, **bounds: int) -> Simulation:
    options = Options(lossless=faults.lossless, **bounds)
    return Simulation(scripts, faults, options, Random(seed))


@CALM
@given(st.lists(SCRIPTS, min_size=1, max_size=4), LOSSY, st.integers(0, 2**32))
def test_a_bad_link(scripts: list[Script], faults: Faults, seed: int) -> None:
    check_run(simulate(scripts, faults, seed))


@CALM
@given(st.lists(SCRIPTS, min_size=1, max_size=4), CUT, st.integers(0, 2**32))
def test_connections_that_are_cut(scripts: list[Script], faults: Faults, seed: int) -> None:
    """Within a connection nothing is lost, and there are neither NACKs nor probes."""
    check_run(simulate(scripts, faults, seed))


@CALM
@given(st.lists(SCRIPTS, min_size=1, max_size=4), LOSSY | CUT, st.integers(0, 2**32), WINDOWS)
def test_a_client_that_opens_and_shuts_its_window(
    scripts: list[Script], faults: Faults, seed: int, windows: list[tuple[float, int]]
) -> None:
    simulation = simulate(scripts, faults, seed)
    for delay_s, frames in [*windows, (6.0, 128)]:
        simulation.at(delay_s, lambda frames=frames: simulation.set_window(frames))  # type: ignore[misc]
    check_run(simulation)


@CALM
@given(st.lists(SCRIPTS, min_size=1, max_size=4), LOSSY | CUT, st.integers(0, 2**32), st.integers(2_000, 20_000))
def test_little_memory(scripts: list[Script], faults: Faults, seed: int, bound_bytes: int) -> None:
    check_run(simulate(scripts, faults, seed, bound_bytes=bound_bytes, ring_bytes=bound_bytes))


SEQS = st.integers(0, 6) | st.sampled_from([128, 129, 2**32 - 1, 2**32])
STREAMS = st.integers(1, 4)
RANGES = st.lists(st.tuples(SEQS, SEQS), min_size=1, max_size=3)
SCORED_DATA = st.builds(
    lambda text, count: encode_scored(text, [[SCORED]] * count, 4096)[0], st.text(max_size=20), st.integers(0, 3)
)
MESSAGES: dict[type[Any], st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, client_id=st.just("c"), epoch=st.integers(0, 2), last_seq=SEQS, window=st.integers(0, 128)),
    Welcome: st.builds(
        Welcome,
        session_id=st.just("s"),
        epoch=st.integers(1, 2),
        resume_token=st.just("t"),
        resume_for_ms=st.just(1),
        oldest_seq=SEQS,
        next_seq=SEQS,
        last_seq=SEQS,
        window=st.integers(0, 128),
    ),
    Infer: st.builds(Infer, stream=STREAMS, model=st.text(max_size=30), more=st.booleans()),
    Part: st.builds(Part, stream=STREAMS, modality=st.sampled_from(Modality), data=st.binary(max_size=1500)),
    Accept: st.builds(Accept, stream=STREAMS, id=st.just("i")),
    Tokens: st.builds(Tokens, STREAMS, st.integers(0, 2), st.binary(max_size=1500) | SCORED_DATA),
    End: st.builds(End, stream=STREAMS, finish_reason=st.just("stop")),
    Error: st.builds(
        Error, stream=st.integers(0, 4), code=st.sampled_from(["gone", "overloaded"]), message=st.just("m")
    ),
    Note: st.builds(Note, stream=st.integers(0, 4), note=st.just("n")),
    Cancel: st.builds(Cancel, stream=st.integers(0, 4)),
    Ack: st.builds(Ack, seq=SEQS, credit=st.integers(0, 128)),
    Nack: st.builds(Nack, ranges=RANGES),
    Ping: st.just(Ping(opaque=b"12345678")),
    Pong: st.just(Pong(opaque=b"\0" * 7 + b"\1")),
}


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Return what a peer sends that knows the frames, but not what they are for: mostly numbered as is right."""
    flags = draw(st.sampled_from([0, IS_CLIENT, IS_LOSSY, IS_CLIENT | IS_LOSSY]))
    opening = Hello(client_id="c") if not flags & IS_CLIENT else draw(st.just(WELCOME) | MESSAGES[Welcome])
    sent, seq = [frame(0, encode_payload(opening))], 0
    for message in draw(st.lists(st.one_of(*MESSAGES.values()), max_size=25)):
        numbered = is_numbered(message)
        seq += numbered
        number = seq + draw(st.sampled_from([0, 0, 0, 0, 1, 2, -1])) if numbered else 0
        sent.append(frame(number, encode_payload(message)))
    return pack(flags, sent)


WELCOME = Welcome(
    session_id="s", epoch=1, resume_token="t", resume_for_ms=1, oldest_seq=1, next_seq=1, last_seq=0, window=128
)


@CALM
@given(conversations())
def test_only_what_is_declared_comes_of_any_frames(data: bytes) -> None:
    check_fm_input(data)


@CALM
@given(conversations(), st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3)), max_size=4))
def test_only_what_is_declared_comes_of_any_bytes(data: bytes, damages: list[tuple[int, bytes, int]]) -> None:
    damaged = bytearray(data)
    for at, replacement, length in damages:
        damaged[at % len(data) : at % len(data) + length] = replacement
    check_fm_input(bytes(damaged))
