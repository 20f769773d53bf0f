"""Files in and out, and archives of a guest that is up to no good."""

# ruff: noqa: E501, PT012  (programs for the guest are text)
from __future__ import annotations

import errno
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gym import _transfer
from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20
_ENDLESS = "a._HANDLERS[a.Op.READ] = lambda path, offset, size: {'data': b'x', 'end': False}"


def test_write_and_read(box: Sandbox) -> None:
    box.write_file("a/b/c.txt", "text\n")
    assert box.read_text("/workspace/a/b/c.txt") == "text\n"
    assert box.shell("cat a/b/c.txt").stdout == "text\n"
    box.write_file("a/b/c.txt", b"")
    assert box.read_file("a/b/c.txt") == b""
    box.write_file("run.sh", "#!/bin/sh\necho ran", mode=0o755)
    assert box.shell("./run.sh").stdout == "ran\n"


def test_large_files_travel_in_pieces(box: Sandbox) -> None:
    data = os.urandom(MIB) * 20 + b"end"
    box.write_file("big", data)
    assert box.read_file("big") == data
    with pytest.raises(LimitExceeded, match="big is larger than 1000"):
        box.read_file("big", max_bytes=1000)


def test_an_endless_file_is_bounded(box: Sandbox) -> None:
    with pytest.raises(LimitExceeded):
        box.read_file("/dev/zero", max_bytes=20 * MIB)
    assert box.shell("true").ok


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/no/such", FileNotFoundError),
        ("/etc", IsADirectoryError),
        ("/etc/passwd/x", NotADirectoryError),
        ("", FileNotFoundError),
        ("x" * 300, OSError),
        ("a\0b", ValueError),
    ],
)
def test_errors_over_files_are_the_usual_ones(box: Sandbox, path: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=box.name) as caught:
        box.read_file(path)
    if isinstance(caught.value, OSError):
        assert caught.value.errno
    assert box.shell("true").ok


def test_a_named_pipe_hangs_nobody(box: Sandbox) -> None:
    box.shell("mkfifo pipe")
    started = time.monotonic()
    with pytest.raises(OSError, match="pipe"):
        box.read_file("pipe")
    with pytest.raises(OSError, match=box.name):
        box.write_file("pipe", b"x")
    assert time.monotonic() - started < 1
    assert box.status == "running"


def test_list_files(box: Sandbox) -> None:
    box.shell(
        "mkdir -p d/e; echo hello > d/f; ln -s /etc/passwd d/l; mkfifo d/p; echo x > d/e/g; chmod 640 d/f"
    )
    found = {entry.path: entry for entry in box.list_files("d")}
    assert list(found) == ["d/e", "d/f", "d/l", "d/p"]
    assert [entry.kind for entry in found.values()] == ["dir", "file", "link", "other"]
    assert [entry.target for entry in found.values()] == ["", "", "/etc/passwd", ""]
    assert (
        found["d/f"].size == 6 and found["d/f"].mode == 0o640 and abs(found["d/f"].mtime - time.time()) < 60
    )
    assert "d/e/g" in [entry.path for entry in box.list_files("d", recursive=True)]
    with pytest.raises(FileNotFoundError):
        box.list_files("nowhere")
    with pytest.raises(ValueError, match="more than 2"):
        box.list_files("d", max_entries=2)


def test_what_vanishes_while_it_is_listed_is_left_out(box: Sandbox) -> None:
    box.shell("mkdir -p d/folder d/other d/stays; touch d/file d/other/x d/stays/x; ln -s x d/link")
    made = box.run_code("""
import os
real = os.scandir
def scandir(path):
    if path == "d/folder":
        os.rmdir(path)
    if path == "d/other":
        os.unlink("d/other/x")
        os.rmdir(path)
        open(path, "w").close()
    entries = list(real(path))
    if path == "d":
        os.unlink("d/file")
        os.unlink("d/link")
    return entries
os.scandir = scandir
""")
    assert made.ok, made
    found = [entry.path for entry in box.list_files("d", recursive=True)]
    assert found == ["d/folder", "d/other", "d/stays", "d/stays/x"]
    with pytest.raises(FileNotFoundError):
        box.list_files("d/folder", recursive=True)


def test_a_file_that_never_ends_ends_by_its_timeout(box: Sandbox) -> None:
    """Its guest answers each call at once, with one byte."""
    assert box.run_code(f"import sandbox_gym_guest.agent as a\n{_ENDLESS}").ok
    with pytest.raises(SandboxTimeout, match="reading f took longer than"):
        box.read_file("f", timeout=0.2)
    assert box.status == "running"


def test_a_listing_that_is_too_long_is_an_error_not_a_death(box: Sandbox) -> None:
    box.run_code("import os\nfor i in range(3000): open('f' * 200 + str(i), 'w').close()")
    assert len(box.list_files()) == 3000


