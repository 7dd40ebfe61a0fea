"""The service as an administrator uses it."""

from __future__ import annotations

from support.system_service import CGROUP, PINS, Service, command, systemctl


def test_the_units_are_sound() -> None:
    command("systemd-analyze", "verify", "seedanced.service", "seedanced.socket", "seedance.slice")


def test_it_starts_serves_and_stops(service: Service) -> None:
    for name in ("acme", "bolt", "crux"):
        service.add_tenant(name)
    seconds = service.start()
    print(f"started in {seconds:.1f} s")
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText")
    for name in service.keys:
        assert service.complete(name)["usage"]["completion_tokens"] == 16
    groups = set(service.processes().values())
    assert {"supervisor", "gateway", "engine"} <= groups, groups
    assert {f"tenants/{name}" for name in service.keys} <= groups, groups
    service.stop()
    assert service.show("Result") == "success"
    assert not CGROUP.exists()
    assert not PINS.exists()
    assert "seedance" not in systemctl("list-units", "--failed", "--plain", "--no-legend")
