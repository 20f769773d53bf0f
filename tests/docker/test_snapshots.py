"""Checkpoints and commits: of one instant, restored many times at once, in place, chained, and given up."""

from __future__ import annotations

import glob
import re
import textwrap
import time
from pathlib import Path

import pytest

from sandbox_gym.backends.docker import owners
from sandbox_gym.backends.docker.owners import CACHE
from sandbox_gym.errors import BackendUnavailable, SandboxDied, SnapshotError
from sandbox_gym.images import store
from sandbox_gym.images.image import Image
from sandbox_gym.sandbox import Sandbox
from tests import dockerd
from tests.docker.conftest import a_folder, backend, end_backends, until, using
from tests.dockerd import Dockerd
from tests.images.making import docker_save

_SERVER = """
import socket
s = socket.create_server(('127.0.0.1', 7000))
while True:
    c, _ = s.accept()
    n = 0
    while c.recv(99):
        n += 1
        c.sendall(str(n).encode())
"""


def test_copies_are_alike_and_sealed(box: Sandbox) -> None:
    unpacked = set(glob.glob("/tmp/ctrd-checkpoint*"))  # which have a guest's memory
    box.run_code("import random; random.seed(7); x = [1]")
    box.write_file("/workspace/f", "before")
    snapshot = box.snapshot()
    assert (snapshot.engine, snapshot.memory_bytes > 1 << 20) == ("criu", True)
    box.run_code("x.append(2)")
    box.write_file("/workspace/f", "after")
    copies = Sandbox.restore_many(snapshot, 4)
    try:
        assert {copy.run_code("x, random.random()").value for copy in copies} == {
            box.run_code("random.seed(7); [1], random.random()").value
        }
        assert {copy.read_text("/workspace/f") for copy in copies} == {"before"}
        for number, copy in enumerate(copies):
            copy.run_code(f"x.append({number}); open('/workspace/f', 'w').write('{number}')")
        assert [copy.run_code("x[-1], open('/workspace/f').read()").value for copy in copies] == [
            f"({n}, '{n}')" for n in range(4)
        ]
        assert box.run_code("x").value == "[1, 2]" and box.read_text("/workspace/f") == "after"
        assert set(glob.glob("/tmp/ctrd-checkpoint*")) <= unpacked
    finally:
        for copy in copies:
            copy.terminate()


def test_memory_and_disk_are_of_one_instant(box: Sandbox) -> None:
    """A thread counts in memory, and after that on disk. A copy's memory tells how far it was at the instant: it has
    counted nothing between that and its own start, which is later than the snapshot's end.
    """
    count = """
        import os, threading, time
        times = [0.0]
        def count():
            while True:
                times.append(time.time())
                with open('/workspace/new', 'w') as file:
                    file.write(str(len(times) - 1))
                os.rename('/workspace/new', '/workspace/count')
        threading.Thread(target=count, daemon=True).start()
    """
    assert box.run_code(textwrap.dedent(count)).ok
    snapshot = box.snapshot()
    taken = time.time()
    with Sandbox.restore(snapshot) as copy:
        in_memory = int(copy.run_code(f"sum(0 < t < {taken} for t in times)").value or 0)
    shot = backend()._population.shots[snapshot.id]
    layers = backend()._daemon.inspect(shot.store)  # of what the sandbox was made of: the commit has one more
    image = backend()._daemon.ask("GET", f"/images/{shot.image}/json")["GraphDriver"]["Data"]
    assert layers["Image"] != shot.image
    on_disk = int(Path(image["UpperDir"], "workspace/count").read_text())
    assert in_memory > 10 and in_memory - on_disk in (0, 1)


def test_processes_pipes_and_loopback_connections_go_along(box: Sandbox) -> None:
    box.write_file("/workspace/server.py", _SERVER)
    box.start(["python3", "/workspace/server.py"])
    box.run_code("import socket, time")
    connect = """
        c = None
        while c is None:
            try:
                c = socket.create_connection(('127.0.0.1', 7000), 5)
            except OSError:
                time.sleep(.01)
    """
    assert box.run_code(textwrap.dedent(connect)).ok
    talk = "c.sendall(b'x'); c.recv(9)"
    assert box.run_code(talk).value == "b'1'"
    copies = box.fork(2)
    for copy in copies:
        assert copy.run_code(talk).value == "b'2'"
        assert [process.argv[0] for process in copy.processes()] == ["python3"]
    for copy in copies:
        copy.terminate()
    assert box.run_code(talk).value == "b'2'"