def test_trees_go_up_and_come_down(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a.bin").write_bytes(os.urandom(9 * MIB))
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("sub/a.bin")
    box.upload(source, "/workspace/dst")
    assert box.shell("stat -c %a:%u dst/run; readlink dst/link").stdout == "755:0\nsub/a.bin\n"
    box.download("dst", tmp_path / "back")
    assert (tmp_path / "back/sub/a.bin").read_bytes() == (source / "sub/a.bin").read_bytes()
    assert (tmp_path / "back/link").is_symlink() and os.access(tmp_path / "back/run", os.X_OK)
    box.upload(source / "run", "/opt/one")
    box.download("/opt/one", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "#!/bin/sh\n"
    box.download(".", tmp_path / "dot")
    assert (tmp_path / "dot/dst/run").exists()
    box.shell("ln -s dst/run shortcut")
    box.download("shortcut", tmp_path / "through")
    assert (tmp_path / "through").read_text() == "#!/bin/sh\n"
    (tmp_path / "empty").mkdir()
    box.upload(tmp_path / "empty", "nothing")
    assert box.list_files("nothing") == []


def test_transfers_that_fail_leave_no_half(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        box.upload(tmp_path / "none", "x")
    with pytest.raises(FileNotFoundError):
        box.download("none", tmp_path / "x")
    box.shell("head -c 20000000 /dev/zero > zeros")
    with pytest.raises(LimitExceeded):
        box.download("zeros", tmp_path / "x", max_bytes=MIB)
    (tmp_path / "big").mkdir()
    (tmp_path / "big/data").write_bytes(os.urandom(20 * MIB))
    with pytest.raises(OSError, match=box.name):
        box.upload(tmp_path / "big", "/proc/nowhere")
    assert sorted(os.listdir(tmp_path)) == ["big"]
    (tmp_path / "small").mkdir()
    (tmp_path / "small/f").write_text("whole")
    box.upload(tmp_path / "small", "again")
    assert [entry.path for entry in box.list_files("again")] == ["again/f"]
    box.fork(1)[0].terminate()  # no spool is left open that would forbid a snapshot


# ---- archives of a hostile guest ------------------------------------------------------------------------------------


def _member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", size: int | None = None
) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data) if size is None else size, 0o7777
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


_DIR = _member("tree", tarfile.DIRTYPE)
_HOSTILE: dict[str, bytes] = {
    "absolute path": _DIR + _member("/tmp/sandbox-gym-escaped", data=b"x"),
    "parent path": _DIR + _member("tree/../../sandbox-gym-escaped", data=b"x"),
    "another root": _member("other", data=b"x"),
    "beside the root": _DIR + _member("other", data=b"x"),
    "absolute link": _DIR + _member("tree/l", tarfile.SYMTYPE, "/etc/passwd"),
    "link out": _DIR + _member("tree/l", tarfile.SYMTYPE, "../../x"),
    "link out later on": _DIR + _member("tree/l", tarfile.SYMTYPE, "a/../../../x"),
    "root as link": _member("tree", tarfile.SYMTYPE, ".."),
    "link through link": _DIR
    + _member("tree/a", tarfile.SYMTYPE, ".")
    + _member("tree/b", tarfile.SYMTYPE, "a/.."),
    "write through link": _DIR
    + _member("tree/d", tarfile.DIRTYPE)
    + _member("tree/l", tarfile.SYMTYPE, "d")
    + _member("tree/l/f", data=b"x"),
    "write over link": _DIR + _member("tree/l", tarfile.SYMTYPE, "d") + _member("tree/l", data=b"x"),
    "hard link out": _DIR + _member("tree/h", tarfile.LNKTYPE, "/etc/passwd"),
    "hard link up": _DIR + _member("tree/h", tarfile.LNKTYPE, "tree/../../../etc/passwd"),
    "hard link to a link": _DIR
    + _member("tree/l", tarfile.SYMTYPE, "d")
    + _member("tree/h", tarfile.LNKTYPE, "tree/l"),
    "device": _DIR + _member("tree/d", tarfile.CHRTYPE),
    "named pipe": _DIR + _member("tree/p", tarfile.FIFOTYPE),
    "file twice": _DIR + _member("tree/f", data=b"1") + _member("tree/f", data=b"2"),
    "file as folder": _DIR + _member("tree/f", data=b"1") + _member("tree/f/g", data=b"2"),
    "short file": _DIR + _member("tree/f", data=b"x", size=5000),
    "empty": b"",
    "garbage": os.urandom(2048),
}


@pytest.mark.parametrize("what", _HOSTILE)
def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, what: str) -> None:
    (tmp_path / "home").mkdir()
    target = tmp_path / "home" / "target"
    spool = io.BytesIO(_HOSTILE[what] + bytes(1024))
    try:
        _transfer.unpack(spool, target, max_bytes=MIB, name="evil")
    except (ProtocolError, OSError):
        pass
    else:  # harmless leftovers of it may be there, all of them inside
        assert what in ("write through link", "write over link")
    assert os.listdir(tmp_path) == ["home"]
    assert set(os.listdir(tmp_path / "home")) <= {"target"}
    assert not os.path.exists("/tmp/sandbox-gym-escaped")
    for folder, folders, files in os.walk(target):
        for name in (*folders, *files):
            assert os.path.realpath(os.path.join(folder, name)).startswith(str(tmp_path / "home"))


