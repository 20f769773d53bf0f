"""Memory that comes when it is touched is right in every case, shared as long as it isn't, and never waited for in vain."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gym.backends import lookup
from sandbox_gym.backends.native import criu, lazy, pages
from sandbox_gym.backends.native.areas import Areas
from sandbox_gym.errors import SandboxDied, SnapshotError
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.conftest import descendants

SOURCE = Path(lazy.__file__).with_name("uffd.c")
MB = 1 << 20

_BUILD = """
import ctypes, mmap, os, random, subprocess, threading, time
MB = 1 << 20
def page(i): return (b"%015d\\n" % i) * 256
def anonymous(size): return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def built(size, base):
    area = anonymous(size)
    for i in range(size >> 12):
        area[i << 12 : (i + 1) << 12] = page(base + i)
    return area
def wrong(area, base, numbers):
    return [i for i in numbers if area[i << 12 : (i + 1) << 12] != (page(base + i) if base is not None else bytes(4096))]
big = built(48 * MB, 0)
small = built(8 * MB, 1_000_000)
PAGES = len(big) >> 12
"""


def can() -> bool:
    return not isinstance(criu.look(), criu.Lack) and os.path.exists("/dev/userfaultfd")


needs_lazy = pytest.mark.skipif(not can(), reason="needs root, criu and /dev/userfaultfd")


@pytest.fixture(scope="module")
def _image() -> Iterator[Callable[[], Snapshot]]:
    """A tree of two processes and three threads, each process with more memory than is restored at once."""
    kept: list[tuple[object, Snapshot]] = []

    def get() -> Snapshot:
        backend = lookup.get("native")
        if not kept or kept[-1][0] is not backend:
            with Sandbox.create(memory="1Gi", cpus=2) as box:
                run(box, _BUILD + "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()")
                run(box, _BUILD_CHILD)
                kept[:] = [(backend, box.snapshot())]
        return kept[0][1]

    yield get
    for _, snapshot in kept:
        snapshot.delete()


_BUILD_CHILD = """
code = '''
import sys
data = bytearray(b"".join(b"%015d\\\\n" % i for i in range(3 << 20)))
print("built", flush=True)
for line in sys.stdin:
    place = int(line)
    print(bytes(data[place * 16 : place * 16 + 15]).decode(), flush=True)
'''
child = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "built\\n"
"""


@pytest.fixture
def image(_image: Callable[[], Snapshot]) -> Snapshot:
    snapshot = _image()
    assert snapshot.engine == "criu" and snapshot.memory_bytes > 3 * lazy.FROM_BYTES
    return snapshot


@pytest.fixture
def copy(image: Snapshot) -> Iterator[Sandbox]:
    with Sandbox.restore(image) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def plain() -> Iterator[Snapshot]:
    """Of one process and one thread: what the fork engine takes too."""
    with Sandbox.create(memory="512Mi", cpus=2) as box:
        run(box, _BUILD)
        snapshot = box.snapshot(engine="criu")
    yield snapshot
    snapshot.delete()


def run(box: Sandbox, code: str) -> str | None:
    result = box.run_code(code, timeout=60)
    assert result.ok, result.error or result
    return result.value


def pagers() -> set[int]:
    """The processes of this client that hold a userfaultfd."""
    return {pid for pid in descendants(os.getpid()) if _userfaultfds(pid)}


def _userfaultfds(pid: int) -> int:
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return 0
    return links.count("anon_inode:[userfaultfd]")


def private_bytes(box: Sandbox) -> int:
    (root,) = [row["pid"] for row in box._backend.list() if row["id"] == box.id]
    text = _inside("cat", f"/proc/{root}/smaps_rollup")
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def image_folders() -> set[str]:
    folder = lookup.get("native")._folder  # type: ignore[attr-defined]
    return {name for name in _inside("ls", f"{folder}/disk").split() if name.startswith("image")}


def _inside(*command: str) -> str:
    """What a command prints among the supervisor's mounts and processes."""
    supervisor = next(pid for pid in descendants(os.getpid()) if _is_first(pid))
    enter = ["nsenter", "-t", str(supervisor), "-m", "-p", *command]
    return subprocess.run(enter, check=True, capture_output=True, text=True, timeout=10).stdout


