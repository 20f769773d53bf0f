"""Trees of processes: memory and disk are of one instant, every part goes on, copies are sealed off, engines mix."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_gym.sandbox import Sandbox, Snapshot
from sandbox_gym.testing.subject import until, value
from tests.criu import village
from tests.criu.village import visit

pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture(scope="module")
def _village(pristine_of_module: Snapshot) -> Iterator[Snapshot]:
    with Sandbox.restore(pristine_of_module) as box:
        village.build(box)
        snapshot = box.snapshot()
    yield snapshot
    snapshot.delete()


@pytest.fixture(scope="module")
def pristine_of_module() -> Iterator[Snapshot]:
    snapshot = Sandbox.create(memory="512Mi", disk="256Mi", pids=128).freeze()
    yield snapshot
    snapshot.delete()


@pytest.fixture
def living(_village: Snapshot) -> Iterator[Sandbox]:
    """A sandbox with bash on a terminal, threads, servers, a pipeline, a database under writes, locks."""
    with Sandbox.restore(_village) as box:
        yield box


def test_every_part_goes_on_and_siblings_are_sealed(living: Sandbox) -> None:
    assert visit(living, "before") == ["before"]
    copies = living.fork(2, prefix="sibling-")
    try:
        assert [copy.name for copy in copies] == ["sibling-1", "sibling-2"]
        assert visit(copies[1], "two") == ["before", "two"]
        assert visit(living, "source") == ["before", "source"]
        assert visit(copies[0], "one") == ["before", "one"]
        assert visit(copies[1], "again") == ["before", "two", "again"]
    finally:
        for copy in copies:
            copy.terminate()


def test_snapshots_in_any_order(living: Sandbox) -> None:
    """A chain on one sandbox, restored in an order that is drawn."""
    chain = []
    try:
        for i in range(3):
            visit(living, f"{i}")
            chain.append(living.snapshot(f"{i}"))
        names = ["0", "1", "2"]
        for i in random.Random(0).sample(range(3), 3):
            with Sandbox.restore(chain[i]) as copy:
                assert visit(copy, "here") == [*names[: i + 1], "here"]
    finally:
        for snapshot in chain:
            snapshot.delete()


def test_checkpoints_and_rewinds_in_place(living: Sandbox) -> None:
    identity = living.id, living.name
    visit(living, "one")
    living.checkpoint("one")
    visit(living, "two")
    living.checkpoint("two")
    living.shell("kill -9 -1 2>/dev/null; echo spoilt > page")
    living.rewind("one")
    assert visit(living, "x") == ["one", "x"]
    living.rewind()
    assert visit(living, "y") == ["one", "two", "y"]
    living.rewind("one")
    assert (living.id, living.name) == identity and visit(living, "z") == ["one", "z"]


def test_generations(living: Sandbox) -> None:
    """Snapshots of restored copies of restored copies; each sandbox visited, in an order that is drawn."""
    family: dict[tuple[int, ...], Sandbox] = {(): living}
    try:
        for generation in range(3):
            parent = max(family, key=len)
            visit(family[parent], f"g{generation}")
            for i, copy in enumerate(family[parent].fork(2 if generation == 1 else 1)):
                child = (*parent, i)
                family[child] = copy
        lines = random.Random(1).sample(sorted(family), len(family))
        for line in lines:
            past = [f"g{i}" for i in range(3 if line == max(family, key=len) else len(line))]
            assert visit(family[line], "last")[: len(past)] == past
    finally:
        for copy in family.values():
            copy.terminate()


_STEPS = """
log = []
def step(x):
    log.append(x)
    open("log", "a").write(x)
    return "".join(log), open("log").read()
