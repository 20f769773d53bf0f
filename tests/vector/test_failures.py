"""A lane that fails ends its own episode, says why, and comes back; the others never notice."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from sandbox_gym._spares import Spares
from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.guest import chance
from sandbox_gym.sandbox import Sandbox
from tests.conftest import kill_guest
from tests.vector import toys

Lanes = Callable[..., Any]


def actions(n: int, lane: int, action: int) -> Any:
    batch = np.zeros(n, np.int64)
    batch[lane] = action
    return batch


def play(env: Any, batch: Any, steps: int) -> None:
    for _ in range(steps):
        env.step(batch)


WAYS = {
    "raise": (toys.RAISE, "RuntimeError: told to raise"),
    "hang": (toys.HANG, "SandboxTimeout.*did not answer"),
    "exit": (toys.EXIT, "SandboxDied.*is gone"),
    "bad shape": (toys.BAD_SHAPE, "does not fit its space"),
    "full disk": (toys.FILL_DISK, "OSError"),
    "bad reward": (toys.BAD_REWARD, "no finite number"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_failure_ends_the_episode_of_its_lane(lanes: Lanes, way: str) -> None:
    action, reason = WAYS[way]
    env = lanes(3, "Trouble", step_timeout=0.5 if way == "hang" else 10.0, disk="8Mi")
    env.reset(seed=0)
    env.step(np.zeros(3, np.int64))
    began = time.monotonic()
    observations, rewards, terminations, truncations, infos = env.step(actions(3, 1, action))
    assert time.monotonic() - began < 8
    assert observations[:, 0].tolist() == [2, 1, 2], "the lane keeps its last observation"
    assert rewards.tolist() == [1.0, 0.0, 1.0]
    assert not terminations.any()
    assert truncations.tolist() == [False, True, False]
    assert infos["_sandbox_error"].tolist() == [False, True, False]
    assert infos["sandbox_error"].dtype == object
    assert infos["sandbox_error"][0] is None
    assert re.search(reason, infos["sandbox_error"][1]), infos["sandbox_error"][1]
    observations, rewards, _, truncations, infos = env.step(np.zeros(3, np.int64))
    assert observations[:, 0].tolist() == [3, 0, 3], "the next step is its reset"
    assert rewards.tolist() == [1.0, 0.0, 1.0]
    assert not truncations.any()
    assert "sandbox_error" not in infos
    assert env.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [4, 1, 4]


def test_several_that_hang_take_no_longer_than_one(lanes: Lanes) -> None:
    env = lanes(4, "Trouble", step_timeout=0.6)
    env.reset(seed=0)
    began = time.monotonic()
    _, rewards, _, truncations, _ = env.step(np.array([toys.HANG, 0, toys.HANG, toys.HANG]))
    assert time.monotonic() - began < 1.5
    assert truncations.tolist() == [True, False, True, True]
    assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_same_step_resets_at_once(lanes: Lanes) -> None:
    env = lanes(2, "Trouble", autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    env.step(np.zeros(2, np.int64))
    observations, rewards, _, truncations, infos = env.step(actions(2, 0, toys.EXIT))
    assert observations[:, 0].tolist() == [0, 2]
    assert rewards.tolist() == [0.0, 1.0]
    assert truncations.tolist() == [True, False]
    assert infos["final_obs"][0][0] == 1
    assert "is gone" in infos["sandbox_error"][0]
    assert "is gone" in infos["final_info"]["sandbox_error"][0]


def test_disabled_waits_for_the_user(lanes: Lanes) -> None:
    env = lanes(2, "Trouble", autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    failed = env.step(actions(2, 1, toys.RAISE))[3]
    observations, _ = env.reset(options={"reset_mask": failed})
    assert observations[:, 0].tolist() == [1, 0]
    assert env.step(np.zeros(2, np.int64))[0][:, 0].tolist() == [2, 1]


def test_values_that_are_no_arrays_fail_alike(lanes: Lanes) -> None:
    env = lanes(3, "Shapes", env_kwargs={"kind": "nested"}, step_timeout=0.8)
    env.reset(seed=5)
    last, _, ended, *_ = env.step(np.zeros(3, np.int64))
    assert not ended.any()
    kill(env, 1)
    observations, rewards, _, truncations, infos = env.step(np.zeros(3, np.int64))
    assert observations["t"][1] == last["t"][1]
    assert observations["t"][0] != last["t"][0]
    assert truncations[1]
    assert rewards[1] == 0.0
    assert "is gone" in infos["sandbox_error"][1]
    assert env.step(np.zeros(3, np.int64))[4]["began"].tolist()[1]


def kill(env: Any, lane: int) -> None:
    kill_guest(env._lanes._lanes[lane].box)


def test_a_killed_guest(lanes: Lanes) -> None:
    env = lanes(3, "Trouble")
    env.reset(seed=0)
    env.step(np.zeros(3, np.int64))
    kill(env, 2)
    observations, rewards, _, truncations, infos = env.step(np.zeros(3, np.int64))
    assert truncations.tolist() == [False, False, True]
    assert rewards.tolist() == [1.0, 1.0, 0.0]
    assert observations[:, 0].tolist() == [2, 2, 1]
    assert "is gone" in infos["sandbox_error"][2]
    assert env.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [3, 3, 0]


def test_one_that_fails_at_every_step_raises(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    env.reset(seed=0)
    bad = actions(2, 1, toys.RAISE)
    with pytest.raises(SandboxError, match=r"lane 1 failed at 3 steps in a row.*told to raise"):
        play(env, bad, 6)
    assert env.reset(seed=0)[0][:, 0].tolist() == [0, 0]
    for _ in range(5):  # failures with good steps between them are accidents
        env.step(bad)
        env.step(np.zeros(2, np.int64))
        env.step(np.zeros(2, np.int64))


def test_what_a_reset_raises(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    with pytest.raises(ValueError, match="these options are refused"):
        env.reset(options={"refuse": True})
    with pytest.raises(TypeError, match="options"):
        env.reset(options={"what": object()})
    assert env.reset(seed=0)[0][:, 0].tolist() == [0, 0]


def test_after_the_supervisor_s_end_a_reset_starts_another(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    first, _ = env.reset(seed=0)
    backend: Any = env._lanes._warm.snapshot._backend
    os.kill(backend._process.pid, signal.SIGKILL)
    backend._process.wait()
    with pytest.raises(SandboxDied, match="reset"):
        play(env, np.zeros(2, np.int64), 50)
    again, _ = env.reset(seed=0)
    assert np.array_equal(again, first)
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fresh", ["snapshot", "reuse"])
def test_what_an_episode_leaves_behind(lanes: Lanes, fresh: str) -> None:
    env = lanes(2, "Trouble", fresh=fresh)
    observations, _ = env.reset(seed=0)
    env.step(actions(2, 0, toys.SPILL))
    while not env.step(np.zeros(2, np.int64))[2].any():
        pass
    observations, _, _, _, infos = env.step(np.zeros(2, np.int64))
    left = [0, 0] if fresh == "snapshot" else [2, 0]
    assert observations[:, 1].tolist() == left
    assert infos["left"].tolist() == [min(one, 1) for one in left]
    assert env.reset(seed=0)[0][:, 1].tolist() == left


def test_close_leaves_nothing(lanes: Lanes) -> None:
    before = len(Sandbox.list())
    env = lanes(4, "Trouble")
    env.reset(seed=0)
    for _ in range(12):
        env.step(np.zeros(4, np.int64))
    assert len(Sandbox.list()) >= before + 4
    env.close()
    assert len(Sandbox.list()) == before


def test_resets_that_outrun_the_end_of_old_copies_wait_for_it(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spares, "_wake", lambda self: None)  # the thread that ends them gets no time at all
    before = len(Sandbox.list())
    env = lanes(16, "CartPole-v1", autoreset_mode="Disabled")
    for _ in range(8):
        env.reset()
    assert len(Sandbox.list()) - before <= 16 + 64
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1"])
def test_too_few_actions_harm_no_lane(lanes: Lanes, name: str) -> None:
    env = lanes(3, name)
    env.reset(seed=0)
    for batch in ([0], np.zeros(2, np.int64), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match="actions for 3 lanes"):
            env.step(batch)
    *_, infos = env.step(np.zeros(3, np.int64))
    assert "sandbox_error" not in infos


def test_a_step_after_close(lanes: Lanes) -> None:
    env = lanes(2, "CartPole-v1")
    env.reset(seed=0)
    env.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.step(np.zeros(2, np.int64))


def test_an_interrupted_step_ends_all_episodes_and_reset_begins_anew(
    lanes: Lanes,
) -> None:
    env = lanes(2, "Trouble", fresh="reuse")
    env.reset(seed=0)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(actions(2, 0, toys.HANG))
    timer.join()
    env.reset(seed=0)
    *_, infos = env.step(np.array([0, 0]))
    assert "sandbox_error" not in infos


class Spill:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


def test_an_emulator_s_state_that_a_guest_made_up_runs_nothing(tmp_path: Path) -> None:
    import ale_py  # noqa: F401  # registers

    env = gymnasium.make("ALE/Pong-v5")
    env.reset(seed=0)
    saved = chance.save(env)
    assert saved is not None
    chance.reset(env, 1, None, saved)
    saved["ale"] = pickle.dumps(Spill(tmp_path / "mark"))
    with pytest.raises((SystemError, ValueError, TypeError)):
        chance.reset(env, 1, None, saved)
    assert not (tmp_path / "mark").exists()
