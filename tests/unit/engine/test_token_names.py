"""The names of what token ids mean."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from support.model_dir import write_model, write_tokenizer

from seedance.engine.model_files import tokens_digest
from seedance.engine.request import ModelInfo
from seedance.engine.token_names import TokenNames

MODEL = ModelInfo(name="m", tokenizer_dir="", max_model_len=9, vocab_size=9, eos_token_ids=(), created=0, engine="vllm")


def test_who_has_a_name_or_no_tokenizer_keeps_it() -> None:
    names = TokenNames()
    assert asyncio.run(names.named(MODEL)) is MODEL
    named = msgspec.structs.replace(MODEL, tokenizer_dir="/nowhere", tokens="t")
    assert asyncio.run(names.named(named)) is named


def test_a_name_is_that_of_the_content_and_of_nothing_else(tmp_path: Path) -> None:
    async def drive() -> None:
        names = TokenNames()
        first, second = (
            msgspec.structs.replace(MODEL, tokenizer_dir=str(write_model(tmp_path / name))) for name in ("a", "b")
        )
        named = await names.named(first)
        assert named.tokens == (await names.named(second)).tokens == tokens_digest(tmp_path / "a")
        assert msgspec.structs.replace(named, tokens="") == first
        (tmp_path / "b" / "tokenizer.json").unlink()
        write_tokenizer(tmp_path / "b", ("x", "y"))
        assert (await names.named(second)).tokens == tokens_digest(tmp_path / "b") != named.tokens
        assert await names.named(first) == named

    asyncio.run(drive())


def test_what_cannot_be_read_is_named_by_its_place(tmp_path: Path) -> None:
    model = msgspec.structs.replace(MODEL, tokenizer_dir=str(tmp_path))
    assert asyncio.run(TokenNames().named(model)).tokens == str(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert asyncio.run(TokenNames().named(model)).tokens == str(tmp_path)
