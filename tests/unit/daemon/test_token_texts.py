"""Slots of tokens."""

from __future__ import annotations

import numpy as np

from seedance.daemon.decoder_table import Entry
from seedance.daemon.token_texts import FIRST, TEXT_BYTES, UNFIT, TokenTexts


def text(texts: TokenTexts, slot: int) -> bytes:
    return texts.texts[slot, : texts.lengths[slot]].tobytes()


def test_a_token_has_a_slot_from_the_first_time_on() -> None:
    entries = [f"<{number}é>" for number in range(700)]  # more than there are slots at first
    texts = TokenTexts(entries)
    ids = np.arange(700, dtype=np.uint32)[::-1]
    slots = texts.find(ids)
    assert len(set(slots.tolist())) == 700
    assert slots.min() == FIRST
    assert [text(texts, slot) for slot in slots.tolist()] == [entries[token_id].encode() for token_id in ids.tolist()]
    assert texts.find(ids).tolist() == slots.tolist()


def test_what_has_no_text_by_itself_does_not_fit() -> None:
    entries: list[Entry] = ["", b"\xf0\x9f", "x" * (TEXT_BYTES + 1), "x" * TEXT_BYTES]
    slots = TokenTexts(entries).find(np.array([0, 1, 2, 3, 4, 10**6], np.uint32))
    assert slots.tolist() == [UNFIT, UNFIT, UNFIT, FIRST, UNFIT, UNFIT]


def test_without_a_vocabulary_nothing_fits() -> None:
    assert TokenTexts(()).find(np.array([0, 7], np.uint32)).tolist() == [UNFIT, UNFIT]
