"""What every benchmark shares: its options, its table, its JSON, its exit status."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class Row:
    """One measurement beside its reference. `bar`: what the ratio to the reference may be at most, or, where
    `more_is_better`, must be at least.
    """

    metric: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    bar: float | None = None
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference_value if self.reference_value else None

    @property
    def ok(self) -> bool | None:
        """None where there is no bar."""
        if self.bar is None or self.ratio is None:
            return None
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar


def main(description: str | None, run: Callable[[bool], Sequence[Row]]) -> NoReturn:
    """Parses the options, calls `run(quick)`, reports, exits: with status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 45 s on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    sys.exit(report(run(options.quick), options.json))


def report(rows: Sequence[Row], json_path: Path | None = None) -> int:
    """Prints the table, writes the JSON. The exit status: 1 when a bar is missed."""
    head = ("metric", "value", "unit", "reference", "its value", "ratio", "bar", "")
    table = [head, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    for line in table:
        cells = [
            cell.rjust(width) if column in (1, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        print("  ".join(cells).rstrip())
    load = os.getloadavg()[0]
    print(
        f"\n{os.cpu_count()} cpus, load {load:.1f}, Linux {platform.release()}, Python {platform.python_version()}"
    )
    if json_path is not None:
        json_path.write_text(json.dumps([_record(row) for row in rows], indent=2) + "\n")
    return int(any(row.ok is False for row in rows))


def _record(row: Row) -> dict[str, object]:
    fields = ("metric", "value", "unit", "reference", "reference_value", "ratio", "bar", "ok")
    return {field: getattr(row, field) for field in fields}


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "ok", False: "MISSED"}[row.ok]
    bar = "" if row.bar is None else f"{'>=' if row.more_is_better else '<='} {row.bar:g}"
    reference_value, ratio = _number(row.reference_value), _number(row.ratio)
    return row.metric, _number(row.value), row.unit, row.reference, reference_value, ratio, bar, verdict


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def progress(message: str) -> None:
    """A line on stderr: what is being measured."""
    print(message, file=sys.stderr, flush=True)
