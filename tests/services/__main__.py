"""Real servers for a command, from the command line.

    python -m tests.services run [--kafka] [--redis] [--postgres] -- COMMAND ...
    python -m tests.services provision [--kafka] [--redis] [--postgres]

With no option: all three. A server named in KAFKA_BOOTSTRAP_SERVERS, REDIS_URL or DATABASE_URL is
used as it is; `run` starts the others, sets those variables for the command, stops what it started
and exits with the command's code.
"""

import argparse
import sys
from collections.abc import Sequence

from tests.services.command import Foreground
from tests.services.environment import running
from tests.services.errors import ServiceError
from tests.services.provisioning import provision

SERVERS = ("kafka", "redis", "postgres")


def main(arguments: Sequence[str]) -> int:
    # argparse's treatment of "--" before a subcommand's rest differs between Python versions.
    ours, dashes, command = _partition(arguments)
    parser = _parser()
    options = parser.parse_args(ours)
    chosen = {name: getattr(options, name) for name in SERVERS}
    if not any(chosen.values()):
        chosen = dict.fromkeys(SERVERS, True)

    if options.action == "run" and not command:
        parser.error("run needs a command: run [--kafka] [--redis] [--postgres] -- COMMAND ...")
    if options.action == "provision" and dashes:
        parser.error("provision takes no command")
    try:
        if options.action == "provision":
            provision(**chosen)
            return 0
        return _run(command, chosen)
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(command: Sequence[str], chosen: dict[str, bool]) -> int:
    foreground = Foreground()
    with foreground.taking_signals(), running(**chosen, verbose=True) as environment:
        return foreground.run(command, environment)


def _partition(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return list(arguments), False, []
    at = arguments.index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.services", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="start servers, run a command, stop them")
    install = actions.add_parser("provision", help="install the servers that are missing")
    for name in SERVERS:
        run.add_argument(f"--{name}", action="store_true", help="only the servers named")
        install.add_argument(f"--{name}", action="store_true", help="only the servers named")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