def test_huge_sizes_are_refused_before_they_are_written(tmp_path: Path) -> None:
    huge = tarfile.TarInfo("tree")
    huge.size = 1 << 45
    with pytest.raises(LimitExceeded):
        _transfer.unpack(
            io.BytesIO(huge.tobuf() + bytes(4096)), tmp_path / "t", max_bytes=1 << 30, name="evil"
        )
    sparse = tarfile.TarInfo("tree")
    sparse.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 40)}
    sparse.pax_headers["GNU.sparse.map"] = "0,0"
    with pytest.raises((LimitExceeded, ProtocolError)):
        _transfer.unpack(
            io.BytesIO(sparse.tobuf(tarfile.PAX_FORMAT) + bytes(4096)),
            tmp_path / "t",
            max_bytes=1 << 30,
            name="evil",
        )
    assert os.listdir(tmp_path) == []


def test_set_user_id_does_not_come_down(tmp_path: Path) -> None:
    _transfer.unpack(
        io.BytesIO(_member("tree", data=b"#!/bin/sh\n") + bytes(1024)),
        tmp_path / "t",
        max_bytes=MIB,
        name="evil",
    )
    assert (tmp_path / "t").stat().st_mode & 0o7777 == 0o755


def test_a_live_guest_that_packs_evil(box: Sandbox, tmp_path: Path) -> None:
    """The guest's own code is the attacker's: it answers a download with an archive of its choice."""
    code = (
        "import sandbox_gym_guest.agent as f, io, tarfile\nb = io.BytesIO()\nt = tarfile.open(fileobj=b, mode='w')\n"
        "i = tarfile.TarInfo('../../escaped'); i.size = 1; t.addfile(i, io.BytesIO(b'x')); t.close()\n"
        "from sandbox_gym_guest.wire import Op\nf._HANDLERS[Op.PACK] = lambda path, offset: {'data': b.getvalue(), 'end': True}"
    )
    assert box.run_code(code).ok
    (tmp_path / "in").mkdir()
    with pytest.raises(ProtocolError, match=box.name):
        box.download("x", tmp_path / "in/t")
    assert os.listdir(tmp_path) == ["in"] and os.listdir(tmp_path / "in") == []


@pytest.mark.parametrize(
    "answer",
    [
        "None",
        "{'data': 'text', 'end': True}",
        "{'data': b'', 'end': False}",
        "{}",
        "[1]",
        "{'data': b'x', 'end': 1}",
    ],
)
@pytest.mark.parametrize("op", ["READ", "PACK"])
def test_a_live_guest_that_answers_nonsense(box: Sandbox, tmp_path: Path, op: str, answer: str) -> None:
    box.run_code(
        "import sandbox_gym_guest.agent as f\nfrom sandbox_gym_guest.wire import Op\n"
        f"f._HANDLERS[Op.{op}] = lambda *a, **k: {answer}"
    )
    calls: dict[str, Callable[[], object]] = {
        "READ": lambda: box.read_file("x"),
        "PACK": lambda: box.download("x", tmp_path / "t"),
    }
    with pytest.raises(ProtocolError, match=box.name):
        calls[op]()
    assert box.status == "dead"


def test_a_full_disk_is_an_error_and_can_be_cleaned(box: Sandbox) -> None:
    with pytest.raises(OSError, match=r"No space|quota") as caught:
        for i in range(40):
            box.write_file(f"fill{i}", os.urandom(8 * MIB))
    assert caught.value.errno in (errno.ENOSPC, errno.EDQUOT)
    assert box.run_code("print('still'); 1 + 1").stdout == "still\n"
    result = box.shell("echo x > more; cat more; head -c 9000000 /dev/zero > more2")
    assert result.exit_code != 0 and ("quota" in result.stderr or "space" in result.stderr)
    assert box.shell("rm -f fill* more*").ok
    box.write_file("after", bytes(8 * MIB))
    assert len(box.read_file("after")) == 8 * MIB