def _is_first(pid: int) -> bool:
    """Whether it is process 1 of the supervisor's namespace: of the client's mounts no longer, of its users still."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        same = os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return False
    return same and re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE) is not None


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


# ---- what is in memory ----------------------------------------------------------------------------------------------


@needs_lazy
def test_every_page_of_every_process_is_as_it_was(copy: Sandbox) -> None:
    assert run(copy, "wrong(big, 0, range(PAGES)) + wrong(small, 1_000_000, range(2048))") == "[]"
    ask = "child.stdin.write(f'{place}\\n'); child.stdin.flush(); answers.append(child.stdout.readline() == f'{place:015}\\n')"
    assert (
        run(copy, f"answers = []\nfor place in range(0, 3 << 20, 4111):\n    {ask}\nall(answers)") == "True"
    )


@needs_lazy
def test_nothing_is_brought_before_it_is_touched(image: Snapshot, copy: Sandbox) -> None:
    before = private_bytes(copy)
    assert before < 16 * MB
    time.sleep(0.5)
    assert private_bytes(copy) <= before + 4 * MB  # the agent's own doings
    run(copy, "wrong(big, 0, range(PAGES))")
    assert private_bytes(copy) > 48 * MB


@needs_lazy
def test_what_was_dropped_is_zero_and_what_is_beside_it_stays(copy: Sandbox) -> None:
    run(copy, "big.madvise(mmap.MADV_DONTNEED, 1000 << 12, 500 << 12)")
    assert run(copy, "wrong(big, None, range(1000, 1500))") == "[]"
    assert run(copy, "wrong(big, 0, [*range(990, 1000), *range(1500, 1510)])") == "[]"
    run(copy, "big[1200 << 12 : 1201 << 12] = page(7)")
    assert run(copy, "big[1200 << 12 : 1201 << 12] == page(7)") == "True"


@needs_lazy
def test_memory_that_grows_and_moves_takes_its_pages_along(copy: Sandbox) -> None:
    run(copy, "small.resize(64 * MB)")
    assert run(copy, "wrong(small, 1_000_000, range(2048))") == "[]"
    assert run(copy, "wrong(small, None, range(2048, 16384))") == "[]"
    run(copy, "small.resize(4 * MB)")
    assert run(copy, "wrong(small, 1_000_000, range(1024))") == "[]"


@needs_lazy
def test_new_memory_where_some_was_given_back_is_zero(copy: Sandbox) -> None:
    code = """
address = ctypes.addressof(ctypes.c_char.from_buffer(small))
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
# MAP_FIXED: over the second half of it
place = libc.mmap(ctypes.c_void_p(address + 4 * MB), ctypes.c_size_t(4 * MB), 3, 0x32, -1, ctypes.c_long(0))
place == address + 4 * MB, wrong(small, 1_000_000, range(1024)), wrong(small, None, range(1024, 2048))
"""
    assert run(copy, code) == "(True, [], [])"


@needs_lazy
def test_memory_in_differently_protected_parts_comes_whole(copy: Sandbox) -> None:
    code = """
address = ctypes.addressof(ctypes.c_char.from_buffer(big))
libc = ctypes.CDLL(None)
for i in range(0, 256, 3):  # reading only: each a mapping of its own
    assert libc.mprotect(ctypes.c_void_p(address + (i << 12)), 4096, 1) == 0
wrong(big, 0, range(300))
"""
    assert run(copy, code) == "[]"
    snapshot = copy.snapshot()
    with Sandbox.restore(snapshot) as other:
        assert run(other, "wrong(big, 0, range(PAGES))") == "[]"
    snapshot.delete()


@needs_lazy
def test_a_forked_child_has_all_of_it_whatever_its_parent_does(copy: Sandbox) -> None:
    code = """
reader, writer = os.pipe()
go, ready = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(go, 1)
    grandchild = os.fork()
    failed = bool(wrong(big, 0, range(PAGES)) or wrong(small, 1_000_000, range(2048)))
    if grandchild:
        failed |= bool(os.waitpid(grandchild, 0)[1])
    os._exit(failed)
big.madvise(mmap.MADV_DONTNEED, 0, len(big))
small.resize(16 * MB)
os.write(ready, b"x")
os.waitpid(pid, 0)[1], wrong(big, None, range(PAGES)), wrong(small, 1_000_000, range(2048))
"""
    assert run(copy, code) == "(0, [], [])"


@needs_lazy
def test_threads_that_read_drop_move_and_fork_at_once_see_no_wrong_page(copy: Sandbox) -> None:
    assert run(copy, _AT_ONCE) == "[]"


_AT_ONCE = """
seen = []
stop = threading.Event()
def reader(seed):
    chosen = random.Random(seed)
    while not stop.is_set():
        seen.extend(("read", i) for i in wrong(big, 0, [chosen.randrange(6000, PAGES)]))
