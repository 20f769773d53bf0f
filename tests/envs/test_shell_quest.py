"""Terminal quests: each can be solved, nothing else counts as solved, and they branch like everything else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from sandbox_gym.envs.shell_quest import FOLDER, KINDS, ShellQuestEnv, files_key, make_quest
from sandbox_gym.envs.shell_quest_files import Entry, fingerprint, look, put
from sandbox_gym.envs.shell_quest_making import MENU_SIZE
from sandbox_gym.errors import SandboxDied
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search import MCTS, best_of_n
from sandbox_gym.search.model import as_model
from sandbox_gym.search.testing import check_model
from tests.conftest import kill_guest


@pytest.fixture(scope="module")
def shared() -> Iterator[ShellQuestEnv]:
    """In text mode; each test resets it."""
    env = ShellQuestEnv(actions="text", render_mode="ansi")
    yield env
    env.close()


@pytest.fixture(scope="module")
def menu() -> Iterator[ShellQuestEnv]:
    env = ShellQuestEnv()
    yield env
    env.close()


def solve(env: ShellQuestEnv) -> list[float]:
    return [float(env.step(command)[1]) for command in env.quest.reference]


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 12
    assert {make_quest(seed).kind for seed in range(200)} == set(KINDS)
    assert make_quest(3).prompt == make_quest(3).prompt
    with pytest.raises(ValueError, match="kind is one of"):
        make_quest(0, "sing")


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_solves_it_and_only_as_a_whole(kind: str, shared: ShellQuestEnv) -> None:
    for seed in (0, 1, 2):
        observation, info = shared.reset(seed=seed, options={"kind": kind})
        assert observation == info["prompt"] == shared.quest.prompt
        rewards = solve(shared)
        assert sum(rewards) == pytest.approx(1)
        assert sum(reward > 0 for reward in rewards) == len(shared.quest.goals) > 1
        with pytest.raises(gymnasium.error.ResetNeeded):
            shared.step("true")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_of_the_menu_solves_it(kind: str, shared: ShellQuestEnv) -> None:
    shared.reset(seed=7, options={"kind": kind})
    quest = shared.quest
    assert len(set(quest.menu)) == MENU_SIZE
    assert set(quest.reference) <= set(quest.menu)
    assert not quest.progress({})
    wrong = [command for command in quest.menu if command not in quest.reference]
    for command in wrong:  # alone, each on the untouched folder
        (branch,) = shared.branch(actions=[command])
        assert branch.reward == 0.0, command
        branch.env.close()
    shared.reset(seed=7, options={"kind": kind})
    for command in wrong[:7]:
        assert shared.step(command)[1] == 0.0, command


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_answers_score_nothing(kind: str, shared: ShellQuestEnv) -> None:
    """What an agent might try that doesn't know: empty answers, guesses, a folder that is gone or made unreadable."""
    for command in (
        "for f in answer found.md bad gone port prices names.txt merged.txt report.txt message.txt; do : > $f; done",
        "for f in answer bad gone port report.txt; do echo 1 > $f; done; touch commit all.txt",
        "rm -rf *",
        f"rm -rf {FOLDER}",
        "for f in answer merged.txt errors.log message.txt; do ln -sf /etc/passwd $f; done",
    ):
        shared.reset(seed=5, options={"kind": kind})
        assert shared.step(command)[1] == 0.0, command


def test_quests_come_from_their_seed(shared: ShellQuestEnv) -> None:
    kinds = []
    for seed in (11, None, 11, None):
        shared.reset(seed=seed)
        kinds.append((shared.quest.prompt, shared.quest.menu))
    assert kinds[:2] == kinds[2:]
    assert kinds[0] != kinds[1]
    with pytest.raises(ValueError, match="level"):
        shared.reset(options={"level": 1})


def test_neither_check_nor_answer_is_in_the_sandbox(shared: ShellQuestEnv) -> None:
    shared.reset(seed=1, options={"kind": "sum_column"})
    total = sum(
        int(line.split(",")[2]) for line in shared.sandbox.read_text(f"{FOLDER}/sales.csv").split()[1:]
    )
    found = shared.sandbox.shell(f"grep -rlw {total} /workspace /run /var 2>/dev/null")
    assert found.stdout == ""
    assert shared.step(f"echo {total} > answer")[1] == pytest.approx(1 / 3)
    assert shared.step("echo 0 > answer")[1] == pytest.approx(-1 / 3)


