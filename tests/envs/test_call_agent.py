"""The phone assistant: a plain environment, a hosted one, and a script in an interpreter."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from sandbox_gym import Sandbox
from sandbox_gym.env import SandboxEnv
from sandbox_gym.envs.call_agent import ACTIONS, CallAgentEnv
from sandbox_gym.envs.call_agent_caller import MAX_TURNS, NEEDS, REPLIES, Call, advance, begin, worth
from sandbox_gym.envs.call_agent_observation import named, observe
from sandbox_gym.envs.call_agent_policy import MAX_POINTS, receptionist
from sandbox_gym.search import best_of_n

ID = "sandbox_gym:CallAgent-v0"
SCRIPT = "from sandbox_gym.envs.call_agent_script import *; play(seed=7)"


def played(seed: int, actions: list[int] | None = None) -> list[Any]:
    env = CallAgentEnv()
    observation, info = env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    seen: list[Any] = [observation.tolist(), info]
    for _ in range(MAX_TURNS):
        action = int(rng.integers(len(ACTIONS)))
        observation, *rest = env.step(action)
        seen += [action, observation.tolist(), rest]
        if rest[1]:
            break
    return seen


def test_gymnasiums_own_checker_is_content() -> None:
    check_env(gymnasium.make(ID, render_mode="rgb_array").unwrapped)


def test_calls_follow_their_seed_and_end() -> None:
    calls = [played(seed) for seed in range(60)]
    assert calls == [played(seed) for seed in range(60)]
    assert all(call[-1][1] for call in calls), "every call ends within MAX_TURNS"
    assert {call[-1][3]["outcome"] for call in calls} >= {"callback", "transfer", "closed", "hung_up"}
    assert calls[0] != calls[1]


def test_a_call_is_copied_by_its_data_alone() -> None:
    """Nothing random is kept in a call: the same numbers give the same call."""
    for seed in range(20):
        calls = []
        for _ in range(2):
            draw = np.random.default_rng(seed).random
            call = begin(draw)
            while call.outcome is None:
                advance(call, ACTIONS[receptionist(observe(call))], draw)
            calls.append(call)
        assert calls[0] == calls[1]


def test_secrets_are_hidden_until_told() -> None:
    def row(need: str) -> Any:
        env = CallAgentEnv()
        env.reset(seed=0)
        object.__setattr__(env.call.caller, "need", need)
        env.call.caller.__dict__.update(budget=0.5 if need == "rent" else 0.9)
        return observe(env.call)

    assert all((row(need) == row("rent")).all() for need in NEEDS)
    env = CallAgentEnv()
    env.reset(seed=1)
    before = observe(env.call)
    while "need" not in env.call.known:
        after, *_ = env.step(ACTIONS.index("ask_need"))
    assert after[NEEDS.index(env.call.caller.need)] == 1 > before[: len(NEEDS)].max()
    seen = named(after)
    assert seen[f"need {env.call.caller.need}"] == 1
    assert seen["count ask_need"] == env.call.turns


def test_rewards_are_as_told() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        draw = rng.random
        call = begin(draw)
        total = 0.0
        while call.outcome is None:
            mood = call.mood
            reward = advance(call, ACTIONS[int(rng.integers(len(ACTIONS)))], draw)
            total += reward
            assert call.reply in REPLIES
            assert 0 <= call.mood <= 1 >= call.interest >= 0
            if call.outcome is None:
                assert reward == pytest.approx(-0.1 - 2 * max(0.0, mood - call.mood))
        assert call.earned == pytest.approx(total)
        assert worth(call) == 0
        with pytest.raises(ValueError, match="is over"):
            advance(call, "close", draw)
    with pytest.raises(ValueError, match="no action 'sing'"):
        advance(begin(draw), "sing", draw)


def test_rules_beat_chance_and_search_beats_greed() -> None:
    def mean(policy: Any, calls: int) -> float:
        returns = []
        for seed in range(calls):
            rng = np.random.default_rng(seed)
            call = begin(rng.random)
            while call.outcome is None:
                advance(call, policy(call, rng), rng.random)
            returns.append(call.earned)
        return statistics.mean(returns)

    chance = mean(lambda _, rng: ACTIONS[int(rng.integers(len(ACTIONS)))], 200)
    rules = mean(lambda call, _: ACTIONS[receptionist(observe(call))], 200)
    assert chance < 0.5
    assert rules > chance + 4
    found = {}
    for n, steps in ((len(ACTIONS), 1), (60, MAX_TURNS)):
        env = CallAgentEnv()
        returns = []
        for seed in range(20):
            env.reset(seed=seed)
            done, total = False, 0.0
            while not done:
                action = best_of_n(env, n=n, max_steps=steps, seed=seed).action
                _, reward, done, _, _ = env.step(np.int64(action))
                total += reward
            returns.append(total)
        found[steps] = statistics.mean(returns)
    assert found[MAX_TURNS] > found[1] + 1


@pytest.mark.parametrize("points", range(1, MAX_POINTS + 1))
def test_episodes_begin_at_decision_points(points: int) -> None:
    env = CallAgentEnv()
    for seed in range(10):
        observation, info = env.reset(seed=seed, options={"decision": points})
        assert info["decision"]
        assert info["outcome"] is None
        again = env.reset(seed=seed, options={"decision": points})
        assert (again[0] == observation).all()
    with pytest.raises(ValueError, match="decision is 0 to"):
        env.reset(options={"decision": MAX_POINTS + 1})
    with pytest.raises(ValueError, match="level"):
        env.reset(options={"level": 1})


def test_pictures() -> None:
    env = CallAgentEnv(render_mode="rgb_array")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.render()
    env.reset(seed=0)
    frames = [env.render()]
    for action in ("greet", "ask_need", "close"):
        env.step(ACTIONS.index(action))
        frames.append(env.render())
    assert all(frame.shape == (400, 480, 3) and frame.dtype == np.uint8 for frame in frames)
    assert all((a != b).any() for a, b in itertools.pairwise(frames))
    env = CallAgentEnv(render_mode="ansi")
    env.reset(seed=0)
    env.step(0)
    assert env.render().splitlines()[1].startswith("assistant: ")


def test_hosted_it_gives_what_it_gives_bare_and_branches() -> None:
    env = SandboxEnv(ID)
    try:
        bare = CallAgentEnv()
        start: dict[str, Any] = {"seed": 5, "options": {"decision": 1}}
        observation, info = env.reset(**start)
        expected = bare.reset(**start)
        assert (observation == expected[0]).all()
        assert info == expected[1]
        actions = [ACTIONS.index(name) for name in ("book_viewing", "ask_budget", "offer_callback")]
        branches = env.branch(actions=actions)
        transcripts = [branch.info["transcript"] for branch in branches]
        for branch in branches:
            branch.env.close()
        assert len(set(transcripts)) == 3
        again = bare.step(actions[1])
        ours = env.step(actions[1])
        assert (ours[0] == again[0]).all()
        assert ours[1:] == again[1:]
        result = best_of_n(env, n=12, max_steps=10, seed=0)
        assert env.action_space.contains(np.int64(result.action))
    finally:
        env.close()


def test_the_script_plays_to_a_decision_and_its_copies_try_what_comes_next() -> None:
    with Sandbox.create(cpus=1, memory="1Gi", idle_timeout=1800) as box:
        played = box.run_code(SCRIPT)
        assert played.ok, played.error
        assert played.stdout.startswith("caller: ")
        before = float(box.run_code("score()").value or "nan")
        decision = box.snapshot()
        scores = {}
        for action in ("book_viewing", "ask_budget", "offer_callback"):
            with Sandbox.restore(decision) as copy:
                result = copy.run_code(f"step({action!r}); print(score())")
                assert result.ok, result.error
                scores[action] = float(result.stdout)
        assert len(set(scores.values())) == 3
        with Sandbox.restore(decision) as copy:
            result = copy.run_code("step('ask_budget'); print(score())")
            assert float(result.stdout) == scores["ask_budget"]
        assert float(box.run_code("score()").value or "nan") == before
        assert box.run_code("step('sing')").error is not None


def test_a_score_is_what_is_earned_and_what_the_best_ending_is_worth() -> None:
    for seed in range(30):
        draw = np.random.default_rng(seed).random
        call: Call = begin(draw)
        if call.caller.need == "repair":
            assert worth(call) == 4
        while call.outcome is None:
            assert -1 <= worth(call) <= 10
            advance(call, ACTIONS[receptionist(observe(call))], draw)
