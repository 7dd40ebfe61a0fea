"""What `vllm-rs bench serve --save-result --save-detailed` reports, and what several of its clients saw together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from bench.processes import BenchError
from bench.report import percentile


class _Detailed(msgspec.Struct):
    """The fields of the program's report that are used (version 0.32.0); times are in seconds.

    `itls` has, for each request, the times between the events, those with an empty text too; `start_times` count from
    the run's begin.
    """

    num_prompts: int
    completed: int
    failed: int
    duration: float
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    start_times: list[float]


class ClientReport(msgspec.Struct, frozen=True):
    """One client's report; `began_s` is of the machine's clock, the others are lengths of time."""

    began_s: float
    duration_s: float
    tokens: int
    first_tokens_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    """When each event came, from `began_s` on."""


class Sample(msgspec.Struct, frozen=True):
    """What all clients of a run saw. `tokens_per_event` over 1: the server merged tokens into one event."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_median_ms: float
    ttft_p99_ms: float
    tokens_per_event: float


def parse_report(data: bytes, ended_s: float, tokens: int) -> ClientReport:
    """Read a report that was written at `ended_s`. Raises BenchError when an answer lacks any of its `tokens`."""
    try:
        detailed = msgspec.json.decode(data, type=_Detailed)
    except msgspec.DecodeError as exc:
        raise BenchError(f"cannot read the load client's report: {exc}") from exc
    if detailed.failed or detailed.completed != detailed.num_prompts:
        raise BenchError(f"cannot use the run: {detailed.completed} of {detailed.num_prompts} requests were answered")
    if wrong := {length for length in detailed.output_lens if length != tokens}:
        raise BenchError(f"cannot use the run: answers have {sorted(wrong)} tokens, not {tokens}")
    return ClientReport(
        began_s=ended_s - detailed.duration,
        duration_s=detailed.duration,
        tokens=sum(detailed.output_lens),
        first_tokens_s=tuple(detailed.ttfts),
        gaps_s=tuple(gap for gaps in detailed.itls for gap in gaps),
        arrivals_s=tuple(_arrivals(detailed)),
    )


def _arrivals(detailed: _Detailed) -> Iterator[float]:
    for start_s, first_s, gaps in zip(detailed.start_times, detailed.ttfts, detailed.itls, strict=True):
        at_s = start_s + first_s
        yield at_s
        for gap in gaps:
            at_s += gap
            yield at_s


def combined(reports: Sequence[ClientReport]) -> Sample:
    """Return what the clients saw together: the rate is that of the time in which all of them ran.

    Raises BenchError where there was no such time.
    """
    begin_s = max(report.began_s for report in reports)
    end_s = min(report.began_s + report.duration_s for report in reports)
    if end_s <= begin_s:
        raise BenchError("cannot use the run: there was no time in which all clients ran; give it more --waves")
    events = sum(len(report.arrivals_s) for report in reports)
    tokens_per_event = sum(report.tokens for report in reports) / events
    within = sum(begin_s <= report.began_s + at_s <= end_s for report in reports for at_s in report.arrivals_s)
    rate = within * tokens_per_event / (end_s - begin_s)
    if len(reports) == 1:
        rate = reports[0].tokens / reports[0].duration_s
    gaps_us = [round(gap * 1e6) for report in reports for gap in report.gaps_s]
    first_us = [round(first * 1e6) for report in reports for first in report.first_tokens_s]
    return Sample(
        tokens_per_s=rate,
        itl_p50_ms=percentile(gaps_us, 50) / 1e3,
        itl_p99_ms=percentile(gaps_us, 99) / 1e3,
        ttft_median_ms=percentile(first_us, 50) / 1e3,
        ttft_p99_ms=percentile(first_us, 99) / 1e3,
        tokens_per_event=tokens_per_event,
    )
