"""``enqueue_on_save``: a row and its job are committed together or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import serializers
from django.db import DatabaseError, connection, models, transaction
from django.db.models.signals import class_prepared, post_save
from django.test.utils import isolate_apps
from django.utils import timezone

from kjo_django import enqueue_on_save
from kjo_django.models import Job
from tests.ledger.jobs import no_op, write
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _hooks_end_with_the_test():
    """Neither receivers nor the patched save outlive a test."""
    signals = post_save, class_prepared
    receivers = [list(signal.receivers) for signal in signals]
    save_base = Entry.__dict__.get("save_base")
    yield
    for signal, before in zip(signals, receivers, strict=True):
        signal.receivers = before
        signal.sender_receivers_cache.clear()
    if save_base is None and "save_base" in Entry.__dict__:
        del Entry.save_base


@pytest.fixture
def isolated_ledger():
    """Models that a test makes are forgotten after it."""
    with isolate_apps("tests.ledger"):
        yield
    Entry._meta._expire_cache()


def subclass_of(model: type[models.Model], name: str, *, proxy: bool = False) -> Any:
    meta = type("Meta", (), {"app_label": "ledger", "proxy": proxy})
    return type(name, (model,), {"__module__": __name__, "Meta": meta})


def hook(**options) -> None:
    enqueue_on_save(Entry, write, payload=lambda entry: {"job": f"of {entry.job}"}, **options)


def jobs() -> list[str]:
    return [job.arguments["job"] for job in Job.objects.order_by("id")]


def test_a_save_enqueues_the_job_with_its_payload():
    hook()
    Entry.objects.create(job="a")
    assert jobs() == ["of a"]


@pytest.mark.parametrize(
    ("created", "expected"), [(True, ["of a"]), (False, ["of b"]), (None, ["of a", "of b"])]
)
def test_created_tells_new_rows_from_changed_ones(created, expected):
    # Given
    hook(created=created)
    # When
    entry = Entry.objects.create(job="a")
    entry.job = "b"
    entry.save()
    # Then
    assert jobs() == expected


def test_the_condition_looks_at_the_instance():
    hook(condition=lambda entry: entry.note == "yes")
    Entry.objects.create(job="a", note="no")
    Entry.objects.create(job="b", note="yes")
    assert jobs() == ["of b"]


def test_the_id_is_made_from_the_instance():
    # Given
    hook(id=lambda entry: f"entry-{entry.pk}")
    entry = Entry.objects.create(job="a")
    # When: saved again while the job is open
    entry.save()
    # Then
    assert [job.unique_id for job in Job.objects.all()] == [f"entry-{entry.pk}"]


def test_a_fixture_being_loaded_enqueues_nothing():
    # Given
    hook()
    data = serializers.serialize("json", [Entry(pk=7, job="a", created_at=timezone.now())])
    # When
    for loaded in serializers.deserialize("json", data):
        loaded.save()
    # Then
    assert Entry.objects.get().pk == 7
    assert jobs() == []


def test_two_hooks_of_one_model_both_fire():
    hook()
    enqueue_on_save(Entry, no_op, payload=lambda entry: {})
    Entry.objects.create(job="a")
    assert sorted(Job.objects.values_list("handler", flat=True)) == ["ledger.no_op", "ledger.write"]


def test_two_hooks_of_one_job_with_conditions_of_their_own_both_fire():
    hook(condition=lambda entry: entry.note == "x")
    hook(condition=lambda entry: entry.note == "y")
    Entry.objects.create(job="a", note="x")
    Entry.objects.create(job="b", note="y")
    assert jobs() == ["of a", "of b"]


# --- Together or not at all -----------------------------------------------------------------------


def refuse_jobs(execute, sql, params, many, context):
    if sql.startswith("INSERT") and "kjo_job" in sql:
        raise DatabaseError("the job could not be stored")
    return execute(sql, params, many, context)


def test_a_row_whose_job_cannot_be_stored_is_not_stored_either():
    """Outside any transaction Django alone would have committed the row before its signal."""
    hook()
    with pytest.raises(DatabaseError, match="could not"), connection.execute_wrapper(refuse_jobs):
        Entry.objects.create(job="a")
    assert not Entry.objects.exists()
    assert jobs() == []
    # And the connection is as good as before
    Entry.objects.create(job="b")
    assert jobs() == ["of b"]


def test_without_the_hook_the_row_would_have_stayed():
    """What the patched save is for; fails should Django change its mind."""

    def receiver(instance, **kwargs):
        write.enqueue(job="x")

    post_save.connect(receiver, sender=Entry)
    with pytest.raises(DatabaseError), connection.execute_wrapper(refuse_jobs):
        Entry.objects.create(job="a")
    assert Entry.objects.exists()


def test_a_change_whose_job_is_refused_is_undone():
    # Given
    entry = Entry.objects.create(job="a")
    enqueue_on_save(Entry, write, payload=lambda entry: {"wrong": 1})
    # When
    entry.note = "changed"
    with pytest.raises(TypeError):
        entry.save()
    # Then
    entry.refresh_from_db()
    assert entry.note == ""


def test_in_a_transaction_of_the_caller_the_caller_decides():
    hook()
    with pytest.raises(RuntimeError), transaction.atomic():
        Entry.objects.create(job="a")
        raise RuntimeError
    assert not Entry.objects.exists()
    assert jobs() == []


def test_a_save_through_a_proxy_of_the_model_enqueues(isolated_ledger):
    """It enqueued nothing, without a word."""
    # Given one proxy that is there before the hook, and others that come later
    early = subclass_of(Entry, "Early", proxy=True)
    hook()
    late = subclass_of(early, "Late", proxy=True)
    # When
    for number, model in enumerate((early, late, Entry)):
        model.objects.create(job=str(number))
    # Then
    assert jobs() == ["of 0", "of 1", "of 2"]


def test_the_hook_of_a_proxy_is_its_own(isolated_ledger):
    proxy = subclass_of(Entry, "Proxy", proxy=True)
    enqueue_on_save(proxy, no_op, payload=lambda entry: {})
    Entry.objects.create(job="a")
    assert not Job.objects.exists()
    proxy.objects.create(job="b")
    assert Job.objects.count() == 1


def test_models_that_inherit_from_it_are_hooked_by_themselves(isolated_ledger):
    # Given a child, and a proxy of that
    child = subclass_of(Entry, "Child")
    proxy = subclass_of(child, "ProxyOfChild", proxy=True)
    with connection.schema_editor() as editor:
        editor.create_model(child)
    try:
        hook()
        # When, then
        child.objects.create(job="a")
        proxy.objects.create(job="b")
        assert jobs() == []
        enqueue_on_save(child, write, payload=lambda entry: {"job": f"of {entry.job}"})
        proxy.objects.create(job="c")
        assert jobs() == ["of c"]
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(child)


def test_many_hooks_patch_the_model_once():
    hook()
    once = Entry.save_base
    enqueue_on_save(Entry, no_op, payload=lambda entry: {})
    assert Entry.save_base is once
    assert Entry.save_base.__name__ == models.Model.save_base.__name__


def test_bulk_writes_send_no_signals_hence_enqueue_nothing():
    hook()
    Entry.objects.bulk_create([Entry(job="a")])
    Entry.objects.update(note="x")
    assert jobs() == []