"""
_WAITS = (
    "import threading; e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start()"
)


@pytest.mark.parametrize("order", ["".join(o) for o in itertools.product("fc", repeat=3)])
def test_engines_mix_from_generation_to_generation(box: Sandbox, order: str) -> None:
    """f: the fork engine, c: criu. Each generation leaves its letter in memory and on disk."""
    box.run_code(_STEPS)
    made = [box]
    try:
        for i, letter in enumerate(order):
            source = made[-1]
            if letter == "c":
                assert source.run_code(_WAITS).ok
            snapshot = source.snapshot()
            assert snapshot.engine == {"f": "fork", "c": "criu"}[letter], snapshot.why
            made.append(Sandbox.restore(snapshot))
            snapshot.delete()
            if letter == "c":
                for sandbox in made[-2:]:
                    assert sandbox.run_code("e.set(); t.join(5)").ok
            assert made[-1].run_code(f"step({letter!r})").value == str((order[: i + 1],) * 2)
        for i, sandbox in enumerate(made):
            assert sandbox.run_code("step('.')").value == str((order[:i] + ".",) * 2)
            assert sandbox.shell("cat log").stdout == order[:i] + "."
    finally:
        for sandbox in made[1:]:
            sandbox.terminate()


def test_snapshots_by_several_threads_at_once(living: Sandbox, box: Sandbox) -> None:
    box.run_code(_WAITS)

    def copied(source: Sandbox) -> str | None:
        with source.fork(1)[0] as copy:
            return copy.run_code("6 * 7").value

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(copied, [living, box, living, box])) == ["42"] * 4
    assert visit(living, "after") == ["after"]


def test_25_restores_at_once_with_the_same_numbers_inside(box: Sandbox) -> None:
    box.shell("sleep 60 & sleep 61 | cat & echo held > f")
    box.run_code("token = open('/dev/urandom', 'rb').read(8).hex()")
    inside = "sorted((int(p), open(f'/proc/{p}/comm').read()) for p in __import__('os').listdir('/proc') if p.isdigit())"
    names = f"sorted(name.strip() for _, name in {inside})"
    until(lambda: value(box, names) == "['cat', 'python', 'sleep', 'sleep']", "programs in their processes")
    expected = value(box, f"token, open('f').read(), {inside}")
    snapshot = box.snapshot()
    assert snapshot.engine == "criu"
    with ThreadPoolExecutor(25) as pool:
        copies = list(pool.map(lambda _: Sandbox.restore(snapshot), range(25)))
        try:
            values = list(
                pool.map(lambda copy: copy.run_code(f"token, open('f').read(), {inside}").value, copies)
            )
        finally:
            list(pool.map(Sandbox.terminate, copies))
    snapshot.delete()
    assert values == [expected] * 25 and len({copy.id for copy in copies}) == 25


def test_the_instant_is_the_same_for_memory_and_disk(box: Sandbox) -> None:
    """A process counts in memory and in a file, and is never stopped; each of ten snapshots has both of one moment."""
    code = """
import mmap, os, struct, time
shared = mmap.mmap(-1, 4096)
fd = os.open("count", os.O_RDWR | os.O_CREAT)
if os.fork() == 0:
    n = 0
    while True:
        n += 1
        shared[0:8] = struct.pack("q", n)
        os.pwrite(fd, struct.pack("q", n), 0)
        shared[8:16] = struct.pack("q", n)
while shared[8] == 0: time.sleep(0.002)
pid = int(open("/proc/self/task/1/children").read())
"""
    assert box.run_code(code).ok
    look = (
        "os.kill(pid, 19); os.waitpid(pid, os.WUNTRACED)\n"
        "a, b = struct.unpack_from('2q', shared); c, = struct.unpack('q', os.pread(fd, 8, 0)); d, = struct.unpack('q', open('count', 'rb').read())\n"
        "os.kill(pid, 18); (a >= c == d >= b >= a - 1) or (a, b, c, d)"
    )
    for _ in range(6):
        snapshot = box.snapshot()
        with Sandbox.restore(snapshot) as copy:
            assert copy.run_code(look).value == "True"
        snapshot.delete()
    assert box.run_code(look).value == "True"
