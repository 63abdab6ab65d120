"""What a worker cannot do just now: told once, kept until it is over."""

import logging

from django.utils import timezone

from kjo_django.worker.statistics import OutageLog


def test_an_outage_is_told_once_and_kept_until_it_is_over(caplog):
    # Given
    caplog.set_level(logging.ERROR, "kjo_django")
    told, before = [], timezone.now()
    outages = OutageLog(lambda source, error: told.append((source, error)))
    # When a part meets the same again and again
    for _ in range(3):
        outages.note("relay", "the broker is away")
    # Then
    assert told == [("relay", "the broker is away")]
    assert caplog.messages == ["relay: the broker is away"]
    assert outages.error == "the broker is away"
    assert before <= outages.began_at <= timezone.now()
    # And once it is over, it is news again
    outages.note("relay", None)
    assert (outages.error, outages.began_at) == ("", None)
    outages.note("relay", "the broker is away")
    assert len(told) == 2


def test_what_one_part_has_is_not_over_since_another_works():
    # Given
    outages = OutageLog(lambda source, error: None)
    outages.note("mailers (default)", "away")
    outages.note("mailers (other)", "gone")
    # When
    outages.note("mailers (default)", None)
    # Then
    assert outages.error == "gone"


def test_a_worker_tells_groups_of_one_name_apart(settings):
    """Two transports with a group of the same name, of which one works."""
    # Given
    from kjo_django.worker.process import Worker

    memory = {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}
    queue = {"consumer_group": "mailers"}
    settings.KJO = {
        "TRANSPORTS": {"default": memory, "other": memory},
        "QUEUES": {"a": queue, "b": {**queue, "transport": "other"}},
    }
    told = []
    worker = Worker(["a", "b"], on_error=lambda source, error: told.append(source))
    one, other = worker.pollers
    # When
    for _ in range(2):
        one._on_error("away")
        other._on_error(None)
    # Then
    assert told == ["mailers (default)"]
    assert worker.last_error == "away"
