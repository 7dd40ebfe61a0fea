"""The head of a safetensors file: what is taken, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_dir import data_bytes, file_of, head_of

from seedance.engine.safetensors import LENGTH_BYTES, MAX_HEAD_BYTES, head_bytes, parse_head


def parse(data: bytes) -> Any:
    length = head_bytes(data[:LENGTH_BYTES], len(data))
    return parse_head(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))


def changed(name: str, **values: Any) -> bytes:
    """Return a file of three tensors, of which one is described otherwise; its data stay as long."""
    head = head_of({"a": (2, 3), "b": (4,), "c": ()})
    data = bytes(data_bytes(head))
    head[name] = {**head[name], **values}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_whole_file() -> None:
    tensors = parse(file_of(head_of({"a": (2, 3), "b": (0,), "c": ()})))
    assert {name: (tensor.count, tensor.data_offsets) for name, tensor in tensors.items()} == {
        "a": (6, (0, 24)),
        "b": (0, (24, 24)),
        "c": (1, (24, 28)),
    }


def test_numbers_below_a_byte_fill_bytes_together() -> None:
    head = {"a": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}}
    assert parse(file_of(head))["a"].count == 6
    head["a"]["shape"] = [3]
    with pytest.raises(ValueError, match=r"3 of F4 are 1\.5"):
        parse(file_of(head))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"\0" * 7, "it has 7 bytes"),
        ((MAX_HEAD_BYTES + 1).to_bytes(8, "little"), "no safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "it is cut off: its head has 100 bytes, the file 10"),
        ((2).to_bytes(8, "little") + b"[]", "head cannot be read"),
        ((2).to_bytes(8, "little") + b"{x", "head cannot be read"),
        (file_of(head_of({"a": (2, 3)}))[:-1], "it is cut off: tensor 'a' ends at 24 of the data, the file at 23"),
        (file_of(head_of({"a": (2, 3)})) + b"\0\0", "2 bytes of it belong to no tensor"),
        (changed("b", data_offsets=[20, 36]), "tensor 'b' overlaps the one before it"),
        (changed("b", data_offsets=[28, 44]), "tensor 'b' leaves a hole before it"),
        (changed("b", shape=[5]), "tensor 'b' has 16 bytes, and 5 of F32 are 20"),
        (changed("b", dtype="F31"), "tensor 'b' has the unknown type 'F31'"),
        (changed("b", shape=[-4]), "head cannot be read"),
        (changed("b", data_offsets=[40, 24]), "tensor 'b' has -16 bytes"),
        (changed("c", shape=[1 << 62, 1 << 62]), "tensor 'c' has 4 bytes"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(data)


@given(st.data())
def test_a_file_with_any_byte_changed_or_missing_is_read_or_refused(data: st.DataObject) -> None:
    whole = file_of(head_of({"a": (2, 3), "b": (4,)}))
    length = data.draw(st.integers(0, len(whole)))
    broken = bytearray(whole[:length])
    if broken:
        broken[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = parse(bytes(broken))
    except ValueError:
        return
    assert length == len(whole)
    assert sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors.values()) == 40
