"""Trials of faults: kills, two supervisors, full disks, malformed outputs, and a long simulated run.

    python benchmarks/faults.py kills [--kills 200]         kill -9 at random moments, then resume
    python benchmarks/faults.py supervisors [--minutes 10]  two supervisors that resume one run and kill each other
    python benchmarks/faults.py disk [--sizes 20]           a file system that fills up, at many sizes (needs root)
    python benchmarks/faults.py fuzz [--outputs 100000]     mutated tool calls through every parser and the agent loop
    python benchmarks/faults.py soak [--episodes 100000]    memory, descriptors and store over a long run

Each prints its table, writes it under its name into results/faults.json, and exits 1 if anything was lost, doubled or
unequal. The trials are in fault_trials/.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fault_trials import disk, fuzz, kills, soak, supervisors  # noqa: E402  (found by the line above)

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
TRIALS = {"kills": kills, "supervisors": supervisors, "disk": disk, "fuzz": fuzz, "soak": soak}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="trial", required=True)
    for name, module in TRIALS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").partition("\n")[0])
        module.options(command)
        command.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-faults-") as folder:
        table, good = TRIALS[args.trial].trial(args, Path(folder))
    table["seconds"] = round(time.monotonic() - began)
    print(json.dumps(table, indent=1))
    stored = json.loads(args.out.read_text()) if args.out.is_file() else {}
    args.out.write_text(json.dumps({**stored, args.trial: table}, indent=1, sort_keys=True) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
