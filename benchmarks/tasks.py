"""The environments that come with sandbox_gym: how plain policies fare in them, and whether search helps a weak one.

python -m benchmarks.tasks [--quick] [--json FILE] [--part baselines|search] [--figure FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import _tasks_baselines, _tasks_search
from benchmarks._report import Row, report

PARTS = ("baselines", "search")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 45 s on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the part search there")
    options = parser.parse_args()
    parts = options.part or PARTS
    rows: list[Row] = []
    if "baselines" in parts:
        rows += _tasks_baselines.run(options.quick)
    if "search" in parts:
        rows += _tasks_search.run(options.quick, options.figure)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
