"""The example shop with the jobs of one queue in a second database, for pictures of the choice."""

import os

from example_project.settings import *  # noqa: F403
from example_project.settings import DATABASES, KJO, sqlite

DATABASES["jobs2"] = sqlite(os.environ["KJO_EXAMPLE_SECOND_DB"])
BACKEND = "kjo_django.transports.database.DatabaseTransport"
KJO["TRANSPORTS"] = {name: {"BACKEND": BACKEND} for name in ("default", "jobs2")}
KJO["QUEUES"]["stock"] |= {"database": "jobs2", "transport": "jobs2"}
