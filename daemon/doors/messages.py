"""Chat messages as clients send them, and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from seedance.daemon.doors.errors import invalid

MAX_MESSAGES: Final = 4096
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    """What an earlier answer called; `arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """A tool call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def check_messages(messages: list[Message], path: str = "messages") -> None:
    """Raise ApiError for the first message that cannot be served, naming it; join text parts to one text, in place.

    Parts are joined by line feeds, as vLLM does for templates that take a text.
    """
    for index, message in enumerate(messages):
        where = f"{path}[{index}]"
        if message.role not in _ROLES:
            raise invalid(f"cannot use '{where}.role': it must be one of {', '.join(_ROLES)}", f"{where}.role")
        if isinstance(message.content, list):
            message.content = _joined(message.content, f"{where}.content")
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise invalid(f"cannot use '{where}.content': it must be text or text parts", f"{where}.content")


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return checked messages as a chat template reads them; the role `developer` becomes `system`.

    Raises ApiError when the arguments of an earlier tool call are no JSON.
    """
    conversation: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": message.content}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_calls:
            entry["tool_calls"] = [
                _template_call(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning_content is not None:
            entry["reasoning_content"] = message.reasoning_content
        conversation.append(entry)
    return conversation


def _joined(parts: list[ContentPart], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if part.type != "text":
            raise invalid(
                f"cannot use '{where}[{index}]': a part of type '{part.type[:40]}' is not supported; send text parts",
                f"{where}[{index}]",
            )
        if part.text is None:
            raise invalid(f"cannot serve the request: '{where}[{index}].text' is missing", f"{where}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    # Templates print the arguments as an object, not as a text with quotes in quotes.
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as exc:
        param = f"{where}.function.arguments"
        raise invalid(f"cannot use '{param}': it must be JSON text", param) from exc
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
