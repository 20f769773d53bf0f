"""Programs as people run them: event loops, databases under writes, pools, pipelines, servers. Each copy is its own."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import contextlib

import pytest

from sandbox_gym.backends.native import criu
from sandbox_gym.env import make_env
from sandbox_gym.sandbox import Sandbox
from tests.kinds.kind import PRELUDE

pytestmark = pytest.mark.usefixtures("nothing_stays")


def run(box: Sandbox, code: str) -> str | None:
    result = box.run_code(code, timeout=20)
    assert result.ok, result.error and result.error.traceback
    return result.value


_LOOP = """
import asyncio
loop = asyncio.new_event_loop()
heard = []
async def serve(reader, writer):
    while line := await reader.readline():
        heard.append(line.decode().strip())
        writer.write(f"{len(heard)} {heard[-1]}\\n".encode())
async def begin():
    global server, reader, writer, ticks
    ticks = asyncio.create_task(tick())
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
async def tick():
    n = 0
    while True:
        n += 1
        heard.append("tick") if n == 3 else None
        await asyncio.sleep(0.01)
async def say(word):
    writer.write(f"{word}\\n".encode())
    answer = (await reader.readline()).decode().split()
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    echo, _ = await child.communicate(word.encode())
    await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(20)), asyncio.to_thread(sum, [1]))
    return answer[1], echo.decode(), ticks.done()
loop.run_until_complete(begin())
"""


def test_an_event_loop_between_two_of_its_turns(box: Sandbox) -> None:
    """Server and client in one loop, a task that waits, threads and children of asyncio's."""
    run(box, _LOOP)
    assert run(box, "loop.run_until_complete(say('first'))") == "('first', 'first', False)"
    copies = box.fork(2)
    try:
        for name, sandbox in zip(("one", "two", "source"), (*copies, box)):
            assert run(sandbox, f"loop.run_until_complete(say({name!r}))") == str((name, name, False))
            assert run(sandbox, "[word for word in heard if word != 'tick']") == str(["first", name])
    finally:
        for copy in copies:
            copy.terminate()


_DATABASE = """
code = '''
import sqlite3, sys, time
base = sqlite3.connect("base.db", isolation_level=None, timeout=30)
base.execute("pragma journal_mode = JOURNAL"); base.execute("pragma synchronous = SYNC")
base.execute("create table if not exists moved (n integer primary key, one integer, other integer)")
base.execute("insert into moved values (0, 1000, 0)")
print("ready", flush=True)
n = 0
while True:
    n += 1
    base.execute("begin immediate")
    base.execute("insert into moved select n + 1, one - 1, other + 1 from moved order by n desc limit 1")
    base.execute("commit")
    time.sleep(0.0005)
'''
writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
assert writer.stdout.readline() == b"ready\\n"
import sqlite3
def look():
    base = sqlite3.connect("base.db", timeout=30)
    ok = base.execute("pragma integrity_check").fetchone()
    count, most, least, total, spread = base.execute("select count(*), max(n), min(n), max(one + other), min(one + other) from moved").fetchone()
    base.close()
    return ok == ("ok",) and (least, most) == (0, count - 1) and (total, spread) == (1000, 1000) and writer.poll() is None, count
before = look()
until(lambda: look()[1] > before[1] + 10)
"""


@pytest.mark.parametrize("journal", ["delete", "wal", "truncate", "persist"])
@pytest.mark.parametrize("sync", ["off", "full"])
def test_a_database_while_another_process_writes(box: Sandbox, journal: str, sync: str) -> None:
    if journal == "wal" and not criu.find().mended:
        pytest.skip("criu is not one that scripts/install-criu.sh has built")
    run(box, PRELUDE + _DATABASE.replace("JOURNAL", journal).replace("SYNC", sync))
    snapshot = box.snapshot()
    copies = Sandbox.restore_many(snapshot, 2)
    try:
        for sandbox in (*copies, box):
            run(sandbox, "ok, count = look(); assert ok; until(lambda: look()[1] > count); assert look()[0]")
        run(
            copies[0],
            "writer.kill(); writer.wait()\nbase = sqlite3.connect('base.db', timeout=30); base.execute('delete from moved'); base.commit()",
        )
        run(copies[1], "assert look()[0]")
        run(box, "assert look()[0]")
    finally:
        snapshot.delete()
        for copy in copies:
            copy.terminate()


