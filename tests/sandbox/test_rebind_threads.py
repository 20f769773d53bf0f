"""Copies map their files again while other threads of theirs run: none is lost, harmed, or overheard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_gym.sandbox import Sandbox

CALL = "from sandbox_gym_guest import rebind, remap\nrebind.rebind()\n"
# Or a second call would find nothing to do.
AGAIN = "remap._root_device = lambda: b''\n"
LOOK = """
from sandbox_gym_guest import rebind, remap
own = remap._root_device()
def foreign(): return [l for l in open("/proc/self/maps", "rb") if b"/" in l and l.split()[3] != own]
"""
PRIVATE = """
import ctypes, mmap
def private(name):
    with open(name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
open("/workspace/f", "wb").write(bytes(mmap.PAGESIZE))
"""


def run(box: Sandbox, code: str) -> str:
    """The value of the code's last line; what failed inside fails the test."""
    result = box.run_code(code, timeout=60)
    assert result.ok, (result.error, result.stderr)
    return result.value or ""


@pytest.fixture
def copy(box: Sandbox) -> Iterator[Sandbox]:
    """Of which everything is mapped from its origin."""
    (copy,) = box.fork(1)
    with copy:
        assert int(run(copy, LOOK + "len(foreign())")) > 50
        yield copy


def test_threads_stand_still_and_go_on(copy: Sandbox) -> None:
    run(
        copy,
        """
import threading, time, queue
stop, counts, lock, work, done = threading.Event(), [0] * 3, threading.Condition(), queue.Queue(), []
def count(i):
    while not stop.is_set():
        counts[i] += 1
def sleep():
    while not stop.is_set():
        time.sleep(0.003)
        done.append(1)
def wait():
    with lock:
        done.append(lock.wait_for(stop.is_set, 50))
def echo():
    while (item := work.get()) is not None:
        done.append(item)
threads = [threading.Thread(target=count, args=(i,)) for i in range(3)]
threads += [threading.Thread(target=t) for t in (sleep, wait, echo)]
for thread in threads: thread.start()
""",
    )
    run(copy, CALL)
    assert run(copy, "foreign(), threading.active_count()") == "([], 7)"
    run(copy, AGAIN + "for _ in range(30): rebind.rebind(); time.sleep(0.001)")
    assert run(copy, "before = counts[:]; time.sleep(0.3); [a < b for a, b in zip(before, counts)]") == (
        "[True, True, True]"
    )
    run(
        copy,
        """
work.put("x"); work.put(None); stop.set()
with lock: lock.notify_all()
for thread in threads: thread.join(10)
""",
    )
    assert (
        run(copy, "[t.is_alive() for t in threads].count(True), 'x' in done, True in done")
        == "(0, True, True)"
    )
    assert (
        run(copy, "import signal; [signal.getsignal(n) for n in (62, 63)] == [signal.SIG_DFL] * 2") == "True"
    )


def test_no_write_of_another_thread_is_lost(copy: Sandbox) -> None:
    """A thread that needs no lock of Python's counts up in a page of a file without pause."""
    run(
        copy,
        PRIVATE
        + """
import threading
def start(mapping): return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
counter = private("/workspace/f")
code = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)  # may be executed
code.write(bytes.fromhex("48ff07 48ffce 75f8 c3"))  # 1: inc qword [rdi]; dec rsi; jnz 1b; ret
count = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(start(code))
N = 400_000_000
thread = threading.Thread(target=count, args=(start(counter), N))
thread.start()
""",
    )
    run(copy, CALL + AGAIN)
    times = run(
        copy,
        """
times = 0
while thread.is_alive() and times < 300:
    rebind.rebind()
    times += 1
thread.join()
times
""",
    )
    assert int(times) > 10
    assert run(copy, "int.from_bytes(counter[:8], 'little') == N") == "True"


def test_threads_that_come_and_go(copy: Sandbox) -> None:
    script = """
import threading, time
stop, made = threading.Event(), 0
def breed():
    global made
    while not stop.is_set():
        child = threading.Thread(target=time.sleep, args=(0.0005,))
        child.start()
        made += 1
        if made % 3 == 0:
            child.join()
breeders = [threading.Thread(target=breed) for _ in range(2)]
for breeder in breeders: breeder.start()
""" + (CALL + AGAIN + "for _ in range(40): rebind.rebind()\nlast = made\ntime.sleep(0.2)\nstop.set()\n")
    assert run(copy, script + "for breeder in breeders: breeder.join(10)\nmade > last > 0") == "True"
    assert run(copy, "foreign()") == "[]"


BLOCKED = """
import os, signal, threading, time
from sandbox_gym_guest import rebind
def blocked():
    stop, ready = threading.Event(), threading.Event()
    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        ready.set()
        stop.wait()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 65))  # what had been left for it would come
    def bystand():
        while not stop.is_set():
            time.sleep(0.01)
    threads = [threading.Thread(target=target) for target in (block, bystand)]
    for thread in threads: thread.start()
    ready.wait()
    try:
        rebind.rebind()
    finally:
        stop.set()
        for thread in threads: thread.join()
"""


def test_a_thread_that_blocks_every_signal(copy: Sandbox) -> None:
    result = copy.run_code(BLOCKED + "blocked()")
    assert result.error is not None and result.error.type == "TimeoutError"
    assert "did not stand still" in result.error.message and 0.9 < result.duration < 5
    assert (
        run(copy, "len(foreign()) > 50, rebind.needs_rebind(), threading.active_count()") == "(True, True, 1)"
    )
    run(copy, CALL)
    assert run(copy, "foreign()") == "[]"
    # Process 1 of a namespace is deaf to signals without a handler; others would die of one that is left.
    child = (
        AGAIN
        + """
child = os.fork()
if not child:
    try:
        blocked()
    except TimeoutError:
        os._exit(0)
    os._exit(1)
os.waitpid(child, 0)[1]
"""
    )
    assert run(copy, child) == "0"


def test_another_thread_maps_a_file_meanwhile(copy: Sandbox) -> None:
    """Between the reading of the areas and the moment when all stand still."""
    late = (
        PRIVATE
        + """
import threading
from sandbox_gym_guest import rebind, remap
stop, calls, held = threading.Event(), [], []
thread = threading.Thread(target=stop.wait)
thread.start()
look = remap._root_device
def root_device():
    calls.append(1)
    if len(calls) <= {n}:
        held.append(private("/workspace/f"))
    return look()
remap._root_device = root_device
"""
    )
    run(copy, late.format(n=2) + "rebind.rebind()")
    assert run(copy, "len(calls), rebind.needs_rebind()") == "(3, False)"
    assert run(copy, "foreign()") == "[]"
    result = copy.run_code("remap._root_device = look\n" + late.format(n=1000) + "rebind.rebind()")
    assert result.error is not None and "never stopped" in result.error.message
    run(copy, "stop.set(); remap._root_device = look")
