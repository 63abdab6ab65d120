"""What production is told to run and to watch: each name in it means something here."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import yaml

from kjo_django.contrib.prometheus.exposition import collect, render
from kjo_django.coordination.redis import RedisCoordination
from kjo_django.operations.monitoring.health import Thresholds
from tests.waiting import PATIENCE, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"
MONITORING_FILES = DOCS / "monitoring"
DASHBOARD = json.loads((MONITORING_FILES / "grafana-dashboard.json").read_text())
ALERTS = (MONITORING_FILES / "alerts.yml").read_text()
MONITORING = (DOCS / "how-to" / "monitoring.md").read_text()
PRODUCTION = (DOCS / "how-to" / "production.md").read_text()

RULES = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def alert_expressions() -> list[str]:
    return [rule["expr"].strip() for rule in RULES]


def names_in(*expressions: str) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\bkjo_\w+", text)}


def exported() -> dict[str, str]:
    """The metrics' names and kinds, as the page declares them."""
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", render(collect(5)), re.MULTILINE))


def with_suffixes() -> set[str]:
    return {
        name + suffix
        for name, kind in exported().items()
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }


# --- KJO-102, KJO-103 -----------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_dashboard_and_alerts_use_metrics_that_are_exported():
    """KJO-103."""
    variables = [variable.get("definition", "") for variable in DASHBOARD["templating"]["list"]]
    used = names_in(*dashboard_expressions(), *variables)
    assert used <= with_suffixes()
    assert names_in(*alert_expressions()) <= with_suffixes()
    # And the dashboard shows everything there is.
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == set(exported())


@pytest.mark.django_db(transaction=True)
def test_every_metric_is_documented():
    """KJO-102: production, lag of each partition, success and failure, Redis, durations."""
    assert set(re.findall(r"^\| `(kjo_\w+)`", MONITORING, re.MULTILINE)) == set(exported())


def test_the_four_dashboards():
    """KJO-103."""
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["System Overview", "Consumer Lag", "Processing Stats", "Error Tracking"]
    for row in rows:
        assert f"**{row}**" in MONITORING


def test_the_panels_of_the_dashboard_do_not_overlap():
    """KJO-103: Grafana draws it as it is written, each row's panels below its title."""
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("q", ["0.5", "0.95", "0.99"])
def test_the_percentiles_of_the_processing_duration_are_shown(q):
    """KJO-102: p50, p95, p99."""
    wanted = f"histogram_quantile({q}, sum by (le) (rate(kjo_job_run_seconds_bucket"
    assert any(expression.startswith(wanted) for expression in dashboard_expressions())


def test_expressions_are_balanced():
    """KJO-103."""
    for expression in dashboard_expressions() + alert_expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression


def test_the_alerts_have_the_thresholds_of_health():
    """KJO-103, RST-31: 100 messages, 10 %, 5 minutes."""
    usual = Thresholds()
    alerts = {rule["alert"]: rule["expr"] for rule in RULES}
    assert f"(kjo_consumer_lag)) > {usual.lag}" in alerts["KjoLag"]
    assert f"> {usual.failure_rate:.2f}" in alerts["KjoFailureRate"]
    assert "[5m]" in alerts["KjoFailureRate"]
    idle = usual.idle.total_seconds()
    assert f"kjo_oldest_waiting_seconds) > {idle:.0f}" in alerts["KjoNothingProcessed"]
    assert f"> {usual.relay_age.total_seconds():.0f}" in alerts["KjoOutboxIsLate"]


def test_the_alerts_are_rules_as_prometheus_reads_them():
    """KJO-103: the keys of its format, no more; ``promtool check rules`` says the rest by hand."""
    content = yaml.safe_load(ALERTS)
    assert set(content) == {"groups"}
    for group in content["groups"]:
        assert set(group) == {"name", "rules"}
    for rule in RULES:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule), rule
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 0


def test_each_alert_has_a_case_that_fires():
    """KJO-103: in the file that promtool runs."""
    cases = yaml.safe_load((MONITORING_FILES / "alerts.test.yml").read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == {
        rule["alert"] for rule in RULES
    }


@pytest.mark.long  # by hand: promtool comes with Prometheus, from no registry of packages
def test_promtool_agrees():
    """KJO-103: the rules are valid, and fire when they should."""
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        subprocess.run(["promtool", *command], cwd=MONITORING_FILES, check=True, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        "Prometheus",
        "Grafana",
        "Loki",
        "Elasticsearch",
        "Jaeger",
        "Zipkin",
        "Kafka UI",
        "Alertmanager",
    ],
)
def test_the_recommended_stack(name):
    """KJO-103."""
    assert name in MONITORING


# --- KJO-96, KJO-99 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "num.network.threads=8",
        "num.io.threads=8",
        "socket.send.buffer.bytes=102400",
        "socket.receive.buffer.bytes=102400",
        "socket.request.max.bytes=104857600",
        "default.replication.factor=3",  # KJO-F16: 2 of 2 stops when one broker is away
        "min.insync.replicas=2",
        "unclean.leader.election.enable=false",
        "log.retention.hours=168",
        "log.segment.bytes=1073741824",
        "log.retention.check.interval.ms=300000",
    ],
)
def test_the_brokers_settings(setting):
    """KJO-96, KJO-F16."""
    (block,) = re.findall(r"```properties\n(.*?)```", PRODUCTION, re.DOTALL)
    assert setting in block.splitlines()


def test_the_notes_on_redis():
    """KJO-99."""
    text = " ".join(PRODUCTION.split())  # wherever its lines are broken
    for words in ("500 MB for a million keys", "100 000 operations", "Persistence", "expire"):
        assert words in text


def sentinel_caches() -> dict:
    found = re.findall(r"```python\n(.*?)```", PRODUCTION, re.DOTALL)
    (source,) = (block for block in found if "SENTINELS" in block)
    names: dict = {}
    exec(source, names)
    return names["CACHES"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def sentinel(redis_server, tmp_path):
    """A real sentinel that watches the tests' Redis as ``kjo-primary``; its port."""
    primary = redis.Redis.from_url(redis_server.url).connection_pool.connection_kwargs
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
        f"sentinel monitor kjo-primary 127.0.0.1 {primary['port']} 1\n"
    )
    process = subprocess.Popen(
        ["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        client = redis.Redis(port=port)
        wait_until(client.ping, "the server answers", process.poll, unless=(redis.ConnectionError,))
        client.close()
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.redis
def test_the_configuration_of_sentinel_reaches_the_primary(settings, sentinel):
    """KJO-99: read from the page, against a real sentinel."""
    # Given
    caches = sentinel_caches()
    options = caches["default"]["OPTIONS"]
    assert len(options["SENTINELS"]) == 3
    options["SENTINELS"] = [("127.0.0.1", sentinel)]
    settings.CACHES = caches
    coordination = RedisCoordination({"CACHE": "default"})
    # When, then
    assert "CACHES['default']" in coordination.probe(5)
    name, ttl = "CONS:SENTINEL:1", timedelta(seconds=30)
    try:
        assert coordination.claim([name], "me", ttl)[0].acquired
        assert not coordination.claim([name], "you", ttl)[0].acquired
        assert coordination.memory_bytes(5) > 100_000
        listener = coordination.listen(["kjo-sentinel"])
        coordination.notify("kjo-sentinel")
        assert listener.wait(PATIENCE) == {"kjo-sentinel"}
        listener.close()
    finally:
        coordination.release([name], "me")
        coordination.close()
