"""Documents against their schema."""

from __future__ import annotations

import pytest

from seedance.errors import ConfigError
from seedance.qos import toml
from seedance.qos.toml import Field, Schema

SCHEMA: Schema = {
    "name": Field("title", toml.text),
    "on": Field("enabled", toml.flag),
    "limits": {
        "streams": Field("streams", toml.or_unlimited(toml.whole(1, 10))),
        "colour": Field("c", toml.one_of("ab")),
    },
}


def read(text: str) -> dict[str, object]:
    return toml.read_table(toml.loads(text, "f.toml"), SCHEMA, "f.toml")


def test_values_get_their_names_and_absent_ones_stay_absent() -> None:
    assert read('name = "x"\n[limits]\nstreams = 3') == {"title": "x", "limits": {"streams": 3}}
    assert read("") == {}


def test_unlimited_is_none() -> None:
    assert read('[limits]\nstreams = "unlimited"') == {"limits": {"streams": None}}


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("nam = 1", "nam", "did you mean 'name'?"),
        ("stream = 4", "stream", "did you mean 'limits.streams'?"),
        ("zzz = 1", "zzz", "known here: name, on, limits"),
        ("[limits]\nstrems = 1", "limits.strems", "did you mean 'streams'?"),
        ("limits = 3", "limits", 'where a table belongs; write e.g. "[limits]"'),
        ("[[limits]]\nstreams = 1", "limits", "where a table belongs"),
        ("[limits]\nstreams = 0", "limits.streams", "cannot take 0; write a whole number from 1 to 10"),
        ("[limits]\nstreams = 1.0", "limits.streams", "cannot take 1.0; write a whole number"),
        ("[limits]\nstreams = true", "limits.streams", "cannot take true"),
        ("[limits]\ncolour = 'c'", "limits.colour", 'cannot take "c"; write one of a, b'),
        ("[limits]\ncolour = []", "limits.colour", "write one of a, b"),
        ("name = ''", "name", "not empty"),
        ("name = 3", "name", "cannot take 3"),
        ("on = 1", "on", "cannot take 1; write true or false"),
        ("on = true\nname = \n", "", "cannot read it as TOML: invalid value (at line 2, column 8)"),
        ("name = 'a'\nname = 'b'", "", "cannot read it as TOML: cannot overwrite a value"),
        ("a = " + "[" * 5000, "", "cannot read it as TOML"),
        ("a = " + "1" * 5000, "", "cannot read it as TOML"),
    ],
)
def test_wrong_documents_say_what_would_be_right(text: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert (raised.value.path, raised.value.key) == ("f.toml", key)
    assert reason in raised.value.reason
    assert raised.value.reason.startswith("cannot ")


def test_above_zero() -> None:
    read_positive = toml.above_zero(toml.whole(0, 9))
    assert read_positive(1) == 1
    with pytest.raises(ValueError, match="cannot take 0; write something above zero"):
        read_positive(0)


def test_overlay_goes_key_by_key_and_changes_neither() -> None:
    base = {"a": {"x": 1, "y": 2}, "b": 1}
    top = {"a": {"y": None}, "c": 3}
    assert toml.overlay(base, top) == {"a": {"x": 1, "y": None}, "b": 1, "c": 3}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}
    assert top == {"a": {"y": None}, "c": 3}
