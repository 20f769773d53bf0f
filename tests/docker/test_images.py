"""Images out of a real daemon: built from a Dockerfile, taken by name, and run by every backend."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox_gym.errors import ImageError
from sandbox_gym.images.image import Image
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, datasets
from sandbox_gym.testing.topics.images import _libraries
from tests.dockerd import Dockerd

DOCKERFILE = """
FROM scratch AS base
ADD layer.tar /
ENV PATH=/opt/python/bin COLOUR=blue
FROM base
WORKDIR /srv/app
COPY kept changed /srv/app/
COPY later/changed /srv/app/
"""


@pytest.fixture(scope="module", autouse=True)
def others() -> None:
    """Their supervisors run for the rest of this process: from before descriptors are counted."""
    for backend in ("native", "gvisor"):
        Sandbox.create(backend=backend).terminate()


@pytest.fixture
def project(tmp_path: Path, python_layer: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    (folder / "later").mkdir(parents=True)
    (folder / "layer.tar").write_bytes(python_layer)
    (folder / "kept").write_text("kept\n")
    (folder / "changed").write_text("before\n")
    (folder / "later/changed").write_text("after\n")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder


def test_a_dockerfile_and_its_name_are_one_image(daemon: Dockerd, project: Path) -> None:
    image = Image.from_dockerfile(project)
    assert Image.from_dockerfile(project / "Dockerfile") == image  # built again of the same, unpacked once
    name = "sandbox-gym-test:one"
    subprocess.run(["docker", "build", "--quiet", "--tag", name, project], check=True, capture_output=True)
    try:
        assert Image.from_docker(name).digest == image.digest
        for backend, given in (("native", name), ("docker", image), ("gvisor", image)):
            with Sandbox.create(backend=backend, image=given) as box:
                code = "import os; os.getcwd(), os.environ['COLOUR'], open('kept').read() + open('changed').read()"
                assert box.run_code(code).value == "('/srv/app', 'blue', 'kept\\nafter\\n')", backend
                (copy,) = box.fork(1)
                with copy:
                    copy.run_code("open('kept', 'w').write('of a copy')")
                assert box.run_code("open('kept').read()").value == "'kept\\n'", backend
    finally:
        subprocess.run(["docker", "image", "rm", "--force", name], check=True, capture_output=True)


def test_what_docker_says_is_in_the_error(daemon: Dockerd, project: Path) -> None:
    with pytest.raises(ImageError, match=r"no image 'sandbox-gym-none:1'.*docker pull"):
        Image.from_docker("sandbox-gym-none:1")
    (project / "Dockerfile").write_text("FROM scratch\nCOPY missing /\n")
    with pytest.raises(ImageError, match="missing"):
        Image.from_dockerfile(project)


def test_a_folder_of_terminal_bench_with_its_dockerfile(daemon: Dockerd, project: Path) -> None:
    (project / "task.yaml").write_text("instruction: Write the sum of what `kept` has into sum.\n")
    (project / "extra").mkdir()
    for path in ["/bin/bash", "/bin/ls", *_libraries(["/bin/bash", "/bin/ls"])]:
        (project / "extra" / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, project / "extra" / path.lstrip("/"))
    (project / "Dockerfile").write_text(f"{DOCKERFILE}COPY extra /\nENV PATH=/opt/python/bin:/usr/bin:/bin\n")
    (project / "run-tests.sh").write_text("#!/bin/bash\npython3 $TEST_DIR/check.py\n")
    (project / "tests").mkdir()
    (project / "tests/check.py").write_text("assert open('/srv/app/sum').read() == '6', 'no sum'\n")
    (project / "solution.sh").write_text("#!/bin/bash\nprintf 6 >/srv/app/sum\n")
    (task,) = datasets.load(project)
    assert task.workdir == "/srv/app"
    for backend in ("native", "docker", "gvisor"):
        with Prepared(task, backend=backend) as prepared, prepared.start() as box:
            assert prepared.grade(box).score == 0.0, backend
            assert (
                box.shell("cat kept && ls /tests; printf 6 >/srv/app/sum", cwd="/srv/app").stdout == "kept\n"
            ), backend
            assert prepared.grade(box).score == 1.0, backend
