"""What a guest sees and reaches of the host and of others: nothing."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

from sandbox_gym.testing.subject import Subject, check, expect, output, value


@check("isolation")
def processes(subject: Subject) -> None:
    """No process of the host or of another sandbox is seen or reached by a signal."""
    number = 10**6 + secrets.randbelow(10**8)
    outside = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({number})"])
    try:
        box, other = subject.create(), subject.create()
        child = other.start(["sleep", str(number)])
        box.shell(
            f"for p in {outside.pid} {os.getpid()} {os.getppid()} {child.pid}; do kill -9 $p; done; kill -9 -1"
        )
        code = "import glob; [open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/cmdline')]"
        for sandbox in (box, subject.create()):
            if sandbox.status == "running":
                assert str(number) not in (value(sandbox, code) or ""), "its command line is seen inside"
        expect((outside.poll(), child.poll()), (None, None), "exit codes of what was to be killed")
    finally:
        outside.kill()
        outside.wait()


@check("isolation")
def host_files(subject: Subject) -> None:
    """Files of the host's users and /tmp aren't there, by any path; what is written inside is not on the host."""
    name, secret, folder = f"check-{secrets.token_hex(6)}", secrets.token_hex(12), subject.folder()
    (folder / name).write_text(secret)
    box = subject.create()
    code = f"""
found = []
for way in ('', '/proc/1/root', '/proc/self/root', '/proc/1/cwd/../../../..'):
    try:
        found.append(open(way + {str(folder / name)!r}).read())
    except OSError:
        pass
found
"""
    expect(value(box, code), "[]", "what was read")
    for place in ("/tmp", "/etc", "/usr/bin", "/var/tmp", "/dev/shm"):
        box.shell(f"echo inside > {place}/{name}")
        assert not os.path.exists(f"{place}/{name}"), f"{place} is the host's"


@check("isolation")
def sockets_and_shared_memory(subject: Subject) -> None:
    """Abstract sockets, System V and POSIX shared memory of the host and of other sandboxes are out of reach."""
    name = f"check-{secrets.token_hex(6)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        box, other = subject.create(), subject.create()
        value(other, f"import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}2'); s.listen()")
        code = "import socket\n[socket.socket(socket.AF_UNIX).connect_ex('\\0' + n) for n in (NAMES)]"
        answers = value(box, code.replace("NAMES", f"{name!r}, {name + '2'!r}"))
        assert "0" not in (answers or "").strip("[]").split(", "), f"connected: {answers}"
    other.shell(f"echo x > /dev/shm/{name}")
    expect(
        value(box, f"import os; os.path.exists('/dev/shm/{name}')"), "False", "another's POSIX shared memory"
    )
    make = (
        "import ctypes; libc = ctypes.CDLL(None); key = 0x5a5a0000 + KEY; libc.shmget(key, 4096, FLAGS) >= 0"
    )
    make = make.replace("KEY", str(secrets.randbelow(1 << 16)))
    expect(value(other, make.replace("FLAGS", "0o1600")), "True", "System V shared memory is made")
    expect(value(box, make.replace("FLAGS", "0")), "False", "and found by another")


@check("isolation")
def host_settings(subject: Subject) -> None:
    """Host name, clock and kernel settings of the host stay what they are, whatever a guest tries."""
    names = ("kernel/core_pattern", "kernel/sysrq", "kernel/modprobe", "vm/overcommit_memory", "fs/file-max")
    files = [f"/proc/sys/{name}" for name in names if os.path.exists(f"/proc/sys/{name}")]

    def settings() -> list[str]:
        return [os.uname().nodename, *(Path(path).read_text() for path in files)]

    before = settings()
    box = subject.create()
    box.shell("hostname changed; echo changed > /proc/sys/kernel/hostname; date -s 2001-01-01; umount -a")
    for path in files:
        box.shell(f"echo 1 > {path}")
    value(
        box,
        "import ctypes; libc = ctypes.CDLL(None); libc.sethostname(b'changed', 7); libc.settimeofday(bytes(16), 0)",
    )
    expect(settings(), before, "the host's settings")
    assert time.time() > 1_700_000_000
    expect(output(subject.create(), "echo fine"), "fine\n", "another sandbox")
