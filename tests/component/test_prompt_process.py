"""The process that tokenises long prompts."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
from collections.abc import Iterator

import pytest
from support import tiny_tokenizers

from seedance.daemon import tokenizer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.prompt_process import PromptProcess

TEXT = tiny_tokenizers.SAMPLE_TEXT * 500


def children() -> list[int]:
    return [int(pid) for pid in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture
def process(tmp_path: pathlib.Path) -> Iterator[PromptProcess]:
    process = PromptProcess(tokenizer.load(tiny_tokenizers.write_model(tmp_path)))
    before = children()
    yield process
    process.end()
    process.end()
    assert children() == before


def test_ids_are_those_of_the_tokenizer(process: PromptProcess) -> None:
    assert process.encode(TEXT, chat=False).tolist() == process.tokenizer.encode(TEXT)
    assert process.encode(TEXT, chat=True).tolist() == process.tokenizer.encode_chat(TEXT)


def test_what_cannot_be_tokenised_is_refused_as_by_the_tokenizer(process: PromptProcess) -> None:
    with pytest.raises(ApiError, match="surrogate") as caught:
        process.encode("a\ud800", chat=False)
    assert caught.value.code == "invalid_request"
    assert process.encode("a", chat=False).tolist() == process.tokenizer.encode("a")


def test_when_it_dies_the_prompt_is_refused_and_the_next_one_gets_another(process: PromptProcess) -> None:
    before = set(children())
    process.encode(TEXT, chat=False)
    [pid] = set(children()) - before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ApiError) as caught:
        process.encode(TEXT, chat=False)
    assert caught.value.code == "overloaded"
    assert process.encode(TEXT, chat=False).tolist() == process.tokenizer.encode(TEXT)


def test_it_keeps_no_connection_of_the_worker_open(process: PromptProcess) -> None:
    ours, client = socket.socketpair()
    with client:
        process.encode(TEXT, chat=False)
        ours.close()
        assert client.recv(1) == b""
