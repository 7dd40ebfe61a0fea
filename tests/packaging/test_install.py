"""`make install`, `make uninstall` and the Debian package, below folders of the test's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
MINOR: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
BASE_PYTHON: Final = str(Path(sys.base_exec_prefix) / "bin" / f"python{MINOR}")
SITE: Final = Path(f"lib/seedance/lib/python{MINOR}/site-packages")
MAKE_VARIABLES: Final = ("PREFIX", "DESTDIR", "WHEELHOUSE", "PURGE")
OURS: Final = '[engine]\nkind = "synthetic"\n\n[listen]\ntcp = ["127.0.0.1:0"]\n'

FILES: Final = (
    "bin/seedanced",
    "bin/seedancectl",
    "lib/seedance/install-engine",
    "lib/systemd/system/seedance.slice",
    "lib/systemd/system/seedanced.service",
    "lib/systemd/system/seedanced.socket",
    "lib/sysusers.d/seedance.conf",
    "lib/tmpfiles.d/seedance.conf",
    "share/doc/seedance/README.md",
    "share/doc/seedance/examples/acme.toml",
)


def script(*command: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script of packaging/; it sees none of our make's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
    kept["PIP_PYTHON"] = sys.executable
    return subprocess.run(
        command,
        cwd=ROOT,
        env=kept | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def run_installed(tree: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an installed command with this Python: the one that it names need not be on this machine."""
    return subprocess.run(
        [BASE_PYTHON, str(tree / "lib/seedance/bin" / command), *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tree / SITE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install below a folder in which the administrator has a configuration already."""
    root = tmp_path_factory.mktemp("root")
    config = root / "etc/seedance/seedanced.toml"
    config.parent.mkdir(parents=True)
    config.write_text(OURS)
    result = script(
        *("packaging/install.sh", "install"),
        DESTDIR=root,
        PREFIX="/opt/there",
        WHEEL=wheel,
        SYSTEM_PYTHON=BASE_PYTHON,
        INTERPRETER=f"/usr/bin/python{MINOR}",
    )
    assert result.returncode == 0, result.stderr
    return root


def test_everything_is_in_its_place(installed: Path) -> None:
    missing = [name for name in FILES if not os.path.lexists(installed / "opt/there" / name)]
    assert missing == []
    assert sorted(path.name for path in installed.iterdir()) == ["etc", "opt"]
    assert (installed / "opt/there/lib/seedance/bin/python").readlink() == Path(f"/usr/bin/python{MINOR}")
    assert (installed / "opt/there/bin/seedanced").readlink() == Path("../lib/seedance/bin/seedanced")


def test_the_units_name_what_was_installed(installed: Path) -> None:
    text = (installed / "opt/there/lib/systemd/system/seedanced.service").read_text()
    assert "ExecStart=/opt/there/bin/seedanced " in text
    assert "ExecReload=/opt/there/bin/seedancectl " in text
    assert "file:///opt/there/share/doc/seedance/README.md" in text
    assert "/usr/bin/seedance" not in text


def test_a_configuration_that_was_there_stays(installed: Path) -> None:
    assert (installed / "etc/seedance/seedanced.toml").read_text() == OURS


def test_the_installed_commands_run(installed: Path) -> None:
    tree = installed / "opt/there"
    (installed / "etc/seedance/tenants.d").mkdir(exist_ok=True)
    config = str(installed / "etc/seedance/seedanced.toml")
    checked = run_installed(tree, "seedanced", "--config", config, "--check-config")
    assert checked.returncode == 0, checked.stderr
    assert "Usage:" in run_installed(tree, "seedancectl", "--help").stdout
    # The first line names the virtual environment as it will be, not as it was staged.
    first = (tree / "lib/seedance/bin/seedanced").read_text().partition("\n")[0]
    assert first == "#!/opt/there/lib/seedance/bin/python -I"


def test_uninstall_takes_back_what_install_made(installed: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(installed, root, symlinks=True)
    kept = script("packaging/install.sh", "uninstall", DESTDIR=root, PREFIX="/opt/there")
    assert kept.returncode == 0, kept.stderr
    assert [str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()] == [
        "etc/seedance/seedanced.toml"
    ]
    purged = script("packaging/install.sh", "uninstall", DESTDIR=root, PREFIX="/opt/there", PURGE="1")
    assert purged.returncode == 0, purged.stderr
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"SYSTEM_PYTHON": "/bin/false"}, "it needs Python 3.11 or newer, which /bin/false is not"),
        ({"INTERPRETER": "/root/python3"}, "user seedance cannot reach /root/python3"),
    ],
)
def test_a_python_that_would_not_do_is_refused(environment: dict[str, str], reason: str, tmp_path: Path) -> None:
    result = script(
        "packaging/install.sh", "install", **{"DESTDIR": str(tmp_path), "SYSTEM_PYTHON": BASE_PYTHON} | environment
    )
    assert result.returncode == 1
    assert reason in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may install")
def test_an_ordinary_user_is_told_that_it_takes_root() -> None:
    result = script("packaging/install.sh", "install")
    assert result.returncode == 1
    assert "as root" in result.stderr


@pytest.fixture(scope="module")
def package(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("dpkg-deb"):
        pytest.skip("no dpkg-deb")
    out = tmp_path_factory.mktemp("deb")
    result = script("packaging/deb.sh", WHEEL=wheel, SYSTEM_PYTHON=BASE_PYTHON, OUT=out)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("seedance_*.deb")
    return built


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "--field", str(package), name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_says_what_it_needs(package: Path) -> None:
    assert field(package, "Package") == "seedance"
    assert re.fullmatch(rf"[0-9][0-9a-z.~]*\+py{MINOR.replace('.', '')}", field(package, "Version"))
    assert f"python3 (>= {MINOR})" in field(package, "Depends")
    assert "libbpf1" in field(package, "Depends")


def test_the_package_unpacks_to_a_whole_installation(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tmp_path)], check=True)
    assert [name for name in FILES if not os.path.lexists(tmp_path / "usr" / name)] == []
    assert (tmp_path / "DEBIAN/conffiles").read_text() == "/etc/seedance/seedanced.toml\n"
    sums = subprocess.run(["md5sum", "--quiet", "-c", "DEBIAN/md5sums"], cwd=tmp_path, check=False)
    assert sums.returncode == 0
    for name in ("postinst", "prerm", "postrm"):
        assert os.access(tmp_path / "DEBIAN" / name, os.X_OK)
        assert subprocess.run(["sh", "-n", str(tmp_path / "DEBIAN" / name)], check=False).returncode == 0
    version = run_installed(tmp_path / "usr", "seedanced", "--version")
    assert field(package, "Version").partition("+")[0] in version.stdout
