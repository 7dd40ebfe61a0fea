from __future__ import annotations

import pathlib

import pytest

from seedance.daemon.sampling_defaults import SamplingDefaults, load_sampling_defaults


def test_without_a_file_they_are_openai_s(tmp_path: pathlib.Path) -> None:
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)


def test_a_model_s_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"bos_token_id": 2, "eos_token_id": [1, 106], "do_sample": true, "top_k": 64, "top_p": 0.95, "min_p": null}'
    )
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults(top_k=64, top_p=0.95)


@pytest.mark.parametrize("content", ["[", "[]", '{"temperature": "hot"}', '{"top_p": 0}'])
def test_a_wrong_file_is_told(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"cannot read .*generation_config\.json"):
        load_sampling_defaults(str(tmp_path))
