"""The engine host as a process of the daemon: named and logging as the others are."""

from __future__ import annotations

import socket
import sys

from seedance.daemon.process import LINK_FD, SERVING_SLICE_S, begin, shorten_slice
from seedance.engine import host


def main() -> None:
    """Run the host on the link that the supervisor left."""
    begin("engine", sys.argv[1:], with_groups=True)  # a GPU's device files may belong to one
    shorten_slice(SERVING_SLICE_S)
    host.run(socket.socket(fileno=LINK_FD))


if __name__ == "__main__":
    main()
