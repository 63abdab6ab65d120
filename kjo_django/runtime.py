"""What the parts of a process share: settings, database, store, coordination and clock.

A worker makes its ``Runtime`` once and passes it down, so nothing on a job's way reads settings or
looks for a backend again. Web code asks for ``current_runtime()`` once per call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kjo_django.backends import get_coordination
from kjo_django.clock import CLOCK, Clock
from kjo_django.conf import Settings, get_settings
from kjo_django.coordination.base import Coordination
from kjo_django.store import Store, store_for
from kjo_django.store.transactions import jobs_database


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one process runs with.

    :param settings: those in force when it was made.
    :param database: the alias of the database that holds the jobs.
    :param store: the statements for that database.
    :param coordination: leases, marks and wake-ups.
    :param clock: the system's, or a test's.
    """

    settings: Settings
    database: str
    store: Store
    coordination: Coordination
    clock: Clock = CLOCK

    @property
    def service(self) -> str:
        """The name of this service, which its markers bear."""
        return self.settings.service_name


_current: tuple[int, Settings, Runtime] | None = None


def current_runtime() -> Runtime:
    """Return the runtime of this process for the settings in force.

    :raises ImproperlyConfigured: a setting is wrong.
    """
    global _current
    settings, coordination = get_settings(), get_coordination()
    made, pid = _current, os.getpid()
    if made is not None and made[0] == pid and made[1] is settings:
        runtime = made[2]
        if runtime.coordination is coordination and runtime.database == jobs_database():
            return runtime
    alias = jobs_database()
    runtime = Runtime(settings, alias, store_for(alias), coordination)
    _current = (pid, settings, runtime)
    return runtime
