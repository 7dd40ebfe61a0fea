from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from support import tiny_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from seedance.daemon import tokenizer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.stop_strings import StopDetokenizer
from seedance.engine import synthetic_vocabulary

USER = [{"role": "user", "content": "the stream"}]


def test_text_goes_to_ids_and_back(tmp_path: pathlib.Path) -> None:
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path))
    library = tiny_tokenizers.byte_level()
    ids = made.encode(tiny_tokenizers.SAMPLE_TEXT)
    assert ids == library.encode(tiny_tokenizers.SAMPLE_TEXT).ids
    assert ids[0] == tiny_tokenizers.id_of(library, "<s>")
    assert made.encode(tiny_tokenizers.SAMPLE_TEXT, add_special_tokens=False) == ids[1:]
    assert made.detokenizer().feed(ids) == tiny_tokenizers.SAMPLE_TEXT
    assert made.longest_token_bytes == max(len(made.vocabulary.token_bytes(i)) for i in range(2, made.vocabulary.size))


def test_a_chat_prompt_has_one_bos(tmp_path: pathlib.Path) -> None:
    config = {"bos_token": "<s>", "chat_template": tiny_tokenizers.CHAT_TEMPLATE}
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path, config=config))
    assert made.has_chat_template
    ids = made.encode_chat(made.render_chat(USER))
    assert ids.count(tiny_tokenizers.id_of(tiny_tokenizers.byte_level(), "<s>")) == 1


def test_a_model_without_template_cannot_chat(tmp_path: pathlib.Path) -> None:
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path))
    with pytest.raises(ApiError, match="it has no chat template") as caught:
        made.render_chat(USER)
    assert (caught.value.code, caught.value.status) == ("invalid_request", 400)


def test_bounds_that_a_file_brings_are_taken_off(tmp_path: pathlib.Path) -> None:
    library = HfTokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    library.enable_truncation(4)
    library.enable_padding(length=64)
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path, library))
    assert (
        made.encode(tiny_tokenizers.SAMPLE_TEXT) == tiny_tokenizers.byte_level().encode(tiny_tokenizers.SAMPLE_TEXT).ids
    )


def test_half_a_surrogate_pair_is_refused(tmp_path: pathlib.Path) -> None:
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path))
    with pytest.raises(ApiError, match="surrogate"):
        made.encode("a\ud800")


def test_a_broken_or_missing_file_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        tokenizer.load(str(tmp_path))


def test_stop_strings_end_a_stream(tmp_path: pathlib.Path) -> None:
    made = tokenizer.load(tiny_tokenizers.write_model(tmp_path))
    ids = made.encode("the tenant, the worker", add_special_tokens=False)
    stream = StopDetokenizer(made.detokenizer(), [","], include_stop=True)
    assert stream.feed(ids) == "the tenant,"
    assert stream.stopped == ","
    assert stream.surplus_tokens > 0


def test_the_synthetic_tokenizer_keeps_any_text() -> None:
    made = tokenizer.synthetic()
    text = "the storm - café 東京 🌲 \x00 ÿ"
    ids = made.encode(text)
    assert ids == synthetic_vocabulary.encode_text(text)
    stream = made.detokenizer()
    assert "".join([stream.feed([token_id]) for token_id in ids]) + stream.finish() == text
    assert stream.feed([synthetic_vocabulary.EOS_ID]) == ""
    assert made.render_chat(USER) == "user: the stream\nassistant:"
    assert made.longest_token_bytes == max(map(len, synthetic_vocabulary.TOKEN_BYTES))


def test_loading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import seedance.daemon.tokenizer as t; t.synthetic(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm', 'numpy')))"
    )
    source = pathlib.Path(tokenizer.__file__).resolve().parents[1] / "src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=False).returncode == 0
