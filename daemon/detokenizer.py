"""Token ids to text, a few at a time: what is told is never half a character and never taken back.

`Vocabulary` holds, for every token id, either its text (`str`) or, for a token that is no whole number of characters,
its bytes. It is built once for a tokenizer, from the decoder that `tokenizer.json` names, and shared by all streams;
one that was built in the parent of forked workers costs them nothing. Streams then need one list look-up a token.
Decoders that no table can express (WordPiece, CTC, unusual sequences) and tables that fail the self check use the
library's own incremental decoder instead.

The text of a stream, put together, equals what the library decodes in one go, special tokens skipped, in the context of
the prompt. One bound is the exception: byte-fallback decoders judge a run of byte tokens as a whole, and a run
over LONGEST_RUN bytes is told as far as its characters are whole instead of being held until it ends.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from seedance.daemon.decoder_table import (
    DecoderTable,
    Entry,
    decoder_table,
    entry_bytes,
    special_token_ids,
    whole_or_bytes,
)

LONGEST_RUN: Final = 64
# How much of a prompt can bear on the text after it, in tokens; a character has at most four bytes, one token each.
_PROMPT_TAIL: Final = 32
_CHECK_TOKENS: Final = 512
_CHECK_LENGTH: Final = 16
_REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """What turns the token ids of one stream into text.

    While `is_plain` is set, a token whose entry in `Vocabulary.entries` is a text stands for just that, and the
    detokenizer need not be asked about it.
    """

    @property
    def entries(self) -> Sequence[Entry]:
        """Return the entries of its vocabulary; none without a table."""

    @property
    def is_plain(self) -> bool:
        """Return whether nothing of the tokens so far bears on the next."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; ids outside the vocabulary have none."""

    def finish(self) -> str:
        """Return what is left at the end of the stream; bytes that are no whole character become U+FFFD."""


class Vocabulary:
    """The tokens of a tokenizer as text and bytes, and the maker of detokenizers; shared by all streams."""

    __slots__ = ("_hf", "_table", "_token_bytes", "size")

    def __init__(
        self, size: int, table: DecoderTable | None, token_bytes: Callable[[int], bytes], hf: HfTokenizer | None = None
    ) -> None:
        assert table is not None or hf is not None
        self.size = size
        self._table = table
        self._token_bytes = token_bytes
        self._hf = hf

    @property
    def entries(self) -> Sequence[Entry]:
        """Return every token's entry by id: its text, or its bytes; none without a table."""
        return self._table.entries if self._table is not None else ()

    @property
    def has_table(self) -> bool:
        """Return whether streams use the table; otherwise they use the library's incremental decoder."""
        return self._table is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, special ones too; none for an unknown id."""
        return self._token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; bytes that are no whole character become U+FFFD."""
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def longest_token_bytes(self) -> int:
        """Return the length of the longest token that is not special; reads all of them."""
        if self._table is None:
            return max((len(self._token_bytes(token_id)) for token_id in range(self.size)), default=1)
        entries = self._table.entries
        return max((len(entry if entry.isascii() else entry_bytes(entry)) for entry in entries), default=1)

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for a stream that continues these prompt tokens."""
        if self._table is None:
            assert self._hf is not None
            return StreamDetokenizer(self._hf, prompt_token_ids)
        if self._table.byte_runs:
            return RunDetokenizer(self._table, prompt_token_ids)
        return ByteDetokenizer(self._table, prompt_token_ids)


class ByteDetokenizer:
    """Byte-level vocabularies: all tokens are bytes of one UTF-8 text, and what is no UTF-8 becomes U+FFFD."""

    __slots__ = ("_entry", "_pending", "entries")

    def __init__(self, table: DecoderTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self.entries = table.entries
        self._entry = table.entries.__getitem__
        self._pending = b""
        self.feed(prompt_token_ids[-_PROMPT_TAIL:])

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if not self._pending:
            try:
                return "".join(map(self._entry, token_ids))  # type: ignore[arg-type]
            except (TypeError, IndexError):
                pass  # some token is not whole, or none of ours
        data = self._pending + b"".join([self._bytes_of(token_id) for token_id in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    @property
    def is_plain(self) -> bool:
        """Return whether no bytes are held."""
        return not self._pending

    def finish(self) -> str:
        """Return U+FFFD for bytes that were left, if any."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        return entry_bytes(self.entries[token_id]) if token_id < len(self.entries) else b""


