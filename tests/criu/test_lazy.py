"""Memory that comes when it is touched is right in every case, and shared as long as it is not touched."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import time

import pytest

from sandbox_gym.backends.native import lazy
from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.criu.memory import (
    BUILD,
    MB,
    eventually,
    image_folders,
    pagers,
    private_bytes,
    run,
)

# ---- what is in memory ----------------------------------------------------------------------------------------------


def test_every_page_of_every_process_is_as_it_was(copy: Sandbox) -> None:
    assert run(copy, "wrong(big, 0, range(PAGES)) + wrong(small, 1_000_000, range(2048))") == "[]"
    ask = "child.stdin.write(f'{place}\\n'); child.stdin.flush(); answers.append(child.stdout.readline() == f'{place:015}\\n')"
    assert (
        run(copy, f"answers = []\nfor place in range(0, 3 << 20, 4111):\n    {ask}\nall(answers)") == "True"
    )


def test_nothing_is_brought_before_it_is_touched(image: Snapshot, copy: Sandbox) -> None:
    before = private_bytes(copy)
    assert before < 16 * MB
    time.sleep(0.5)
    assert private_bytes(copy) <= before + 4 * MB  # the agent's own doings
    run(copy, "wrong(big, 0, range(PAGES))")
    assert private_bytes(copy) > 48 * MB


def test_what_was_dropped_is_zero_and_what_is_beside_it_stays(copy: Sandbox) -> None:
    run(copy, "big.madvise(mmap.MADV_DONTNEED, 1000 << 12, 500 << 12)")
    assert run(copy, "wrong(big, None, range(1000, 1500))") == "[]"
    assert run(copy, "wrong(big, 0, [*range(990, 1000), *range(1500, 1510)])") == "[]"
    run(copy, "big[1200 << 12 : 1201 << 12] = page(7)")
    assert run(copy, "big[1200 << 12 : 1201 << 12] == page(7)") == "True"


def test_memory_that_grows_and_moves_takes_its_pages_along(copy: Sandbox) -> None:
    run(copy, "small.resize(64 * MB)")
    assert run(copy, "wrong(small, 1_000_000, range(2048))") == "[]"
    assert run(copy, "wrong(small, None, range(2048, 16384))") == "[]"
    run(copy, "small.resize(4 * MB)")
    assert run(copy, "wrong(small, 1_000_000, range(1024))") == "[]"


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


def test_a_snapshot_has_the_memory_that_had_not_come(copy: Sandbox) -> None:
    run(copy, "big[5 << 12 : 6 << 12] = page(42)")
    snapshot = copy.snapshot()
    assert snapshot.engine == "criu" and snapshot.memory_bytes > 48 * MB
    with Sandbox.restore(snapshot) as other:
        for box in (other, copy):
            assert run(box, "wrong(big, 0, [i for i in range(PAGES) if i != 5])") == "[]"
            assert run(box, "big[5 << 12 : 6 << 12] == page(42)") == "True"
    snapshot.delete()


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


def test_an_image_that_is_deleted_lasts_as_long_as_memory_comes_from_it() -> None:
    with Sandbox.create(memory="512Mi") as box:
        run(box, BUILD)
        before = image_folders()
        snapshot = box.snapshot(engine="criu")
    copies = Sandbox.restore_many(snapshot, 2)
    snapshot.delete()
    assert len(image_folders()) > len(before)
    for copy in copies:
        assert run(copy, "wrong(big, 0, range(PAGES)) + wrong(small, 1_000_000, range(2048))") == "[]"
        copy.terminate()
    eventually(lambda: image_folders() == before)


# ---- what it costs ---------------------------------------------------------------------------------------------------


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
    # So far apart that no two wait at once, which the kernel would make one.
    code = """
sender = subprocess.Popen(["sh", "-c", f"for i in 1 2 3 4 5 6 7 8; do kill -USR1 {os.getpid()}; sleep 0.1; done"])
child = os.fork()
if child == 0: os._exit(bool(wrong(big, 0, range(PAGES))))
os.write(w, b"word")
codes = [os.waitpid(child, 0)[1], os.waitpid(waiting, 0)[1] >> 8, sender.wait(), state(stopped)]
os.kill(stopped, signal.SIGKILL)
codes + [os.waitpid(stopped, 0)[1], count]
"""
    with Sandbox.create(memory="1Gi", cpus=2) as box:
        run(box, BUILD + prepare)
        snapshot = box.snapshot(engine="criu")
        before = pagers()
        with Sandbox.restore(snapshot) as copy:
            assert pagers() > before
            assert run(copy, code) == "[0, 1, 0, 'T', 9, 8]"
        snapshot.delete()


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


def test_pages_of_files_do_not_take_the_room_of_a_snapshot(plain: Snapshot) -> None:
    with Sandbox.restore(plain) as copy:
        run(copy, "with open('/tmp/file', 'wb') as file:\n    for _ in range(500): file.write(bytes(MB))")
        run(copy, "os.sync()")
        copy.snapshot(engine="criu").delete()
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"


def test_without_room_below_the_limit_all_comes_at_once() -> None:
    before = pagers()
    with Sandbox.create(memory="128Mi") as box:
        run(box, BUILD)
        snapshot = box.snapshot(engine="criu")
        assert snapshot.memory_bytes > lazy.FROM_BYTES
    with Sandbox.restore(snapshot) as copy:
        assert pagers() == before
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"
    snapshot.delete()


def test_what_a_pager_keeps_is_bounded(copy: Sandbox) -> None:
    run(copy, "for i in range(0, PAGES, 2): big.madvise(mmap.MADV_DONTNEED, i << 12, 1 << 12)")
    eventually(lambda: private_bytes(copy) > 16 * MB)  # of the 24 that are left: unasked
    assert run(copy, "wrong(big, 0, range(1, PAGES, 2)) + wrong(big, None, range(0, PAGES, 2))") == "[]"
