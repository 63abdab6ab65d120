"""Settings of the user service: those of the example, with a name and an app of its own."""

from example_project.settings import *  # noqa: F403
from example_project.settings import INSTALLED_APPS as COMMON_APPS
from example_project.settings import KJO as COMMON

INSTALLED_APPS = [app for app in COMMON_APPS if not app.startswith("example_project.")]
INSTALLED_APPS += ["example_project.users"]

KJO = {
    **COMMON,
    # Its consumer group is "user-service-group", and its events say they come from here.
    "SERVICE_NAME": "user-service",
    "TOPIC_OPTIONS": {"partitions": 3, "replication_factor": 1},
    # It publishes there and does not listen; where it listens, consumers.py says.
    "QUEUES": {"user-events": {"consume": False}},
}
