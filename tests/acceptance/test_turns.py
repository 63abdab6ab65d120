"""Groups of ``atomic=False`` handlers under SIGKILL: what was recorded does not run again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kjo_django.states import JobState
from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def warm_up(engine: Engine) -> list[str]:
    """Let the worker learn that the handler is quick, so that it groups its jobs."""
    names = [f"first-{number}" for number in range(60)]
    jobs.write_wait_or_kill.enqueue_many({"job": name} for name in names)
    engine.settle()
    return names


@pytest.mark.promise("job-is-run", "not-atomic-crash")
@pytest.mark.medium("embedded", "real")
def test_a_worker_killed_in_a_slow_one_behind_quick_ones(
    any_engine: Engine, tmp_path: Path
) -> None:
    engine = any_engine
    # Given a worker in a job that has turned out to be slow, with quick ones before and behind it
    worker = engine.ready_worker("--concurrency", "1")
    first = warm_up(engine)
    path = tmp_path / "slow"
    before, behind = ([f"{place}-{n}" for n in range(8)] for place in ("before", "behind"))
    payloads = [{"job": name} for name in before]
    payloads += [{"job": "slow", "path": str(path)}]
    payloads += [{"job": name} for name in behind]
    jobs.write_wait_or_kill.enqueue_many(payloads)
    engine.wait_until(path.with_name(f"slow.{worker.pid}").exists, "The slow one never began")

    # When those that have run before it are recorded, though it holds the lane, and it is killed
    def is_recorded() -> bool:
        done = engine.jobs.filter(state=JobState.COMPLETED).count()
        return bool(done == engine.entries.count() >= len(first))

    engine.wait_until(is_recorded, "What has run was not recorded")
    done = set(engine.jobs.filter(state=JobState.COMPLETED).values_list("pk", flat=True))
    worker.kill()
    path.with_name("slow.go").touch()
    engine.worker()
    engine.settle()
    # Then each has taken effect once, outside of any transaction too
    engine.assert_each_ran_once([*first, *before, "slow", *behind])
    # And what was recorded has spent one attempt
    assert set(engine.jobs.filter(pk__in=done).values_list("attempts", flat=True)) == {1}


@pytest.mark.promise("killer-job", "not-atomic-crash")
@pytest.mark.medium("real")
def test_a_job_that_kills_its_process_takes_nobody_with_it(any_engine: Engine) -> None:
    engine = any_engine
    # Given a killer in a group of quick ones that may be tried no more often than it
    supervised = engine.worker("--processes", "2", "--concurrency", "2")
    first = warm_up(engine)
    others = [f"other-{number}" for number in range(60)]
    payloads = [{"job": name} for name in others]
    payloads.insert(30, {"job": "killer", "kill": True})
    # When they run
    jobs.write_wait_or_kill.enqueue_many(payloads)
    engine.wait_until(lambda: engine.dead_letters.exists(), "The killer goes on")
    engine.settle()
    # Then the killer is dead after its three attempts
    letter = engine.dead_letters.get()
    assert (letter.reason, letter.attempts) == ("stalled", 3)
    assert engine.jobs.get(pk=letter.job_id).arguments["job"] == "killer"
    # And the others are done. What had run beside it and was not recorded has run again, once:
    # from then on the killer ran alone.
    ran = Counter(engine.entries.values_list("job", flat=True))
    assert set(ran) == {*first, *others}
    assert max(ran.values()) <= 2
    assert set(engine.jobs.values_list("state", flat=True)) == {"completed", "failed"}
    assert supervised.stop() == 0, supervised.log_tail()