def remover():
    for i in range(5000, 5900, 3):
        big.madvise(mmap.MADV_DONTNEED, i << 12, 2 << 12)
        seen.extend(("removed", i) for i in wrong(big, None, [i, i + 1]) + wrong(big, 0, [i + 2]))
def forker():
    for i in range(6000, 6900, 30):
        pid = os.fork()
        if pid == 0:
            os._exit(len(wrong(big, 0, [i])))
        if os.waitpid(pid, 0)[1]:
            seen.append(("forked", i))
def mover():
    size = len(small)
    for _ in range(20):
        size = 24 * MB - size  # 8 and 16 MB in turn
        small.resize(size)
        other = anonymous(MB)  # in the way of growing in place
        seen.extend(("moved", i) for i in wrong(small, 1_000_000, [random.randrange(2048)]))
threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
ends = [threading.Thread(target=f) for f in (remover, forker, mover)]
for thread in threads + ends:
    thread.start()
for thread in ends:
    thread.join()
stop.set()
for thread in threads:
    thread.join()
seen + wrong(big, 0, range(6000, PAGES)) + wrong(small, 1_000_000, range(2048))
"""


# ---- snapshots of what has not all come ---------------------------------------------------------------------------------


@needs_lazy
def test_a_snapshot_has_the_memory_that_had_not_come(copy: Sandbox) -> None:
    run(copy, "big[5 << 12 : 6 << 12] = page(42)")
    snapshot = copy.snapshot()
    assert snapshot.engine == "criu" and snapshot.memory_bytes > 48 * MB
    with Sandbox.restore(snapshot) as other:
        for box in (other, copy):
            assert run(box, "wrong(big, 0, [i for i in range(PAGES) if i != 5])") == "[]"
            assert run(box, "big[5 << 12 : 6 << 12] == page(42)") == "True"
    snapshot.delete()


@needs_lazy
def test_a_snapshot_taken_while_threads_are_at_it_is_right(copy: Sandbox) -> None:
    run(
        copy,
        "stop, seen = threading.Event(), []\n"
        "def reader(seed):\n"
        "    chosen = random.Random(seed)\n"
        "    while not stop.wait(1e-4):\n"
        "        seen.extend(wrong(big, 0, [chosen.randrange(PAGES)]))\n"
        "threads = [threading.Thread(target=reader, args=(seed,), daemon=True) for seed in range(3)]\n"
        "for thread in threads: thread.start()",
    )
    snapshot = copy.snapshot()
    with Sandbox.restore(snapshot) as other:
        for box in (other, copy):
            assert (
                run(box, "time.sleep(0.1); stop.set(); [thread.join() for thread in threads]; seen") == "[]"
            )
            assert run(box, "wrong(big, 0, range(PAGES))") == "[]"
    snapshot.delete()


@needs_lazy
def test_the_fork_engine_takes_one_whose_memory_had_not_come(plain: Snapshot) -> None:
    with Sandbox.restore(plain) as box:
        snapshot = box.snapshot()
        assert snapshot.engine == "fork"
        copies = [box, *Sandbox.restore_many(snapshot, 2)]
        for i, sandbox in enumerate(copies):
            assert run(sandbox, f"wrong(big, 0, range({i}, PAGES))") == "[]"
        deeper = copies[1].snapshot(engine="criu")
        with Sandbox.restore(deeper) as other:
            assert run(other, "wrong(big, 0, range(PAGES)) + wrong(small, 1_000_000, range(2048))") == "[]"
        deeper.delete()
        for sandbox in copies[1:]:
            sandbox.terminate()
        snapshot.delete()


@needs_lazy
def test_an_image_that_is_deleted_lasts_as_long_as_memory_comes_from_it() -> None:
    with Sandbox.create(memory="512Mi") as box:
        run(box, _BUILD)
        before = image_folders()
        snapshot = box.snapshot(engine="criu")
    copies = Sandbox.restore_many(snapshot, 2)
    snapshot.delete()
    assert len(image_folders()) > len(before)
    for copy in copies:
        assert run(copy, "wrong(big, 0, range(PAGES)) + wrong(small, 1_000_000, range(2048))") == "[]"
        copy.terminate()
    eventually(lambda: image_folders() == before)


# ---- how a pager ends -----------------------------------------------------------------------------------------------


@needs_lazy
def test_a_pager_ends_with_its_sandbox(image: Snapshot) -> None:
    before = pagers()
    copies = Sandbox.restore_many(image, 3)
    assert len(pagers() - before) == 6  # each with its keeper
    for copy in copies:
        copy.terminate()
    eventually(lambda: pagers() == before)


@needs_lazy
def test_a_pager_ends_when_all_has_come(plain: Snapshot) -> None:
    before = pagers()
    with Sandbox.restore(plain) as copy:
        copy.snapshot(engine="criu").delete()
        eventually(lambda: pagers() == before)
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"


@needs_lazy
@pytest.mark.parametrize("waiting", [False, True])
def test_a_sandbox_whose_pager_is_killed_ends_with_that_reason_and_sees_no_wrong_page(
    image: Snapshot, waiting: bool
) -> None:
    before = pagers()
    copy = Sandbox.restore(image)
    pid = next(pid for pid in pagers() - before if _parent(pid) not in pagers())  # not the keeper
    if waiting:
        os.kill(pid, signal.SIGSTOP)
        copy._live.channel.post(
            Op.CODE, b'{"code": "wrong(big, 0, range(PAGES))", "timeout": 30}', timeout=30.0
        )
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    if waiting:
        with pytest.raises(SandboxDied):
            copy._live.channel.wait(Op.CODE, timeout=30.0)
    with pytest.raises(SandboxDied, match="ended"):
        _touch_at_random(copy)
    copy.terminate()
    eventually(lambda: pagers() == before)


def _touch_at_random(box: Sandbox) -> None:
    for _ in range(1000):
        assert run(box, "wrong(big, 0, [random.randrange(PAGES)])") == "[]"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_lazy
def test_a_snapshot_fails_when_the_pager_is_killed_meanwhile(image: Snapshot) -> None:
    before = pagers()
    copy = Sandbox.restore(image)
    pid = next(pid for pid in pagers() - before if _parent(pid) not in pagers())
    os.kill(pid, signal.SIGSTOP)  # it would be ready before it is killed
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises((SandboxDied, SnapshotError), match="ended"):
        copy.snapshot(engine="criu")
    timer.join()
    copy.terminate()
    eventually(lambda: pagers() == before)


@needs_lazy
def test_children_that_have_ended_leave_nothing_in_the_pager(image: Snapshot) -> None:
    before = pagers()
    with Sandbox.restore(image) as copy:
        run(
            copy,
            "for _ in range(200):\n    pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)",
        )
        (most,) = {_userfaultfds(pid) for pid in pagers() - before}
        assert most <= 4  # those of two processes, and of the child that was last


# ---- what it costs ---------------------------------------------------------------------------------------------------


@needs_lazy
@pytest.mark.parametrize("call", ["pool()", "daemon()"])
def test_children_forked_at_once_share_what_had_not_come(copy: Sandbox, call: str) -> None:
    """All but the first, which is on its way when the pager hears of it."""
    code = r"""
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
def pool():
    reader, writer = os.pipe()
    children = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            failed = bool(wrong(big, 0, range(PAGES)))
            os.write(writer, b"%d\n" % (1 << 30 if failed else private() >> 10))
            time.sleep(30)  # what is shared with nobody alive is private
            os._exit(0)
        children.append(pid)
    answers = b""
    while answers.count(b"\n") < 6:
        answers += os.read(reader, 100)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return sorted(map(int, answers.split()))[4] < 16
