"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.qos.pins import parse_mount_kind

MOUNTINFO = r"""21 1 0:20 / / rw - ext4 /dev/vda rw
22 21 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw
23 22 0:22 / /sys/fs/bpf rw shared:8 - bpf bpf rw,mode=700
24 21 0:23 / /mnt/two\040words rw - bpf bpf rw
25 21 0:24 / /covered rw - bpf bpf rw
26 25 0:25 / /covered rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/sys/fs/bpf", "bpf"),
        ("/sys/fs/bpf/below", "bpf"),
        ("/sys/fs/bpfx", "sysfs"),
        ("/mnt/two words", "bpf"),
        ("/covered", "tmpfs"),
        ("/home", "ext4"),
    ],
)
def test_mount_kind(path: str, kind: str) -> None:
    assert parse_mount_kind(MOUNTINFO, Path(path)) == kind
