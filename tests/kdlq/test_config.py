"""``DlqConfig``: validated, with KDLQ's own defaults (KDLQ-01 … 03, 12, 20, F1, F7)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kjo_django.patterns.kdlq import (
    DlqConfig,
    KDLQConfigurationException,
    KDLQMessageConsumer,
    ProcessingStatus,
    Status,
)
from kjo_django.patterns.kdlq.config import PRODUCER_DEFAULTS


def test_the_defaults_are_kdlqs() -> None:
    """KDLQ-02."""
    config = DlqConfig("dlq")
    assert (config.max_kills, config.max_redeliveries) == (-1, -1)
    assert config.redelivery_topic is None
    assert not config.informational_headers
    assert config.default_on_exception == "dlq"


@pytest.mark.parametrize(
    "wrong",
    [
        {"dlq_topic": ""},
        {"dlq_topic": "  "},
        {"servers": []},
        {"servers": "localhost:9092"},
        {"servers": [""]},
        {"redelivery_topic": ""},
        {"max_kills": "3"},
        {"max_redeliveries": True},
        {"redelivery_delay": timedelta(seconds=-1)},
        {"max_redelivery_delay": timedelta(0)},
        {"redelivery_multiplier": 0.5},
        {"redelivery_multiplier": "2"},
        {"listeners": [object()]},
        {"default_on_exception": "ignore"},
        {"ordering": "partition"},
        {"producer_properties": {"acks": 1}},
        {"servers": ["a:1"], "redelivery_delay": timedelta(seconds=1)},
    ],
)
def test_what_cannot_work_is_refused(wrong) -> None:
    """KDLQ-01; a cap of zero would switch all delays off (KDLQ-F1)."""
    with pytest.raises(KDLQConfigurationException):
        DlqConfig(**{"dlq_topic": "dlq", **wrong})


def test_it_is_immutable() -> None:
    with pytest.raises(AttributeError):
        DlqConfig("dlq").max_kills = 3  # type: ignore[misc]


def test_its_id_is_that_of_its_producer() -> None:
    """KDLQ-03: servers and producer properties alone."""
    one = DlqConfig("a", servers=["x:1", "y:2"], producer_properties={"linger.ms": 5})
    other = DlqConfig(
        "b", servers=["y:2", "x:1"], producer_properties={"linger.ms": 5}, max_kills=1
    )
    assert one.id == other.id
    assert one.id != DlqConfig("a", servers=["x:1"]).id
    assert DlqConfig("a").id == DlqConfig("b").id


def test_consumers_of_one_configuration_share_a_producer() -> None:
    """KDLQ-03, KDLQ-19: closed by the last; closing twice does no harm."""
    config = DlqConfig("dlq", servers=["localhost:1"])
    one, other = (KDLQMessageConsumer(name, config, lambda record: None) for name in "ab")
    assert one._transport is other._transport
    one.close()
    one.close()
    third = KDLQMessageConsumer("c", config, lambda record: None)
    assert third._transport is other._transport
    other.close()
    third.close()
    fresh = KDLQMessageConsumer("d", config, lambda record: None)
    assert fresh._transport is not one._transport
    fresh.close()


def test_the_delay_grows_to_its_cap() -> None:
    """KDLQ-F1: multiplier 1.5, and never beyond the cap however many there were."""
    config = DlqConfig(
        "d", redelivery_delay=timedelta(seconds=2), max_redelivery_delay=timedelta(seconds=9)
    )
    delays = [config.delay_of(n).total_seconds() for n in (0, 1, 2, 3, 4, 100_000)]
    assert delays == [2, 3, 4.5, 6.75, 9, 9]
    assert DlqConfig("d").delay_of(0) == timedelta(seconds=1)
    assert DlqConfig("d", servers=["a:1"]).delay_of(5) == timedelta(0)
    assert DlqConfig("d", redelivery_delay=timedelta(0)).delay_of(5) == timedelta(0)


def test_a_producer_of_its_own_has_kdlqs_defaults() -> None:
    """KDLQ-20, KDLQ-F7: the wait is never shorter than the delivery timeout."""
    assert PRODUCER_DEFAULTS == {
        "acks": "all",
        "retries": 5,
        "linger.ms": 50,
        "delivery.timeout.ms": 120_000,
        "request.timeout.ms": 30_000,
        "client.id": "KDLQ",
    }
    with KDLQMessageConsumer("a", DlqConfig("d", servers=["x:1"]), lambda r: None) as consumer:
        assert consumer._transport._options.delivery_timeout == 120  # type: ignore[attr-defined]


def test_the_names_are_kdlqs() -> None:
    """KDLQ-05, KDLQ-06."""
    assert {each.name for each in ProcessingStatus} == {"OK", "MUST_BE_REDELIVERED", "ERROR"}
    assert {each.name for each in Status} == {
        "OK",
        "ROUTED_TO_DLQ",
        "SKIPPED_DLQ_MAX_ATTEMPTS_REACHED",
        "REDELIVERED",
    }


@pytest.mark.parametrize("id", ["", " ", "x" * 101])
def test_an_id_that_is_none_is_refused(id) -> None:
    with pytest.raises(KDLQConfigurationException):
        KDLQMessageConsumer(id, DlqConfig("d"), lambda record: None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("multiplier", [1, 1.5, 3])
def test_a_count_made_up_by_others_costs_no_time(multiplier) -> None:
    """It comes with the message, up to the largest number of Java."""
    config = DlqConfig("dlq", redelivery_multiplier=multiplier)
    longest = timedelta(seconds=1) if multiplier == 1 else timedelta(minutes=10)
    assert config.delay_of(2**31 - 1) == longest
