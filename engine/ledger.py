"""The ledger: one table of shared memory between the supervisor, the engine host and the process that makes the steps.

    column             row          written by      read by
    limits             tenant       supervisor      the scheduler
    statistics         tenant       the scheduler   supervisor
    pause flags        stream       engine host     the scheduler
    engine records     engine       its scheduler   supervisor, engine host
    step histogram     -            the scheduler   supervisor
    active engine      -            engine host     the schedulers, supervisor

A host may have several engines at a time, each with a row. The active one's scheduler is the one that writes tenants'
statistics and the histogram; the others only give signs of life.

Each column has one writer, and nobody waits for anybody. What is wider than a word is a record with a checksum: a
reader takes it whole, or not at all when the writer is in the middle of it. That asks nothing of the order in which a
processor makes stores visible. A counter of changes beside a column says when to look at it again; a reader that
finds a record torn looks again at its next step.

The table is a memfd: whoever has its descriptor has it, and it goes with its last user. The supervisor makes it, so
that limits outlive an engine. Rows of tenants that were never written cost no memory.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from seedance.engine.scheduling import TenantLimits, TenantStatistics
from seedance.errors import EngineError

ROWS: Final = 1 << 16
ENGINES: Final = 16
STREAMS: Final = 1 << 16
HISTOGRAM_PLACES: Final = 32

_MAGIC: Final = 0x32_7265_6764_656C  # "ledger2"
_LINE: Final = 64  # no two writers share a cache line
_CODES: Final = {float: "d", int: "q", bool: "?", float | None: "d"}


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's sign of life: `beat_s` on CLOCK_MONOTONIC, steps made, and seconds spent in them."""

    beat_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0


S = TypeVar("S", bound=msgspec.Struct)


