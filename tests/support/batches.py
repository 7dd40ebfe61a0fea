"""A batch as its deltas, however they were encoded."""

from __future__ import annotations

from seedance.engine.channel import Batch, Delta


def all_deltas(batch: Batch) -> list[Delta]:
    """Return every stream's part of a batch."""
    return [*batch.deltas, *(Delta(stream, [token_id]) for stream, token_id in batch.pairs())]
