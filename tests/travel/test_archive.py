"""One file that any other client restores from, and none that was changed by as much as a bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from sandbox_gym import archive
from sandbox_gym.archive import Manifest, Part
from sandbox_gym.errors import SandboxError, SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot

from .conftest import Client, said

# ---- there and back -----------------------------------------------------------------------------------------------


def test_a_fork_snapshot_in_another_client(box: Sandbox, client: Client, tmp_path: Path) -> None:
    box.run_code("import random; state = {'n': 41}; random.seed(7)")
    box.shell("echo disk > kept; ln kept other; rm -r /usr/share/doc; mkdir -p /usr/share/doc/own")
    snapshot = box.snapshot("label")
    assert snapshot.engine == "fork"
    box.run_code("state['n'] = 0")
    snapshot.save(tmp_path / "x.sbx")
    assert os.listdir(tmp_path) == ["x.sbx"]
    assert stat.S_IMODE((tmp_path / "x.sbx").stat().st_mode) == 0o600
    expected = box.run_code("random.random()").value
    other = client(
        f"""
snap = sg.Snapshot.load("file://{tmp_path}/x.sbx")
assert (snap.engine, snap.label, snap.parent) == ("criu", "label", None), snap
for box in (sg.Sandbox.restore(snap), sg.Sandbox.restore(snap)):
    print(box.run_code("state['n'] += 1; state['n'], random.random()").value)
    print(box.shell("cat other; stat -c %h kept; ls /usr/share/doc; ls /usr/share | wc -l").stdout)
    again = box.snapshot()  # it goes on as any other
    assert again.engine == "fork", again.why
snap.delete()
"""
    )
    count = len(os.listdir("/usr/share"))
    assert said(other).split() == ["(42,", f"{expected})", "disk", "2", "own", f"{count}"] * 2


def test_a_tree_with_threads_and_a_server_in_another_client(
    box: Sandbox, client: Client, tmp_path: Path
) -> None:
    box.write_file("index.html", "served")
    box.shell("python3 -m http.server 8000 >/dev/null 2>&1 &")
    box.run_code(
        "import threading, time, urllib.request\n"
        "def fetch(): return urllib.request.urlopen('http://127.0.0.1:8000/index.html', timeout=5).read()\n"
        "ticks = 0\ndef tick():\n    global ticks\n    while True:\n        ticks += 1\n        time.sleep(0.005)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "while True:\n    try: fetch(); break\n    except OSError: time.sleep(0.02)"
    )
    snapshot = box.snapshot()
    assert snapshot.engine == "criu"
    snapshot.save(str(tmp_path / "tree.sbx"))
    ticks = int(box.run_code("ticks").value or 0)
    snapshot.delete()
    other = client(
        f"""
box = sg.Sandbox.restore(sg.Snapshot.load({str(tmp_path / "tree.sbx")!r}))
first = int(box.run_code("ticks").value)
print(first, box.run_code("time.sleep(0.1); ticks").value, box.run_code("fetch()").value)
"""
    )
    first, later, page = said(other).split()
    assert 0 < int(first) <= ticks + 50 and int(later) > int(first)
    assert page == "b'served'"


def test_a_loaded_snapshot_is_saved_again(saved: Path, tmp_path: Path) -> None:
    first = Snapshot.load(saved)
    first.save(tmp_path / "again.sbx")
    first.delete()
    with open(saved, "rb") as one, open(tmp_path / "again.sbx", "rb") as two:
        assert archive.read(one)[0].parts == archive.read(two)[0].parts


def test_a_url_of_fsspec(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.snapshot()
    snapshot.save("memory://some/x.sbx")
    snapshot.delete()
    loaded = Snapshot.load("memory://some/x.sbx")
    with Sandbox.restore(loaded) as copy:
        assert copy.run_code("x").value == "1"
    loaded.delete()
    fsspec.filesystem("memory").rm("some/x.sbx")
    with pytest.raises(FileNotFoundError):
        Snapshot.load("memory://some/x.sbx")


def test_the_same_disk_is_the_same_part(box: Sandbox, tmp_path: Path) -> None:
    """Layers are known by what is in them: a second snapshot shares all that it has in common with the first."""
    box.run_code("import os; open('large', 'wb').write(os.urandom(1 << 20))")
    parts = []
    for number in range(3):
        snapshot = box.snapshot()
        snapshot.save(tmp_path / "x.sbx")  # over the one before
        with open(tmp_path / "x.sbx", "rb") as file:
            parts.append(archive.read(file)[0].parts)
        snapshot.delete()
        box.shell(f"echo {number} > small")
    common = set(parts[0][1:])
    assert any(part.bytes > 1 << 20 for part in common)
    assert set(parts[2][1:]) > set(parts[1][1:]) > common
    assert parts[0][0] not in parts[1]  # memory is never quite the same


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(pristine: Snapshot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of several parts."""
    path = tmp_path_factory.mktemp("saved") / "x.sbx"
    with Sandbox.restore(pristine) as box:
        box.shell("echo 1 > one")
        first = box.snapshot()
        box.shell("echo 2 > two")
        snapshot = box.snapshot()
        snapshot.save(path)
        snapshot.delete()
        first.delete()
    with open(path, "rb") as file:
        assert len(archive.read(file)[0].parts) >= 3
    return path


