"""Sandboxes of images that come out of archives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

import sandbox_gym
from sandbox_gym import BackendUnavailable, Image, Sandbox, Snapshot, SnapshotError, Template
from sandbox_gym.backends import lookup
from sandbox_gym.backends.native import criu
from sandbox_gym.backends.shared import programs
from tests.images.making import docker_save, entry, folder, hard_link, layer, layout

ENV = ["PATH=/opt/python/bin:/usr/bin:/bin", "GREETING=hello"]


@pytest.fixture(scope="module")
def top() -> bytes:
    capability, content = entry("srv/app/ping", content=b"x", mode=0o755)
    capability.pax_headers = {
        "SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x04" + "\0" * 14,
        "SCHILY.xattr.user.note": "mine",
    }
    return layer(
        folder("srv/app", uid=1000, gid=1000, mode=0o750),
        entry("srv/app/main.py", content=b"print('main')\n", uid=1000, gid=1000),
        hard_link("srv/app/again.py", "srv/app/main.py"),
        (capability, content),
        entry("etc/.wh.motd"),
        folder("tmp", mode=0o1777),
        folder("home", uid=5, gid=6, mode=0o711),
    )


@pytest.fixture(scope="module")
def archive(python_layer: bytes, top: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layout(
        tmp_path_factory.mktemp("archive") / "layout",
        [python_layer, top],
        Env=ENV,
        WorkingDir="/srv/app",
        User="1000",
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_GYM_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def image(archive: Path, home: Path) -> Image:
    assert home.exists()
    return Image.from_oci_archive(archive)


def test_it_runs_with_its_environment_in_its_folder(image: Image) -> None:
    with Sandbox.create(image=image, env={"GREETING": "mine"}, disk="64Mi", memory="256Mi") as box:
        assert box.run_code("import os, sys; os.getcwd(), sys.executable").value == str(
            ("/srv/app", "/opt/python/bin/python3")
        )
        assert (
            box.shell("echo $GREETING; pwd; id -u; cat main.py").stdout
            == "mine\n/srv/app\n0\nprint('main')\n"
        )
        assert box.read_text("again.py") == "print('main')\n"  # a relative path is read from there
        assert not box.shell("test -e /etc/motd || test -e /etc/ssl").ok
    with Sandbox.create(image=image, memory="256Mi") as box:
        assert box.shell("echo $GREETING").stdout == "hello\n"


def test_files_look_as_in_the_image(image: Image) -> None:
    code = """
import os, socket
def look(path):
    status = os.stat(path)
    return status.st_uid, status.st_gid, oct(status.st_mode & 0o7777)