def daemon():
    pid = os.fork()
    if pid == 0:
        os._exit(pool())
    return os.waitpid(pid, 0)[1] == 256
"""
    assert run(copy, code + call) == "True"


@needs_lazy
def test_standing_still_at_a_fork_changes_nothing_for_others() -> None:
    prepare = """
import select, signal
count = 0
def heard(*_):
    global count
    count += 1
signal.signal(signal.SIGUSR1, heard)
def started(body):
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(7)
    return pid
stopped = started(lambda: time.sleep(3600))
os.kill(stopped, signal.SIGSTOP)
os.waitpid(stopped, os.WUNTRACED)
r, w = os.pipe()
def wait_for_word():
    poll = select.epoll(); poll.register(r); poll.poll(); os._exit(os.read(r, 10) == b"word")
waiting = started(wait_for_word)
def state(pid): return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
"""
    code = """
sender = subprocess.Popen(["sh", "-c", f"for i in 1 2 3 4 5 6 7 8; do kill -USR1 {os.getpid()}; sleep 0.02; done"])
child = os.fork()
if child == 0: os._exit(bool(wrong(big, 0, range(PAGES))))
os.write(w, b"word")
codes = [os.waitpid(child, 0)[1], os.waitpid(waiting, 0)[1] >> 8, sender.wait(), state(stopped)]
os.kill(stopped, signal.SIGKILL)
codes + [os.waitpid(stopped, 0)[1], count]
"""
    with Sandbox.create(memory="1Gi", cpus=2) as box:
        run(box, _BUILD + prepare)
        snapshot = box.snapshot(engine="criu")
        before = pagers()
        with Sandbox.restore(snapshot) as copy:
            assert pagers() > before
            assert run(copy, code) == "[0, 1, 0, 'T', 9, 8]"
        snapshot.delete()


@needs_lazy
def test_a_snapshot_that_has_no_room_for_what_is_missing_is_refused_and_harms_nobody(plain: Snapshot) -> None:
    with Sandbox.restore(plain) as copy:
        run(copy, "pid = os.fork()\nif not pid: time.sleep(60)")  # lacks all
        run(copy, "blob = b'x' * (400 * MB)")
        with pytest.raises(SnapshotError, match="memory limit leaves room for"):
            copy.snapshot(engine="criu")
        assert run(copy, "del blob; wrong(big, 0, range(PAGES))") == "[]"
        snapshot = copy.snapshot(engine="criu")
        with Sandbox.restore(snapshot) as other:
            assert run(other, "os.kill(pid, 9); os.waitpid(pid, 0); wrong(big, 0, range(PAGES))") == "[]"
        snapshot.delete()


@needs_lazy
def test_pages_of_files_do_not_take_the_room_of_a_snapshot(plain: Snapshot) -> None:
    with Sandbox.restore(plain) as copy:
        run(copy, "with open('/tmp/file', 'wb') as file:\n    for _ in range(500): file.write(bytes(MB))")
        run(copy, "os.sync()")
        copy.snapshot(engine="criu").delete()
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"


@needs_lazy
def test_without_room_below_the_limit_all_comes_at_once() -> None:
    before = pagers()
    with Sandbox.create(memory="128Mi") as box:
        run(box, _BUILD)
        snapshot = box.snapshot(engine="criu")
        assert snapshot.memory_bytes > lazy.FROM_BYTES
    with Sandbox.restore(snapshot) as copy:
        assert pagers() == before
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"
    snapshot.delete()


@needs_lazy
def test_what_a_pager_keeps_is_bounded(copy: Sandbox) -> None:
    run(copy, "for i in range(0, PAGES, 2): big.madvise(mmap.MADV_DONTNEED, i << 12, 1 << 12)")
    eventually(lambda: private_bytes(copy) > 16 * MB)  # of the 24 that are left: unasked
    assert run(copy, "wrong(big, 0, range(1, PAGES, 2)) + wrong(big, None, range(0, PAGES, 2))") == "[]"


@needs_lazy
def test_a_restore_whose_pager_is_killed_fails_at_once(image: Snapshot) -> None:
    before = descendants(os.getpid())
    failures: list[BaseException] = []

    def restore() -> None:
        try:
            with Sandbox.restore(image) as copy:  # it may just have been ready
                run(copy, "wrong(big, 0, range(PAGES))")
        except (SandboxDied, SnapshotError) as error:
            failures.append(error)

    thread = threading.Thread(target=restore)
    started = time.monotonic()
    thread.start()
    found: set[int] = set()
    while not found:
        assert time.monotonic() < started + 5
        made = descendants(os.getpid()) - before
        found = {pid for pid in made if _userfaultfds(pid) and _parent(pid) not in made}
    os.kill(found.pop(), signal.SIGKILL)
    thread.join(timeout=10)
    assert not thread.is_alive() and "ended" in str(failures[0])
    eventually(lambda: not pagers() & (descendants(os.getpid()) - before))


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_the_library_is_that_of_the_source(tmp_path: Path) -> None:
    """Byte for byte where the compiler is the one that made it."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    comment = SOURCE.read_text().split("*/")[0].replace("\n *", " ")
    flags = re.search(r"gcc (.*?) -o X", comment)
    assert flags
    built = tmp_path / "X"
    subprocess.run(["gcc", *flags[1].split(), "-o", built, SOURCE], check=True, timeout=60)
    version = subprocess.run(
        ["gcc", "-dumpfullversion"], check=True, capture_output=True, text=True, timeout=60
    )
    if version.stdout.strip() == "12.2.0":
        block, library = bytearray(built.read_bytes()), zlib.decompress(lazy._CODE)
        block[40:48], block[58:64] = bytes(8), bytes(6)  # without the sections' table, which no loader reads
        assert bytes(block[: len(library)]) == library


