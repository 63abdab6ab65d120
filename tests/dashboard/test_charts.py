"""Charts drawn here: where the numbers go."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone, translation
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.admin.dashboard import charts, figures
from kjo_django.admin.dashboard.charts import Chart, Line

START = datetime(2026, 5, 4, 10, 0, tzinfo=UTC)


def chart(*values, **options):
    times = [START + timedelta(minutes=index) for index in range(len(values))]
    return Chart("runs", "Run time", times, [Line("p50", "p50", values)], **options)


def ys(svg):
    (points,) = re.findall(r'<polyline[^>]*points="([^"]+)"', svg)
    return [float(point.split(",")[1]) for point in points.split()]


def test_the_highest_value_is_at_the_top_and_zero_at_the_bottom():
    assert ys(chart(0.0, 5.0, 10.0).render()) == [charts.BOTTOM, 87.0, charts.TOP]


@pytest.mark.parametrize(
    ("highest", "shown"),
    [
        (0, ["0", "1"]),
        (3, ["0", "1", "2", "3"]),
        (41, ["0", "10", "20", "30", "40", "50"]),
        (14_999, ["0", "5,000", "10.0 k", "15.0 k"]),
        (2_600_000, ["0", "1.0 M", "2.0 M", "3.0 M"]),
    ],
)
def test_an_axis_has_round_numbers(highest, shown):
    assert levels(chart(highest).render()) == shown


@pytest.mark.parametrize(
    ("highest", "shown"),
    [
        (0, ["0", "1 s"]),
        (0.0042, ["0", "1 ms", "2 ms", "3 ms", "4 ms", "5 ms"]),
        (0.97, ["0", "200 ms", "400 ms", "600 ms", "800 ms", "1 s"]),
        (7, ["0", "2 s", "4 s", "6 s", "8 s"]),
        (119.9, ["0", "30 s", "1 min", "1.5 min", "2 min"]),
        (500, ["0", "2 min", "4 min", "6 min", "8 min", "10 min"]),
        (5_000, ["0", "30 min", "1 h", "1.5 h"]),
        (4 * 86_400, ["0", "1 d", "2 d", "3 d", "4 d"]),
        (900 * 86_400, ["0", "200 d", "400 d", "600 d", "800 d", "1000 d"]),
    ],
)
def test_an_axis_of_durations_has_round_seconds_minutes_hours_or_days(highest, shown):
    svg = chart(highest, show=figures.duration, step=figures.duration_step).render()
    assert levels(svg) == shown


def levels(svg):
    return re.findall(r'text-anchor="end">([^<]+)<', svg)


def test_a_gap_is_a_gap():
    svg = chart(1.0, 2.0, None, 3.0).render()
    lines = re.findall(r'<polyline[^>]*points="([^"]+)"', svg)
    assert [len(line.split()) for line in lines] == [2, 2]  # a lone value is drawn as a short line


def test_bars_are_stacked_upon_each_other():
    lines = [Line("completed", "completed", [6]), Line("failed", "failed", [4])]
    svg = Chart("t", "Jobs", [START], lines, is_stacked=True).render()
    bars = re.findall(r'class="kjo-c-\w+" d="M[\d.]+ ([\d.]+)V([\d.]+)h', svg)
    (low_foot, low_head), (high_foot, high_head) = [tuple(map(float, bar)) for bar in bars]
    assert (low_foot, high_head) == (charts.BOTTOM, charts.TOP)
    assert low_head == high_foot
    assert (low_foot - low_head) / (high_foot - high_head) == pytest.approx(1.5, abs=0.01)


def test_places_are_written_for_svg_in_every_language():
    with translation.override("de"):
        svg = chart(0.5, 1.25, None, 3.2, show=figures.duration).render()
        stacked = chart(1, 2, 3, is_stacked=True).render()
        spark = charts.sparkline([1, 2, 3], "three")
        assert "3,2 s" in svg  # for people
    for place in re.findall(r'\s(?:x|y|x1|x2|y1|y2|width|height|viewBox)="([^"]+)"', svg + stacked):
        assert "," not in place
    for outline in re.findall(r' d="([^"]+)"', stacked):
        assert "," not in outline
    for points in re.findall(r'points="([^"]+)"', svg + spark):
        assert all(point.count(",") == 1 for point in points.split())


def test_what_is_drawn_is_told_in_words_and_as_a_table():
    html = chart(0.002, 0.004, show=figures.duration).render()
    assert 'aria-label="Run time. p50: now 4 ms, at most 4 ms"' in html
    assert html.count("<td>") == 2
    with timezone.override("UTC"):
        assert (
            "<title>10:01: p50 4 ms</title>" in chart(0.002, 0.004, show=figures.duration).render()
        )


def test_a_deploy_is_marked_where_it_happened_and_not_outside():
    marks = [(START + timedelta(minutes=1), "v2"), (START - timedelta(hours=1), "v1")]
    svg = chart(1, 2, 3, 4, marks=marks).render()
    assert svg.count("kjo-mark-text") == 1
    assert ">v2</text>" in svg


def test_a_hostile_release_is_text():
    svg = chart(1, 2, marks=[(START, "<script>alert(1)</script>")]).render()
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg


def test_nothing_is_drawn_as_nothing():
    html = Chart("x", "Nothing", [], [Line("p50", "p50", [])]).render()
    assert "Nothing happened in this time." in html


@given(st.lists(st.none() | st.floats(0, 1e15), max_size=50))
def test_every_value_stays_within_the_picture(values):
    svg = chart(*values).render()
    for points in re.findall(r'<polyline[^>]*points="([^"]+)"', svg):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert charts.LEFT - 4 <= x <= charts.RIGHT + 4
            assert charts.TOP - 0.11 <= y <= charts.BOTTOM + 0.11


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("", "–"),
        (0, "0"),
        (9999, "9,999"),
        (9999.7, "10.0 k"),
        (12_345, "12.3 k"),
        (14_999, "15.0 k"),
        (99_960, "100 k"),
        (999_700, "1.0 M"),
        (-14_999, "-15.0 k"),
        (1_234_567, "1.2 M"),
        (0.25, "0.25"),
        (3.5, "3.5"),
        (1.96, "2.0"),
        (0.999, "1.00"),
    ],
)
def test_numbers(value, shown):
    assert figures.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (0.00996, "10 ms"),
        (0.0042, "4.2 ms"),
        (0.25, "250 ms"),
        (3.21, "3.2 s"),
        (0.9996, "1 s"),
        (9.96, "10 s"),
        (59, "59 s"),
        (59.6, "1 min"),
        (90, "1.5 min"),
        (119.9, "2 min"),
        (3599, "1 h"),
        (7200, "2 h"),
        (86_000, "1 d"),
        (86_400 * 39.7, "40 d"),
    ],
)
def test_durations(seconds, shown):
    assert figures.duration(seconds) == shown


def test_a_bounded_count_says_that_it_is_one():
    assert (figures.capped(99, 100), figures.capped(100, 100)) == ("99", "100+")
