"""Chromium in a sandbox, branched with the page that it shows: each copy opens another box, then the origin the best.

python -m examples.browser [--out FOLDER] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import gymnasium
from PIL import Image

from examples.browser.boxes import BOXES
from sandbox_gym._table import table
from sandbox_gym.env import SandboxEnv

Row = tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.browser",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("browser"), help="folder for the screenshots")
    parser.add_argument("--seed", type=int, default=0, help="of what is in the boxes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with contextlib.closing(make()) as env:
        env.reset(seed=arguments.seed)
        total, over = 0.0, False
        while not over:
            best, seen = look_ahead(env, arguments.out, 1 + len(rows) // BOXES)
            rows += seen
            _, reward, over, _, info = env.step(best)
            total += reward
    print(table(("round", "box", "page", "cookie", "scrolled", "picture"), rows))
    print(f"\nThe origin, which opened the best of each round:\n{info['heading']}")
    return 0


def make() -> SandboxEnv:
    here = str(Path(__file__).parents[2])  # where the sandbox finds `examples`
    env = gymnasium.make(
        "sandbox_gym:Sandbox-v0", entry_point="examples.browser.boxes:BoxesEnv", python_path=[here]
    )
    assert isinstance(env.unwrapped, SandboxEnv)
    return env.unwrapped


def look_ahead(env: SandboxEnv, folder: Path, number: int) -> tuple[int, list[Row]]:
    """Opens each box, on a copy of the browser. The best, and what the copies saw."""
    rows: list[Row] = []
    branches = env.branch(actions=range(BOXES))
    for box, branch in enumerate(branches):
        path = folder / f"{number}-{box}.png"
        Image.fromarray(branch.observation).save(path)
        info = branch.info
        state = info["heading"], info["cookie"], f"{info['scrolled']}"
        rows.append((f"{number}", f"{box}", *state, str(path)))
        branch.env.close()
    return max(range(BOXES), key=lambda box: branches[box].reward), rows


if __name__ == "__main__":
    raise SystemExit(main())
