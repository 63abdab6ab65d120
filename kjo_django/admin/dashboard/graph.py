"""The graph of a workflow as SVG: steps in layers, each to the right of all it waits for.

Steps that are alike are one node with counts. Nothing here reads the database; whoever asks has
grouped what is too much to load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from kjo_django.admin.dashboard.figures import number
from kjo_django.operations.safe_text import inert
from kjo_django.states import JobStatus

FEW = 3
"""Most siblings that stay nodes of their own."""
MOST_NODES = 300
"""Most nodes that are drawn. With more, steps of one handler in one layer are one node."""
MOST_BENDS = 3000
"""Most places where a line may run round nodes between its ends."""
SWEEPS = 8
MARGIN = 6

BY_WEIGHT = ("failed", "held", "cancelled", "failing", "processing", "queued", "pending")
"""States of which one among many decides how a node looks; the first found does."""
ENDED_WELL = "completed"


@dataclass(frozen=True, slots=True)
class Node:
    """One step, or several that are alike."""

    key: str
    name: str
    """What is written in the box."""
    handler: str
    counts: Mapping[str, int]
    """Numbers of steps by the state that people are shown."""
    parents: tuple[str, ...] = ()
    """Keys of the nodes it waits for."""
    url: str = ""
    is_added: bool = False
    """Whether a running step has added it to the workflow."""

    @property
    def total(self) -> int:
        """The number of its steps."""
        return sum(self.counts.values())

    @property
    def state(self) -> str:
        """The state that the box shows."""
        found = [state for state, count in self.counts.items() if count]
        heavy = next((state for state in BY_WEIGHT if state in found), "")
        return heavy or next((state for state in found if state != ENDED_WELL), ENDED_WELL)

    @property
    def is_completed(self) -> bool:
        """Whether all its steps are."""
        return self.counts.get(ENDED_WELL, 0) == self.total


class Form(NamedTuple):
    """The measures of a drawing, along its layers' axis and across it."""

    name: str
    width: int
    height: int
    between_layers: int
    between_nodes: int
    letters: int
    """Most characters of a name."""
    is_upright: bool = False
    """Whether layers follow one another downwards."""

    @property
    def along(self) -> int:
        """The size of a box along the axis of the layers."""
        return self.height if self.is_upright else self.width

    @property
    def across(self) -> int:
        """The size of a box across that axis."""
        return self.width if self.is_upright else self.height


LYING = Form("lying", 186, 52, 54, 14, 22)
UPRIGHT = Form("upright", 150, 52, 34, 14, 17, is_upright=True)
UPRIGHT_LAYER = 2
"""Most nodes of a layer in a drawing that is also made upright, for narrow screens."""


def render(nodes: Iterable[Node], name: str) -> SafeString:
    """Return the graph as HTML: lying, and for narrow screens also upright if it is narrow.

    :param nodes: as ``merged`` returned them.
    :param name: of the workflow, for screen readers.
    :raises ValueError: steps wait for one another in a circle.
    """
    found = list(nodes)
    layers = layers_of(found)
    is_narrow = max(Counter(layers.values()).values(), default=0) <= UPRIGHT_LAYER
    forms = (LYING, UPRIGHT) if is_narrow else (LYING,)
    context = {
        "drawings": [_drawing(found, layers, form) for form in forms],
        "is_narrow": is_narrow,
        "title": _("The graph of %s") % inert(name),
        "summary": _summary(found),
    }
    return render_to_string("admin/kjo_django/dashboard/graph.html", context)


# --- Nodes ----------------------------------------------------------------------------------------


