from __future__ import annotations

import datetime
import pathlib
from typing import Any

import pytest
from support import tiny_tokenizers

from seedance.daemon.chat_template import MAX_MESSAGES, ChatTemplate, load_chat_template
from seedance.daemon.doors.errors import ApiError

USER = [{"role": "user", "content": "Hi"}]


def template(text: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special_tokens, lambda: datetime.datetime(2030, 2, 3))


def rendered(text: str, **given: Any) -> str:
    return template(text, bos_token="<s>").render(USER, **given)


def test_a_conversation_becomes_a_prompt() -> None:
    made = template(tiny_tokenizers.CHAT_TEMPLATE, bos_token="<s>")
    assert made.render(USER) == "<s><|user|>Hi\n<|assistant|>"
    assert made.render(USER, add_generation_prompt=False) == "<s><|user|>Hi\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ {'ä': '<&>'} | tojson }}", '{"ä": "<&>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ strftime_now('%Y-%m-%d') }}", "2030-02-03"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}x{{ messages[0].role }}{% endgeneration %}y", "xusery"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ messages[0]['content'] + (missing or '!') }}", "Hi!"),
    ],
)
def test_templates_have_what_transformers_gives_them(text: str, expected: str) -> None:
    assert rendered(text) == expected


def test_clients_may_set_variables_but_not_the_server_s() -> None:
    assert rendered("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    for name in ("messages", "raise_exception"):
        with pytest.raises(ApiError) as caught:
            rendered("", variables={name: 1})
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_what_goes_wrong_in_a_template_is_an_api_error(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(text)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_template_s_own_words_reach_the_client() -> None:
    with pytest.raises(ApiError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_too_many_messages_are_refused() -> None:
    with pytest.raises(ApiError, match=str(MAX_MESSAGES)):
        template("").render(USER * (MAX_MESSAGES + 1))


def test_tools_choose_the_template_for_tools() -> None:
    made = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert [made.render(USER), made.render(USER, tools=[{"type": "function"}])] == ["plain", "tools"]
    assert ChatTemplate({"only": "one"}, {}).render(USER) == "one"


def test_a_template_that_is_no_jinja_is_told_at_load() -> None:
    with pytest.raises(ValueError, match="cannot use the model's chat template"):
        ChatTemplate({"default": "{% if %}"}, {})


def test_special_tokens_are_text_or_objects(tmp_path: pathlib.Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
    }
    tiny_tokenizers.write_model(tmp_path, config=config)
    made = load_chat_template(tmp_path)
    assert made is not None
    assert made.render(USER) == "<s></s>False"


def test_the_file_of_its_own_wins(tmp_path: pathlib.Path) -> None:
    tiny_tokenizers.write_model(
        tmp_path, config={"chat_template": "field", "bos_token": "<s>"}, jinja="file{{ bos_token }}"
    )
    made = load_chat_template(tmp_path)
    assert made is not None
    assert made.render(USER) == "file<s>"


def test_named_templates_come_as_a_list(tmp_path: pathlib.Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    tiny_tokenizers.write_model(tmp_path, config={"chat_template": named})
    made = load_chat_template(tmp_path)
    assert made is not None
    assert made.render(USER) == "d"


def test_no_template_is_none_and_a_broken_file_is_an_error(tmp_path: pathlib.Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        load_chat_template(tmp_path)
