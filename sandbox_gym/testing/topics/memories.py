"""What a snapshot holds: each kind of thing that a running sandbox may have, alive in copies and in the source."""

from __future__ import annotations

from sandbox_gym.testing.subject import PATIENCE, Subject, check, expect, output, value


@check("capture")
def large_memory(subject: Subject) -> None:
    """Every byte of the interpreter's memory."""
    box = subject.create()
    digest = "import hashlib; hashlib.sha256(block).hexdigest()"
    value(box, "import os; block = bytearray(os.urandom(32 << 20))")
    before = value(box, digest)
    (copy,) = subject.fork(box)
    value(box, "block[::4096] = bytes(len(block[::4096]))")
    expect(value(copy, digest), before, "its hash in the copy")
    assert value(box, digest) != before


@check("capture")
def whole_disk(subject: Subject) -> None:
    """Files that were made, changed, deleted, linked, and their modes, anywhere."""
    box = subject.create()
    box.write_file("tree/old", b"x" * 3_000_000)
    subject.snapshot(box)
    output(
        box,
        "cd tree; printf y >> old; mkdir -p a/b; printf 1 > a/b/f; chmod 711 a/b/f; ln -s b a/l; ln a/b/f a/h; "
        "mkfifo a/p; touch -d @1000000 a/b/f; echo more >> /etc/motd; rm -rf /usr/share/zoneinfo /etc/issue; "
        "mkdir /opt/new; printf z > /opt/new/z; mv a/b a/c",
    )
    look = (
        "cd tree; find . -exec stat -c '%n %f %s %h' {} + | grep -v ' 4[0-9a-f]* ' | sort; cat old | cksum; "
        "cat a/c/f /etc/motd /opt/new/z; stat -c %Y a/c/f; ls /usr/share/zoneinfo /etc/issue 2>&1 | sort"
    )
    before = output(box, f"({look}) 2>&1; true")
    assert "./a/h 81c9 1 2" in before and "1000000" in before, before
    (copy,) = subject.fork(box)
    expect(output(copy, f"({look}) 2>&1; true"), before, "what is on the copy's disk")
    output(copy, "rm -r tree")
    expect(output(box, f"({look}) 2>&1; true"), before, "what is on the source's disk")


@check("capture")
def open_files(subject: Subject) -> None:
    """Open files stay at their place, each copy's on its own disk; folder and umask too."""
    box = subject.create()
    value(
        box,
        "import os\nopen('/tmp/f', 'w').write('abcdef')\nf = open('/tmp/f', 'r+', buffering=1)\nf.read(0)\n"
        "fd = os.open('/tmp/f', os.O_RDWR)\nos.read(fd, 2)\nos.mkdir('/tmp/d')\nos.chdir('/tmp/d')\n"
        "os.umask(0o27) and None",
    )
    (copy,) = subject.fork(box)
    code = "os.write(fd, b'XY'); os.lseek(fd, 0, 1), open('/tmp/f').read(), os.getcwd(), os.umask(0o27)"
    for sandbox in (copy, box):
        expect(value(sandbox, code), "(4, 'abXYef', '/tmp/d', 23)", "place, content, folder, umask")


@check("capture")
def threads(subject: Subject) -> None:
    """Threads of the interpreter go on."""
    box = subject.create()
    value(
        box,
        "import queue, threading\nasked, told = queue.Queue(), queue.Queue()\ncount = 0\n"
        "def serve():\n    global count\n    while True:\n        count += asked.get()\n        told.put(count)\n"
        "threading.Thread(target=serve, daemon=True).start()",
    )
    ask = f"asked.put(1); told.get(timeout={PATIENCE / 2})"
    expect(value(box, ask), "1", "the thread")
    (copy,) = subject.fork(box)
    for sandbox in (copy, box):
        expect(value(sandbox, ask), "2", "the thread after the snapshot")


@check("capture")
def processes(subject: Subject) -> None:
    """Processes that were started go on, with their memory and pipes; handles find each copy's own."""
    box = subject.create()
    process = box.start(["sh", "-c", "n=0; while read x; do n=$((n + 1)); echo $n $x; done"])
    process.write("a\n")
    expect(process.read_text(PATIENCE), "1 a\n", "its answer")
    (copy,) = subject.fork(box)
    for sandbox in (copy, box):
        mine = sandbox.process(process.id)
        mine.write("b\n")
        expect(mine.read_text(PATIENCE), "2 b\n", "its answer after the snapshot")
    process.kill()
    expect(copy.process(process.id).poll(), None, "the copy's, when the source's has ended")


@check("capture")
def terminals(subject: Subject) -> None:
    """Processes on a terminal go on."""
    box = subject.create()
    process = box.start(
        ["sh", "-c", "stty -echo; echo up; n=0; while read x; do n=$((n + 1)); echo $n $x; done"], pty=True
    )
    expect(process.read_text(PATIENCE), "up\r\n", "its first line")
    (copy,) = subject.fork(box)
    for sandbox in (copy, box):
        mine = sandbox.process(process.id)
        mine.write("b\n")
        expect(mine.read_text(PATIENCE), "1 b\r\n", "its answer after the snapshot")


@check("capture")
def sessions(subject: Subject) -> None:
    """Shell sessions go on where they were."""
    box = subject.create()
    box.session().run("cd /tmp; a=5; f() { echo f $a; }")
    (copy,) = subject.fork(box)
    expect(copy.session().run("a=6; f; pwd").stdout, "f 6\n/tmp\n", "the copy's")
    expect(box.session().run("f").stdout, "f 5\n", "the source's")


@check("capture")
def connections_inside(subject: Subject) -> None:
    """Servers that listen, and connections and pipes within the sandbox, go on, with what is on its way in them."""
    box = subject.create()
    value(
        box,
        "import os, socket\nserver = socket.create_server(('127.0.0.1', 7077))\n"
        "near = socket.create_connection(('127.0.0.1', 7077))\nfar, _ = server.accept()\n"
        "one, two = socket.socketpair()\nread, write = os.pipe()\n"
        "near.sendall(b'tcp'); one.sendall(b'unix'); os.write(write, b'pipe') and None",
    )
    (copy,) = subject.fork(box)
    code = (
        "far.settimeout(20); two.settimeout(20)\nfar.sendall(b'back')\n"
        "more = socket.create_connection(('127.0.0.1', 7077), 20)\n"
        "other, _ = server.accept()\nfar.recv(9), near.recv(9), two.recv(9), os.read(read, 9)"
    )
    for sandbox in (copy, box):
        expect(value(sandbox, code), "(b'tcp', b'back', b'unix', b'pipe')", "what was said in them")
