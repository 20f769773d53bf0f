"""AlphaZero-style training over live snapshots of a sandboxed MiniGrid level, from scratch, on this machine.

python -m examples.alphazero [--minutes 15] [--out FOLDER] [--env ID] [--seed N]

Started again with the same folder, it goes on from the checkpoint there.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import ray
from tqdm import tqdm

from examples.alphazero.training import Row, Settings, train


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.alphazero",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=Settings.minutes, help="at most, all runs together")
    parser.add_argument("--out", type=Path, default=Path("alphazero"), help="folder for curve and checkpoint")
    parser.add_argument("--env", default=Settings.env_id, help="a MiniGrid level")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    settings = Settings(env_id=arguments.env, seed=arguments.seed, minutes=arguments.minutes)
    ray.init(log_to_driver=False)
    try:
        tqdm.write("  ".join(column.name for column in fields(Row)))
        train(settings, arguments.out, on_row=show)
    finally:
        ray.shutdown()
    print(f"curve and checkpoint: {arguments.out}")


def show(row: Row) -> None:
    """Under the names of the columns, flush right."""
    cells = ((column.name, getattr(row, column.name)) for column in fields(Row))
    tqdm.write(
        "  ".join(f"{cell:{len(name)}{'d' if isinstance(cell, int) else '.3g'}}" for name, cell in cells)
    )


if __name__ == "__main__":
    main()