def test_any_changed_byte_is_noticed(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    whole = saved.read_bytes()
    with open(saved, "rb") as file:
        manifest, blobs = archive.read(file)
    tail = archive._TAIL.size
    places = [0, 10, len(whole) - 1, len(whole) - tail, len(whole) - tail - 1, len(whole) - tail - 40]
    for blob in blobs:
        last = blob.part.stored_bytes - 1
        places += [blob.offset, blob.offset + last // 2, blob.offset + last]
    start = sum(part.stored_bytes for part in manifest.parts) + len(archive._HEAD)
    places += range(start, len(whole), 97)  # all over the manifest
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "x.sbx").write_bytes(damaged)
        with pytest.raises(SnapshotError, match=r"x\.sbx: it"):
            Snapshot.load(tmp_path / "x.sbx")


def test_whatever_is_cut_off_or_added_is_noticed(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    whole = saved.read_bytes()
    for wrong in (
        b"",
        whole[:5],
        whole[: len(whole) // 2],
        whole[:-1],
        whole[1:],
        whole[: -archive._TAIL.size],
        whole + b"\0",
        whole[:30] + whole[31:],
        whole[:30] + b"\0" + whole[30:],
        b"PK\3\4" + whole[4:],
        whole + whole,
    ):
        (tmp_path / "x.sbx").write_bytes(wrong)
        with pytest.raises(SnapshotError, match=r"x\.sbx: it"):
            Snapshot.load(tmp_path / "x.sbx")


def _rebuilt(
    saved: Path,
    target: Path,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    *,
    fields: Callable[[dict[str, Any]], object] = lambda fields: None,
    contents: Callable[[list[bytes]], object] = lambda contents: None,
) -> Path:
    """Another archive, with hashes that are right, of parts and a manifest that were tampered with."""
    with open(saved, "rb") as file:
        manifest, blobs = archive.read(file)
        stored = [b"".join(blob._stored()) for blob in blobs]
    contents(stored)
    sealed = json.loads(change(manifest).encode())["manifest"]
    fields(sealed)
    body = json.dumps(sealed, separators=(",", ":")).encode()
    block = b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    tail = archive._TAIL.pack(len(block), archive._END)
    target.write_bytes(archive._HEAD + b"".join(stored) + block + tail)
    return target


def _with(number: int, **values: Any) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        parts = list(manifest.parts)
        parts[number] = dataclasses.replace(parts[number], **values)
        return dataclasses.replace(manifest, parts=tuple(parts))

    return change


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


_WRONG_FIELDS = {
    "another version": (_set("version", value=2), "version 2"),
    "another format": (_set("format", value="tar"), "'tar'"),
    "no parts": (_set("parts", value=[]), "manifest"),
    "parts of another kind": (_set("parts", value=[1]), "manifest"),
    "a part with more to it": (_set("parts", 0, "more", value=1), "manifest"),
    "a hash that is a path": (_set("parts", 0, "sha256", value="../../etc/passwd"), "manifest"),
    "a huge part": (_set("parts", 0, "stored_bytes", value=1 << 60), "not as long"),
    "a negative part": (_set("parts", 0, "stored_bytes", value=-1), "manifest"),
    "a size that is none": (_set("parts", 0, "bytes", value=1.5), "manifest"),
    "another number of parts": (_set("state", "parts", value=1), "manifest"),
    "a spec of none": (_set("state", "spec", value=[]), "known"),
    "a spec with more to it": (_set("state", "spec", "more", value=1), "known"),
    "no facts": (_set("facts", value={}), "known"),
    "facts of another kind": (_set("facts", "python", value=3), "known"),
    "a mount more": (_set("state", "attached", value=["/data"]), "disks"),
}


@pytest.mark.parametrize("what", _WRONG_FIELDS)
def test_a_manifest_that_tells_another_story(
    saved: Path, tmp_path: Path, what: str, nothing_left: None
) -> None:
    fields, words = _WRONG_FIELDS[what]
    place = _rebuilt(saved, tmp_path / "x.sbx", fields=fields)
    with pytest.raises(SnapshotError, match=words):
        Snapshot.load(place)


def _zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def test_parts_that_are_not_what_the_manifest_says(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    """Found only while they are unpacked: what was made until then goes again."""
    with open(saved, "rb") as file:
        parts = archive.read(file)[0].parts
    place = tmp_path / "x.sbx"
    for number, size in ((0, parts[0].bytes + 1), (1, parts[1].bytes - 1), (len(parts) - 1, 1 << 60)):
        _rebuilt(saved, place, _with(number, bytes=size))
        with pytest.raises(SnapshotError, match="holds not as much"):
            Snapshot.load(place)
    for content, words in (
        (b"no compressed data", "decompressed"),
        (_zstd(b""), "unpacked"),
        (_zstd(b"\0" * 5000), "unpacked"),
        (_zstd(b"\xff" * 5000), "unpacked"),
    ):
        forged = Part(hashlib.sha256(content).hexdigest(), len(content), 5000 if b"data" in content else 0)
        if not forged.bytes:
            forged = dataclasses.replace(forged, bytes=len(zstandard.ZstdDecompressor().decompress(content)))

        def replace(contents: list[bytes], content: bytes = content) -> None:
            contents[1] = content

        _rebuilt(saved, place, _with(1, **dataclasses.asdict(forged)), contents=replace)
        with pytest.raises(SnapshotError, match=words):
            Snapshot.load(place)


def test_parts_in_another_order(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    def swap(contents: list[bytes]) -> None:
        contents[0], contents[1] = contents[1], contents[0]

    with pytest.raises(SnapshotError, match="not what was written"):
        Snapshot.load(_rebuilt(saved, tmp_path / "x.sbx", contents=swap))


# ---- another machine ------------------------------------------------------------------------------------------------

_ELSEWHERE = {
    "processor": (("cpu_flags",), ["sse2", "avx9001"], "lacks avx9001"),
    "machine": (("machine",), "riscv64", "made on riscv64"),
    "criu": (("criu",), "99.1", "criu 99.1 wrote it"),
    "guest": (("guest",), "0" * 64, "other code inside the guest"),
    "version": (("python", "version"), "3.99.0", r"version is 3\.99\.0"),
    "prefix": (("python", "prefix"), "/opt/else", "prefix is /opt/else"),
    "build": (("python", "files"), {"/lib/libc.so.6": "0"}, r"/lib/libc\.so\.6 is another build"),
}


@pytest.mark.parametrize("what", _ELSEWHERE)
def test_what_this_machine_lacks_is_named(saved: Path, tmp_path: Path, what: str, nothing_left: None) -> None:
    path, value, words = _ELSEWHERE[what]
    place = _rebuilt(saved, tmp_path / "x.sbx", fields=_set("facts", *path, value=value))
    with pytest.raises(SnapshotError, match=words):
        Snapshot.load(place)


def test_folders_that_are_not_here(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    place = tmp_path / "x.sbx"
    mount = {"source": "/no/such/data", "target": "/data"}
    for field, value in (("mounts", [mount]), ("python_path", ["/no/such/data"])):
        _rebuilt(saved, place, fields=_set("state", "spec", field, value=value))
        with pytest.raises(SnapshotError, match=r"/no/such/data.*is not here"):
            Snapshot.load(place)
    _rebuilt(saved, place, fields=_set("state", "spec", "rootfs", value="/no/such/root"))
    with pytest.raises(SnapshotError, match="/no/such/root is not here"):
        Snapshot.load(place)


# ---- saving fails ---------------------------------------------------------------------------------------------------


@pytest.fixture
def large(box: Sandbox) -> Iterator[Snapshot]:
    """80 MB that don't compress."""
    box.run_code("import os; large = os.urandom(80 << 20)")
    snapshot = box.snapshot(engine="criu")
    yield snapshot
    snapshot.delete()


def test_a_full_disk_leaves_nothing(large: Snapshot, tmp_path: Path, nothing_left: None) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "none", str(tmp_path)], check=True, timeout=10)
    try:
        with pytest.raises(OSError, match="No space left"):
            large.save(tmp_path / "x.sbx")
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=10)
    with pytest.raises(FileNotFoundError):
        large.save(tmp_path / "missing/x.sbx")


def test_too_little_time(large: Snapshot, tmp_path: Path, nothing_left: None) -> None:
    with pytest.raises(SandboxError, match=r"within 0\.0"):
        large.save(tmp_path / "x.sbx", timeout=0.02)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_nameless_files(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot.load(saved)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel sees that doesn't know the flag
    snapshot.save(tmp_path / "x.sbx")
    assert os.listdir(tmp_path) == ["x.sbx"]
    with pytest.raises(SandboxError):
        snapshot.save(tmp_path / "y.sbx", timeout=1e-6)
    assert os.listdir(tmp_path) == ["x.sbx"]
    snapshot.delete()


def test_a_client_that_is_killed_in_the_middle_leaves_no_file(client: Client, tmp_path: Path) -> None:
    process = client(
        f"""
box = sg.Sandbox.create()
box.run_code("import os; large = os.urandom(100 << 20)")
print("go", flush=True)
box.snapshot(engine="criu").save({str(tmp_path / "x.sbx")!r})
"""
    )
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 30
    while not _writes_in(process.pid, tmp_path, at_least=1 << 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert os.listdir(tmp_path) == []


def _writes_in(pid: int, folder: Path, *, at_least: int) -> bool:
    """Whether a process has a file of that size open there."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"{folder}/") and fd.stat().st_size >= at_least:
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def test_what_can_not_be_saved(box: Sandbox, tmp_path: Path) -> None:
    snapshot = box.snapshot()
    snapshot.delete()
    with pytest.raises(SnapshotError, match="deleted"):
        snapshot.save(tmp_path / "x.sbx")
    with pytest.raises(ValueError, match="other-host"):
        Snapshot.load("file://other-host/x.sbx")
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none.sbx")
    with pytest.raises(SnapshotError, match=r"no archive|too short"):
        Snapshot.load(sys.executable)
