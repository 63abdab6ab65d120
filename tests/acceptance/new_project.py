"""A project as ``startproject`` makes it, with kjo_django and no setting of it.

python -m tests.acceptance.new_project DATABASE_URL kjo_consume
python -m tests.acceptance.new_project DATABASE_URL enqueue PATH
"""

from __future__ import annotations

import os
import sys

import django
from django.conf import settings

from tests.acceptance.manage import die_with_parent
from tests.settings import database


def main() -> None:
    die_with_parent()
    os.environ["KJO_TEST_PARENT"] = str(os.getpid())  # of the process that a reloader starts
    database_url, command, *arguments = sys.argv[1:]
    context = "django.template.context_processors.request"
    settings.configure(
        SECRET_KEY="x" * 50,
        USE_TZ=True,
        LANGUAGE_CODE=os.environ.get("KJO_TEST_LANGUAGE", "en-us"),
        ROOT_URLCONF="tests.urls",
        DATABASES={"default": database(database_url)},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.staticfiles",
            "kjo_django",
            "tests.ledger",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": [context]},
            }
        ],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    if command == "enqueue":
        django.setup()
        from tests.ledger import jobs

        jobs.list_modules.enqueue(path=arguments[0])
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", command, *arguments])


if __name__ == "__main__":
    main()
