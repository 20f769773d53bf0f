"""The picture and the graph of a tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox_gym.search import MCTS, SearchResult, beam_search
from sandbox_gym.search.picture import _columns, _most_visited
from sandbox_gym.search.testing import TableModel


def rule(place: int, action: int) -> tuple[int, float, bool, bool]:
    return (3 * place + action + 1) % 11, (place * 7 + action * 5) % 9 / 9, place == 5, False


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return MCTS(num_simulations=150).search(TableModel(rule, num_actions=4, start=2))


def test_plot_makes_a_picture(result: SearchResult, tmp_path: Path) -> None:
    before = set(sys.modules)
    result.tree.plot(tmp_path / "tree.png", action_names=["up", "down", "left", "right"])
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    result.tree.plot(str(tmp_path / "tree.svg"), max_nodes=5)
    assert "<svg" in (tmp_path / "tree.svg").read_text()
    assert "matplotlib.pyplot" not in set(sys.modules) - before


def test_a_tree_with_one_value_and_one_step_is_drawn(tmp_path: Path) -> None:
    model = TableModel(lambda p, a: (p, 0.0, True, False), num_actions=1)
    beam_search(model, width=1, stop_when=lambda node: True).tree.plot(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 1000


def test_the_most_visited_are_shown_with_their_ancestors_and_apart(result: SearchResult) -> None:
    shown = _most_visited(result.tree, 40)
    assert len(shown) == 40
    assert set(result.tree.principal_variation) < set(shown)
    assert all(node.parent in shown for node in shown if node.parent is not None)
    x = _columns(result.tree.root, shown)
    for one in shown:
        for other in shown:
            if one is not other and one.depth == other.depth:
                assert abs(x[one] - x[other]) >= 1 - 1e-9


def test_networkx_holds_every_node_and_edge(result: SearchResult) -> None:
    import networkx

    graph = result.tree.to_networkx()
    assert graph.number_of_nodes() == result.num_nodes == graph.number_of_edges() + 1
    assert networkx.is_arborescence(graph)
    assert graph.nodes[0]["visits"] == 151
    first = [(edge["action"], edge["visits"]) for _, _, edge in graph.out_edges(0, data=True)]
    assert sorted(first) == [(a, n) for a, n in enumerate(result.visit_counts.tolist()) if n]
    line = [i for i, best in graph.nodes(data="principal_variation") if best]
    assert len(line) == len(result.principal_variation)


@pytest.mark.parametrize(("package", "call"), [("matplotlib", "plot"), ("networkx", "to_networkx")])
def test_a_missing_package_is_named(
    result: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, call: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"sandbox-gym\[search\]"):
        getattr(result.tree, call)(*[tmp_path / "tree.png"] * (call == "plot"))
