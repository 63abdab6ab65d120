"""The pages on performance and on sizing say what the raw results say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks.published import alone, page, plots, svg
from tests.benchmarks.published.targets import TARGETS, Target, judged

FOUND = page.results()
TEXT = page.PAGE.read_text()


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_raw_results(path: Path):
    text = path.read_text()
    assert page.rewritten(text, FOUND) == text, "run `python -m tests.benchmarks --plots`"


def test_the_pictures_are_those_of_the_raw_results():
    drawn = dict(plots.drawn(FOUND))
    kept = {path.name: path.read_text() for path in page.FOLDER.glob("*.svg")}
    assert kept == drawn, "run `python -m tests.benchmarks --plots`"


def test_the_pages_show_every_block_and_every_picture_once():
    names = [name for path in page.PAGES for _, name, _ in page.BLOCK.findall(path.read_text())]
    assert sorted(names) == sorted(page.BLOCKS)
    shown = re.findall(r"!\[[^\]]*\]\(performance/([^)]+)\)", TEXT)
    assert sorted(shown) == sorted(name for name, _ in plots.drawn(FOUND))


def test_a_changed_number_is_noticed():
    changed = {**FOUND, "real": {**FOUND["real"], "seconds": FOUND["real"]["seconds"] + 6000}}
    assert page.rewritten(TEXT, changed) != TEXT


def test_the_profile_is_shared_out_completely():
    for profile in FOUND["profile"].values():
        assert sum(profile["stages"].values()) == pytest.approx(1, abs=0.01)


def test_every_target_that_is_not_reached_is_spoken_of():
    missed = {
        target.group
        for target, value in (*judged(FOUND["real"]), *judged(FOUND, alone.TARGETS))
        if value is None or not target.is_reached(value)
    }
    told = set(map(int, re.findall(r"^\*\*Target (\d+)", TEXT, re.MULTILINE)))
    assert missed <= told


def test_results_name_no_host():
    for run in page.runs(FOUND).values():
        assert set(run["machine"]) == {
            "cpu_model",
            "cpu_count",
            "memory_gb",
            "system",
            "architecture",
            "load_average",
        }


# --- Targets --------------------------------------------------------------------------------------


def run(**cases: dict) -> dict:
    return {"results": {"real": {name.replace("__", "."): case for name, case in cases.items()}}}


def test_a_target_is_reached_at_its_bound():
    most = Target(4, "p50", lambda result: 0, 8, is_least=False)
    least = Target(1, "ratio", lambda result: 0, 0.4)
    assert [most.is_reached(value) for value in (8, 8.1)] == [True, False]
    assert [least.is_reached(value) for value in (0.4, 0.39)] == [True, False]


def test_what_was_not_measured_has_no_value():
    assert {value for _, value in judged({"results": {"real": {}}, "peers": {}})} == {None}


def test_a_peer_is_compared_by_rate_and_a_table_by_cost():
    result = run(
        drain__no_op={"ours": {"jobs_per_second": 12000}, "ratio": 0.5},
        table__relay_10m={"ours": {}, "ratio": 0.8},
    )
    result["peers"] = {"dramatiq": {"ours": {"jobs_per_second": 4000}}}
    values = {target.text: value for target, value in judged(result) if value is not None}
    assert values["The same, by tuned Dramatiq"] == 3
    assert values["Cost per job with ten million rows, relay"] == pytest.approx(1.25)


def test_the_targets_are_the_seven_that_are_measured():
    assert sorted({target.group for target in TARGETS}) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted({target.group for target in alone.TARGETS}) == [9, 10, 11, 12, 13, 14, 15]


def on_postgres(**cases: dict) -> dict:
    named = {name.replace("__", "."): case for name, case in cases.items()}
    run = {"results": {"postgres": named}, "peers": {"oban": {"versions": {"oban": "0.7"}}}}
    return {"postgres": run}


def values_of(found: dict) -> dict[str, float]:
    told = judged(found, alone.TARGETS)
    return {target.text: value for target, value in told if value is not None}


def test_a_job_on_postgresql_is_compared_with_obans():
    found = on_postgres(
        rates__20={"ours": {"worker_ms": 6.0, "postgres_ms": 3.0, "p50_ms": 4.0, "p99_ms": 9.0}},
        rates__20__oban={"ours": {"worker_ms": 2.0, "postgres_ms": 1.5}},
    )

    assert values_of(found) == {
        "20/s: worker's CPU by Oban's": 3,
        "20/s: PostgreSQL's CPU by Oban's": 2,
        "20/s: p50": 4,
        "20/s: p99": 9,
    }


def test_round_trips_are_told_by_what_a_longer_one_adds():
    found = on_postgres(
        far__2ms={"ours": {"p50_ms": 20.0, "round_trip_ms": 2.5, "together_seconds": 1.0}},
        far__20ms={"ours": {"p50_ms": 110.0, "round_trip_ms": 20.5, "together_seconds": 3.0}},
    )
    assert values_of(found)["Round trips one after the other, from stored to finished"] == 5


def test_the_worst_of_all_drains_is_compared_with_what_it_was():
    found = {
        engine: {"results": {engine: {name: {"ratio": before} for name, before in ratios.items()}}}
        for engine, ratios in alone.BEFORE.items()
    }
    found["embedded"]["results"]["embedded"]["drain.async"]["ratio"] /= 2
    assert values_of(found)["Any drain's ratio on Kafka and SQLite, by the one before"] == 0.5


def test_a_queue_that_is_missing_is_named_where_the_others_have_figures():
    run = {
        "versions": {"kjo_django": "1"},
        "results": {"postgres": {"crowd": {"ours": {"jobs_per_second": 400.0}}}},
        "peers": {
            "oban": {
                "versions": {},
                "leaves": "a row",
                "setup": "as it comes",
                "options": {"LIMIT": "10"},
                "missing": "there is no Python 3.13",
            }
        },
    }
    *_, ours, theirs = page.BLOCKS["postgres peers"]({"postgres": run})
    assert "| 400 |" in ours
    assert "oban (not installed)" in theirs
    assert "there is no Python 3.13" in theirs


# --- Pictures -------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_values():
    text = svg.bar_chart("A <title>", [svg.Bars("a", [50.0, 100.0])], series=["x", "y"])
    bars = [
        float(rect.get("width"))
        for rect in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("height") == str(svg.BAR)
    ]
    assert bars[0] * 2 == pytest.approx(bars[1], abs=0.2)


def test_a_logarithmic_bar_grows_by_the_same_for_each_factor():
    groups = [svg.Bars(str(value), [value]) for value in (10.0, 100.0, 1000.0)]
    text = svg.bar_chart("t", groups, series=[""], is_logarithmic=True)
    widths = [float(width) for width in re.findall(rf'width="([\d.]+)" height="{svg.BAR}"', text)]
    assert widths[1] - widths[0] == pytest.approx(widths[2] - widths[1], abs=0.2)


def test_a_curve_is_legible_in_dark():
    curve = svg.Curve("c", [(0.0, 1.0), (10.0, 90.0)])
    text = svg.line_chart("t", [curve], unit="MB", x_unit="jobs")
    ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
