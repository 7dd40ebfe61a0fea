"""What the tests in the guest share: the service under systemd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support.system_service import Service

_HERE: Final = Path(__file__).parent


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
