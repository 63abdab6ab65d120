"""One run: see `tests.cluster`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.network import COMMAND, make_folder, obstacle
from tests.cluster.plan import KINDS, draw, draw_short, in_pairs

INSIDE = "KJO_TEST_CLUSTER"
"""Set in the process that has namespaces of its own."""
ENDLESS = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--faults", type=int, help="how many; by default as many as there is time")
    parser.add_argument("--minutes", type=float, default=10.0, help="no fault begins later")
    parser.add_argument(
        "--short", action="store_true", help="three short faults, and a small cluster"
    )
    parser.add_argument("--two-at-once", action="store_true", help="in different parts")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--summary", type=Path, help="a file for everything as JSON")
    parser.add_argument("--logs", type=Path, help="a folder that keeps logs and histories")
    options = parser.parse_args()
    if not os.environ.get(INSIDE):
        if reason := obstacle():
            parser.error(reason)
        os.environ[INSIDE] = "1"
        os.execvp(COMMAND[0], [*COMMAND, sys.executable, "-m", "tests.cluster", *sys.argv[1:]])
    tempfile.tempdir = str(make_folder())
    return run(options, options.logs or Path(tempfile.mkdtemp()))


def run(options: argparse.Namespace, logs: Path) -> int:
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from tests.cluster.cluster import Cluster
    from tests.cluster.run import Run, table, write

    logs.mkdir(parents=True, exist_ok=True)
    if options.short:
        faults = draw_short(options.seed)
    else:
        faults = draw(options.seed, options.faults or ENDLESS, options.kinds)
    rounds = in_pairs(faults) if options.two_at_once else ([fault] for fault in faults)
    print(f"seed {options.seed}", flush=True)
    began = time.time()
    with Cluster(logs, is_small=options.short) as cluster:
        print(f"started in {time.time() - began:.1f} s", flush=True)
        run = Run(cluster)
        run.carry_out(rounds, until=time.time() + options.minutes * 60)
        if run.complaints:
            print(f"{cluster.engine.report()}\n\nseed {options.seed}:", *run.complaints, flush=True)
        try:
            report = run.end()
        except AssertionError as error:
            print(f"{cluster.engine.report()}\n\nseed {options.seed} failed: {error}")
            return 1
    summary = {"seed": options.seed, **report.summary()}
    if options.summary:
        write(summary, options.summary)
    print({name: value for name, value in summary.items() if name != "faults"})
    print(table([summary]))
    print(f"took {time.time() - began:.1f} s")
    if complaints := report.complaints():
        print(f"seed {options.seed} failed:", *complaints, sep="\n")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
