"""What a sandbox can't see or reach: its siblings, the host's files, processes, network and kernel."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gym.sandbox import Sandbox

Boxes = Callable[[int], list[Sandbox]]


# ---- siblings -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["siblings", "parent and copy", "strangers"])
def pair(request: pytest.FixtureRequest, boxes: Boxes) -> Iterator[tuple[Sandbox, Sandbox]]:
    if request.param == "siblings":
        one, other = boxes(2)
    elif request.param == "parent and copy":
        (one,) = boxes(1)
        (other,) = one.fork(1)
    else:
        (one,), other = boxes(1), Sandbox.create()
    yield one, other
    other.terminate()


def test_files_and_memory(pair: tuple[Sandbox, Sandbox]) -> None:
    one, other = pair
    token = secrets.token_hex(8)
    one.run_code(f"secret = {token!r}")
    for place in (
        "/workspace/s",
        "/tmp/s",
        "/dev/shm/s",
        "/root/s",
        "/run/s",
        "/var/tmp/s",
        "/etc/s",
        "/usr/s",
    ):
        one.write_file(place, token)
        assert other.shell(f"test -e {place}").exit_code == 1
    found = other.shell(
        f"grep -rls {token[:8]}'{token[8:]}' /workspace /tmp /dev/shm /run /etc /home /mnt /srv"
    )
    assert found.stdout == ""
    assert other.run_code("secret").error is not None


def test_processes(pair: tuple[Sandbox, Sandbox]) -> None:
    one, other = pair
    one.shell("exec -a visible-only-here sleep 60 & while ! grep -q visible /proc/$!/cmdline; do :; done")
    assert "visible-only-here" in one.shell("cat /proc/[0-9]*/cmdline").stdout
    assert "visible-only-here" not in other.shell("cat /proc/[0-9]*/cmdline").stdout
    other.shell("kill -9 -1; for p in $(seq 2 3000); do kill -9 $p; done", timeout=10)
    assert "visible-only-here" in one.shell("cat /proc/[0-9]*/cmdline").stdout
    assert one.run_code("1").ok


def test_sockets_and_ports(pair: tuple[Sandbox, Sandbox]) -> None:
    one, other = pair
    one.run_code(
        "import socket\nu = socket.socket(socket.AF_UNIX); u.bind('/tmp/u'); u.listen()\n"
        "a = socket.socket(socket.AF_UNIX); a.bind('\\0abstract'); a.listen()\n"
        "t = socket.create_server(('127.0.0.1', 9000))"
    )
    connect = (
        "import socket\ndef reaches(family, address):\n    with socket.socket(family) as s:\n        s.settimeout(2)\n"
        "        return s.connect_ex(address) == 0\n"
        "[reaches(1, '/tmp/u'), reaches(1, '\\0abstract'), reaches(2, ('127.0.0.1', 9000))]"
    )
    assert one.run_code(connect).value == "[True, True, True]"
    assert other.run_code(connect).value in ("[False, False, False]", None)
    # Both may use the same port.
    assert other.run_code("import socket; socket.create_server(('127.0.0.1', 9000)).close()").ok


def test_shared_memory_and_queues(pair: tuple[Sandbox, Sandbox]) -> None:
    one, other = pair
    get = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "[libc.shmget(4711, 4096, {f}), libc.semget(4711, 1, {f}), libc.msgget(4711, {f})]"
    )
    made = one.run_code(get.format(f="0o1600")).value
    assert made is not None and "-1" not in made
    assert other.run_code(get.format(f="0")).value == "[-1, -1, -1]"
    one.run_code(
        "from multiprocessing import shared_memory as s; m = s.SharedMemory('seg', create=True, size=64)"
    )
    assert "FileNotFoundError" in str(
        other.run_code("from multiprocessing import shared_memory as s; s.SharedMemory('seg')").error
    )


def test_host_name_and_mounts(pair: tuple[Sandbox, Sandbox]) -> None:
    one, other = pair
    before = other.shell("hostname").stdout
    assert one.shell("hostname elsewhere").exit_code in (0, 1)
    assert other.shell("hostname").stdout == before
    links = "for n in pid mnt net ipc uts cgroup; do readlink /proc/self/ns/$n; done"
    mine, theirs = one.shell(links).stdout.split(), other.shell(links).stdout.split()
    assert len(mine) == 6 and not set(mine) & set(theirs)
    here = {
        os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt", "net", "ipc", "uts", "cgroup", "user")
    }
    assert not here & set(mine)


# ---- the host -------------------------------------------------------------------------------------------------------


def test_the_host_s_files_are_not_there(box: Sandbox, tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    places = [
        Path.home(),
        Path("/home"),
        Path("/opt"),
        Path("/srv"),
        Path("/mnt"),
        Path("/var/tmp"),
        Path("/run"),
        tmp_path,
    ]
    made = []
    try:
        for place in places:
            if place.is_dir() and os.access(place, os.W_OK):
                made.append(place / f"secret-{token}")
                made[-1].write_text(token)
        assert made
        for path in made:
            assert box.shell(f"cat {path}").exit_code != 0
            # By way of a process, of the overlay's layers, of a folder above.
            for way in ("/proc/1/root", "/proc/self/root", "/proc/1/cwd/../../../..", "/.."):
                assert box.shell(f"cat {way}{path}").exit_code != 0
        found = box.shell(
            f"find / -maxdepth 4 -name 'secret-{token[:5]}*' -not -path '/usr/*' 2>/dev/null", timeout=60
        )
        assert found.stdout == ""
    finally:
        for path in made:
            path.unlink()
    assert box.shell("ls -A /home /srv /mnt /boot /run 2>/dev/null | grep -v :").stdout.strip() == ""
    assert "PRIVATE" not in box.shell("cat /etc/shadow /root/.ssh/* /etc/ssh/* /etc/machine-id").stdout
    assert box.shell("cat /etc/shadow /etc/machine-id").stdout == ""


def test_descriptors_of_the_host_are_not_there(box: Sandbox) -> None:
    listing = box.shell("ls -l /proc/1/fd | sed 's/.*-> //'").stdout.split()
    others = [
        entry
        for entry in listing
        if entry not in ("/dev/null", "0") and not entry.startswith(("pipe:", "anon_inode"))
    ]
    assert len([entry for entry in others if entry.startswith("socket:")]) <= 1, listing
    assert not [
        entry
        for entry in others
        if entry.startswith("/") and not entry.startswith(("/tmp/#", "/memfd:", "/proc"))
    ]


def test_there_is_no_network_but_loopback(box: Sandbox) -> None:
    assert box.run_code("import socket; [name for _, name in socket.if_nameindex()]").value == "['lo']"
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        addresses = {
            "127.0.0.1",
            *socket.gethostbyname_ex(socket.gethostname())[2],
            "8.8.8.8",
            "169.254.169.254",
        }
        code = (
            f"import socket\nhits = []\nfor a in {sorted(addresses)!r}:\n    s = socket.socket(); s.settimeout(1)\n"
            f"    if s.connect_ex((a, {port})) == 0: hits.append(a)\nhits"
        )
        assert box.run_code(code).value == "[]"
    assert box.run_code("import socket; socket.getaddrinfo('example.org', 80)").error is not None


def test_mounts_of_the_caller_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("given")
    (tmp_path / "deep").mkdir()
    with Sandbox.create(
        mounts=[str(tmp_path), (tmp_path / "data", "/mnt/file"), (tmp_path / "deep", "/usr/share/x")]
    ) as box:
        (copy,) = box.fork(1)
        for sandbox in (box, copy):
            assert sandbox.read_text(f"{tmp_path}/data") == sandbox.read_text("/mnt/file") == "given"
            for command in (
                f"echo x > {tmp_path}/data",
                f"rm {tmp_path}/data",
                "echo x > /mnt/file",
                "touch /usr/share/x/y",
            ):
                assert "Read-only" in sandbox.shell(command).stderr
            assert sandbox.shell(f"mount -o remount,rw {tmp_path}; umount {tmp_path}").exit_code != 0
            assert sandbox.shell(f"chmod 777 {tmp_path}; chown 1 {tmp_path}/data").exit_code != 0
        copy.terminate()
    assert (tmp_path / "data").read_text() == "given" and os.listdir(tmp_path / "deep") == []
    with pytest.raises(ValueError, match="at most"):
        Sandbox.create(mounts=[str(tmp_path)] * 1000)
    with pytest.raises(ValueError, match="target"):
        Sandbox.create(mounts=[(tmp_path, "../x")])


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_the_guest_s_own_process_can_t_make_them_writable(tmp_path: Path) -> None:
    """It has CAP_SYS_ADMIN in its user namespace, as a copy needs it; the mounts are its namespace's own."""
    (tmp_path / "data").write_text("given")
    attack = f"""
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
place = {str(tmp_path)!r}.encode()
for flags in (32 | 4096, 32, 4096, 4096 | 16384, 8192, 1 << 18, 32 | 4096 | 14, 0):
    assert libc.mount(b"/", place, None, flags, None) == -1, flags
    assert libc.mount(place, b"/mnt", None, flags, None) == -1, flags
clear = struct.pack("QQQQ", 0, 1, 0, 0)
fd = os.open(place, os.O_PATH)
assert libc.syscall(442, -100, place, 0, clear, 32) == libc.syscall(442, fd, b"", 0x1000, clear, 32) == -1
assert libc.syscall(428, -100, place, 1) == libc.syscall(428, fd, b"", 0x1001) == -1
assert libc.syscall(433, -100, place, 0) == libc.syscall(430, b"tmpfs", 0) == libc.syscall(467, -100, place, 1, 0, 0) == -1
libc.unshare(0x20000)
assert libc.mount(None, place, None, 32 | 4096, None) == -1
try:
    open(place + b"/data", "w").write("hacked")
except OSError as error:
    print(error.errno)
"""
    with Sandbox.create(mounts=[str(tmp_path)]) as box:
        (copy,) = box.fork(1)
        with copy:
            for sandbox in (box, copy):
                result = sandbox.run_code(attack)
                assert result.error is None and result.stdout == "30\n", result
    assert (tmp_path / "data").read_text() == "given"


