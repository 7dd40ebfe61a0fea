"""The supervisor's hold on the journals of the tenants' workers: one `shared_log` a tenant, kept for the next worker.

With a service manager that has a store for descriptors (systemd's `FDSTORE=1`, sd_notify(3)) they are there, too, so
that a restart of the service, or the death of this process, ends no session. What is stored comes back among the
descriptors that the manager hands over (`activation`), under the name that it was stored by.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from seedance.daemon import notify, shared_log

_log = logging.getLogger(__name__)

PREFIX: Final = "sessions-"
"""What the names of our descriptors in the store begin with; the tenant follows."""


class LogStore:
    """The logs by tenant; owns their descriptors."""

    def __init__(
        self,
        inherited: Mapping[str, int],
        store: Callable[[str, int], bool] = notify.store,
        discard: Callable[[str], bool] = notify.discard,
    ) -> None:
        """`inherited` are those of the last supervisor, by tenant."""
        self._fds = dict(inherited)
        self._store = store
        self._discard = discard

    @property
    def tenants(self) -> list[str]:
        """The tenants that have a log."""
        return list(self._fds)

    def of(self, tenant: str) -> int:
        """Return a tenant's log, a new one if it has none. Raises OSError."""
        if tenant not in self._fds:
            self._fds[tenant] = shared_log.create(PREFIX + tenant)
            self._store(PREFIX + tenant, self._fds[tenant])
        return self._fds[tenant]

    def sessions(self, tenant: str) -> int:
        """Return how many sessions a tenant has in its log."""
        return shared_log.count(self._fds[tenant]) if tenant in self._fds else 0

    def drop(self, tenant: str) -> None:
        """Forget a tenant's log, and all sessions in it."""
        fd = self._fds.pop(tenant, None)
        if fd is not None:
            self._discard(PREFIX + tenant)
            os.close(fd)

    def close(self) -> None:
        """Close them; the service manager still has those that it was given."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
