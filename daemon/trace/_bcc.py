"""Compile and run one tracing program. The system's Python runs this, so it needs nothing but BCC.

Standard input: one JSON object, `text` (the program), `interval_s`, `count` (0: until interrupted). Standard output:
first `ready` alone in a line, then after each interval one JSON list of [tenant, slot, count], counted since the start.
The exit status is NO_BCC when BCC is missing.
"""

import contextlib
import importlib
import json
import sys
import time

NO_BCC = 3


def main() -> None:
    """Do what standard input says."""
    try:
        bcc = importlib.import_module("bcc")
    except ImportError:
        sys.exit(NO_BCC)
    order = json.load(sys.stdin)
    program = bcc.BPF(text=order["text"])
    print("ready", flush=True)
    rounds = 0
    while not order["count"] or rounds < order["count"]:
        time.sleep(order["interval_s"])
        rows = [[key.tenant, key.slot, value.value] for key, value in program["counts"].items()]
        print(json.dumps(rows), flush=True)
        rounds += 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