class RunDetokenizer:
    """Vocabularies with byte fallback: a run of byte tokens is UTF-8 as a whole, or each of its bytes is U+FFFD.

    The decoder may treat the beginning of the whole text in its own way; the prompt is then where that begins.
    """

    __slots__ = ("_entry", "_first_text", "_plain", "_run", "_strip", "_strips", "entries")

    def __init__(self, table: DecoderTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self.entries = table.entries
        self._entry = table.entries.__getitem__
        self._run = b""
        self._first_text = table.first_text
        self._strip = table.strip
        self._strips = table.strips
        if (self._strips or self._first_text) and any(map(self._entry_of, prompt_token_ids)):
            self._first_text, self._strips = None, 0
        self._feed_slowly(prompt_token_ids[-_PROMPT_TAIL:])
        self._told_of_run()  # whole characters at the prompt's end are the prompt's

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if self._plain:
            try:
                return "".join(map(self._entry, token_ids))  # type: ignore[arg-type]
            except (TypeError, IndexError):
                pass  # some token is a byte, or none of ours
        return self._feed_slowly(token_ids)

    @property
    def is_plain(self) -> bool:
        """Return whether no run is open and the beginning of the text is past."""
        return self._plain

    def finish(self) -> str:
        """Return what the run at the end of the stream stands for."""
        return self._stripped(self._end_run())

    def _feed_slowly(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            entry = self._entry_of(token_id)
            if not entry:
                continue  # skipped by the decoder before it looks at anything
            if self._first_text is not None:
                entry, self._first_text = self._first_text(token_id), None
            if isinstance(entry, bytes):
                self._run += entry
                if len(self._run) >= LONGEST_RUN:
                    parts.append(self._told_of_run())
            else:
                parts += (self._end_run(), entry)
        text = self._stripped("".join(parts))
        self._plain = not (self._run or self._strips or self._first_text)
        return text

    def _entry_of(self, token_id: int) -> Entry:
        return self.entries[token_id] if token_id < len(self.entries) else ""

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _told_of_run(self) -> str:
        """Return the whole characters of a run that goes on, and keep the bytes of one that is not all here."""
        try:
            text, used = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            return self._end_run()
        self._run = self._run[used:]
        return text

    def _stripped(self, text: str) -> str:
        while text and self._strips:
            if text[0] == self._strip:
                self._strips -= 1
                text = text[1:]
            else:
                self._strips = 0
        return text


class StreamDetokenizer:
    """Any other vocabulary: the library's own incremental decoder, and the rest at the end by decoding all again."""

    __slots__ = ("_context", "_hf", "_stream", "_token_ids", "_told")

    def __init__(self, hf: HfTokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._hf = hf
        self._token_ids = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._context = len(hf.decode(self._token_ids))
        self._told = 0
        self._stream = DecodeStream(ids=list(self._token_ids), skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        text = "".join(map(self._step, token_ids))
        self._told += len(text)
        return text

    @property
    def entries(self) -> Sequence[Entry]:
        """Return none."""
        return ()

    @property
    def is_plain(self) -> bool:
        """Return False: the library keeps its own counsel."""
        return False

    def finish(self) -> str:
        """Return what the library's decoder was still holding."""
        return self._hf.decode(self._token_ids)[self._context + self._told :]

    def _step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        try:
            return self._stream.step(self._hf, token_id) or ""
        except Exception:
            # The library raises a bare Exception where its text so far is no beginning of the new one.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._hf, token_id) or ""


def table_vocabulary(tokens: Sequence[bytes]) -> Vocabulary:
    """Return the vocabulary whose tokens are these bytes, by id; tokens without bytes are special."""

    def token_bytes(token_id: int) -> bytes:
        return tokens[token_id] if 0 <= token_id < len(tokens) else b""

    entries = [whole_or_bytes(data) for data in tokens]
    return Vocabulary(len(entries), DecoderTable(entries, lambda token: token), token_bytes)


def hf_vocabulary(hf: HfTokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the `tokenizers` library, with a table where one can express it."""
    table = decoder_table(hf)
    if table is not None and not _agrees(table, hf):
        table = None
    specials = special_token_ids(hf)

    def token_bytes(token_id: int) -> bytes:
        token = hf.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in specials:
            return token.encode()
        if table is None:
            return hf.decode([token_id], skip_special_tokens=False).encode()
        return entry_bytes(table.convert(token))

    size = len(table.entries) if table is not None else max(hf.get_vocab().values(), default=-1) + 1
    return Vocabulary(size, table, token_bytes, hf)


def _agrees(table: DecoderTable, hf: HfTokenizer) -> bool:
    """Return whether the table gives the library's text for a fixed sample of token sequences."""
    size = len(table.entries)
    if size == 0:
        return False
    choose = random.Random(0)
    sample = [choose.randrange(size) for _ in range(_CHECK_TOKENS)] + list(range(min(size, _CHECK_TOKENS)))
    vocabulary = Vocabulary(size, table, lambda _: b"")
    for start in range(0, len(sample), _CHECK_LENGTH):
        token_ids = sample[start : start + _CHECK_LENGTH]
        stream = vocabulary.detokenizer()
        if "".join([stream.feed([token_id]) for token_id in token_ids]) + stream.finish() != hf.decode(token_ids):
            return False
    return True
