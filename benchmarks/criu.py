"""The CRIU engine: restore against criu's own command, large guests, clones that share memory, a tree of everything.

python -m benchmarks.criu [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks import _inside
from benchmarks._report import Row, main
from benchmarks.branch import restore_times
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox, Snapshot

_CLONES = 8

# bash, threads, a shell on a terminal, a server with a client that is connected, a pipeline
_TREE = """
import os, pty, socket, subprocess, threading, time
ticks = [0]
def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.01)
for _ in range(3):
    threading.Thread(target=tick, daemon=True).start()
bash = subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
master, slave = pty.openpty()
shell = subprocess.Popen(["sh"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
pipeline = subprocess.Popen("cat | sed -u s/a/b/", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
"""
_ALL_ALIVE = """
before = ticks[0]
bash.stdin.write("echo $((6 * 7))\\n"); bash.stdin.flush()
said = [bash.stdout.readline().strip()]
os.write(master, b"echo $((5 + 6))\\n")
text = b""
while b"11" not in text.replace(b"\\r", b"").split(b"\\n"):
    text += os.read(master, 1000)
client.sendall(b"ping"); said.append(accepted.recv(4).decode())
pipeline.stdin.write(b"aha\\n"); pipeline.stdin.flush(); said.append(pipeline.stdout.readline().decode().strip())
time.sleep(0.05)
(*said, ticks[0] > before)
"""


def guest(megabytes: int, *, thread: bool = False) -> Sandbox:
    """One that has so much memory of its own, all of it different; with a thread where a fork is not to do. Without a
    memory limit: near one, its memory would not come lazily (lazy.ROOM).
    """
    box = Sandbox.create(memory=None)
    code = (
        f"import os; hold = bytearray(os.urandom(1 << 20)) * {megabytes - 20}"
        if megabytes > 20
        else "hold = b''"
    )
    if thread:
        code += (
            "\nimport threading, time; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
        )
    result = box.run_code(code, timeout=60)
    assert result.ok, result.error
    return box


def snapshot_times(box: Sandbox, n: int) -> list[float]:
    """Seconds of each, and one for criu to find out about the kernel first."""
    times = []
    for _ in range(n + 1):
        start = time.perf_counter()
        snapshot = box.snapshot(engine="criu")
        times.append(time.perf_counter() - start)
        snapshot.delete()
    return times[1:]


def small(rounds: int, each: int) -> tuple[list[Row], float]:
    """The 20 MB guest, in turn with criu's bare commands on the same image and the same process."""
    ours: list[float] = []
    bare: list[float] = []
    with guest(20) as box:
        plan = _inside.measure(box, "plan", 300)
        dumps = [1e3 * t for t in snapshot_times(box, rounds * 2)]
        bare_dumps = _inside.measure(box, "dump", rounds * 2)
        snapshot = box.snapshot(engine="criu")
        restore_times(snapshot, 2)
        for _ in range(rounds):
            ours += [1e3 * t for t in restore_times(snapshot, each)]
            bare += _inside.measure(box, "restore", each)
        snapshot.delete()
    p50, floor = statistics.median(ours), statistics.median(bare)
    dump, bare_dump = statistics.median(dumps), statistics.median(bare_dumps)
    return [
        Row("planner, its own cost a snapshot", statistics.median(plan), "ms", "bound", 0.3, bar=1.0),
        Row("snapshot, 20 MB guest, p50", dump, "ms", "bare criu dump", bare_dump),
        Row("restore, 20 MB guest, p50", p50, "ms", "bound", 30.0, bar=1.0),
        Row("restore, 20 MB guest, p50", p50, "ms", "bare criu restore", floor, bar=1.3),
    ], p50


def large(megabytes: int, n: int, small_ms: float, bar: float | None) -> list[Row]:
    with guest(megabytes) as box:
        start = time.perf_counter()
        snapshot = box.snapshot(engine="criu")
        taken = 1e3 * (time.perf_counter() - start)
        restored = 1e3 * statistics.median(restore_times(snapshot, n))
        whole = _use_all(snapshot)
        snapshot.delete()
    name = f"{megabytes} MB guest"
    return [
        Row(f"restore to first answer, {name}", restored, "ms", "20 MB guest", small_ms, bar=bar),
        Row(f"  and all its memory used, {name}", whole, "ms"),
        Row(f"  its snapshot, {name}", taken, "ms"),
    ]


def _use_all(snapshot: Snapshot) -> float:
    start = time.perf_counter()
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("hold.count(b'x')", timeout=60).ok
        return 1e3 * (time.perf_counter() - start)


def clones(rounds: int) -> list[Row]:
    """Eight at once of a guest with threads, and what each has for itself alone."""
    with guest(500, thread=True) as box:
        snapshot = box.snapshot()
        assert snapshot.engine == "criu", snapshot.why
        before = private_megabytes(box)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            copies = Sandbox.restore_many(snapshot, _CLONES)
            for copy in copies:
                copy._live.channel.post(Op.PING, timeout=30.0)
            for copy in copies:
                copy._live.channel.wait(Op.PING, timeout=30.0)
            times.append(1e3 * (time.perf_counter() - start))
            at_once = private_megabytes(box) - before
            time.sleep(1.0)
            later = private_megabytes(box) - before
            for copy in copies[1:]:
                copy.terminate()
            copies[0].snapshot(engine="criu").delete()
            whole = private_megabytes(box) - before
            copies[0].terminate()
        snapshot.delete()
    return [
        Row(
            f"{_CLONES} clones of 500 MB, all answering",
            statistics.median(times),
            "ms",
            "bound",
            400.0,
            bar=1.0,
        ),
        Row("  their private memory then", at_once, "MB", f"{_CLONES} x 500 MB", _CLONES * 500.0, bar=0.25),
        Row("  and a second later", later, "MB", f"{_CLONES} x 500 MB", _CLONES * 500.0, bar=0.25),
        Row("  of one that a snapshot has brought whole", whole, "MB", "500 MB", 500.0),
    ]


def private_megabytes(member: Sandbox) -> float:
    """Private_Clean + Private_Dirty of all processes of this client's supervisor: guests, pagers, itself."""
    supervisor = str(member._backend._folder)  # type: ignore[attr-defined]
    groups = f"sandbox-gym-{Path(supervisor).name}"
    total = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            ours = groups in (process / "cgroup").read_text()
            if not ours and supervisor.encode() not in (process / "cmdline").read_bytes():
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total / 1024


def tree(n: int) -> list[Row]:
    with Sandbox.create() as box:
        result = box.run_code(_TREE, timeout=60)
        assert result.ok, result.error
        taken = [1e3 * t for t in snapshot_times(box, n)]
        snapshot = box.snapshot()
        assert snapshot.engine == "criu", snapshot.why
        restored = [1e3 * t for t in restore_times(snapshot, n)]
        with Sandbox.restore(snapshot) as copy:
            result = copy.run_code(_ALL_ALIVE, timeout=30)
            assert result.value == "('42', 'ping', 'bha', True)", result
        snapshot.delete()
    name = "bash, threads, terminal, TCP, pipeline"
    return [
        Row(f"snapshot, {name}, p50", statistics.median(taken), "ms", "bound", 150.0, bar=1.0),
        Row(f"restore, {name}, p50", statistics.median(restored), "ms", "bound", 100.0, bar=1.0),
    ]


def run(quick: bool) -> list[Row]:
    rows, small_ms = small(3, 8) if quick else small(10, 20)
    rows += tree(5 if quick else 20)  # before the large ones: writing those out would hold up its dumps
    if not quick:
        rows += large(100, 10, small_ms, None)
    rows += large(1000, 5 if quick else 20, small_ms, 3.0)
    return rows + clones(2 if quick else 5)


if __name__ == "__main__":
    main(__doc__, run)
