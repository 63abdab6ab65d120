"""The graph of a workflow: layers, lines and nodes, drawn here."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter

import pytest
from django.utils import translation
from hypothesis import given, settings
from hypothesis import strategies as st

from kjo_django.admin.dashboard import graph
from kjo_django.admin.dashboard.graph import Node


def node(key, *parents, handler="", state="waiting", count=1, name="", url=""):
    return Node(key, name or key, handler or key, {state: count}, tuple(parents), url)


def chain(*keys):
    return [
        node(key, *before) for key, before in zip(keys, [(), *((k,) for k in keys)], strict=False)
    ]


def drawn(nodes, name="import"):
    return graph.render(graph.merged(nodes), name)


def boxes(svg):
    """The name, place and state of each box of the lying drawing."""
    drawing = svg.partition("</svg>")[0]
    found = re.findall(
        r'<g class="kjo-(\w+)">(?:<rect class="kjo-behind"[^>]*>)?'
        r'<rect class="kjo-front" x="([\d.]+)" y="([\d.]+)".*?kjo-box-name"[^>]*>([^<]*)<',
        drawing,
        re.DOTALL,
    )
    return {name: (float(x), float(y), state) for state, x, y, name in found}


def lines(svg):
    return re.findall(r'kjo-edge-(\w+)" d="([^"]+)"', svg.partition("</svg>")[0])


def test_each_step_is_right_of_all_it_waits_for():
    nodes = [node("a"), node("b", "a"), node("c", "a", "b"), node("d", "a")]
    found = boxes(drawn(nodes, "import"))
    assert found["a"][0] < found["b"][0] < found["c"][0]
    assert found["d"][0] == found["b"][0]


def test_siblings_that_are_alike_are_one_box_with_counts():
    loads = [node(f"load-{n}", "fetch", handler="shop.load") for n in range(6)]
    loads[0] = node("load-0", "fetch", handler="shop.load", state="failed")
    loads[1] = node("load-1", "fetch", handler="shop.load", state="completed")
    report = node("report", *(load.key for load in loads))
    svg = drawn([node("fetch", state="completed"), *loads, report], "import")
    assert set(boxes(svg)) == {"fetch", "shop.load", "report"}
    assert "1 / 6 · 1 Failed" in svg
    assert 'class="kjo-part kjo-part-failed"' in svg
    assert "1 Completed, 1 Failed" in svg  # what a screen reader reads
    assert [kind for kind, _outline in lines(svg)] == ["released", "waiting"]


def test_a_few_siblings_stay_boxes_of_their_own():
    loads = [node(f"load-{n}", "fetch", handler="shop.load") for n in range(3)]
    assert len(boxes(drawn([node("fetch"), *loads], "import"))) == 4


def test_siblings_with_other_followers_are_not_alike():
    loads = [node(f"load-{n}", handler="shop.load") for n in range(8)]
    sums = [node("even", *(f"load-{n}" for n in range(0, 8, 2)))]
    sums += [node("odd", *(f"load-{n}" for n in range(1, 8, 2)))]
    found = graph.merged([*loads, *sums])
    assert Counter(each.handler for each in found) == {"shop.load": 2, "even": 1, "odd": 1}


def test_a_line_that_a_longer_way_implies_is_not_drawn_but_told():
    svg = drawn([node("a"), node("b", "a"), node("c", "a", "b")], "import")
    assert len(lines(svg)) == 2
    assert "c: Waiting; waits for a, b" in svg


def test_more_nodes_than_can_be_looked_at_are_one_for_each_handler_and_layer():
    many = []
    for n in range(400):
        many += [node(f"a{n}", handler="a"), node(f"b{n}", f"a{n}", handler="b")]
    found = graph.merged(many)
    assert {each.handler: each.total for each in found} == {"a": 400, "b": 400}
    assert found[1].parents == (found[0].key,)


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="circle"):
        drawn([node("a", "b"), node("b", "a")], "import")


def test_names_are_escaped_and_cut_and_control_characters_are_spelt_out():
    nasty = '<script>alert("x")</script>\u202e'
    svg = drawn([node("a", name=nasty, url='/?q="><b>')], nasty)
    assert "<script" not in svg
    assert "<b>" not in svg
    assert "\u202e" not in svg
    assert 'href="/?q=&quot;&gt;&lt;b&gt;"' in svg


def test_each_box_leads_to_its_address_and_tells_its_state():
    svg = drawn([node("a", url="/jobs/1/", state="failed")], "import")
    assert re.search(r'<a href="/jobs/1/" class="kjo-box"><title>a: Failed</title>', svg)


def test_a_narrow_graph_is_also_drawn_upright_and_a_wide_one_is_not():
    assert drawn(chain("a", "b", "c"), "import").count("<svg") == 2
    wide = [node("a"), *(node(f"b{n}", "a") for n in range(3))]
    assert drawn(wide, "import").count("<svg") == 1


def test_an_empty_graph_is_drawn():
    assert "<svg" in drawn([], "import")


def test_places_are_written_for_svg_in_every_language():
    with translation.override("de"):
        svg = drawn(chain(*"abc"), "import")
    for place in re.findall(r'\s(?:x|y|width|height|viewBox|d)="([^"]+)"', svg):
        assert "," not in place


graphs = st.integers(1, 25).flatmap(
    lambda size: st.lists(
        st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=60
    ).map(
        lambda pairs: [
            node(str(n), *sorted({str(low) for low, high in pairs if low < high == n}))
            for n in range(size)
        ]
    )
)


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_no_two_boxes_overlap_and_every_wait_can_be_followed(nodes):
    found = boxes(drawn(nodes, "import"))
    assert set(found) == {each.name for each in graph.merged(nodes)}
    for (x, y, _), (other_x, other_y, _) in itertools.combinations(found.values(), 2):
        assert abs(x - other_x) >= graph.LYING.width or abs(y - other_y) >= graph.LYING.height
    # What is drawn leads from every parent to its followers, directly or by others.
    number = {each.key: n for n, each in enumerate(nodes)}
    layers = graph.layers_of(nodes)
    direct = graph._direct_lines(nodes, number, [layers[each.key] for each in nodes])
    after = {n: {n} for n in number.values()}
    for start, end in sorted(direct, key=lambda line: -layers[nodes[line[0]].key]):
        after[start] |= after[end]
    for each in nodes:
        for parent in each.parents:
            assert number[each.key] in after[number[parent]]


def test_two_hundred_steps_are_drawn_in_a_moment():
    nodes = [node("0")]
    for n in range(1, 200):
        nodes.append(node(str(n), *{str(n * 7919 % n), str(max(0, n - 1 - n % 13))}))
    took = []
    for _ in range(3):  # a machine that is busy makes one of them slow
        began = time.thread_time()
        svg = drawn(nodes, "import")
        took.append(time.thread_time() - began)
    assert len(boxes(svg)) == 200
    assert min(took) < 0.3
