"""``enqueue_on_save``: a model's save enqueues a job, both in one transaction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from django.db import models, router, transaction
from django.db.models.signals import post_save

from kjo_django.enqueue.definition import JobDefinition


def enqueue_on_save(
    model: type[models.Model],
    job: JobDefinition,
    *,
    payload: Callable[[Any], Mapping[str, Any]],
    created: bool | None = None,
    condition: Callable[[Any], bool] | None = None,
    id: Callable[[Any], str] | None = None,
) -> None:
    """Enqueue ``job`` whenever an instance of ``model`` is saved.

    Django sends ``post_save`` after an autocommitted save has been committed; a crash in between
    would lose the job. So the model's saves are given a transaction of their own here: the row and
    its job are committed together or not at all. ``bulk_create`` and ``QuerySet.update`` send no
    signals, hence enqueue nothing.

    :param payload: makes the handler's keyword arguments from the instance.
    :param created: True for new rows only, False for changed rows only, None for both.
    :param condition: further condition on the instance.
    :param id: makes the job's unique id from the instance.
    """
    _commit_save_and_signals_together(model)

    def receiver(sender: Any, instance: Any, raw: bool = False, **kwargs: Any) -> None:
        if raw or (created is not None and kwargs["created"] is not created):
            return  # raw: a fixture is being loaded, its jobs have long run
        if condition is not None and not condition(instance):
            return
        definition = job if id is None else job.using(id=id(instance))
        definition.enqueue(**payload(instance))

    post_save.connect(
        receiver,
        sender=model,
        weak=False,
        # A module imported twice hooks once; two hooks of one job may differ in their functions.
        dispatch_uid=":".join(
            ["kjo_django", job.name, str(created), *map(_place, (payload, condition, id))]
        ),
    )


def _place(function: Callable[..., Any] | None) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _commit_save_and_signals_together(model: type[models.Model]) -> None:
    original = model.save_base
    if getattr(original, "_kjo_is_atomic", False):
        return

    @functools.wraps(original)
    def save_base(self: models.Model, *args: Any, **kwargs: Any) -> None:
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using, savepoint=False):
            original(self, *args, **kwargs)

    save_base._kjo_is_atomic = True  # type: ignore[attr-defined]
    model.save_base = save_base  # type: ignore[method-assign]
