"""A process that puts limits into the kernel, says so, and waits to be killed: `python -m support.kernel_process`.

Arguments: settings and quotas, as JSON. Prints the tenants' indices as JSON once the limits are in force.
"""

from __future__ import annotations

import signal
import sys

import msgspec

from seedance.qos.kernel import KernelLimits
from seedance.qos.quota import Quota
from seedance.qos.settings import KernelSettings


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=KernelSettings)
    quotas = msgspec.json.decode(sys.argv[2], type=dict[str, Quota])
    kernel = KernelLimits(settings)
    kernel.apply(quotas)
    print(msgspec.json.encode(kernel.indices).decode(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