def test_with_the_library_system_calls_are_as_without(tmp_path: Path) -> None:
    library = tmp_path / "uffd.so"
    library.write_bytes(zlib.decompress(lazy._CODE))
    code = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall.restype = ctypes.c_long\n"
        "import os; print(libc.syscall(39) == os.getpid(), libc.syscall(3, 9999), ctypes.get_errno())\n"
        "place = ctypes.create_string_buffer(4096)\n"  # six arguments: mmap
        "print(libc.syscall(9, 0, 8192, 3, 0x22, ctypes.c_long(-1), 0) > 0)\n"
    )
    said = subprocess.run(
        ["python3", "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert said.stdout == "True -1 9\nTrue\n" and not said.stderr


Step = tuple[str, int, int, int]
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.integers(0, 60), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, 40), st.integers(1, 10), st.integers(60, 90)),
        st.tuples(st.just("move"), st.integers(60, 90), st.integers(1, 10), st.integers(0, 40)),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(st.sets(st.integers(0, 60)), _steps)
def test_areas_are_what_a_map_of_single_pages_would_be(pages: set[int], steps: list[Step]) -> None:
    model = {page: page * 7 for page in pages}
    areas = Areas((page * 10, page * 10 + 10, page * 70) for page in pages)
    for kind, place, length, target in steps:
        if kind == "cut":
            gone = {page: model.pop(page) for page in range(place, place + length) if page in model}
            assert _pages(areas.cut(place * 10, (place + length) * 10)) == gone
        else:
            moved = {page: model.pop(page) for page in range(place, place + length) if page in model}
            for page in range(target, target + length):
                model.pop(page, None)
            model |= {page - place + target: offset for page, offset in moved.items()}
            areas.move(place * 10, target * 10, length * 10)
        assert _pages(areas) == model
        assert len(areas) == len(list(areas))
        for page in range(0, 101, 9):
            at, after = areas.at(page * 10), areas.after(page * 10)
            assert (at is not None) == (page in model)
            assert after is None or after[0] >= page * 10
            assert (after is None) == (
                not any(other >= page for other in model) or _none_starts(areas, page * 10)
            )


