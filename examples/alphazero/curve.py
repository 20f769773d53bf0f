"""The learning curve, as a table and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.alphazero.training import Row


def write(path: Path, rows: Sequence[Row]) -> None:
    """One line for each row, under the names of its fields."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])))
        table.writeheader()
        table.writerows(asdict(row) for row in rows)


def plot(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Success rates over minutes, and how many nodes a search needs."""
    from matplotlib.figure import Figure

    minutes = [row.seconds / 60 for row in rows]
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True)
    success, nodes = axes
    success.set_title(f"{title}, from scratch")
    success.plot(
        minutes, [100 * row.success for row in rows], marker=".", label="network alone, held-out levels"
    )
    success.plot(
        minutes, [100 * row.search_success for row in rows], ls="--", label="with search, new levels"
    )
    success.axhline(90, color="grey", lw=0.8)
    success.set(ylabel="levels solved (%)", ylim=(-3, 103))
    success.legend(loc="lower right")
    nodes.plot(minutes, [row.nodes_per_search for row in rows], marker=".", color="tab:green")
    nodes.set(ylabel="nodes to find the goal", xlabel="minutes", yscale="log")
    for panel in axes:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
