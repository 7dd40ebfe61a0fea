"""FM on a link that drops, doubles, reorders, delays and is cut: all is delivered once, in order, within bounds."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fm_link import Faults, Script, Simulation, check_run

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
