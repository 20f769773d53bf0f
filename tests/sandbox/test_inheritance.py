"""What a sandbox takes over of the process that made it: what is installed for its Python. Not the folder that it was
started in, its environment, nor the signals that it ignores.
"""

# ruff: noqa: E501  (programs are text)
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sandbox_gym

ROOT = Path(sandbox_gym.__file__).parent.parent


@pytest.mark.parametrize(
    "how", [["program.py"], ["-m", "program"], ["-m", "package.program"], ["package/program.py"]]
)
def test_the_folder_that_python_was_started_in_is_not_there(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    code = f"from sandbox_gym import Sandbox\nwith Sandbox.create() as box: print(box.shell('ls -A {tmp_path}').stdout)"
    for place in ("program.py", "package/program.py"):
        (tmp_path / place).write_text(
            f"import sys\nsys.path += [{str(tmp_path)!r}] * 2  # as Ray does\n{code}\n"
        )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}",
    }  # its end is no name of the working directory
    process = subprocess.run(
        [sys.executable, *how],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert process.stdout == "\n"


@pytest.mark.parametrize("kind", ["hook", "path"])
def test_a_package_that_is_installed_in_place_is_there_alone(kind: str, tmp_path: Path) -> None:
    """As setuptools does it for a folder with a package in it, and as others do."""
    environment, project = tmp_path / "environment", tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    (packages,) = environment.glob("lib/python3*/site-packages")
    source = project if kind == "hook" else project / "src"
    (source / "mine").mkdir(parents=True)
    (source / "mine/__init__.py").write_text("from .beside import VALUE")
    (project / "beside").mkdir()
    (project / "beside/__init__.py").write_text("VALUE = 'found'")
    (source / "mine/beside").symlink_to(project / "beside")
    (project / ".env").write_text("secret")
    if kind == "hook":
        hook = packages / "__editable___mine_finder.py"
        hook.write_text(
            f"import sys\nfrom importlib.util import spec_from_file_location\nMAPPING = {{'mine': {str(source / 'mine')!r}}}\n"
            "class Finder:\n    @classmethod\n    def find_spec(cls, name, path=None, target=None):\n"
            "        if name in MAPPING: return spec_from_file_location(name, MAPPING[name] + '/__init__.py')\n"
            "sys.meta_path.append(Finder)\n"
        )
        (packages / "__editable__.mine.pth").write_text("import __editable___mine_finder")
    else:
        (packages / "mine.pth").write_text(f"{source}\n")
        (source / "mine/beside").unlink()
        (project / "beside").rename(source / "mine/beside")
    own = [entry for entry in sys.path if entry.endswith("site-packages")]
    code = (
        f"import sys; sys.path += {[str(ROOT), *own]!r}\nfrom sandbox_gym import Sandbox\nwith Sandbox.create() as box:\n"
        f"    print(box.run_code('import mine; mine.VALUE').value, box.shell('cat {project}/.env').ok)"
    )
    process = subprocess.run(
        [environment / "bin/python", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert process.stdout == "'found' False\n", process.stderr


def test_the_host_s_environment_is_not_there(client: Callable[..., subprocess.Popen[str]]) -> None:
    code = """
with Sandbox.create(env={"MINE": "given"}) as box:
    print(box.shell("env; cat /proc/*/environ | tr '\\\\0' '\\\\n'").stdout, box.run_code("import os; dict(os.environ)").value)
"""
    out, err = client(
        code, AWS_SECRET_ACCESS_KEY="hush-hush", SANDBOX_TEST="x", PYTHONWARNINGS="ignore"
    ).communicate(timeout=30)
    assert "MINE=given" in out, err
    assert "hush" not in out and "SANDBOX_TEST" not in out and "PYTHONWARNINGS" not in out


def test_a_guest_ignores_no_signal_that_its_client_does(client: Callable[..., subprocess.Popen[str]]) -> None:
    out, err = client(
        "import signal\n"
        "for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT): signal.signal(number, signal.SIG_IGN)\n"
        "with Sandbox.create() as box: print(box.shell('grep SigIgn /proc/self/status').stdout)"
    ).communicate(timeout=60)
    word, mask = out.split()
    # 32 and 33 are the C library's own, which its posix_spawn leaves ignored.
    assert (word, int(mask, 16) & ~(3 << 31)) == ("SigIgn:", 0), err
