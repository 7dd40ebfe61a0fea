"""The tokenizer of the served model, as workers use it: no torch, no transformers, no network."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as HfTokenizer

from seedance.daemon.chat_template import ChatTemplate, load_chat_template
from seedance.daemon.detokenizer import Detokenizer, Vocabulary, hf_vocabulary, table_vocabulary
from seedance.daemon.doors.errors import invalid
from seedance.engine import synthetic_vocabulary

# The synthetic engine understands nothing, so any plain form of a conversation does.
_SYNTHETIC_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    `encode_text(text, add_special_tokens)` does the first. `longest_token_bytes` bounds what a text can shrink to:
    over `context * longest_token_bytes` bytes there is no need to tokenise it to know that it is too long.
    """

    __slots__ = ("_chat_template", "_encode", "longest_token_bytes", "vocabulary")

    def __init__(
        self,
        encode_text: Callable[[str, bool], list[int]],
        vocabulary: Vocabulary,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._encode = encode_text
        self._chat_template = chat_template
        self.vocabulary = vocabulary
        self.longest_token_bytes = vocabulary.longest_token_bytes()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ApiError when it is no valid Unicode."""
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeError, TypeError) as exc:
            raise invalid("cannot use the prompt: it has half a surrogate pair, which is no character") from exc

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation, to which the template has added what the model needs.

        A chat template writes special tokens itself or means none, as in transformers and vLLM.
        """
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. Raises ApiError when the model has no template or it refuses."""
        if self._chat_template is None:
            raise invalid(
                "cannot chat with this model: it has no chat template (it may be a base model); "
                "use completions with a plain prompt",
                "messages",
            )
        return self._chat_template.render(messages, tools, add_generation_prompt, variables)

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model can chat."""
        return self._chat_template is not None

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for a stream that continues these prompt tokens."""
        return self.vocabulary.detokenizer(prompt_token_ids)


def load(tokenizer_dir: str) -> Tokenizer:
    """Return the tokenizer of a model directory. Raises ValueError, or OSError, when it cannot be read."""
    directory = pathlib.Path(tokenizer_dir)
    content = (directory / "tokenizer.json").read_bytes()
    try:
        hf = HfTokenizer.from_buffer(content)
    except Exception as exc:  # the library raises nothing finer
        raise ValueError(f"cannot read '{directory / 'tokenizer.json'}': {exc}") from exc
    # A file may carry its training's bounds; the engine's context is the only one here.
    hf.no_truncation()
    hf.no_padding()

    def encode_text(text: str, add_special_tokens: bool) -> list[int]:
        # By this call the library keeps no places in the text, which takes a third of the time.
        return hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    return Tokenizer(encode_text, hf_vocabulary(hf), load_chat_template(directory))


def synthetic() -> Tokenizer:
    """Return the tokenizer of the synthetic engine."""
    return Tokenizer(
        lambda text, _: synthetic_vocabulary.encode_text(text),
        table_vocabulary(synthetic_vocabulary.TOKEN_BYTES),
        ChatTemplate({"default": _SYNTHETIC_TEMPLATE}, {}),
    )