def test_a_session_goes_along(box: Sandbox) -> None:
    box.session().run("cd /tmp; export A=1")
    with box.fork(1)[0] as copy:
        assert copy.session().run("echo $A $PWD").stdout == "1 /tmp\n"


def test_rewind_in_place(box: Sandbox) -> None:
    box.run_code("x = 1")
    box.checkpoint("first")
    name, container = box.name, backend()._population.boxes[box.id].container
    box.run_code("x = 2")
    box.rewind("first")
    assert box.run_code("x").value == "1" and box.name == name
    assert backend()._population.boxes[box.id].container != container
    assert len(backend()._daemon.containers(f"sandbox-gym.id={box.id}")) == 1
    with pytest.raises(SandboxDied, match="exit code 3"):
        box.run_code("import os; os._exit(3)")
    box.rewind()
    assert box.run_code("x").value == "1"


def test_generations(box: Sandbox) -> None:
    copies = [box]
    for generation in range(3):
        copies[-1].run_code(f"x = {generation}; open(f'/workspace/{{x}}', 'w').close()")
        copies.append(copies[-1].fork(1)[0])
    assert copies[-1].run_code("x").value == "2"
    assert sorted(file.path for file in copies[-1].list_files("/workspace")) == [
        f"/workspace/{n}" for n in range(3)
    ]
    for copy in copies[1:]:
        copy.terminate()


