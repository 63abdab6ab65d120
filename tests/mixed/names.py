"""Queues and topics of one run, known to its processes and to the test alike."""

from __future__ import annotations

from typing import Any

RUN = "KJO_MIXED_RUN"
"""Environment variable: what tells the topics of one run from those of another."""

JOB_QUEUES = (
    *("work", "slow", "hot", "long", "uneven"),
    *("idle", "paused", "killers", "tasks", "large"),
    *("limited", "slots", "unique", "flows"),
)


def job_queue(name: str) -> str:
    """Return the name of a queue of jobs."""
    return f"mixed-{name}"


def topic(name: str, run: str) -> str:
    """Return the topic of a queue, or of what is no queue of jobs."""
    return f"mixed-{name}-{run}"


def group(run: str) -> str:
    """Return the one consumer group of a run."""
    return f"mixed-{run}-group"


def queue_settings(run: str) -> dict[str, dict[str, Any]]:
    """Return the queues of ``KJO["QUEUES"]``; the others are declared by their handlers."""
    queues: dict[str, dict[str, Any]] = {
        job_queue(name): {"topic": topic(name, run)} for name in JOB_QUEUES
    }
    queues[job_queue("slow")]["concurrency"] = 1
    queues[job_queue("large")]["topic_options"] = {"config_entries": {"max.message.bytes": "20000"}}
    queues[job_queue("others")] = {"topic": topic("others", run), "consume": False}
    # Of other tests: their handlers are known to every process, their topics to nobody here.
    queues["ledger"] = {"consume": False}
    return queues


def consumed_topics(run: str) -> list[str]:
    """Return every topic workers of a run read."""
    group_name = group(run)
    events, kdlq, stream = topic("events", run), topic("kdlq", run), topic("stream", run)
    return [
        *(topic(name, run) for name in JOB_QUEUES),
        events,
        f"{events}-retry-{group_name}",
        kdlq,
        f"{kdlq}-retry-mixed",
        stream,
        topic("items", run),
    ]


def topics_of_others(run: str) -> list[str]:
    """Return the topics nobody of a run reads: of records for others, and of dead letters."""
    read = [*JOB_QUEUES, "events", "stream", "items"]
    return [topic("others", run), *(f"{topic(name, run)}-dlq" for name in read)]