def _none_starts(areas: Areas, address: int) -> bool:
    return all(start < address for start, _, _ in areas)


def _pages(areas: Areas | list[tuple[int, int, int]]) -> dict[int, int]:
    found = {}
    for start, end, offset in areas:
        assert start < end
        for address in range(start, end, 10):
            assert address // 10 not in found
            found[address // 10] = (offset + address - start) // 10
    return found


def test_an_image_of_either_criu_is_read(tmp_path: Path) -> None:
    """4.1 tells the number of pages in one field, 4.2 in another."""
    from sandbox_gym.backends.native import rpc

    def message(*fields: tuple[int, int]) -> bytes:
        block = b"".join(rpc._field(number, value) for number, value in fields)
        return len(block).to_bytes(4, "little") + block

    lazy_page, present = 6, 4
    image = bytes(8) + message((1, 3))
    image += message((1, 0x10000), (2, 2), (4, present))
    image += message((1, 0x20000), (2, 3), (4, lazy_page))
    image += message((1, 0x30000), (2, 0), (4, lazy_page), (5, 1))
    (tmp_path / "pagemap-1.img").write_bytes(image)
    (tmp_path / "pages-3.img").write_bytes(bytes(6 * 4096))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        _, areas = pages.read_image(folder, 1)
    finally:
        os.close(folder)
    assert list(areas) == [(0x20000, 0x23000, 0x2000), (0x30000, 0x31000, 0x5000)]
