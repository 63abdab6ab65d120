"""`manage.py` of the processes of a mixed load.

python -m tests.mixed.manage kjo_consume
"""

import sys

import django
from django.core.management import execute_from_command_line

from tests.acceptance.manage import die_with_parent


def set_up() -> None:
    """Make Django and the handlers of the mixed load ready."""
    die_with_parent()
    django.setup()
    import tests.mixed.handlers  # noqa: F401 - declares them


if __name__ == "__main__":
    set_up()
    execute_from_command_line(sys.argv)
