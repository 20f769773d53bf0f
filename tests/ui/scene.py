"""A client that does, bit by bit, what the page is to show; and `python -m tests.ui.scene FILE`, which takes its
picture for the documents.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_HEAD = """
import sys
import gymnasium
from sandbox_gym import Allow, Sandbox
port = sys.argv[1]
print("ready", flush=True)
for line in sys.stdin:
    answer = ""
    exec(eval(line))
    print(answer, flush=True)
"""
AGENT = """
agent = Sandbox.create("agent", network=Allow([], services={"api:80": "127.0.0.1:" + port}), memory="512Mi")
agent.shell("mkdir -p app && printf 'def double(x):\\n    return x + x + 1\\n' > app/main.py && ls app")
agent.run_code("import urllib.request as u; u.urlopen('http://api/').status")
agent.run_code("u.urlopen('http://example.org/weights')")
tries = agent.fork(3, prefix="try-")
"""
TRIES = """
tries[0].shell("sed -i 's/ + 1//' app/main.py && python3 -c 'import main' 2>&1 | tail -1", cwd="/workspace")
tries[1].shell("cd app && sed -i 's/ + 1//' main.py && python3 -c 'import main; assert main.double(4) == 8'")
tries[1].write_file("app/NOTES.md", "double was off by one\\n")
tries[2].run_code("1 / 0")
final = tries[1].fork(2, prefix="final-")
final[0].shell("cd app && python3 -m py_compile main.py && echo fine")
"""
GAME = """
env = gymnasium.make("Sandbox-v0", env_id="CartPole-v1", render_mode="rgb_array", network=Allow(["pypi.org"]))
_ = env.reset(seed=0)
steps = [env.step(i % 2) for i in range(30)]
pictures = [env.render()]
root = env.unwrapped.snapshot("decision")
env.unwrapped.sandbox.run_code("import urllib.request as u; u.urlopen('http://example.org/policy.pt')")
branches = env.unwrapped.branch(3)
steps += [branch.step(i % 2) for i, branch in enumerate(branches) for _ in range(4 + 2 * i)]
pictures += [branch.render() for branch in branches]
branches[1].sandbox.shell("df -h /workspace | tail -1")
branches[1].sandbox.run_code("import math; math.degrees(0.2095)  # at which the pole has fallen")
leaves = branches[1].branch(2)
steps += [leaf.step(1) for leaf in leaves for _ in range(3)]
pictures += [leaf.render() for leaf in leaves]
"""


class Client:
    """Its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def do(self, lines: str) -> str:
        """Runs lines in it. Returns what they leave in `answer`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{lines!r}\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        assert said, "the client has ended"
        return said.strip()


class _Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def client(log: Path) -> Iterator[Client]:
    """Ends with its sandboxes. It may reach a server here, as `api`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        environment = {**os.environ, "SANDBOX_GYM_AUDIT": str(log), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", _HEAD, str(server.server_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield Client(process)
        finally:
            process.kill()
            process.communicate(timeout=60)
            server.shutdown()
            thread.join()


def _take_picture(target: Path) -> None:
    from playwright.sync_api import expect

    from sandbox_gym import ui
    from tests.pages import browser_page

    with tempfile.TemporaryDirectory() as folder, client(Path(folder) / "audit.db") as acting:
        acting.do(AGENT + TRIES + GAME)
        chosen = acting.do("answer = branches[1].unwrapped.sandbox.id")
        until = threading.Event()
        until.set()  # as soon as the picture is taken

        def shoot(address: str) -> None:
            with browser_page(viewport={"width": 1280, "height": 800}) as (page, _):
                page.goto(address)
                page.fill("#filter", f"client:{acting.process.pid}")
                page.click(f".row[data-id='{chosen}']")
                expect(page.locator("#frame")).to_be_visible()
                page.screenshot(path=target)

        ui.serve(str(Path(folder) / "audit.db"), on_ready=shoot, until=until)


if __name__ == "__main__":
    _take_picture(Path(sys.argv[1]))