class _Column(Generic[S]):
    """Records of one struct of numbers, one after the other; None is kept as NaN."""

    def __init__(self, kind: type[S], offset: int, count: int) -> None:
        self._kind = kind
        self._offset = offset
        fields = msgspec.structs.fields(kind)
        self._names = [field.name for field in fields]
        self._optional = [field.name for field in fields if field.type == float | None]
        self._pack = struct.Struct("=" + "".join(_CODES[field.type] for field in fields))
        self._room = -(-(self._pack.size + 4) // 8) * 8
        self.end = offset + self._room * count

    def place(self, row: int) -> slice:
        at = self._offset + row * self._room
        return slice(at, at + self._pack.size + 4)

    def encode(self, value: S) -> bytes:
        numbers = msgspec.structs.astuple(value)
        if self._optional:
            numbers = tuple(math.nan if number is None else number for number in numbers)
        data = self._pack.pack(*numbers)
        return data + zlib.crc32(data).to_bytes(4, "little")

    def decode(self, data: bytes) -> S | None:
        """Return the record, or None when it is torn or was never written."""
        if int.from_bytes(data[-4:], "little") != zlib.crc32(data[:-4]):
            return None
        values: dict[str, Any] = dict(zip(self._names, self._pack.unpack(data[:-4]), strict=True))
        for name in self._optional:
            if math.isnan(values[name]):
                values[name] = None
        return self._kind(**values)


# The layout: this is the only place that knows it.
_MAGIC_AT: Final = 0
_ACTIVE_AT: Final = 8
_LIMITS_CHANGES_AT: Final = _LINE
_LIMITS_ROWS_AT: Final = _LINE + 8
_PAUSE_CHANGES_AT: Final = 2 * _LINE
_HISTOGRAM_AT: Final = 3 * _LINE
_PAUSES_AT: Final = _HISTOGRAM_AT + 8 * HISTOGRAM_PLACES
_ENGINES: Final = _Column(EngineRecord, _PAUSES_AT + STREAMS, ENGINES)
_LIMITS: Final = _Column(TenantLimits, -(-_ENGINES.end // _LINE) * _LINE, ROWS)
_STATISTICS: Final = _Column(TenantStatistics, -(-_LIMITS.end // _LINE) * _LINE, ROWS)
LEDGER_BYTES: Final = -(-_STATISTICS.end // mmap.PAGESIZE) * mmap.PAGESIZE


class Ledger:
    """The table, mapped; owns its descriptor.

    Rows are numbers of tenants, 1 to ROWS - 1; the flag of a stream is at its number modulo STREAMS. `engine_row` is
    that of the engine which writes by this object.
    """

    def __init__(self, fd: int, engine_row: int = 0) -> None:
        """Map the ledger behind a descriptor. Raises EngineError when it is none; the descriptor is closed then."""
        self.fd = fd
        self.engine_row = engine_row
        if os.fstat(fd).st_size != LEDGER_BYTES:
            os.close(fd)
            raise EngineError("internal", f"cannot use the ledger: it must have {LEDGER_BYTES} bytes")
        self._map = mmap.mmap(fd, LEDGER_BYTES)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        if self._words[_MAGIC_AT // 8] != _MAGIC:
            self.close()
            raise EngineError("internal", "cannot use the ledger: it was made by another version of seedance")

    @classmethod
    def create(cls) -> Ledger:
        """Make an empty one. Raises OSError."""
        fd = os.memfd_create("seedance-ledger", os.MFD_CLOEXEC)
        os.ftruncate(fd, LEDGER_BYTES)
        os.pwrite(fd, _MAGIC.to_bytes(8, "little"), _MAGIC_AT)
        return cls(fd)

    def for_engine(self, engine_row: int) -> Ledger:
        """Return the same table for the engine of a row; the caller closes it."""
        return Ledger(os.dup(self.fd), engine_row)

    def close(self) -> None:
        """Unmap it and close the descriptor; idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._bytes.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # -- the supervisor's columns -------------------------------------------------------------------------------------

    def set_limits(self, row: int, limits: TenantLimits | None) -> None:
        """Write a tenant's limits, None for a row that is nobody's; they count from `limits_changed` on."""
        place = _LIMITS.place(row)
        data = bytes(place.stop - place.start) if limits is None else _LIMITS.encode(limits)
        self._bytes[place] = data
        self._words[_LIMITS_ROWS_AT // 8] = max(self._words[_LIMITS_ROWS_AT // 8], row + 1)

    def limits_changed(self) -> None:
        """Have the limits read again, after all of them were written."""
        self._words[_LIMITS_CHANGES_AT // 8] += 1

    # -- the engine host's columns ------------------------------------------------------------------------------------

    def choose(self, engine_row: int) -> None:
        """Make an engine the active one; what another one has told of tenants is forgotten."""
        self._words[_ACTIVE_AT // 8] = engine_row
        self.clear_statistics()

    @property
    def active_row(self) -> int:
        """The row of the active engine."""
        return self._words[_ACTIVE_AT // 8]

    @property
    def is_active(self) -> bool:
        """Whether our engine is the active one."""
        return self.active_row == self.engine_row

    def set_paused(self, stream: int, is_paused: bool) -> None:
        """Write the pause flag of a stream."""
        at = _PAUSES_AT + stream % STREAMS
        if self._bytes[at] != is_paused:
            self._bytes[at] = is_paused
            self._words[_PAUSE_CHANGES_AT // 8] += 1

    def is_paused(self, stream: int) -> bool:
        """Return the pause flag of a stream."""
        return bool(self._bytes[_PAUSES_AT + stream % STREAMS])

    @property
    def pause_changes(self) -> int:
        """How often a pause flag has changed."""
        return self._words[_PAUSE_CHANGES_AT // 8]

    # -- the scheduler's columns --------------------------------------------------------------------------------------

    def set_statistics(self, row: int, statistics: TenantStatistics) -> None:
        """Write a tenant's statistics."""
        self._bytes[_STATISTICS.place(row)] = _STATISTICS.encode(statistics)

    def statistics(self, row: int) -> TenantStatistics | None:
        """Return a tenant's statistics; None while there are none, or while they are being written."""
        return _STATISTICS.decode(bytes(self._bytes[_STATISTICS.place(row)]))

    def clear_statistics(self) -> None:
        """Forget what was told of tenants and steps."""
        for row in range(self._words[_LIMITS_ROWS_AT // 8]):
            place = _STATISTICS.place(row)
            if any(self._bytes[place]):
                self._bytes[place] = bytes(place.stop - place.start)
        for place_number in range(HISTOGRAM_PLACES):
            self._words[_HISTOGRAM_AT // 8 + place_number] = 0

    def set_engine(self, record: EngineRecord) -> None:
        """Write our engine's record."""
        self._bytes[_ENGINES.place(self.engine_row)] = _ENGINES.encode(record)

    def engine(self, row: int | None = None) -> EngineRecord | None:
        """Return an engine's record, or the active one's; None while there is none, or while it is being written."""
        row = self.active_row if row is None else row
        return _ENGINES.decode(bytes(self._bytes[_ENGINES.place(row)]))

    def count_step(self, step_s: float) -> None:
        """Count a step in the histogram: place n has those of less than 2^n microseconds, and no less than half."""
        place = min(int(step_s * 1e6).bit_length(), HISTOGRAM_PLACES - 1)
        self._words[_HISTOGRAM_AT // 8 + place] += 1

    def histogram(self) -> list[int]:
        """Return how many steps there were of each length."""
        first = _HISTOGRAM_AT // 8
        return self._words[first : first + HISTOGRAM_PLACES].tolist()


class LimitsReader:
    """The limits as one reader has seen them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changes = self._looked_at = 0
        self._seen: dict[int, bytes] = {}

    @property
    def has_news(self) -> bool:
        """Whether there may be any: costs less to ask, for who does so in every step."""
        return self._ledger._words[_LIMITS_CHANGES_AT // 8] != self._changes

    def news(self) -> Iterator[tuple[int, TenantLimits | None]]:
        """Yield rows whose limits have changed since the last time, None for a row that is nobody's now."""
        words = self._ledger._words
        changes = words[_LIMITS_CHANGES_AT // 8]
        if changes == self._changes:
            return
        is_whole = True
        for row in range(1, words[_LIMITS_ROWS_AT // 8]):
            data = bytes(self._ledger._bytes[_LIMITS.place(row)])
            if data == self._seen.get(row):
                continue
            limits = _LIMITS.decode(data)
            if limits is None and any(data):
                is_whole = False
                continue
            known = self._seen.get(row)
            self._seen[row] = data
            if limits is not None or (known is not None and any(known)):
                yield row, limits
        # Looked at twice: a processor may show the counter before what it counts.
        if is_whole and self._looked_at == changes:
            self._changes = changes
        self._looked_at = changes
