"""`seedancectl limits` and `tenant` against limits in a real kernel, in a namespace and groups of the test's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.namespaces import Namespace
from support.observed import new_bpffs

from seedance.bpf import loader
from seedance.daemon import ctl

NAME = f"seedance-ctl-{os.getpid()}"
LIMITS = """[cpu]
max = "50%"
[network]
egress = "8Mbit"
ingress = "4Mbit"
"""


def missing() -> str:
    """Return why these tests cannot run here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    return loader.supported()


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"limits cannot be put into this kernel: {missing()}")


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with contextlib.closing(Namespace()) as made:
        yield made


@contextlib.contextmanager
def _running(namespace: Namespace, tmp_path: Path, policy: str, limits: str) -> Iterator[Daemon]:
    with new_bpffs(tmp_path / "bpf") as folder:
        kernel = {"limits": policy, "name": NAME, "bpffs": str(folder), "observe": False}
        daemon = Daemon(tmp_path / "d", tables={"kernel": kernel})
        try:
            daemon.add_tenant("acme", limits)
            with namespace:
                daemon.start()
            yield daemon
        finally:
            daemon.close()
            wait_until(lambda: not daemon.processes())
            with namespace:  # a killed process gives its files back, the lock too, after its memory
                wait_until(lambda: _ctl(daemon, "limits", "remove")[0] == 0, 5)
        assert not (folder / NAME).exists()


@pytest.fixture
def daemon(namespace: Namespace, tmp_path: Path) -> Iterator[Daemon]:
    with _running(namespace, tmp_path, "best_effort", LIMITS) as daemon:
        yield daemon


def _ctl(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = ctl.run(["--config", str(daemon.config), *arguments])
    return status, out.getvalue(), err.getvalue()


def _json(daemon: Daemon, *arguments: str) -> object:
    status, out, err = _ctl(daemon, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def _enforced(daemon: Daemon) -> dict[str, str]:
    shown = _json(daemon, "tenant", "show", "acme")
    assert isinstance(shown, dict)
    return dict(shown["enforced"])


def test_limits_are_shown_as_the_kernel_has_them_and_follow_the_file(daemon: Daemon) -> None:
    off = daemon.status().limits_off
    assert not {"egress", "ingress"} & off.keys(), off
    enforced = _enforced(daemon)
    assert (enforced["egress_bytes_per_s"], enforced["ingress_bytes_per_s"]) == ("1000000", "500000")
    assert ("cpu" in off) == ("cpu.max" not in enforced)
    if "cpu" not in off:
        assert enforced["cpu.max"] == "50000 100000"
    shown = _json(daemon, "limits", "show", "acme")
    assert isinstance(shown, dict)
    assert (shown["tenants"], shown["off"]) == ({"acme": enforced}, off)
    assert any("lo" in line for line in shown["attachments"]), shown["attachments"]
    _, text, _ = _ctl(daemon, "limits", "show")
    assert "egress_bytes_per_s" in text
    assert "attached: " in text

    daemon.tenant_file("acme").write_text(daemon.tenant_file("acme").read_text().replace("8Mbit", "16Mbit"))
    wait_until(lambda: _enforced(daemon)["egress_bytes_per_s"] == "2000000", 5)


def test_what_a_killed_daemon_left_is_removed_once_and_for_all(daemon: Daemon, namespace: Namespace) -> None:
    status, out, err = _ctl(daemon, "limits", "remove")
    assert (status, out) == (1, "")
    assert err.startswith("seedancectl: cannot remove the limits of a running seedanced")

    daemon.signal(signal.SIGKILL)
    daemon.wait()
    wait_until(lambda: not daemon.processes())
    assert "seedance" in namespace.run("tc", "filter", "show", "dev", "lo", "egress"), "limits outlive a crash"

    with namespace:
        status, out, err = _ctl(daemon, "limits", "remove")
        again = _ctl(daemon, "limits", "remove")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) > 1, out
    assert namespace.run("tc", "filter", "show", "dev", "lo", "egress") == ""
    assert again == (0, "nothing to remove\n", "")


def test_a_tenant_whose_limit_cannot_be_kept_leaves_no_file(namespace: Namespace, tmp_path: Path) -> None:
    with _running(namespace, tmp_path, "required", "") as daemon:
        if "cpu" not in daemon.status().limits_off:
            pytest.skip("this machine keeps every limit")
        path = daemon.tenant_file("newcomer")
        status, out, err = _ctl(daemon, "tenant", "add", "newcomer", "--cpu", "50%")
        assert (status, out) == (78, "")
        assert f"seedancectl: cannot use '{path}', key 'cpu.max': " in err
        assert not path.exists()
        assert _ctl(daemon, "check")[0] == 0
        status, out, err = _ctl(daemon, "tenant", "add", "newcomer", "--cpu", "50%", "--best-effort")
        assert status == 0, err
        assert out.startswith("sk-seed-")
        assert [tenant.quota.tenant for tenant in daemon.status().tenants] == ["acme", "newcomer"]