def merged(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes, with siblings that are alike as one: of one handler, with the same parents
    and the same followers. Such a node has no address.

    If many are left, those of one handler in one layer are one.
    """
    known = {node.key for node in nodes}
    nodes = [
        replace(node, parents=tuple(dict.fromkeys(key for key in node.parents if key in known)))
        for node in nodes
    ]
    followers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for parent in node.parents:
            followers[parent].append(node.key)
    kinds: dict[Any, list[Node]] = defaultdict(list)
    for node in nodes:
        neighbours = frozenset(node.parents), frozenset(followers[node.key])
        alike = (node.handler, node.is_added, *neighbours)
        kinds[alike].append(node)
    groups = [
        part
        for group in kinds.values()
        for part in ([group] if len(group) > FEW else [[node] for node in group])
    ]
    nodes = _joined(groups)
    if len(nodes) > MOST_NODES:
        layers = layers_of(nodes)
        places: dict[Any, list[Node]] = defaultdict(list)
        for node in nodes:
            places[node.handler, layers[node.key]].append(node)
        nodes = _joined(places.values())
    return nodes


def _joined(groups: Iterable[list[Node]]) -> list[Node]:
    """Return one node for each group, with the parents of all its members."""
    groups = list(groups)
    place = {node.key: group[0].key for group in groups for node in group}
    found = []
    for group in groups:
        counts: Counter[str] = Counter()
        for node in group:
            counts.update(node.counts)
        parents = dict.fromkeys(place[key] for node in group for key in node.parents)
        first = group[0]
        found.append(
            replace(
                first,
                name=first.name if len(group) == 1 else first.handler,
                counts=dict(counts),
                parents=tuple(parents),
                url=first.url if len(group) == 1 else "",
            )
        )
    return found


def layers_of(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the layer of each node by its key: the longest way to it from a node without parents.
    One that was added to the running workflow is in no first layer.

    :raises ValueError: nodes wait for one another in a circle.
    """
    waits = {node.key: len(node.parents) for node in nodes}
    followers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for parent in node.parents:
            followers[parent].append(node.key)
    layers = {node.key: int(node.is_added) for node in nodes if not waits[node.key]}
    ready = list(layers)
    for key in ready:
        for follower in followers[key]:
            layers[follower] = max(layers.get(follower, 0), layers[key] + 1)
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(ready) < len(nodes):
        raise ValueError("The steps wait for one another in a circle")
    return layers


# --- Places ---------------------------------------------------------------------------------------


class _Layout:
    """Nodes and bends of lines, in layers, each with its place."""

    def __init__(self, nodes: Sequence[Node], layers: Mapping[str, int], form: Form) -> None:
        self.form = form
        self.number = {node.key: index for index, node in enumerate(nodes)}
        self.layer = [layers[node.key] for node in nodes]
        self.lines: list[list[int]] = []
        """The items each line goes through: a node, bends, a node."""
        direct = _direct_lines(nodes, self.number, self.layer)
        room = sum(self.layer[end] - self.layer[start] - 1 for start, end in direct)
        for start, end in direct:
            between = range(self.layer[start] + 1, self.layer[end]) if room <= MOST_BENDS else ()
            first = len(self.layer)
            self.layer.extend(between)
            self.lines.append([start, *range(first, len(self.layer)), end])
        self.node_count = len(nodes)
        count = len(self.layer)
        self.above: list[list[int]] = [[] for _index in range(count)]
        self.below: list[list[int]] = [[] for _index in range(count)]
        for line in self.lines:
            for start, end in pairwise(line):
                self.below[start].append(end)
                self.above[end].append(start)
        self.rows: list[list[int]] = [[] for _index in range(max(self.layer, default=-1) + 1)]
        for item, layer in enumerate(self.layer):
            self.rows[layer].append(item)
        self.at = [0.0] * count
        """The middle of each item, across the axis of the layers."""
        self._order()
        self._place()

    def _order(self) -> None:
        """Order each layer by the mean of its neighbours' places, downwards and upwards."""
        place = [0.0] * len(self.layer)
        for row in self.rows:
            for index, item in enumerate(row):
                place[item] = index / max(1, len(row) - 1)
        for sweep in range(SWEEPS):
            is_down = sweep % 2 == 0
            neighbours = self.above if is_down else self.below
            for row in self.rows if is_down else reversed(self.rows):
                # A stable sort keeps the order of items whose neighbours have the same middle.
                row.sort(key=lambda item: _mean(neighbours[item], place))
                for index, item in enumerate(row):
                    place[item] = index / max(1, len(row) - 1)

    def _place(self) -> None:
        """Move each item towards the middle of its neighbours, without changing the order."""
        for row in self.rows:
            self._spread(row, [0.0] * len(row))
        for sweep in range(SWEEPS):
            is_down = sweep % 2 == 0
            neighbours = self.above if is_down else self.below
            for row in self.rows if is_down else reversed(self.rows):
                self._spread(row, [_mean(neighbours[item], self.at) for item in row])
        highest = min(
            (self.at[item] - self.size(item) / 2 for item in range(len(self.at))), default=0
        )
        self.at = [at - highest + MARGIN for at in self.at]

    def size(self, item: int) -> float:
        """Return the size of an item across the axis of the layers."""
        return self.form.across if item < self.node_count else 4

    def _spread(self, row: list[int], wanted: list[float]) -> None:
        """Give the items of a layer the places that are nearest to the wanted ones, in order and
        without overlap: the means of pools of neighbours that would overlap."""
        offsets, offset = [], 0.0
        for index, item in enumerate(row):
            if index:
                offset += (self.size(row[index - 1]) + self.size(item)) / 2
                offset += self.form.between_nodes
            offsets.append(offset)
        pools: list[tuple[float, int]] = []  # sum and count
        for place, offset in zip(wanted, offsets, strict=True):
            total, count = place - offset, 1
            while pools and pools[-1][0] * count >= total * pools[-1][1]:
                before, members = pools.pop()
                total, count = total + before, count + members
            pools.append((total, count))
        middles = [total / count for total, count in pools for _member in range(count)]
        for item, middle, offset in zip(row, middles, offsets, strict=True):
            self.at[item] = middle + offset


def _mean(neighbours: Sequence[int], place: Sequence[float]) -> float:
    return sum(place[item] for item in neighbours) / len(neighbours) if neighbours else 0.0


def _direct_lines(
    nodes: Sequence[Node], number: Mapping[str, int], layer: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the lines that no longer way replaces: who waits for a node waits for its parents."""
    followers: list[list[int]] = [[] for _node in nodes]
    for node in nodes:
        for parent in node.parents:
            followers[number[parent]].append(number[node.key])
    reached = [0] * len(nodes)  # bits of the nodes after each
    lines = []
    for start in sorted(range(len(nodes)), key=lambda item: -layer[item]):
        seen = 0
        for end in sorted(followers[start], key=lambda item: layer[item]):
            if not seen >> end & 1:
                lines.append((start, end))
            seen |= 1 << end | reached[end]
        reached[start] = seen
    return sorted(lines)


# --- Drawing --------------------------------------------------------------------------------------


def _drawing(nodes: Sequence[Node], layers: Mapping[str, int], form: Form) -> dict[str, Any]:
    """Return the template's values. Coordinates are text already: a template would localise
    numbers, and SVG takes no decimal comma.
    """
    layout = _Layout(nodes, layers, form)
    step = form.along + form.between_layers
    length = len(layout.rows) * step - form.between_layers + 2 * MARGIN
    breadth = max((at + layout.size(item) / 2 for item, at in enumerate(layout.at)), default=0)
    sides = (length, breadth + MARGIN)
    width, height = reversed(sides) if form.is_upright else sides
    outlines: dict[int, list[str]] = defaultdict(list)
    for line in layout.lines:
        outlines[line[0]].append(_outline(layout, line))
    names = {node.key: node.name for node in nodes}
    return {
        "form": form.name,
        "box": f"0 0 {width:.0f} {height:.0f}",
        "width": f"{width:.0f}",
        "height": f"{height:.0f}",
        "lines": [
            {
                "outline": "".join(parts),
                "kind": "released" if nodes[start].is_completed else "waiting",
            }
            for start, parts in outlines.items()
        ],
        "boxes": [
            _box(
                node,
                form,
                MARGIN + layers[node.key] * step,
                layout.at[index] - form.across / 2,
                [names[key] for key in node.parents],
            )
            for index, node in enumerate(nodes)
        ],
    }


def _outline(layout: _Layout, line: Sequence[int]) -> str:
    """Return the outline of a line: curves between layers, straight where it passes one."""
    form = layout.form
    step = form.along + form.between_layers

    def point(along: float, across: float) -> str:
        x, y = (across, along) if form.is_upright else (along, across)
        return f"{x:.0f} {y:.0f}"

    parts = []
    for start, end in pairwise(line):
        left = MARGIN + layout.layer[start] * step + form.along
        right = MARGIN + layout.layer[end] * step
        here, there, bow = layout.at[start], layout.at[end], form.between_layers / 2
        curve = (point(left + bow, here), point(right - bow, there), point(right, there))
        move = "M" if start == line[0] else "L"
        parts.append(f"{move}{point(left, here)}C{curve[0]} {curve[1]} {curve[2]}")
    return "".join(parts)


def _box(node: Node, form: Form, along: float, across: float, waits: list[str]) -> dict[str, Any]:
    x, y = (across, along) if form.is_upright else (along, across)
    state, total = node.state, node.total
    label = label_of(state)
    done = node.counts.get(ENDED_WELL, 0)
    waits_for = _("waits for %s") % some(waits) if waits else ""
    added = _("added by a running step") if node.is_added else ""
    spoken = "; ".join(filter(None, (f"{node.name}: {states_of(node)}", waits_for, added)))
    arrow = (
        f"M{x + form.width / 2 - 4:.0f} {y - 6:.0f}h8l-4 6z"
        if form.is_upright
        else f"M{x - 6:.0f} {y + form.height / 2 - 4:.0f}v8l6 -4z"
    )
    detail = label
    if total > 1:
        detail = f"{number(done)} / {number(total)}"
        if state not in (ENDED_WELL, "waiting"):
            detail += f" · {number(node.counts.get(state, 0))} {label}"
    if node.is_added:
        detail = _("%s · added") % detail
    return {
        "name": _short(inert(node.name), form.letters),
        "detail": _short(detail, form.letters + 2),
        "spoken": inert(spoken),
        "state": state,
        "url": node.url,
        "is_stack": total > 1,
        "x": f"{x:.0f}",
        "y": f"{y:.0f}",
        "width": str(form.width),
        "height": str(form.height),
        "behind": (f"{x + 3:.0f}", f"{y + 3:.0f}"),
        "text_x": f"{x + 12:.0f}",
        "name_y": f"{y + 21:.0f}",
        "detail_y": f"{y + 37:.0f}",
        "arrow": arrow if waits else "",
        "bar": _bar(node, form, x, y) if total > 1 else [],
    }


def _bar(node: Node, form: Form, x: float, y: float) -> list[dict[str, str]]:
    """Return the parts of the bar that shows how many steps are in which state."""
    width, total, at = form.width - 24.0, node.total, x + 12
    parts = []
    for state in (ENDED_WELL, *BY_WEIGHT):
        share = width * node.counts.get(state, 0) / total
        if share:
            parts.append({"state": state, "x": f"{at:.0f}", "width": f"{share:.2f}"})
            at += share
    for part in parts:
        part["y"] = f"{y + form.height - 8:.0f}"
    return parts


def label_of(state: str) -> str:
    """Return what people are shown as the name of a state."""
    return str(JobStatus(state).label) if state in JobStatus.values else inert(state.capitalize())


def states_of(node: Node) -> str:
    """Return the states of a node's steps, with their numbers if there are several steps."""
    if node.total <= 1:
        return label_of(node.state)
    counts = sorted(node.counts.items())
    return ", ".join(f"{number(count)} {label_of(state)}" for state, count in counts if count)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many there are besides."""
    shown = ", ".join(names[:most])
    more = len(names) - most
    return (
        shown if more <= 0 else _("%(names)s and %(count)d more") % {"names": shown, "count": more}
    )


def _summary(nodes: Sequence[Node]) -> str:
    counts: Counter[str] = Counter()
    for node in nodes:
        counts.update(node.counts)
    text = _("%(steps)s steps in %(nodes)s boxes: %(states)s.")
    return text % {
        "steps": number(sum(counts.values())),
        "nodes": number(len(nodes)),
        "states": states_of(Node("", "", "", counts)),
    }
