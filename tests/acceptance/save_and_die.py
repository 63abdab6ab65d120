"""A process that saves a model, outside any transaction, and is killed on the way.

    python -m tests.acceptance.save_and_die before|after|never NAME

``before`` dies between the row's INSERT and the enqueue, ``after`` between the enqueue and the
commit, ``never`` lives.
"""

import os
import signal
import sys
from typing import Any

import django

from tests.acceptance.manage import die_with_parent


def main(point: str, name: str) -> None:
    die_with_parent()
    django.setup()
    from django.contrib.auth.models import Group
    from django.db.models.signals import post_save

    from kjo_django import enqueue_on_save
    from tests.ledger import jobs

    def die(**kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if point == "before":
        post_save.connect(die, sender=Group)
    enqueue_on_save(Group, jobs.write, payload=lambda group: {"job": group.name}, created=True)
    if point == "after":
        post_save.connect(die, sender=Group)
    Group.objects.create(name=name)


if __name__ == "__main__":
    main(*sys.argv[1:])
