"""``UniqueWhereGiven``: unique ids are unique, and rows without one pay nothing for it."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import UniqueConstraint

from kjo_django.models import Job, UniqueWhereGiven
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db

(CONSTRAINT,) = Job._meta.constraints


def explained(rows) -> str:
    """How PostgreSQL would read them from a table too large to be read from end to end."""
    with connection.cursor() as cursor, transaction.atomic():
        cursor.execute("SET LOCAL enable_seqscan = off")
        return rows.explain()


def test_two_jobs_of_a_queue_cannot_have_one_id_and_any_number_can_have_none(real_database):
    JobFactory(queue="a", unique_id="order-7")
    JobFactory(queue="b", unique_id="order-7")
    JobFactory.create_batch(2, queue="a", unique_id=None)
    with pytest.raises(IntegrityError), transaction.atomic():
        JobFactory(queue="a", unique_id="order-7")


def test_jobs_without_an_id_are_not_in_the_index(real_database):
    if connection.vendor == "mysql":
        pytest.skip("its indexes have no conditions")
    # When
    with connection.cursor() as cursor:
        if real_database == "postgresql":
            cursor.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'kjo_job_unique_id'")
        else:
            cursor.execute("SELECT sql FROM sqlite_master WHERE name = 'kjo_job_unique_id'")
        ((definition,),) = cursor.fetchall()
    # Then
    assert "UNIQUE INDEX" in definition
    assert definition.replace('"', "").rstrip(")").endswith("unique_id IS NOT NULL")


@pytest.mark.parametrize("asked", [{"unique_id": "order-7"}, {"unique_id__in": ["a", "order-7"]}])
def test_jobs_are_found_by_their_ids_in_the_index(postgres, asked):
    # Given more than the statistics of an empty table, of which every index is as good as another
    Job.objects.bulk_create(JobFactory.build(queue="a", unique_id=f"id-{n}") for n in range(500))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE kjo_job")
    # Then
    assert "kjo_job_unique_id" in explained(Job.objects.filter(queue="a", **asked))


def test_where_indexes_have_no_conditions_it_is_the_usual_constraint(monkeypatch):
    monkeypatch.setattr(connection.features, "supports_partial_indexes", False)
    usual = UniqueConstraint(fields=CONSTRAINT.fields, name=CONSTRAINT.name)
    editor = connection.schema_editor(collect_sql=True)
    for method in ("constraint_sql", "create_sql", "remove_sql"):
        ours, theirs = (getattr(one, method)(Job, editor) for one in (CONSTRAINT, usual))
        assert str(ours) == str(theirs)
    assert "models.W036" not in {problem.id for problem in Job.check(databases=["default"])}


def test_where_indexes_have_no_conditions_they_begin_with_the_columns_of_theirs(monkeypatch):
    """``PartialIndex``: the rows meant are found without the others."""
    monkeypatch.setattr(connection.features, "supports_partial_indexes", False)
    indexes = {index.name: index for index in Job._meta.indexes}
    editor = connection.schema_editor(collect_sql=True)
    text = str(indexes["kjo_job_due_idx"].create_sql(Job, editor))
    unquoted = text.replace('"', "").replace("`", "")
    assert unquoted.endswith("ON kjo_job (state, available_at, id)")
    assert "models.W037" not in {problem.id for problem in Job.check(databases=["default"])}


def test_migrations_tell_it_from_the_usual_constraint():
    options = {"fields": CONSTRAINT.fields, "name": CONSTRAINT.name}
    ours, usual = UniqueWhereGiven(**options), UniqueConstraint(**options)
    assert ours == CONSTRAINT
    assert ours != usual
    assert usual != ours
