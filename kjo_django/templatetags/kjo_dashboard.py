"""Filters of the dashboard's templates: how numbers, times and others' texts are shown."""

from __future__ import annotations

from django import template

from kjo_django.admin.dashboard import figures
from kjo_django.admin.display import badge, show_text, show_traceback, show_value
from kjo_django.operations.safe_text import inert
from kjo_django.operations.translations import translated

register = template.Library()
register.filter("number", figures.number)
register.filter("exact", figures.exact)
register.filter("capped", figures.capped)
register.filter("duration", figures.duration)
register.filter("size", figures.size)
register.filter("moment", figures.moment)
register.filter("age", figures.age)
register.filter("inert", inert)
register.filter("translated", translated)
register.filter("text_block", show_text)
register.filter("traceback_block", show_traceback)
register.filter("value_block", show_value)


@register.simple_tag
def state(kind: str, label: object = "") -> str:
    """Show a state by its word; the colour only helps."""
    return badge(kind, label or kind)
