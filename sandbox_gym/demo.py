"""The main job, shown: a game stepped in isolated lanes, then a level that random play does not solve, solved by a
search over snapshots of its live process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tqdm import tqdm

from sandbox_gym._table import table
from sandbox_gym.env import SandboxEnv
from sandbox_gym.guest.wire import Op
from sandbox_gym.registration import register_envs
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search import MCTS, PUCT, Node, Novelty, SearchResult, observation_key

GAME = "ALE/Breakout-v5"
LEVEL = "MiniGrid-DoorKey-6x6-v0"
LANES = 8
_SEED = 1
_STEPS = 400  # of each lane
_RESTORES = 200
_SIMULATIONS = 3000
_ENTRY_POINT = "sandbox_gym.envs.fully_observable:make"

Row = tuple[str, str]


def main(folder: Path) -> int:
    """Runs the demo, writes tree.png and solution.gif to `folder`, prints a table. The exit status: 0 when solved."""
    register_envs()
    folder.mkdir(parents=True, exist_ok=True)
    rows = play_lanes() + time_restores()
    solved, more = solve(folder)
    print(table(("what", "result"), rows + more))
    return 0 if solved else 1


def play_lanes() -> list[Row]:
    """A random policy on all lanes at once."""
    started = time.perf_counter()
    venv = gymnasium.make_vec("Sandbox-v0", num_envs=LANES, env_id=GAME)
    made = time.perf_counter() - started
    try:
        venv.action_space.seed(_SEED)
        venv.reset(seed=_SEED)
        episodes = 0
        started = time.perf_counter()
        for _ in tqdm(range(_STEPS), desc=f"{LANES} x {GAME}", unit="step", disable=None):
            _, _, terminated, truncated, _ = venv.step(venv.action_space.sample())
            episodes += int(np.count_nonzero(terminated | truncated))
        spent = time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(5):
            venv.reset()
        resets = 5 * LANES / (time.perf_counter() - started)
    finally:
        venv.close()
    return [
        (f"{LANES} lanes of {GAME} made", f"{made:.2f} s"),
        ("random play", f"{LANES * _STEPS / spent:,.0f} steps/s, {episodes} episodes ended"),
        ("resets (each restores a snapshot)", f"{resets:,.0f} resets/s"),
    ]


def time_restores() -> list[Row]:
    """From the request for a copy of a warmed-up guest to its first answer."""
    times = []
    with Sandbox.create() as box:
        box.run_code("import gymnasium")
        snapshot = box.snapshot()
        for _ in tqdm(range(_RESTORES), desc="restores", unit="copy", disable=None):
            started = time.perf_counter()
            copy = Sandbox.restore(snapshot)
            copy._request(Op.PING, timeout=30.0)
            times.append(1e3 * (time.perf_counter() - started))
            copy.terminate()
    times.sort()
    p99 = times[int(0.99 * (len(times) - 1))]
    return [("restore to first answer", f"p50 {statistics.median(times):.1f} ms, p99 {p99:.1f} ms")]


def solve(folder: Path) -> tuple[bool, list[Row]]:
    """Searches the level, then plays what was found, and plays at random for as many steps as the search took."""
    with closing_env() as env:
        env.reset(seed=_SEED)
        started = time.perf_counter()
        result = search(env)
        spent = time.perf_counter() - started
        solved = result.found is not None and replay(env, result, folder / "solution.gif")
        random_solved = play_at_random(env, result.num_steps)
    result.tree.plot(folder / "tree.png")
    plan = f"solved in {len(result.principal_variation)} actions" if solved else "not solved"
    return solved, [
        (f"search in {LEVEL}", f"{plan}, after {result.num_steps} steps"),
        ("nodes", f"{result.num_nodes} at {result.num_nodes / spent:,.0f} nodes/s"),
        ("random play, as many steps", f"solved {random_solved} time(s)" if random_solved else "not solved"),
        ("search tree", str(folder / "tree.png")),
        ("solution", str(folder / "solution.gif")),
    ]


@contextmanager
def closing_env() -> Iterator[SandboxEnv]:
    env = SandboxEnv(entry_point=_ENTRY_POINT, env_kwargs={"env_id": LEVEL, "render_mode": "rgb_array"})
    try:
        yield env
    finally:
        env.close()


def search(env: SandboxEnv) -> SearchResult:
    """Explores the level's states, each once, until one gives a reward."""

    def reached_goal(node: Node) -> bool:
        return node.reward > 0

    with tqdm(total=_SIMULATIONS, desc=f"search in {LEVEL}", unit="simulation", disable=None) as bar:

        def advance(done: int, tree: Any) -> None:
            bar.update(done - bar.n)

        planner = MCTS(
            num_simulations=_SIMULATIONS,
            evaluate=Novelty(),
            action_selection=PUCT(pb_c_init=5.0),
            key=observation_key,
            max_snapshots=_SIMULATIONS,
            stop_when=reached_goal,
            on_simulation=advance,
            seed=_SEED,
        )
        return planner.search(env)


def replay(env: SandboxEnv, result: SearchResult, path: Path) -> bool:
    """Plays the plan in the environment itself and films it. True when it reaches the goal."""
    from PIL import Image

    frames = [env.render()]
    reward = 0.0
    for action in result.principal_variation:
        _, step_reward, _, _, _ = env.step(action)
        reward += step_reward
        frames.append(env.render())
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:] + images[-1:] * 4, duration=250, loop=0)
    return reward > 0


def play_at_random(env: SandboxEnv, steps: int) -> int:
    """How many episodes of random play, from the level's start, end at the goal within so many steps in all."""
    solved = 0
    episode = 0
    while steps > 0:
        env.reset(seed=_SEED)
        played = env.rollout(policy="random", max_steps=steps, seed=episode)
        solved += bool(played.rewards.sum() > 0)
        steps -= max(1, len(played))
        episode += 1
    return solved
