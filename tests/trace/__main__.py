"""``python -m tests.trace [--json]``: how much of the app's own code one job walks through."""

import json
import logging
import sys
from dataclasses import asdict

from tests.trace.scenarios import measure


def main(arguments: list[str]) -> None:
    logging.disable(logging.ERROR)  # the dead letter of each round
    walks = measure()
    if "--json" in arguments:
        print(json.dumps({name: asdict(walk) for name, walk in walks.items()}))
        return
    print(f"{'':12}{'files':>8}{'functions':>12}{'calls':>8}{'changes of file':>18}")
    for name, walk in walks.items():
        print(f"{name:12}{walk.files:8}{walk.functions:12}{walk.calls:8}{walk.changes:18}")


if __name__ == "__main__":
    main(sys.argv[1:])
