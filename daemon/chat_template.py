"""Chat templates: a model's Jinja template, run in a sandbox as transformers runs it.

The template is the model's, thus the operator's; the messages are a client's. The sandbox has no way to Python's
inside, templates cannot change what they are given, and the size of the input is bounded, so a rendering is short.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from seedance.daemon.doors.errors import invalid

MAX_MESSAGES: Final = 4096
MAX_VARIABLES: Final = 32
# Names that a client cannot set: what the server passes, and what the environment defines.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception"})
_TEXT_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Clock = Callable[[], datetime.datetime]


class ChatTemplate:
    """The template of a model, with the special tokens that it names; `named` maps names to templates.

    Raises ValueError if a template is no valid Jinja. `clock` tells templates today's date.
    """

    __slots__ = ("_special_tokens", "_templates")

    def __init__(
        self, named: Mapping[str, str], special_tokens: Mapping[str, str], clock: Clock = datetime.datetime.now
    ) -> None:
        environment = _environment(clock)
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateError as exc:
            raise ValueError(f"cannot use the model's chat template: {exc}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. Raises ApiError when the template refuses it."""
        if len(messages) > MAX_MESSAGES:
            raise invalid(f"cannot use 'messages': {MAX_MESSAGES} are the most", "messages")
        variables = variables or {}
        if len(variables) > MAX_VARIABLES or not _RESERVED.isdisjoint(variables):
            raise invalid(
                f"cannot use 'chat_template_kwargs': at most {MAX_VARIABLES}, none of {', '.join(sorted(_RESERVED))}",
                "chat_template_kwargs",
            )
        context = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._choose(tools).render(context)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as exc:
            raise invalid(f"cannot make a prompt of these messages: {exc}", "messages") from exc
        except (RecursionError, MemoryError) as exc:
            raise invalid("cannot make a prompt of these messages: they are nested too deeply", "messages") from exc

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        return next(iter(self._templates.values()))


def load_chat_template(directory: pathlib.Path, clock: Clock = datetime.datetime.now) -> ChatTemplate | None:
    """Return the chat template of a model directory, None if it has none.

    `chat_template.jinja` wins over the field of `tokenizer_config.json`, a text or a list of named ones. Raises
    ValueError when the files are wrong, OSError when they cannot be read.
    """
    config = _read_object(directory / "tokenizer_config.json")
    named = _named_templates(directory / "chat_template.jinja", config.get("chat_template"))
    if not named:
        return None
    texts = {**_read_object(directory / "special_tokens_map.json"), **config}
    return ChatTemplate(named, _special_tokens(texts), clock)


def _environment(clock: Clock) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ValueError(f"cannot read '{path}': {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"cannot read '{path}': it must hold a JSON object")
    return content


def _named_templates(file: pathlib.Path, field: Any) -> dict[str, str]:
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    if isinstance(field, str):
        return {"default": field}
    return {entry["name"]: entry["template"] for entry in field or ()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TEXT_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