@pytest.mark.parametrize(
    "command",
    [
        "truncate -s 1T huge",
        "for i in $(seq 3000); do : > f$i; done",
        "mkfifo pipe; ln -s /dev/zero zero; mknod null c 1 3",
        "mkdir -p " + "/".join(["d" * 200] * 15),
        "head -c 8000000 /dev/zero > large",
        "chmod 000 .",
        "printf x > \"$(printf 'a\\377b\\nc')\"",
        "ln -s . loop; ln -s loop/loop/loop deep",
        "(while :; do date > clock; rm -f clock; done) & sleep 0.2",
    ],
)
def test_a_folder_full_of_harm_is_only_unsolved(command: str, shared: ShellQuestEnv) -> None:
    shared.reset(seed=1, options={"kind": "organise"})
    observation, reward, terminated, _, _ = shared.step(command)
    assert (reward, terminated) == (0.0, False)
    assert shared.observation_space.contains(observation)
    assert shared.sandbox.status == "running"


def test_time_outs_limits_and_deaths(shared: ShellQuestEnv) -> None:
    env = ShellQuestEnv(actions="text", step_timeout=0.5, max_steps=2)
    try:
        env.reset(seed=0)
        observation, _, _, truncated, info = env.step("echo begun; sleep 60")
        assert observation == "begun\n[timed out after 0.5 s]"
        assert info["timed_out"]
        assert not truncated
        assert env.step("true")[3]
        env.reset(seed=0)
        kill_guest(env.sandbox)
        with pytest.raises(SandboxDied):
            env.step("true")
        assert env.reset(seed=0)[0] == env.quest.prompt
        assert env.step("kill -9 1; echo it lives")[0] == "it lives"  # nobody kills process 1 from inside
        for action in ("a\0b", "\ud800", 3):
            with pytest.raises(ValueError):  # noqa: PT011  # one is ours, one the sandbox's
                env.step(action)
    finally:
        env.close()
    with pytest.raises(ValueError, match="actions is"):
        ShellQuestEnv(actions="voice")  # type: ignore[arg-type]


def test_snapshots_and_branches_know_the_episode(shared: ShellQuestEnv) -> None:
    shared.reset(seed=2, options={"kind": "unique_names"})
    first, *rest = shared.quest.reference
    shared.step(first)
    here = shared.snapshot()
    left, right = shared.branch(2)
    try:
        assert [left.step(command)[1] for command in rest] == [0.25] * 3
        assert right.step("rm -r *")[1] == -0.25
        assert [shared.step(command)[1] for command in rest] == [0.25] * 3
        shared.restore(here)
        assert [shared.step(command)[2] for command in rest] == [False, False, True]
        assert shared.reset(options={"snapshot": here})[1]["kind"] == "unique_names"
        shared.reset(seed=3, options={"kind": "organise"})
        shared.restore(here)  # of another quest: that one goes on
        assert [shared.step(command)[1] for command in rest] == [0.25] * 3
        assert "unique" not in (shared.render() or "")
    finally:
        left.close()
        right.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_checker_is_content() -> None:
    for actions in ("menu", "text"):
        env = gymnasium.make("sandbox_gym:ShellQuest-v0", actions=actions, disable_env_checker=True)
        try:
            check_env(env.unwrapped, skip_render_check=True)
        finally:
            env.close()


def test_the_menu_is_in_numbers(menu: ShellQuestEnv) -> None:
    observation, info = menu.reset(seed=4, options={"kind": "rename_files"})
    assert menu.observation_space.contains(observation)
    assert info["menu"] == list(menu.quest.menu)
    looking = next(i for i, command in enumerate(info["menu"]) if command not in menu.quest.reference[:1])
    first = info["menu"].index(menu.quest.reference[0])
    seen, *_ = menu.step(np.int64(first))
    assert files_key(seen) != files_key(observation)
    menu.reset(seed=4, options={"kind": "rename_files"})
    assert files_key(menu.step(np.int64(first))[0]) == files_key(seen)
    menu.reset(seed=4, options={"kind": "rename_files"})
    assert (menu.step(looking)[0] != observation).any()


