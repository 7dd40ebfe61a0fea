"""Run the Autobahn WebSocket suite against an echo endpoint: exit 0 when every case passes, else list the bad ones.

    python tests/autobahn/run.py --url ws://127.0.0.1:9001/echo --wstest …/wstest [--cases '1.*' …] [--output DIR]

The endpoint must echo each message, text as text and binary as binary, and take messages of at least 16 MiB. `wstest`
is the command of the package autobahntestsuite. Cases 12 and 13 test permessage-deflate, which is not offered, and 8 is
empty; the default is all the others.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = ("1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "9.*", "10.*")
AGENT = "seedance"
PASSED = frozenset(("OK", "NON-STRICT", "INFORMATIONAL"))


def main() -> int:
    """Run what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the echo endpoint")
    parser.add_argument("--wstest", required=True, type=Path, help="the wstest command")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="patterns of case numbers")
    parser.add_argument("--output", type=Path, help="folder for the reports; none are kept without")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for the whole run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        output = (arguments.output or Path(scratch, "reports")).resolve()
        spec = Path(scratch, "spec.json")
        spec.write_text(json.dumps(specification(arguments.url, arguments.cases, output)), encoding="utf-8")
        command = [arguments.wstest, "--mode", "fuzzingclient", "--spec", spec]
        try:
            subprocess.run(
                command,
                cwd=scratch,
                stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                timeout=arguments.timeout,
                check=True,
            )
            index = json.loads(Path(output, "index.json").read_text(encoding="utf-8"))
        except (OSError, subprocess.SubprocessError, ValueError) as exc:
            print(f"cannot run the suite: {exc}", file=sys.stderr)
            return 2
    return report(index.get(AGENT, {}), arguments.cases)


def specification(url: str, cases: list[str], output: Path) -> dict[str, Any]:
    """Return the fuzzing client's specification."""
    return {
        "outdir": str(output),
        "servers": [{"agent": AGENT, "url": url}],
        "cases": cases,
        "exclude-cases": [],
        "exclude-agent-cases": {},
    }


def report(results: dict[str, dict[str, Any]], cases: list[str]) -> int:
    """Print one JSON line and the bad cases; a pattern for which no case ran is bad, too."""
    bad = sorted(
        (case, result["behavior"], result["behaviorClose"])
        for case, result in results.items()
        if not {result["behavior"], result["behaviorClose"]} <= PASSED
    )
    missing = [case for case in cases if not any(ran.startswith(case.rstrip("*")) for ran in results)]
    behaviors = collections.Counter(result["behavior"] for result in results.values())
    print(json.dumps({"cases": len(results), "bad": len(bad), "missing": missing, "behaviors": behaviors}))
    for case, behavior, behavior_close in bad:
        print(f"case {case}: {behavior}, close: {behavior_close}", file=sys.stderr)
    for case in missing:
        print(f"cannot find a result for '{case}': no such case ran", file=sys.stderr)
    return 1 if bad or missing or not results else 0


if __name__ == "__main__":
    sys.exit(main())
