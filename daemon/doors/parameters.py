"""What a client may ask of a generation: the fields that all JSON doors share, their ranges, and their meaning.

The ranges are OpenAI's where OpenAI has the field, else vLLM's. A field with `null` counts as absent. Fields that
are unknown or cannot change the text are ignored; fields that would change it and are not supported are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.sampling_defaults import SamplingDefaults
from seedance.engine.request import Sampling

MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MOST_DEADLINE_MS: Final = 86_400_000
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 4096

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]

T = TypeVar("T")

_OPENAI_DEFAULTS: Final = SamplingDefaults()


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class TextFormat(msgspec.Struct, tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct):
    """OpenAI's wrapper of a JSON schema; the schema itself stays JSON text."""

    schema: msgspec.Raw
    name: str | None = None


class JsonSchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that keeps a schema."""

    json_schema: JsonSchema


class Parameters(msgspec.Struct, kw_only=True):
    """The fields of a request that are no prompt, as they came; None is absent.

    `resumable` is ours: the stream outlives its connection.
    """

    stream: bool | None = None
    resumable: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None

    # Known to other servers, not served here.
    best_of: Any = None
    suffix: Any = None
    echo: Any = None
    use_beam_search: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    prompt_embeds: Any = None

    def streams(self) -> bool:
        """Return whether the text shall come in parts."""
        return bool(self.stream)

    def choices(self) -> int:
        """Return how many texts are wanted for one prompt."""
        return self.n or 1

    def stop_strings(self) -> tuple[str, ...]:
        """Return the strings that end the text, in the order given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def include_usage(self) -> bool:
        """Return whether a stream shall end with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def wanted_max_tokens(self) -> int | None:
        """Return the client's own bound of output tokens, None for as many as fit."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives wanted beside each chosen token, None for no log probabilities."""
        return None


# field → the values beside null that ask for nothing
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "prompt_embeds": (),
}


def refuse_unsupported(request: msgspec.Struct, refused: dict[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for the first field of `refused` whose value asks for something that is not served."""
    for name, harmless in refused.items():
        value = getattr(request, name)
        if value is not None and not any(value == good and type(value) is type(good) for good in harmless):
            would_do = " or ".join(["leave it out", *(f"send {_json(good)}" for good in harmless)])
            raise invalid(f"cannot use '{name}': it is not supported here; {would_do}", name)


def check(request: Parameters) -> None:
    """Raise ApiError for what the types alone do not catch."""
    refuse_unsupported(request, _REFUSED)
    longest, shortest = request.wanted_max_tokens(), request.min_tokens
    if longest is not None and shortest is not None and shortest > longest:
        raise invalid(f"cannot use 'min_tokens': {shortest} is over 'max_tokens', {longest}", "min_tokens")
    if request.stream_options is not None and not request.stream:
        raise invalid("cannot use 'stream_options': it needs 'stream' to be true", "stream_options")
    if request.resumable and not request.streams():
        raise invalid("cannot use 'resumable': it needs 'stream' to be true", "resumable")
    if request.n is not None and request.n > 1 and request.temperature == 0:
        raise invalid("cannot use 'n' over 1 with 'temperature' 0: all choices would be the same", "n")
    if isinstance(request.response_format, JsonSchemaFormat):
        schema = request.response_format.json_schema.schema
        if not bytes(schema).lstrip().startswith(b"{"):
            param = "response_format.json_schema.schema"
            raise invalid(f"cannot use '{param}': a JSON schema must be an object", param)


def sampling(
    request: Parameters,
    *,
    prompt_tokens: int,
    context_tokens: int,
    vocab_size: int,
    choice: int = 0,
    defaults: SamplingDefaults = _OPENAI_DEFAULTS,
) -> Sampling:
    """Return the engine's form of a request, once the length of its prompt is known.

    `context_tokens` bounds prompt and output together: the smaller of the model's and the tenant's. A bound of output
    tokens that does not fit into the rest is cut to it. A seed is moved by `choice`, or all choices of a request
    would be the same text; `defaults` fill in what the request leaves out. Raises ApiError when there is no room for
    one token, or an id is outside the vocabulary.
    """
    room = context_tokens - prompt_tokens
    if room < 1:
        raise context_too_long(prompt_tokens, context_tokens)
    _check_ids(request.logit_bias or (), "logit_bias", vocab_size)
    _check_ids(request.stop_token_ids or (), "stop_token_ids", vocab_size)
    max_tokens = min(request.wanted_max_tokens() or room, room)
    response_format = request.response_format
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=None if request.seed is None else _seed(request.seed, choice),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=request.logit_bias or None,
        logprobs=request.wanted_logprobs(),
        json_schema=_schema_text(response_format),
        json_object=isinstance(response_format, JsonObjectFormat),
    )


def context_too_long(prompt_tokens: int, context_tokens: int) -> ApiError:
    """Return the error for a prompt that leaves no room for an answer."""
    return ApiError(
        "context_too_long",
        f"cannot take a prompt of {prompt_tokens} tokens: the context is {context_tokens} tokens and must also hold "
        "the answer; send a shorter prompt",
    )


def refuse_long_text(texts: Iterator[str], *, context_tokens: int, longest_token_bytes: int) -> None:
    """Raise ApiError for text that cannot fit into the context however it is tokenised, without tokenising it."""
    limit_bytes = context_tokens * longest_token_bytes
    size_bytes = 0
    for text in texts:
        size_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size_bytes > limit_bytes:
            raise ApiError(
                "context_too_long",
                f"cannot take a prompt of over {limit_bytes} bytes: no more can fit into the context of "
                f"{context_tokens} tokens; send a shorter prompt",
            )


def require_model(name: str, served: str) -> None:
    """Raise ApiError when a request names another model than the one that is served."""
    if name != served:
        raise ApiError(
            "not_found",
            f"cannot find the model '{name[:200]}': this server has '{served}'",
            param="model",
        )


_PATH: Final = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `([^`]+)`")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | str) -> T:
    """Return a JSON body in the decoder's type; raises ApiError that names the field and what would be right."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise invalid(f"cannot read the request as JSON: {exc}") from exc
    except RecursionError as exc:
        raise invalid("cannot read the request as JSON: it is nested too deeply") from exc


def _explain(problem: str) -> ApiError:
    path = ""
    if found := _PATH.search(problem):
        path, problem = found[1], problem[: found.start()]
    if missing := _MISSING.match(problem):
        path = f"{path}.{missing[1]}".lstrip(".")
        return invalid(f"cannot serve the request: '{path}' is missing", path)
    problem = problem[:1].lower() + problem[1:]
    if not path:
        return invalid(f"cannot use the request: {problem}")
    return invalid(f"cannot use '{path}': {problem}", path)


def _check_ids(ids: Any, name: str, vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"cannot use '{name}': token id {token_id} is not in 0 … {vocab_size - 1}", name)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _seed(seed: int, choice: int) -> int:
    # Kept within 64 bits with sign, which is what engines take.
    return (seed + choice + 2**63) % 2**64 - 2**63


def _schema_text(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> str | None:
    if isinstance(response_format, JsonSchemaFormat):
        return bytes(response_format.json_schema.schema).decode()
    return None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