def test_search_finds_what_chance_does_not(menu: ShellQuestEnv) -> None:
    menu.reset(seed=6, options={"kind": "fix_permissions"})
    before = len(Sandbox.list())

    def nothing_known(observations: list[Any]) -> tuple[None, Any]:
        return None, np.zeros(len(observations))

    planner = MCTS(
        num_simulations=300,
        discount=1.0,
        evaluate=nothing_known,
        key=files_key,
        stop_when=lambda node: node.path_return > 0.99,
    )
    result = planner.search(menu)
    assert len(Sandbox.list()) == before
    assert result.found is not None
    steps = [menu.step(np.int64(action)) for action in result.principal_variation]
    assert steps[-1][2]
    assert sum(step[1] for step in steps) == pytest.approx(1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        menu.search_model()
    menu.reset(seed=6, options={"kind": "fix_permissions"})
    played = best_of_n(menu, n=13, max_steps=3, seed=0)
    assert len(Sandbox.list()) == before
    gained = sum(float(menu.step(np.int64(a))[1]) for a in played.principal_variation)
    assert gained == pytest.approx(played.value)


def test_its_model_keeps_what_models_promise(menu: ShellQuestEnv) -> None:
    menu.reset(seed=2, options={"kind": "find_file"})
    before = len(Sandbox.list())
    check_model(as_model(menu))
    assert len(Sandbox.list()) == before
    assert [menu.step(menu.quest.menu.index(command))[2] for command in menu.quest.reference][-1]


def test_many_at_once() -> None:
    venv = gymnasium.make_vec(
        "sandbox_gym:ShellQuest-v0", num_envs=3, vectorization_mode="sync", max_steps=2, kind="organise"
    )
    try:
        venv.reset(seed=0)
        _, rewards, _, truncated, infos = venv.step(venv.action_space.sample())
        assert rewards.shape == (3,)
        assert not truncated.any()
        assert venv.step(venv.action_space.sample())[3].all()
        assert list(infos["kind"]) == ["organise"] * 3
    finally:
        venv.close()


def test_pictures() -> None:
    env = ShellQuestEnv(render_mode="rgb_array", actions="text")
    try:
        env.reset(seed=0, options={"kind": "organise"})
        frames = [env.render()]
        for command in (*env.quest.reference, "seq 1000; echo " + "x" * 1000)[-3:]:
            env.step(command)
            frames.append(env.render())
    finally:
        env.close()
    assert all(frame.shape == frames[0].shape and frame.dtype == np.uint8 for frame in frames)
    assert all((a != b).any() for a, b in itertools.pairwise(frames))


def test_text_cannot_be_searched(shared: ShellQuestEnv) -> None:
    shared.reset(seed=0)
    with pytest.raises(TypeError, match="Discrete"):
        shared.search_model()


def test_what_is_put_is_what_is_seen() -> None:
    files = {
        "a/b.txt": Entry("file", 0o640, b"text\n"),
        "empty": Entry("file", 0o600),
        "folder": Entry("dir", 0o700),
        "link": Entry("link", 0o777, target="a/b.txt"),
    }
    with Sandbox.create() as box:
        put(box, FOLDER, files)
        seen = dict(look(box, FOLDER))
        assert seen.pop("a").kind == "dir"
        assert seen == files
        keys = {fingerprint(look(box, FOLDER))}
        for i, command in enumerate(
            (
                "chmod 600 a/b.txt",
                "echo more >> a/b.txt",
                "mv empty full",
                "ln -sf empty link",
                "rmdir folder",
            )
        ):
            assert box.shell(f"cd {FOLDER} && {command}").ok
            keys.add(fingerprint(look(box, FOLDER)))
            assert len(keys) == i + 2
        box.shell(
            f"cd {FOLDER} && ln a/b.txt second; mkdir .git && touch .git/config; touch -d 2001-01-01 full"
        )
        seen = dict(look(box, FOLDER))
        assert seen["second"] == seen["a/b.txt"]
        assert not any(".git" in path for path in seen)
        assert look(box, "/workspace/none") == {}


def test_menus_of_many_seeds_are_whole() -> None:
    for kind, seed in itertools.product(KINDS, range(100)):
        quest = make_quest(seed, kind)
        assert len(set(quest.menu)) == MENU_SIZE
        assert not quest.progress(dict(quest.files))
    random.seed(0)
    first = make_quest(1)
    random.seed(1)
    assert make_quest(1).menu == first.menu