def test_copies_have_all_of_many_mounts(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with Sandbox.create(mounts=[(tmp_path, f"/mnt/{i}") for i in range(100)]) as box:
        (copy,) = box.fork(1)
        with copy:
            assert copy.shell("cat /mnt/*/f").stdout == box.shell("cat /mnt/*/f").stdout == "x" * 100


def test_the_system_s_folders_are_written_in_the_sandbox_only(box: Sandbox) -> None:
    name = f"sandbox-gym-test-{secrets.token_hex(4)}"
    folders = [
        folder for folder in ("/usr/bin", "/usr/lib", "/etc", sys.prefix, "/bin") if os.path.isdir(folder)
    ]
    for folder in folders:
        box.shell(f"echo x > {folder}/{name}")
        assert not os.path.exists(f"{folder}/{name}")
    box.shell("rm -rf /usr/share/doc /bin/ls")
    assert os.path.exists("/bin/ls")


# ---- the kernel -----------------------------------------------------------------------------------------------------

_SYSCALL = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall.restype = ctypes.c_long\n"
_DENIED = {
    "keyctl": (250, "0, 0, 0, 0, 0"),
    "add_key": (248, "b'user', b'k', b'v', 1, -3"),
    "bpf": (321, "0, 0, 0"),
    "io_uring_setup": (425, "8, 0"),
    "userfaultfd": (323, "0"),
    "perf_event_open": (298, "0, 0, -1, -1, 0"),
    "init_module": (175, "0, 0, b''"),
    "kexec_load": (246, "0, 0, 0, 0"),
    "reboot": (169, "0xfee1dead, 672274793, 0x4321fedc, 0"),
    "open_by_handle_at": (304, "-100, b'\\0' * 128, 0"),
    "settimeofday": (164, "0, 0"),
    "unshare(NEWUSER)": (272, "0x10000000"),
    "clone(NEWUSER)": (56, "0x10000000 | 17, 0, 0, 0, 0"),
    "syslog": (103, "3, 0, 0"),
    "swapon": (167, "b'/x', 0"),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
@pytest.mark.parametrize("call", _DENIED)
def test_system_calls_that_are_denied(box: Sandbox, call: str) -> None:
    number, arguments = _DENIED[call]
    code = _SYSCALL + f"(libc.syscall({number}, {arguments}), ctypes.get_errno())"
    assert box.run_code(code).value == "(-1, 1)"
    assert (
        box.exec(["python3", "-c", code.replace("(libc", "print(libc").replace("())", "())")]).stdout.strip()
        == "-1 1"
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="int 0x80 is x86's")
def test_other_architectures_calls_are_no_way_round(box: Sandbox) -> None:
    assert (
        box.run_code(_SYSCALL + "(libc.syscall(0x40000000 + 250, 0, 0, 0, 0, 0), ctypes.get_errno())").value
        == "(-1, 38)"
    )
    assert box.run_code(_SYSCALL + "(libc.syscall(435, 0, 0), ctypes.get_errno())").value == "(-1, 38)"


@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs none /mnt",
        "mount -t proc proc /mnt",
        "mount --bind /etc /mnt",
        "umount /proc",
        "unshare -r true",
        "unshare -m true",
        "nsenter -t 1 -n true",
        "chroot /workspace true",
        "mknod /tmp/sda b 8 0",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo c > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/core_pattern",
        "insmod /no.ko",
        "dmesg",
        "date -s 2000-01-01",
        "ip link add dummy0 type dummy",
        "renice -20 $$",
    ],
)
def test_commands_that_need_more_than_they_have(box: Sandbox, command: str) -> None:
    result = box.shell(f"command -v {command.split(maxsplit=1)[0]} >/dev/null || exit 99; {command}")
    assert result.exit_code != 0, result
    assert box.shell("true").ok