def test_a_database_in_the_middle_of_a_transaction(box: Sandbox) -> None:
    run(
        box,
        "import sqlite3; base = sqlite3.connect('b.db'); base.execute('create table t (x)'); base.commit()",
    )
    run(box, "base.execute('insert into t values (1)'); rows = base.execute('select x from t')")
    (copy,) = box.fork(1)
    with copy:
        run(copy, "base.rollback()")
        assert run(copy, "base.execute('select count(*) from t').fetchone()") == "(0,)"
    assert (
        box.shell(
            "python3 -c \"import sqlite3; sqlite3.connect('b.db', timeout=0).execute('insert into t values (2)')\""
        ).exit_code
        == 1
    )
    run(box, "base.commit()")
    assert run(box, "base.execute('select count(*) from t').fetchone()") == "(1,)"


def test_a_pipeline_under_way(box: Sandbox) -> None:
    """Three processes that move numbered lines; the copy ends with every line once, and so does the source."""
    box.shell(
        "(i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done | sed -u s/^/n/ | while read x; do echo $x; done > out; echo done > end) >/dev/null 2>&1 &"
    )
    until = (
        "import os, time\nwhile not os.path.exists({0!r}) or os.path.getsize({0!r}) < {1}: time.sleep(0.002)"
    )
    run(box, until.format("out", 100))
    (copy,) = box.fork(1)
    with copy:
        for sandbox in (copy, box):
            run(sandbox, until.format("end", 1))
            assert run(sandbox, "open('out').read() == ''.join(f'n{i}\\n' for i in range(3000))") == "True"


def test_pools(box: Sandbox) -> None:
    code = """
import multiprocessing, concurrent.futures
processes = multiprocessing.Pool(2)
threads = concurrent.futures.ThreadPoolExecutor(2)
queue, lock, value = multiprocessing.Queue(), multiprocessing.Lock(), multiprocessing.Value("i", 5)
assert processes.map(abs, range(-9, 0)) == list(range(9, 0, -1)) and list(threads.map(abs, [-1])) == [1]
queue.put("held"); until(lambda: not queue.empty())
lock.acquire()
"""
    run(box, PRELUDE + code)
    copies = box.fork(2)
    try:
        for i, sandbox in enumerate((*copies, box)):
            run(sandbox, f"value.value += {i}")
            assert (
                run(
                    sandbox,
                    "processes.map(abs, [-1, -2]), list(threads.map(abs, [-3])), queue.get(timeout=5)",
                )
                == "([1, 2], [3], 'held')"
            )
            assert run(
                sandbox, "lock.acquire(timeout=0), lock.release(), lock.acquire(timeout=0), value.value"
            ) == str((False, None, True, 5 + i))
        run(box, "processes.close(); processes.join()")
    finally:
        for copy in copies:
            copy.terminate()


def test_node(box: Sandbox) -> None:
    """An event loop, its pool of threads, timers and just-in-time machine code."""
    script = """
const http = require("http"), fs = require("fs");
let seen = [], ticks = 0;
setInterval(() => { ticks += 1; }, 5);
function fib(n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
fib(22);
http.createServer((request, response) => {
  seen.push(request.url.slice(1));
  fs.appendFile("log", seen.at(-1), () => fs.readFile("log", "utf8", (error, text) =>
    response.end(JSON.stringify([seen.join(""), text, fib(15), ticks > 0]))));
}).listen(0, "127.0.0.1", function () { fs.writeFileSync("port", String(this.address().port)); });
"""
    box.write_file("server.js", script.encode())
    box.shell("node server.js >/dev/null 2>&1 &")
    ask = "import json, urllib.request\ndef ask(x): return json.load(urllib.request.urlopen(f'http://127.0.0.1:{open(\"port\").read()}/{x}', timeout=10))\n"
    run(box, PRELUDE + ask + "until(lambda: os.path.exists('port') and os.path.getsize('port') > 0)")
    assert run(box, "ask('a')") == str(["a", "a", 610, True])
    snapshot = box.snapshot()
    copies = Sandbox.restore_many(snapshot, 2)
    try:
        for name, sandbox in zip("bcd", (*copies, box)):
            assert run(sandbox, f"ask({name!r})") == str([f"a{name}", f"a{name}", 610, True])
    finally:
        snapshot.delete()
        for copy in copies:
            copy.terminate()


def test_an_environment_with_a_thread_and_a_child_branches() -> None:
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(contextlib.closing(make_env(entry_point="tests.criu.toys:Busy")))
        env.reset(seed=3)
        env.step(1)
        snapshot = env.snapshot()
        stack.callback(snapshot.delete)
        assert snapshot.engine == "criu"
        after = [env.step(action)[0].tolist() for action in (2, 3, 4)]
        branches = [stack.enter_context(contextlib.closing(branch)) for branch in env.branch(2)]
        env.restore(snapshot)
        assert [env.step(action)[0].tolist() for action in (2, 3, 4)] == after
        last = [branch.step(1)[0].tolist() for branch in (*branches, env)]
        assert last[0] == last[1] == last[2] != after[-1]
