from __future__ import annotations

import math

import pytest

from seedance.engine.admission import AdmissionWindow, WindowSettings

pytestmark = pytest.mark.unit

H_S = 0.001


def opens(window: AdmissionWindow, waiting: int, decoders: int, now_s: float, *, is_reading: bool = False) -> float:
    return window.opens_s(waiting, decoders, H_S, is_reading=is_reading, now_s=now_s)


def arrived(settings: WindowSettings, times_s: list[float]) -> AdmissionWindow:
    window = AdmissionWindow(settings, 0.0)
    for time_s in times_s:
        window.request_arrived(time_s)
    return window


def test_nobody_waits_for_nobody() -> None:
    assert opens(arrived(WindowSettings(), []), 0, 5, 1.0) == math.inf


@pytest.mark.parametrize(("decoders", "waiting", "is_reading"), [(0, 1, False), (10, 64, False), (10, 1, True)])
def test_it_is_open_at_once_where_to_gather_gains_nothing(decoders: int, waiting: int, is_reading: bool) -> None:
    window = arrived(WindowSettings(), [1.0])
    assert opens(window, waiting, decoders, 1.0, is_reading=is_reading) <= 1.0


def test_it_gathers_longer_the_more_decode_and_shorter_the_more_arrive() -> None:
    settings = WindowSettings(max_wait_s=1.0)
    few = opens(arrived(settings, [1.0]), 1, 4, 1.0) - 1.0
    many = opens(arrived(settings, [1.0]), 1, 64, 1.0) - 1.0
    rush = opens(arrived(settings, [1.0 + i / 1000 for i in range(100)]), 1, 64, 1.1) - 1.0
    assert few == pytest.approx(math.sqrt(2 * 4 * H_S), abs=1e-4)
    assert many == pytest.approx(4 * few, rel=0.01)
    assert rush == pytest.approx(many / math.sqrt(100), rel=0.1)


def test_it_gathers_no_longer_than_it_may() -> None:
    window = arrived(WindowSettings(max_wait_s=0.02), [1.0])
    assert opens(window, 1, 1000, 1.0) == pytest.approx(1.02, abs=1e-4)


def test_who_is_left_over_begins_to_wait_anew() -> None:
    window = arrived(WindowSettings(max_wait_s=0.02), [1.0])
    window.requests_taken(3, 5.0)
    assert opens(window, 3, 1000, 5.0) == pytest.approx(5.02, abs=1e-4)
    window.requests_taken(0, 6.0)
    window.request_arrived(9.0)
    assert opens(window, 1, 1000, 9.0) == pytest.approx(9.02, abs=1e-4)


def test_who_waits_after_all_were_taken_begins_to_wait_when_it_is_seen() -> None:
    """As those of a tenant that was held when the others were taken."""
    window = AdmissionWindow(WindowSettings(max_wait_s=0.02), 0.0)
    window.request_arrived(0.0)
    window.requests_taken(0, 0.0)
    opens_s = window.opens_s(1, 8, 1.0, is_reading=False, now_s=1.0)
    assert 1.0 < opens_s <= 1.02
    assert window.opens_s(1, 8, 1.0, is_reading=False, now_s=1.01) == opens_s


def test_the_static_window_waits_for_its_number_or_its_time() -> None:
    window = arrived(WindowSettings(static_batch=32, static_wait_s=0.1), [1.0])
    assert opens(window, 31, 0, 1.0) == pytest.approx(1.1, abs=1e-4)
    assert opens(window, 32, 5, 1.0) <= 1.0
    assert window.most() == 32


def test_the_rate_is_of_late() -> None:
    window = arrived(WindowSettings(), [i / 50 for i in range(500)])
    assert window.rate_per_s(10.0) == pytest.approx(50, rel=0.05)
    assert window.rate_per_s(20.0) < 0.1
