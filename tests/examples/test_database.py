"""A database that is branched while it serves: connections, data and its log are each copy's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from examples.database.__main__ import make
from examples.database.migration import ACTIONS
from sandbox_gym.sandbox import Sandbox
from tests.examples.conftest import run_example


def run(box: Sandbox, code: str) -> str | None:
    result = box.run_code(code, timeout=30)
    assert result.ok, result.error and result.error.traceback
    return result.value


@pytest.fixture
def boxes() -> Iterator[list[Sandbox]]:
    """One in which a database runs, and two copies of it, made in the middle of what its clients do."""
    with Sandbox.create() as box, ExitStack() as stack:
        run(
            box,
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from examples.database.redis import Server\n"
            "server = Server()\n"
            "one, two, three = (server.connect() for _ in range(3))\n"
            "one('SET', 'kept', 1); one('MULTI'); one('INCR', 'kept')\n"
            "waiting = ThreadPoolExecutor(1).submit(two, 'BLPOP', 'queue', 0)\n"
            "while 'blocked_clients:1' not in three('INFO', 'clients'): pass",
        )
        copies = box.fork(2)
        for copy in copies:
            stack.enter_context(copy)
        assert copies[0].parent is not None and copies[0].parent.engine == "criu"
        yield [*copies, box]


def test_connections_go_on_in_every_copy(boxes: list[Sandbox]) -> None:
    """One in a transaction, one that waits for what another will send."""
    for box, end in zip(boxes, ("EXEC", "DISCARD", "EXEC")):
        run(box, f"one({end!r}); three('RPUSH', 'queue', {box.name!r})")
    for box, kept in zip(boxes, ("2", "1", "2")):
        assert run(box, "one('GET', 'kept'), waiting.result(5)") == str((kept, ["queue", box.name]))


def test_what_was_written_and_not_yet_synced_is_in_the_copies(boxes: list[Sandbox]) -> None:
    """Each copy has a log of its own: a server that starts anew there finds what its own wrote, and none else's."""
    for number, box in enumerate(boxes):
        run(box, f"three('SET', 'own', {number})")
    for number, box in enumerate(boxes):
        run(box, "server.kill(); server = Server(); again = server.connect()")
        assert run(box, "again('MGET', 'kept', 'own')") == str(["1", str(number)])


def test_the_environment_branches() -> None:
    drop, split = ACTIONS.index("drop name"), ACTIONS.index("split name")
    with ExitStack() as stack:
        env = stack.enter_context(closing(make()))
        observation, info = env.reset(seed=7)
        one, other = env.branch(actions=[drop, split])
        for branch in (one, other):
            stack.enter_context(closing(branch.env))
            assert branch.info == info  # the same connection, and no other was ever asked for
        assert observation.tolist() == [8, 0, 0]
        assert one.observation.tolist() == [0, 0, 0] and other.observation.tolist() == [8, 8, 0]
        _, reward, terminated, *_ = one.env.step(ACTIONS.index("audit"))
        assert (reward, terminated) == (0.0, True)
        plan = [ACTIONS.index(name) for name in ("drop name", "index by last name", "audit")]
        assert [other.env.step(action)[1] for action in plan][-1] == 10.0
        after, *_ = env.step(split)  # of the origin
        assert np.array_equal(after, other.observation)


def test_the_example_finds_what_greedy_play_does_not() -> None:
    said = run_example("examples.database")
    assert "searched    8.7   split name, " in said and "greedy      0.9" in said, said
