"""OpenAI's requests: the bodies of chat completions and completions, checked."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from seedance.daemon.doors.errors import invalid
from seedance.daemon.doors.messages import Messages, check_messages, template_messages
from seedance.daemon.doors.parameters import (
    MAX_LOGPROBS,
    Parameters,
    PositiveInt,
    TokenId,
    check,
    decode,
    refuse_unsupported,
)

MAX_PROMPTS: Final = 64
MAX_TOTAL_CHOICES: Final = 128
# OpenAI's documented default of `max_tokens` for completions; an explicit null asks for as many as fit.
DEFAULT_COMPLETION_TOKENS: Final = 16


class ChatRequest(Parameters, kw_only=True):
    """The body of `POST /v1/chat/completions`; `messages` are checked, their contents joined to text."""

    model: str
    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None

    def wanted_max_tokens(self) -> int | None:
        """Return `max_completion_tokens`, or else the older `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        """Return `top_logprobs` when log probabilities are on."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as a chat template reads it. Raises ApiError on tool arguments that are no JSON."""
        return template_messages(self.messages)

    def template_variables(self) -> dict[str, Any]:
        """Return what else the client tells the chat template, such as `enable_thinking`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables


class CompletionRequest(Parameters, kw_only=True):
    """The body of `POST /v1/completions`; `prompts` lists the prompts, each a text or token ids."""

    model: str
    prompt: str | list[str | int | list[TokenId]]
    max_tokens: PositiveInt | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives; unlike in chat, 0 is on."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts in order. Raises ApiError when the list mixes kinds or holds an empty prompt."""
        return split_prompts(self.prompt)


_CHAT_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
}
_chat: Final = msgspec.json.Decoder(ChatRequest)
_completion: Final = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Return a checked chat request. Raises ApiError `invalid_request`, naming the field and what would be right."""
    request = decode(_chat, body)
    check(request)
    refuse_unsupported(request, _CHAT_REFUSED)
    _check_tools(request)
    check_messages(request.messages)
    if request.top_logprobs and not request.logprobs:
        raise invalid("cannot use 'top_logprobs': it needs 'logprobs' to be true", "top_logprobs")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Return a checked completion request. Raises ApiError `invalid_request`, as `parse_chat` does."""
    request = decode(_completion, body)
    check(request)
    choices = len(request.prompts()) * request.choices()
    if choices > MAX_TOTAL_CHOICES:
        raise invalid(f"cannot make {choices} texts in one request: {MAX_TOTAL_CHOICES} is the most", "prompt")
    return request


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return OpenAI's four forms of a prompt as a list of texts or of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("cannot use 'prompt': it is empty; send a text or token ids", "prompt")
    kind = type(prompt[0])
    for index, entry in enumerate(prompt):
        if type(entry) is not kind:
            raise invalid("cannot use 'prompt': all its entries must be of one kind", f"prompt[{index}]")
        if entry == []:
            raise invalid(f"cannot use 'prompt[{index}]': it has no token ids", f"prompt[{index}]")
        if kind is int and not 0 <= entry < 2**31:
            raise invalid(f"cannot use 'prompt[{index}]': {entry} is no token id", f"prompt[{index}]")
    if kind is int:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"cannot use 'prompt': it has {len(prompt)} prompts, {MAX_PROMPTS} is the most", "prompt")
    return prompt


def check_prompt_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ApiError when a prompt given as token ids has one outside the vocabulary.

    In an array they are unsigned 32-bit ids, which are looked at without an object for each.
    """
    worst = int(np.frombuffer(token_ids, np.uint32).max()) if isinstance(token_ids, array.array) else max(token_ids)
    if worst >= vocab_size:
        raise invalid(f"cannot use 'prompt': token id {worst} is not in 0 … {vocab_size - 1}", "prompt")


def _check_tools(request: ChatRequest) -> None:
    if request.tool_choice not in (None, "none", "auto"):
        raise invalid("cannot use 'tool_choice': tool calls are not supported here; send \"none\"", "tool_choice")
    if request.tools and request.tool_choice != "none":
        raise invalid(
            'cannot use \'tools\': tool calls are not supported here; leave it out or send "tool_choice": "none"',
            "tools",
        )