def test_freeze_makes_a_snapshot_of_the_sandbox_itself(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.freeze()
    assert not any(row["id"] == box.id for row in backend().list())
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("x").value == "1"


def test_the_disk_alone(box: Sandbox) -> None:
    box.write_file("/workspace/f", "kept")
    box.run_code("x = 1")
    snapshot = box.snapshot(scope="disk")
    assert (snapshot.engine, snapshot.memory_bytes) == ("disk", 0)
    with Sandbox.restore(snapshot) as copy:
        assert copy.read_text("/workspace/f") == "kept"
        error = copy.run_code("x").error
        assert error is not None and error.type == "NameError"


def test_native_captures_no_disk_alone() -> None:
    with Sandbox.create() as native, pytest.raises(SnapshotError, match="captures memory too: leave scope"):
        native.snapshot(scope="disk")


def test_what_no_engine_does_is_an_error(box: Sandbox) -> None:
    with pytest.raises(SnapshotError, match="no fork engine"):
        box.snapshot(engine="fork")
    with pytest.raises(ValueError, match="'full' or 'disk'"):
        box.snapshot(scope="half")  # type: ignore[arg-type]
    snapshot = box.snapshot()
    snapshot.delete()
    with pytest.raises(SnapshotError, match="was deleted"):
        Sandbox.restore(snapshot)
    with pytest.raises(SnapshotError, match="take another"):
        backend().restore(snapshot.id, names=[None], timeout=10)


def test_all_or_none(box: Sandbox) -> None:
    snapshot = box.snapshot()
    before = backend().list()
    # One file of the checkpoint is damaged: every copy fails, and nothing of them stays.
    store = backend()._population.shots[snapshot.id].store
    folder = Path(backend()._maker.checkpoints.folder(store), "sandbox")
    (folder / "core-1.img").write_bytes(b"damaged")
    with pytest.raises(SnapshotError, match="criu"):
        Sandbox.restore_many(snapshot, 3)
    assert [row["id"] for row in backend().list()] == [row["id"] for row in before] == [box.id]
    assert len(backend()._daemon.containers("sandbox-gym.kind=sandbox")) == 1


def test_a_state_that_criu_refuses_is_named(box: Sandbox) -> None:
    ring = "import ctypes; ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))"
    fd = "import os, socket; s = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)"
    made = box.run_code(ring).value not in (None, "-1") or box.run_code(fd).ok
    assert made, "neither of what criu can't capture can be had here"
    with pytest.raises(SnapshotError, match=r"criu.*Error"):
        box.snapshot()
    assert box.run_code("6 * 7").value == "42"  # and the sandbox goes on
    assert backend()._daemon.containers("sandbox-gym.kind=snapshot") == []


def test_release_takes_image_and_checkpoint_when_nothing_hangs_from_it(box: Sandbox) -> None:
    snapshot = box.snapshot()
    shot = backend()._population.shots[snapshot.id]
    copy = Sandbox.restore(snapshot)
    snapshot.delete()
    ids = [row["Id"] for row in backend()._daemon.containers("sandbox-gym.kind=snapshot")]
    assert shot.store not in ids
    assert not Path(backend()._maker.checkpoints.folder(shot.store)).exists()
    assert shot.image in [row["Id"] for row in backend()._daemon.images("sandbox-gym.kind=snapshot")]
    assert copy.run_code("1").ok
    copy.terminate()
    until(
        lambda: shot.image not in [row["Id"] for row in backend()._daemon.images("sandbox-gym.kind=snapshot")]
    )
    backend().release(snapshot.id)


def test_side_by_side(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.snapshot()
    start = time.monotonic()
    Sandbox.restore(snapshot).terminate()
    one = time.monotonic() - start
    start = time.monotonic()
    copies = Sandbox.restore_many(snapshot, 8)
    print(f"one and its end: {one:.2f} s, eight: {time.monotonic() - start:.2f} s")
    assert [copy.run_code("x").value for copy in copies] == ["1"] * 8
    for copy in copies:
        copy.terminate()


def test_a_daemon_without_checkpoints_says_how_to_enable_them() -> None:
    with (
        a_folder() as folder,
        dockerd.started(folder, experimental=False) as plain,
        using(plain),
        Sandbox.create(backend="docker", disk=None) as box,
    ):
        with pytest.raises(SnapshotError, match=re.escape('{"experimental": true}')) as caught:
            box.snapshot()
        assert "criu 4.1" in str(caught.value) and 'scope="disk"' in str(caught.value)
        assert box.run_code("1").ok
        with Sandbox.restore(box.snapshot(scope="disk")) as copy:
            assert copy.run_code("1").ok


def test_an_image_is_imported_once(daemon: Dockerd, python_layer: bytes, tmp_path: Path) -> None:
    archive = docker_save(
        tmp_path / "image.tar", [python_layer], Env=["PATH=/opt/python/bin:/usr/bin", "A=1"]
    )
    image = Image.from_oci_archive(archive)
    try:
        with Sandbox.create(backend="docker", image=image, disk=None) as box:
            assert box.run_code("import os; os.environ['A'], os.path.exists('/work')").value == "('1', False)"
            box.write_file("/workspace/f", "x")
            with box.fork(1)[0] as copy:
                assert copy.read_text("/workspace/f") == "x"
        (kept,) = backend()._daemon.images(CACHE)
        end_backends()
        with Sandbox.create(backend="docker", image=image, disk=None) as box:
            assert box.run_code("6 * 7").value == "42"
        assert [row["Id"] for row in backend()._daemon.images(CACHE)] == [kept["Id"]]
        end_backends()
        assert [line for line in owners.collect_all(dry_run=False) if "kept for later" in line]
        assert backend()._daemon.images(CACHE) == []
    finally:
        assert image.digest is not None
        store.default().delete(image.digest)


def test_a_folder_as_root_file_system(daemon: Dockerd, small_root: Path) -> None:
    with Sandbox.create(backend="docker", image=small_root, disk=None) as box:
        assert box.run_code("6 * 7").value == "42"
        assert box.run_code("open('/etc/hosts').read()[:9]").value == "'127.0.0.1'"
    with pytest.raises(BackendUnavailable, match="python3"):
        Sandbox.create(backend="docker", image=small_root / "usr", disk=None)


def test_open_files(box: Sandbox) -> None:
    box.run_code("f = open('/workspace/log', 'w'); f.write('one\\n'); f.flush()")
    with box.fork(1)[0] as copy:
        copy.run_code("f.write('two\\n'); f.flush()")
        assert copy.read_text("/workspace/log") == "one\ntwo\n"
    assert box.read_text("/workspace/log") == "one\n"
