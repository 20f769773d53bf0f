"""What every benchmark shares: its options, its table, its JSON, its exit status."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measurement beside its reference. `ratio`: value to reference_value; `ok`: None where there is no bar."""

    metric: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    ratio: float | None = None
    bar: str = ""
    ok: bool | None = None


def row(
    metric: str,
    value: float,
    unit: str,
    *,
    reference: str = "",
    reference_value: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A row whose bar is on the ratio to the reference, or on the value itself where there is no reference."""
    ratio = None if reference_value is None else value / reference_value
    judged = value if ratio is None else ratio
    times = "" if ratio is None else " x"
    bar, ok = "", None
    if at_least is not None:
        bar, ok = f">= {at_least:g}{times}", judged >= at_least
    elif at_most is not None:
        bar, ok = f"<= {at_most:g}{times}", judged <= at_most
    return Row(metric, value, unit, reference, reference_value, ratio, bar, ok)


def parse(description: str | None) -> argparse.Namespace:
    """`--quick` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 45 s on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser.parse_args()


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
    print(f"\n{os.cpu_count()} cpus, load {load:.1f}, Linux {platform.release()}, Python {platform.python_version()}")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(any(row.ok is False for row in rows))


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "ok", False: "MISSED"}[row.ok]
    reference_value, ratio = _number(row.reference_value), _number(row.ratio)
    return row.metric, _number(row.value), row.unit, row.reference, reference_value, ratio, row.bar, verdict


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def progress(message: str) -> None:
    """A line on stderr: what is being measured."""
    print(message, file=sys.stderr, flush=True)
