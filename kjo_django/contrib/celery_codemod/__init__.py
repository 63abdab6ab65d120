"""A codemod that rewrites a project's use of Celery as jobs: ``manage.py kjo_migrate_celery``.

Needs the extra ``migrate`` (libcst). It parses files and imports none of them. The command carries
out a ``migration.Migration``.
"""
