"""B 1. Prepare once: a base named task-base, which reaches the hosts of its set-up alone, with a repository in it; or a
template, from which a later sandbox starts with no install step.
"""

from __future__ import annotations

import http.server
import tempfile
import threading
from functools import partial
from pathlib import Path

from sandbox_gym import Allow, Sandbox, Template

SETUP = [
    "curl -sSf -o repo.bundle http://forge/repo.bundle && git clone -q repo.bundle repo",
    "python3 -c 'import compileall; compileall.compile_dir(\"repo\", quiet=1)'",  # stands for an install
]


class Forge(http.server.SimpleHTTPRequestHandler):
    """Stands for the host of a repository, on this machine's loopback."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def make_bundle(folder: Path) -> None:
    """A repository as one file. It is made in a sandbox: nothing of this machine's git configuration matters."""
    with Sandbox.create() as box:
        made = box.shell(
            "git init -q -b main r && cd r && echo 'def area(a, b): return a + b' > shapes.py && git add -A && "
            "git -c user.name=a -c user.email=a@a commit -qm first && git bundle create -q ../repo.bundle HEAD main"
        )
        assert made.ok, made.stderr
        (folder / "repo.bundle").write_bytes(box.read_file("repo.bundle"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_bundle(Path(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Forge, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        forge = Allow(services={"forge:80": f"127.0.0.1:{server.server_port}"})
        with Sandbox.create(name="task-base", network=forge) as base:
            for line in SETUP:
                result = base.shell(line, timeout=60)
                assert result.ok, result.stderr
            print(base.name, base.shell("git -C repo log --oneline | wc -l").stdout.strip(), "commit")
        Template.build("repo-env", setup=SETUP, network=forge)
        server.shutdown()
        server.server_close()
    try:
        with Sandbox.create(
            image=Template.get("repo-env")
        ) as box:  # the forge is gone: nothing is installed now
            print("from the template:", box.read_text("repo/shapes.py").strip())
    finally:
        Template.get("repo-env").delete()


if __name__ == "__main__":
    main()
