"""The command line; see the package."""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.judging import JudgingError, Verdict, judge
from tests.mutants.sites import draw
from tests.tiers import Tier

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("own", Tier.MEDIUM.value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as the command line says; the exit code. A mutant that survives is no failure."""
    options = _parser().parse_args(arguments)
    return int(options.do(options))


def _run(options: argparse.Namespace) -> int:
    """Run the tests on each mutant, and write what became of it."""
    verdicts: list[Verdict] = []
    unknown = 0
    with tempfile.TemporaryDirectory(prefix="kjo-mutants-") as directory:
        copy = Path(directory, "copy")
        # Some tests ask git which files there are.
        subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
        mutants = dict(enumerate(draw(copy, options.seed, options.count), start=1))
        for number in options.only or mutants:
            mutant = mutants[number]
            print(f"{number}. {mutant.path}:{mutant.line}: {mutant.change}: ", end="", flush=True)
            try:
                verdict = judge(mutant, copy, options.stages)
            except JudgingError as error:
                unknown += 1
                print(f"UNKNOWN: {error}", flush=True)
                continue
            verdicts.append(verdict)
            became = f"killed by {verdict.killed_by}" if verdict.killed_by else "SURVIVED"
            print(f"{became} ({verdict.seconds:.0f} s)", flush=True)
            if options.out:
                told = {"seed": options.seed, "mutants": [asdict(each) for each in verdicts]}
                options.out.write_text(f"{json.dumps(told, indent=1)}\n")
    killed = sum(bool(each.killed_by) for each in verdicts)
    print(f"{killed} of {len(verdicts)} killed, {unknown} unknown")
    return 1 if unknown else 0


def _show(options: argparse.Namespace) -> int:
    """Print a mutant as a diff."""
    mutant = draw(ROOT, options.seed, options.number)[options.number - 1]
    source = (ROOT / mutant.path).read_bytes()
    before, after = (
        text.decode().splitlines(keepends=True) for text in (source, mutant.apply(source))
    )
    sys.stdout.writelines(difflib.unified_diff(before, after, mutant.path, str(mutant.change)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="run the tests on some mutants")
    running.add_argument("--seed", type=int, required=True)
    running.add_argument("--count", type=int, default=60)
    running.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of the drawn ones")
    running.add_argument(
        "--stages",
        nargs="+",
        choices=["own", *(tier.value for tier in Tier)],
        default=STAGES,
        help="own: the tests of the mutant's module; else a tier (default: own medium)",
    )
    running.add_argument("--out", type=Path, metavar="FILE")
    running.set_defaults(do=_run)
    showing = commands.add_parser("show", help="print a mutant as a diff")
    showing.add_argument("number", type=int)
    showing.add_argument("--seed", type=int, required=True)
    showing.set_defaults(do=_show)
    return parser


if __name__ == "__main__":
    sys.exit(main())
