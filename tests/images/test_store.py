"""The store of unpacked images: several processes at once, killed ones, deletion, other users' folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sandbox_gym
from sandbox_gym import BackendUnavailable, Image, ImageError
from sandbox_gym.errors import SandboxError
from sandbox_gym.images import store
from tests.images.making import docker_save, entry, folder, layer, layout

ROOT = Path(sandbox_gym.__file__).parent.parent
Start = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def unpacker() -> Iterator[Start]:
    """`unpacker(archive)`: a process that unpacks it and prints where."""
    started: list[subprocess.Popen[str]] = []
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sandbox_gym as sg; "
    code += "print(sg.Image.from_oci_archive(sys.argv[1]).rootfs)"

    def start(archive: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(archive)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def big(place: Path, files: int = 3000) -> Path:
    """An image that takes a moment."""
    content = b"content" * 100
    return layout(
        place, [layer(folder("d", mode=0o555), *(entry(f"d/{n}", content=content) for n in range(files)))]
    )


def drafts(home: Path) -> list[str]:
    try:
        return [name for name in os.listdir(home / "images") if name.startswith(".")]
    except FileNotFoundError:
        return []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_several_processes_unpack_it_once(tmp_path: Path, home: Path, unpacker: Start) -> None:
    archive = big(tmp_path / "layout", 500)
    processes = [unpacker(archive) for _ in range(4)]
    said = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4 and len(said) == 1
    image = Image.from_oci_archive(archive)
    assert said == {image.rootfs} and len(os.listdir(f"{image.rootfs}/d")) == 500
    assert drafts(home) == [] and Image.list() == [image]


def test_a_killed_unpack_counts_for_nothing(tmp_path: Path, home: Path, unpacker: Start) -> None:
    archive = big(tmp_path / "layout")
    process = unpacker(archive)

    def begun() -> bool:
        return any((home / "images" / name / ".root/d/5").exists() for name in drafts(home))

    until(begun)
    waiting = unpacker(archive)  # for the one that is killed
    process.send_signal(signal.SIGKILL)
    process.wait()
    if waiting.poll() is None:
        assert len(drafts(home)) == 1
    rootfs = waiting.communicate(timeout=60)[0].strip()
    assert len(os.listdir(f"{rootfs}/d")) == 3000 and drafts(home) == []
    assert os.stat(f"{rootfs}/d").st_mode & 0o777 == 0o555


def test_prune_sweeps_what_was_killed_and_nothing_else(tmp_path: Path, home: Path, unpacker: Start) -> None:
    archive = big(tmp_path / "layout")
    process = unpacker(archive)
    until(lambda: any((home / "images" / name / ".root/d").exists() for name in drafts(home)))
    process.send_signal(signal.SIGSTOP)
    assert Image.prune("1Gi") == [] and len(drafts(home)) == 1  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Image.list() == []
    assert Image.prune("1Gi") == [] and os.listdir(home / "images") == []


def test_the_least_lately_used_go_first(tmp_path: Path) -> None:
    archives = [layout(tmp_path / str(n), [layer(entry("a", content=bytes([n]) * 1000))]) for n in range(3)]
    images = [Image.from_oci_archive(archive) for archive in archives]
    for age, image in zip((30, 10, 20), images):
        record = Path(str(image.rootfs)).parent / "image.json"
        os.utime(record, (time.time() - age,) * 2)
    Image.from_oci_archive(archives[0])
    assert Image.prune(2500) == [images[2].digest]
    assert Image.prune("1Mi") == [] and Image.prune(0) == [images[1].digest, images[0].digest]
    images[0].delete()  # again
    assert Image.list() == []


def test_what_is_held_stays(tmp_path: Path) -> None:
    image = Image.from_oci_archive(layout(tmp_path / "layout", [layer(entry("a", content=b"x"))]))
    assert image.rootfs is not None
    held = store.hold(image.rootfs)
    try:
        with pytest.raises(ImageError, match="has sandboxes"):
            image.delete()
        assert Image.prune(0) == [] and Image.list() == [image]
    finally:
        os.close(held)
    image.delete()
    assert Image.list() == [] and not os.path.exists(image.rootfs)
    with pytest.raises(BackendUnavailable, match="was deleted"):
        store.hold(image.rootfs)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, home: Path) -> None:
    archive = layout(tmp_path / "layout", [layer(entry("a"))])
    Image.from_oci_archive(archive)
    assert (home / "images").stat().st_mode & 0o777 == 0o700  # what is setuid inside is for nobody outside
    (home / "images").chmod(0o777)
    with pytest.raises(SandboxError, match="chmod 700"):
        Image.from_oci_archive(archive)


def test_without_docker_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    calls: list[Callable[[], Image]] = [
        lambda: Image.of("debian:12"),
        lambda: Image.from_dockerfile(tmp_path),
    ]
    for call in calls:
        with pytest.raises(BackendUnavailable, match=r"no docker command.*docker save -o"):
            call()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n"
    )
    (tmp_path / "bin/docker").chmod(0o755)
    for call in calls:
        with pytest.raises(BackendUnavailable, match=r"Cannot connect.*from_oci_archive"):
            call()
    (tmp_path / "bin/docker").write_text(
        "#!/bin/sh\n[ $1 = version ] || { echo 'No such image' >&2; exit 1; }\n"
    )
    with pytest.raises(ImageError, match="docker pull"):
        Image.of("debian:12")
    for name in ("", "-v"):
        with pytest.raises(ValueError, match="name"):
            Image.from_docker(name)
    with pytest.raises(ValueError, match="Dockerfile"):
        Image.from_dockerfile(tmp_path / "bin")


def test_what_docker_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that answers as docker does: it saves an image that is not there yet, once."""
    saved = docker_save(tmp_path / "saved.tar", [layer(entry("a", content=b"x"))])
    expected = Image.from_oci_archive(saved)
    expected.delete()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/asked
case $1 in
    image|build) echo sha256:{expected.digest} ;;
    save) /bin/cp {saved} "$3" ;;
esac
""")
    (tmp_path / "bin/docker").chmod(0o755)
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert (
        Image.of("name:tag")
        == expected
        == Image.from_dockerfile(tmp_path)
        == Image.from_dockerfile(tmp_path / "Dockerfile")
    )
    assert (Path(str(expected.rootfs)) / "a").read_bytes() == b"x"
    asked = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    again = ["version", "build", "version", "image"]
    assert asked == ["version", "image", "save", *again, *again]
    assert f"--file {tmp_path}/Dockerfile {tmp_path}" in (tmp_path / "asked").read_text()