address = socket.gethostbyname('localhost')
[look(p) for p in ('/', '/srv/app', 'main.py', '/home', '/tmp')], os.stat('main.py').st_nlink, address
"""
    with Sandbox.create(image=image, memory="256Mi") as box:
        assert box.run_code(code).value == str(
            (
                [
                    (0, 0, "0o755"),
                    (1000, 1000, "0o750"),
                    (1000, 1000, "0o644"),
                    (5, 6, "0o711"),
                    (0, 0, "0o1777"),
                ],
                2,
                "127.0.0.1",
            )
        )
        attributes = box.run_code(
            "import os; {n: len(os.getxattr('ping', n)) for n in sorted(os.listxattr('ping'))}"
        )
        assert attributes.value == str({"security.capability": 20, "user.note": 4})
        # A link in overlayfs is to a file of the image until it is written to.
        box.shell("echo changed > main.py")
        assert box.read_text("main.py") == "changed\n"
    assert image.rootfs is not None
    assert (Path(image.rootfs) / "srv/app/main.py").read_text() == "print('main')\n"


def test_snapshots_and_forks(image: Image) -> None:
    with Sandbox.create(image=image, memory="256Mi", disk="64Mi") as box:
        box.run_code("import os; x = 1; os.remove('again.py')")
        box.shell("echo 1 > kept")
        snapshot = box.snapshot()
        one, other = box.fork(2)
        one.run_code("x += 1; open('kept', 'a').write('2')")
        assert one.run_code("x, open('kept').read()").value == str((2, "1\n2"))
        assert other.run_code("x, open('kept').read()").value == str((1, "1\n"))
        with Sandbox.restore(snapshot) as copy:
            assert copy.shell("echo * $GREETING").stdout.split() == ["kept", "main.py", "ping", "hello"]
        for copy in (one, other):
            copy.terminate()
        snapshot.delete()


def test_an_environment_in_an_image(image: Image) -> None:
    """The sandbox itself as one: a hosted one needs Gymnasium inside."""
    env = gym.make("Sandbox-v0", image=image, memory="256Mi")
    env.reset(seed=0)
    assert "/srv/app hello" in str(env.step("import os; print(os.getcwd(), os.environ['GREETING'])")[0])
    env.close()


def test_an_archive_or_a_folder_will_do_in_its_place(archive: Path, image: Image, small_root: Path) -> None:
    for given in (str(archive), archive, Image.from_directory(small_root), Image.from_host()):
        with Sandbox.create(image=given, memory="256Mi") as box:
            assert box.run_code("6 * 7").value == "42"
    assert Image.list() == [image]


@pytest.mark.usefixtures("home")
def test_docker_save(python_layer: bytes, tmp_path: Path) -> None:
    saved = docker_save(tmp_path / "image.tar", [python_layer], Env=ENV)
    with Sandbox.create(image=saved, memory="256Mi") as box:
        assert box.run_code("import os; os.getcwd()").value == "'/workspace'"


@pytest.mark.usefixtures("home")
def test_without_a_python_the_next_step_is_named(tmp_path: Path) -> None:
    image = Image.from_oci_archive(layout(tmp_path / "layout", [layer(entry("bin/sh"))]))
    with pytest.raises(BackendUnavailable, match=r"no /usr/bin/python3.*install"):
        Sandbox.create(image=image)
    image.delete()
    image = Image.from_oci_archive(
        layout(tmp_path / "other", [layer(entry("usr/bin/python3", content=b"#!", mode=0o755))])
    )
    with pytest.raises(BackendUnavailable, match=r"Python 3.10 or newer"):
        Sandbox.create(image=image)


def test_an_image_in_use_is_not_deleted(image: Image) -> None:
    with Sandbox.create(image=image, memory="256Mi"):
        with pytest.raises(sandbox_gym.ImageError, match="has sandboxes"):
            image.delete()
        assert Image.prune(0).count(str(image.digest)) == 0


# ---- criu, templates, archives --------------------------------------------------------------------------------


@pytest.fixture
def needs_criu() -> None:
    found = criu.look()
    if isinstance(found, programs.Lack):
        pytest.skip(f"nothing can be saved here: {found.why}")


@pytest.mark.usefixtures("needs_criu")
def test_criu_takes_it_and_an_archive_asks_for_the_same_image(
    image: Image, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox.create(image=image, memory="256Mi", disk="64Mi") as box:
        box.run_code("import os; x = 5; os.remove('again.py')")
        process = box.start(["/bin/sh", "-c", "echo up; while read line; do echo $line; done"])
        assert process.read_text(timeout=10) == "up\n"
        box.shell("echo 1 > kept")
        snapshot = box.snapshot()
        assert snapshot.engine == "criu"
        snapshot.save(tmp_path / "box.sbx")
        with Sandbox.restore(snapshot) as copy:
            assert copy.run_code("x, open('kept').read()").value == str((5, "1\n"))
        snapshot.delete()
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(SnapshotError, match=f"digest {image.digest} is not here"):
        Snapshot.load(tmp_path / "box.sbx")
    there = Image.from_oci_archive(archive)
    assert there.digest == image.digest and there.rootfs != image.rootfs
    loaded = Snapshot.load(tmp_path / "box.sbx")
    with Sandbox.restore(loaded) as copy:
        assert copy.run_code("x, open('kept').read()").value == str((5, "1\n"))
        assert copy.shell("cat main.py; echo $GREETING *").stdout.split() == [
            *("print('main')", "hello", "kept", "main.py", "ping")
        ]
        assert copy.process(process.id).poll() is None
    loaded.delete()


@pytest.mark.usefixtures("needs_criu")
def test_a_template_of_an_image(image: Image) -> None:
    template = Template.build("small", image, ["echo set up > note"], memory="256Mi", disk="64Mi")
    try:
        with Sandbox.create(image=template) as box:
            assert box.shell("cat note; pwd; echo $GREETING").stdout == "set up\n/srv/app\nhello\n"
    finally:
        template.delete()
        del box  # a handle on what the template has ready in this process
        sandbox_gym.template._slots.clear()
        lookup.get("native").release("")
