"""A relay that is killed after its first batch was published and before that was recorded."""

import os
import signal
from typing import Any

import django

from tests.acceptance.manage import die_with_parent


def main() -> None:
    die_with_parent()
    django.setup()
    from kjo_django.producer.relay import Relay

    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Relay._record = die  # type: ignore[method-assign]
    Relay().run()


if __name__ == "__main__":
    main()
