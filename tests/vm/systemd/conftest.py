"""What the tests in the guest share: the service under systemd, and clients behind a network device of their own."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support.namespaces import Namespace
from support.system_service import Service, command

_HERE: Final = Path(__file__).parent
_SERVER: Final = "10.77.0.1"
_CLIENT: Final = "10.77.0.2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip elsewhere what changes the machine that it runs on."""
    if os.environ.get("SEEDANCE_GUEST") == "systemd":
        return
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.skip(reason="runs in a guest with systemd: make test-vm"))


@pytest.fixture
def service() -> Iterator[Service]:
    """The installed service, configured with the synthetic engine, not started; removed afterwards."""
    found = Service()
    found.configure()
    try:
        yield found
    finally:
        found.remove()


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """A network namespace joined to the machine's own: `client` on its device there, `server` on the other here."""

    namespace: Namespace
    server_device: str = "sd0"
    client_device: str = "sd1"
    server: str = _SERVER
    client: str = _CLIENT

    def received_bytes(self) -> int:
        """Return the bytes that the clients' device has received, link layer included."""
        return self._bytes("rx")

    def sent_bytes(self) -> int:
        """Return the bytes that the clients' device has sent, link layer included."""
        return self._bytes("tx")

    def _bytes(self, direction: str) -> int:
        # Not from /sys, which shows the devices of the namespace that it was mounted in.
        listing = self.namespace.run("ip", "-stats", "-json", "link", "show", "dev", self.client_device)
        return int(json.loads(listing)[0]["stats64"][direction]["bytes"])


@pytest.fixture
def clients() -> Iterator[Clients]:
    """Clients behind a veth pair."""
    found = Clients(Namespace())
    try:
        command(
            *("ip", "link", "add", found.server_device, "type", "veth", "peer", "name", found.client_device),
            *("netns", found.namespace.path),
        )
        command("ip", "address", "add", f"{found.server}/24", "dev", found.server_device)
        command("ip", "link", "set", found.server_device, "up")
        found.namespace.run("ip", "address", "add", f"{found.client}/24", "dev", found.client_device)
        found.namespace.run("ip", "link", "set", found.client_device, "up")
        yield found
    finally:
        command("ip", "link", "delete", found.server_device, check=False)
        found.namespace.close()