def test_guest_root_is_nobody_on_the_host(box: Sandbox) -> None:
    box.shell("sleep 60 &")
    pid = next(row["pid"] for row in box._backend.list() if row["id"] == box.id)
    assert pid
    users: set[str] = set()
    deadline = time.monotonic() + 10
    while not users and time.monotonic() < deadline:  # the shell's child may not have become the program yet
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and Path(f"/proc/{entry}/comm").read_text() == "sleep\n":
                    status = Path(f"/proc/{entry}/status").read_text()
                    if "NSpid" in status and len(status.split("NSpid:")[1].split("\n")[0].split()) > 2:
                        users.add(status.split("Uid:")[1].split()[0])
            except OSError:
                continue
    assert users and "0" not in users
    assert box.shell("id -u; cat /proc/self/uid_map").stdout.split()[0] == "0"
    assert "NoNewPrivs:\t1" in box.read_text("/proc/self/status")


def test_cells_and_commands_have_few_capabilities(box: Sandbox) -> None:
    def held(status: str) -> int:
        lines = dict(line.split(":\t") for line in status.splitlines())
        return int(lines["CapEff"], 16) | int(lines["CapPrm"], 16)

    docker = 0x00000000A80425FB  # what Docker keeps
    (copy,) = box.fork(1)
    with copy:
        for sandbox in (box, copy):
            assert held(sandbox.shell("cat /proc/self/status").stdout) == docker
            # A copy mounts its root and sets back its clocks.
            assert held(sandbox.read_text("/proc/self/status")) == docker | 1 << 21 | 1 << 25


def test_signals_stay_inside(box: Sandbox) -> None:
    host = subprocess.Popen(["sleep", "60"])
    try:
        box.shell(
            f"kill -9 {host.pid}; kill -9 {os.getpid()} {os.getppid()}; kill -9 1; kill -9 -1; pkill -9 sleep; true"
        )
        assert host.poll() is None
    finally:
        host.kill()
        host.wait()
    assert box.run_code("1").ok
