"""What each tenant may use of the engine and what it has used, through the ledger: the supervisor's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from seedance.daemon.control_messages import StepReport
from seedance.engine.ledger import Ledger
from seedance.engine.scheduling import TenantLimits, TenantStatistics, limits_of
from seedance.qos.quota import Quota


class EngineLimits:
    """The supervisor's columns of a ledger that it makes; every engine host gets that one.

    `row(tenant)` returns a number of a tenant that has a quota: its own for as long as it has one.
    """

    def __init__(self, row: Callable[[str], int]) -> None:
        """Raises OSError."""
        self.ledger = Ledger.create()
        self._row = row
        self._written: dict[int, TenantLimits] = {}
        self._rows: dict[str, int] = {}

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Put the limits of all tenants in force; who is not among them has none any more."""
        self._rows = {tenant: self._row(tenant) for tenant in quotas}
        wanted = {self._rows[tenant]: limits_of(quota) for tenant, quota in quotas.items()}
        for row in self._written.keys() - wanted.keys():
            self.ledger.set_limits(row, None)
        for row, limits in wanted.items():
            if self._written.get(row) != limits:
                self.ledger.set_limits(row, limits)
        if wanted != self._written:
            self._written = wanted
            self.ledger.limits_changed()

    def row(self, tenant: str) -> int:
        """Return the tenant's row, 0 for one without a quota."""
        return self._rows.get(tenant, 0)

    def statistics(self, tenant: str) -> TenantStatistics | None:
        """Return what the engine counts for a tenant; None while it has counted nothing."""
        return self.ledger.statistics(self.row(tenant))

    def steps(self, now_s: float) -> StepReport | None:
        """Return how the engine's steps go; `now_s` is CLOCK_MONOTONIC. None before its first sign of life."""
        record = self.ledger.engine()
        if record is None or not record.beat_s:
            return None
        return StepReport(
            beat_age_s=max(0.0, now_s - record.beat_s),
            count=record.steps,
            total_s=record.step_s,
            histogram=self.ledger.histogram(),
        )
