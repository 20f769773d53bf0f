"""A guest full of life: `BUILD` makes it, `visit(name)` inside asks every part whether it goes on, and leaves the name.

Memory and disk move in lockstep: a process counts in memory, in a file by write(2) and in a mapped file, another in a
database, none of it ever synced. A snapshot must have all of them at one instant.
"""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from sandbox_gym.backends.native import criu
from sandbox_gym.sandbox import Sandbox
from tests.kinds.kind import PRELUDE

_SERVER = r"""
import socket, threading
names = []
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
def serve(client):
    lines = client.makefile("rw")
    for line in lines:
        names.append(line.strip())
        lines.write(" ".join(names) + "\n"); lines.flush()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
_HTTP = r"""
import http.server
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""
_WRITER = r"""
import sqlite3, time
base = sqlite3.connect("base.db", isolation_level=None)
base.execute("pragma journal_mode = JOURNAL"); base.execute("pragma synchronous = off")
base.execute("create table done (n integer primary key, twice integer)")
print("ready", flush=True)
n = 0
while True:
    n += 1
    time.sleep(0.001)
    base.execute("begin"); base.execute("insert into done values (?, ?)", (n, 2 * n)); base.execute("commit")
    if n % 500 == 0:
        base.execute("delete from done where n < ?", (n - 50,))
"""
_LOCKER = r"""
import fcntl, time
file = open("lock", "w"); fcntl.flock(file, fcntl.LOCK_EX); print("ready", flush=True); time.sleep(600)
"""

BUILD = (
    f"""{PRELUDE}
import http.client, pty, sqlite3
def start(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, process.stdout.readline().strip()
server, port = start({_SERVER!r})
client = socket.create_connection(("127.0.0.1", int(port))).makefile("rw")
web, web_port = start({_HTTP!r})
writer, _ = start({_WRITER!r})
locker, _ = start({_LOCKER!r})
pipeline = subprocess.Popen("cat | stdbuf -o0 tr a-z A-Z | cat", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
open("page", "w").write("page")
gone = open("gone", "w+"); gone.write("held"); gone.flush(); os.remove("gone")
q = []
thread(q.append)
"""
    r"""
shell_pid, shell = pty.fork()
if shell_pid == 0:
    os.execvp("bash", ["bash", "--norc", "--noprofile"])
def type_in(line, answer):
    os.write(shell, line.encode() + b"\n")
    seen = b""
    while answer.encode() not in seen:
        assert select.select([shell], [], [], 5)[0], seen
        seen += os.read(shell, 4096)
type_in("x=42; echo set-$x", "set-42")

# The order of a step: begun, the file, the mapped file, ended.
begun_and_ended = mmap.mmap(-1, 4096)
open("mapped", "wb").write(bytes(4096))
mapped_fd, plain_fd = os.open("mapped", os.O_RDWR), os.open("plain", os.O_RDWR | os.O_CREAT)
mapped = mmap.mmap(mapped_fd, 4096)
def count():
    if os.fork() == 0:
        n = 0
        while True:
            n += 1
            number = struct.pack("q", n)
            begun_and_ended[0:8] = number
            os.pwrite(plain_fd, number, 0)
            mapped[0:8] = number
            begun_and_ended[8:16] = number
            time.sleep(0.0002)
counter = child(count)
until(lambda: struct.unpack_from("q", begun_and_ended)[0] > 100)

def steps():
    for pid in [int(p) for p in os.listdir("/proc") if p.isdigit()]:
        if open(f"/proc/{pid}/stat").read().split()[3] == str(counter):
            counting = pid
    os.kill(counting, signal.SIGSTOP)
    until(lambda: open(f"/proc/{counting}/stat").read().split()[2] == "T")
    try:
        begun, ended = struct.unpack_from("2q", begun_and_ended)
        plain, by_map = struct.unpack("q", os.pread(plain_fd, 8, 0))[0], struct.unpack_from("q", mapped)[0]
        on_disk = struct.unpack("q", open("mapped", "rb").read(8))[0]
    finally:
        os.kill(counting, signal.SIGCONT)
    return begun, plain, by_map, on_disk, ended

def visit(name):
    type_in("echo x-is-$x-$(tty)", "x-is-42-/dev/pts/")
    client.write(name + "\n"); client.flush()
    names = client.readline().split()
    connection = http.client.HTTPConnection("127.0.0.1", int(web_port), timeout=5)
    connection.request("GET", "/page")
    assert connection.getresponse().read() == b"page"
    connection.close()
    pipeline.stdin.write(b"through\n"); pipeline.stdin.flush()
    assert pipeline.stdout.readline() == b"THROUGH\n"
    with open("lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise AssertionError("the lock is lost")
        except BlockingIOError:
            pass
    gone.seek(0); assert gone.read() == "held" and not os.path.exists("gone")
    begun, plain, by_map, on_disk, ended = steps()
    assert begun >= plain >= by_map >= ended >= begun - 1 and by_map == on_disk, (begun, plain, by_map, on_disk, ended)
    until(lambda: steps()[4] > ended)
    base = sqlite3.connect("base.db", timeout=20)
    assert base.execute("pragma quick_check").fetchone() == ("ok",)
    most, rows, least, twice = base.execute("select max(n), count(*), min(n), sum(twice) from done").fetchone()
    assert most - least + 1 == rows and twice == (most + least) * rows, (most, rows, least, twice)
    until(lambda: base.execute("select max(n) from done").fetchone()[0] > most)
    base.close()
    assert t.is_alive() and q == [False] and all(p.poll() is None for p in (server, web, writer, locker, pipeline))
    return names
"""
)


def build(box: Sandbox) -> None:
    journal = "wal" if criu.find().mended else "delete"
    result = box.run_code(BUILD.replace("JOURNAL", journal), timeout=30)
    assert result.ok, result.error and result.error.traceback


def visit(box: Sandbox, name: str) -> list[str]:
    """The names that visitors have left in this sandbox and where it came from, this one's last."""
    result = box.run_code(f"print(*visit({name!r}))", timeout=30)
    assert result.ok, result.error and result.error.traceback
    return result.stdout.split()
