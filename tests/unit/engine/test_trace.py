from __future__ import annotations

import pytest

from seedance.engine.trace import Arrival, encode, head, parse
from seedance.errors import ConfigError

pytestmark = pytest.mark.unit

FIRST = Arrival(at_s=0.25, tenant="acme", prompt_tokens=512, output_tokens=128)
SECOND = Arrival(
    at_s=0.5,
    tenant="globex",
    prompt_tokens=1,
    output_tokens=2,
    max_tokens=9,
    priority=1,
    rtt_s=0.05,
    rtt_variance_s=0.01,
    deadline_s=2.0,
)


def test_what_is_written_is_read() -> None:
    lines = [head(), b"\n", encode(FIRST), encode(SECOND)]
    assert list(parse(lines, "t")) == [FIRST, SECOND]


def test_defaults_are_not_written() -> None:
    assert encode(FIRST) == b'{"at_s":0.25,"tenant":"acme","prompt_tokens":512,"output_tokens":128}\n'


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        ([], "line 1", "its first line must be"),
        ([encode(FIRST)], "line 1", "its first line must be"),
        ([b'{"format":"seedance-trace","version":2}'], "line 1", "its first line must be"),
        ([head(), b"{"], "line 2", "cannot read a request"),
        ([head(), b"\xff"], "line 2", "cannot read a request"),
        ([head(), encode(FIRST).replace(b"512", b"0")], "line 2", "prompt_tokens"),
        ([head(), encode(FIRST).replace(b"at_s", b"at")], "line 2", "at"),
        ([head(), encode(SECOND), encode(FIRST)], "line 3", "cannot go back to 0.25 s after 0.5 s"),
    ],
)
def test_a_bad_line_is_named(lines: list[bytes], where: str, what: str) -> None:
    with pytest.raises(ConfigError, match="cannot") as caught:
        list(parse(lines, "t.jsonl"))
    assert (caught.value.path, caught.value.key) == ("t.jsonl", where)
    assert what in caught.value.reason
