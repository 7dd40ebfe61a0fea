"""What is asked for, and told, when another model is to be served in the place of the one that is."""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal

import msgspec

Policy = Literal["finish", "continue"]
"""What becomes of streams that run at the switch: they end where they began, or go on with the new model at once."""

Place = Literal["auto", "beside", "instead"]
"""Where a new model comes up: beside the old one, or in its place, as there is memory for one alone."""

Way = Literal["", "beside", "reload", "instead"]
"""How it came up: in an engine beside the old one, in the same engine, or in one that was started after the old one."""

DEFAULT_DRAIN_S: Final = 600.0


class LoadPhase(enum.StrEnum):
    """How far a load is; the values are for status.

    CHECKING → STARTING → TRYING → PREPARING → DRAINING → SERVED. Where there is memory for one engine alone, PREPARING
    and DRAINING come before STARTING, or RELOADING. FAILED may follow each of those before SERVED, and then the old
    model is served as before.
    """

    CHECKING = "checking"
    STARTING = "starting"
    RELOADING = "reloading"
    TRYING = "trying"
    PREPARING = "preparing"
    DRAINING = "draining"
    SERVED = "served"
    FAILED = "failed"

    @property
    def is_last(self) -> bool:
        """Return whether nothing more happens."""
        return self in (LoadPhase.SERVED, LoadPhase.FAILED)


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator asks for. `name` is what clients ask for from then on, empty for the name that they use now.

    With policy "finish" the old model keeps its streams for `drain_s` at most; those that then still run go on with the
    new one where its token ids mean the same, and end with an error where they do not.
    """

    path: str
    name: str = ""
    policy: Policy = "finish"
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = DEFAULT_DRAIN_S
    needs_manifest: bool = False


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    """How a load goes. `is_switched` says that new requests go to the new model.

    `reason` is why it failed. `restart_reason` is why the engine that ran could not take the new weights, where there
    was memory for one alone. `done_bytes` of `total_bytes` have been checked; `has_manifest` says whether against
    checksums. `streams` run on the old engine still. `pause_s` is how long new requests waited at most, None before
    that is known; for `reload_s` of that time the engine stood still for other weights.
    """

    order: LoadOrder
    phase: LoadPhase = LoadPhase.CHECKING
    is_switched: bool = False
    reason: str = ""
    place: Way = ""
    restart_reason: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    has_manifest: bool = False
    weight_bytes: int = 0
    streams: int = 0
    pause_s: float | None = None
    reload_s: float | None = None
