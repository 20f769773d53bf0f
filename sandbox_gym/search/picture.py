"""The tree as a picture and as a graph. matplotlib and networkx are imported by the call that needs them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sandbox_gym.search.tree import Node, Tree

if TYPE_CHECKING:
    import networkx

_INK = "#22303c"
_EDGE = "#b9c3cc"
_LINE = "#e4572e"
_PALETTE = "YlGnBu"


@contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} is missing: pip install 'sandbox-gym[search]'") from error


def to_networkx(tree: Tree) -> networkx.DiGraph[int]:
    with _needs("networkx"):
        import networkx
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    index = {node: i for i, node in enumerate(tree.nodes)}
    best = set(tree.principal_variation)
    for node, i in index.items():
        graph.add_node(
            i,
            depth=node.depth,
            visits=node.visits,
            value=node.value,
            raw_value=node.raw_value,
            path_return=node.path_return,
            terminated=node.terminated,
            truncated=node.truncated,
            principal_variation=node in best,
        )
        if node.parent is not None:
            graph.add_edge(
                index[node.parent],
                i,
                action=node.action,
                reward=node.reward,
                visits=node.visits,
                prior=float(node.parent.prior_probs[node.action]),
                q=float(node.reward + tree.discount * node.value) if node.visits else None,
            )
    return graph


def draw(
    tree: Tree, path: str | os.PathLike[str], *, max_nodes: int, action_names: Sequence[str] | None = None
) -> None:
    with _needs("matplotlib"):
        # Never pyplot: it would choose a window system and keep the figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    shown = _most_visited(tree, max_nodes)
    x = _columns(tree.root, shown)
    span, depth = max(x.values()) - min(x.values()), max(node.depth for node in shown)
    width = min(max(7.0, 0.75 * span + 2.5), 24)
    height = min(max(4.0, min(0.95, max(0.62, 12 / (depth + 1))) * depth + 2.0), 30)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.margins(0.04, 0.06)
    title = f"{len(tree)} nodes, {len(shown)} most visited shown; depth {max(node.depth for node in tree)}"
    axes.set_title(title, fontsize=10, color=_INK, loc="left")
    best = {tree.root, *tree.principal_variation}
    most = max(node.visits for node in shown) or 1
    for node in shown:
        if node.parent is not None:
            label = str(node.action) if action_names is None else action_names[node.action]
            start, end = (x[node.parent], -node.parent.depth), (x[node], -node.depth)
            _draw_edge(axes, start, end, label, weight=math.sqrt(node.visits / most), chosen=node in best)
    _draw_nodes(figure, axes, tree, shown, x, best)
    _draw_legend(axes)
    figure.savefig(os.fspath(path))


def _draw_edge(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    *,
    weight: float,
    chosen: bool,
) -> None:
    axes.plot(
        [start[0], end[0]],
        [start[1], end[1]],
        color=_LINE if chosen else _EDGE,
        linewidth=2.6 if chosen else 0.8 + 1.6 * weight,
        zorder=2 if chosen else 1,
        solid_capstyle="round",
    )
    axes.text(
        start[0] + 0.55 * (end[0] - start[0]),
        start[1] + 0.55 * (end[1] - start[1]),
        label,
        fontsize=7,
        color=_LINE if chosen else _INK,
        fontweight="bold" if chosen else "normal",
        ha="center",
        va="center",
        zorder=3,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
    )


def _draw_nodes(
    figure: Any,
    axes: Any,
    tree: Tree,
    shown: Sequence[Node],
    x: Mapping[Node, float],
    best: AbstractSet[Node],
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # With the reward of the step that led there: a goal is worth its reward, though nothing follows it.
    values = {node: node.reward + tree.discount * node.value if node.parent else node.value for node in shown}
    low, high = min(values.values()), max(values.values())
    # Equal values would be divided by a range of nothing.
    norm = Normalize(low, high if high > low else low + 1)
    most = max(node.visits for node in shown) or 1
    area = {node: 30 + 600 * math.sqrt(node.visits / most) for node in shown}  # points squared
    for marker, ended in (("o", False), ("s", True)):
        group = [node for node in shown if node.ended == ended]
        axes.scatter(
            [x[node] for node in group],
            [-node.depth for node in group],
            s=[area[node] for node in group],
            c=[values[node] for node in group],
            cmap=_PALETTE,
            norm=norm,
            marker=marker,
            edgecolors=[_LINE if node in best else _INK for node in group],
            linewidths=[2.0 if node in best else 0.7 for node in group],
            zorder=4,
        )
    for node in shown:
        # A smaller marker has no room for its number.
        if area[node] > 190:
            ink = "white" if norm(values[node]) > 0.45 else _INK
            axes.text(
                x[node],
                -node.depth,
                str(node.visits),
                fontsize=7,
                ha="center",
                va="center",
                zorder=5,
                color=ink,
            )
    bar = figure.colorbar(
        ScalarMappable(norm, _PALETTE), ax=axes, fraction=0.025, pad=0.01, aspect=30, shrink=0.7
    )
    bar.set_label("value, with the reward of the step", color=_INK, fontsize=9)
    bar.ax.tick_params(labelsize=8, colors=_INK)
    bar.outline.set_visible(False)


def _draw_legend(axes: Any) -> None:
    from matplotlib.lines import Line2D

    marks: dict[str, Any] = {"color": _INK, "markerfacecolor": "white", "linestyle": ""}
    axes.legend(
        handles=[
            Line2D([], [], color=_LINE, linewidth=2.6, label="principal variation"),
            Line2D([], [], marker="o", label="state (number: visits)", **marks),
            Line2D([], [], marker="s", label="episode ended", **marks),
        ],
        loc="upper right",
        fontsize=8,
        frameon=False,
    )


def _most_visited(tree: Tree, max_nodes: int) -> list[Node]:
    """The principal variation, then the most visited nodes, each with its ancestors; in the order they were made."""
    must = {tree.root, *tree.principal_variation[: max_nodes - 1]}
    # A parent has as many visits as its child at least, and was made before it: it is taken first.
    order = sorted(
        (i for i in range(len(tree)) if tree.nodes[i].visits), key=lambda i: (-tree.nodes[i].visits, i)
    )
    rest = [tree.nodes[i] for i in order if tree.nodes[i] not in must]
    chosen = must | set(rest[: max(0, max_nodes - len(must))])
    return [node for node in tree.nodes if node in chosen]


def _columns(root: Node, shown: Sequence[Node]) -> dict[Node, float]:
    """An x for each node: siblings in the order of their actions, parents above their middle, subtrees side by side.

    Each subtree is moved as close to its left neighbour as their outlines allow (Reingold and Tilford 1981).
    """
    chosen = set(shown)
    offset: dict[Node, float] = {root: 0.0}
    outline: dict[
        Node, tuple[list[float], list[float]]
    ] = {}  # left and right edge by level, from the node itself
    for node in reversed(shown):
        children = [child for _, child in sorted(node.children.items()) if child in chosen]
        left: list[float] = []
        right: list[float] = []
        for child in children:
            child_left, child_right = outline.pop(child)
            shift = max((end - start + 1 for end, start in zip(right, child_left, strict=False)), default=0.0)
            offset[child] = shift
            left += [shift + edge for edge in child_left[len(left) :]]
            right[: len(child_right)] = [shift + edge for edge in child_right]
        middle = (offset[children[0]] + offset[children[-1]]) / 2 if children else 0.0
        for child in children:
            offset[child] -= middle
        outline[node] = [0.0] + [edge - middle for edge in left], [0.0] + [edge - middle for edge in right]
    x: dict[Node, float] = {}
    for node in shown:
        x[node] = offset[node] + (x[node.parent] if node.parent is not None else 0.0)
    return x
