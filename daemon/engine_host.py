"""The engine host as a process of the daemon: named and logging as the others are."""

from __future__ import annotations

import socket
import sys

from seedance.daemon.links import LINK_FD
from seedance.daemon.logs import start_logging
from seedance.daemon.process import set_name
from seedance.engine import host


def main() -> None:
    """Run the host on the link that the supervisor left; the log level is the only argument."""
    set_name("seed-engine")
    start_logging("engine host", sys.argv[1])
    host.run(socket.socket(fileno=LINK_FD))


if __name__ == "__main__":
    main()
