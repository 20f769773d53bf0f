"""The duel's page, over plain HTTP and in a browser."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples import preferences
from sandbox_gym.cli import main
from sandbox_gym.duel import Duel, call_agent_duels, load, serve
from sandbox_gym.sandbox import Sandbox
from tests.pages import Site, browser_page

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class Served(Site):
    """A server in a thread. `made`: what `serve` returned or raised, once it has."""

    out: Path
    made: queue.Queue[Any]

    def choose(self, number: Any, choice: Any) -> tuple[int, str]:
        return self.ask("POST", "/choice", {"number": number, "choice": choice})


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    @contextmanager
    def start(duels: Any, n: int = 3, out: Path = tmp_path / "chosen.jsonl") -> Iterator[Served]:
        ready: queue.Queue[str] = queue.Queue()
        made: queue.Queue[Any] = queue.Queue()

        def work() -> None:
            try:
                made.put(serve(duels, out, n=n, on_ready=ready.put))
            except Exception as error:
                made.put(error)

        thread = threading.Thread(target=work)
        thread.start()
        served = Served(ready.get(timeout=10), out, made)
        try:
            yield served
        finally:
            if thread.is_alive():
                served.ask("POST", "/quit", {})
            thread.join(10)
            assert not thread.is_alive()

    return start  # type: ignore[return-value]


def toys() -> Iterator[Duel]:
    for i in range(100):
        yield Duel(f"before {i}", f"<b>left</b> {i}", f"right {i}", {"i": i})


def test_choices_are_stored_until_there_are_enough(serving: Any) -> None:
    with serving(toys(), n=3) as served:
        status, text = served.ask("GET", "/duel")
        assert (status, json.loads(text)) == (
            200,
            {"number": 0, "of": 3, "prefix": "before 0", "a": "<b>left</b> 0", "b": "right 0"},
        )
        assert served.ask("GET", "/duel")[1] == text  # looking decides nothing
        assert json.loads(served.choose(0, "a")[1])["prefix"] == "before 1"
        assert served.choose(0, "b")[0] == 409  # a second click
        assert served.choose(1, "tie")[0] == 200
        assert json.loads(served.choose(2, "b")[1]) == {"done": True, "made": 3, "problem": None}
        assert served.made.get(timeout=10) == 3
    found = load(served.out)
    assert [(p.prefix, p.choice, p.about) for p in found] == [
        ("before 0", "a", {"i": 0}),
        ("before 1", "tie", {"i": 1}),
        ("before 2", "b", {"i": 2}),
    ]
    assert found[0].time <= found[1].time <= found[2].time
    assert found[0].a == "<b>left</b> 0"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/duel", {"X_Token": "wrong"}, 403),
        ("GET", "/duel", {"X_Token": ""}, 403),
        ("POST", "/choice", {"X_Token": "wrong"}, 403),
        ("POST", "/quit", {"X_Token": "wrong"}, 403),
        ("GET", "/", {}, 404),
        ("GET", "/", {"X_Token": ""}, 403),
        ("GET", "/?token=wrong", {}, 403),
        ("GET", "/duel", {"Host": "example.org"}, 403),
        ("GET", "/duel", {"Host": "127.0.0.1:1"}, 403),
        ("GET", "/duel", {"Origin": "http://example.org"}, 403),
        ("POST", "/choice", {"Origin": "null"}, 403),
        ("GET", "/choice", {}, 405),
        ("PUT", "/choice", {}, 501),
        ("POST", "/nothing", {}, 404),
    ],
)
def test_what_is_refused(method: str, path: str, headers: dict[str, str], status: int, serving: Any) -> None:
    with serving(toys()) as served:
        assert served.ask(method, path, {"number": 0, "choice": "a"}, **headers)[0] == status
        assert not served.out.exists()
        served.ask("GET", "/duel")
        assert served.choose(0, "a")[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"[" * 4000, b"x" * 5000, {"number": 0, "choice": "c"}, {"number": 0, "choice": []}],
)
def test_a_body_that_is_no_choice(body: Any, serving: Any) -> None:
    with serving(toys()) as served:
        served.ask("GET", "/duel")
        assert served.ask("POST", "/choice", body)[0] == 400
        assert served.choose("0", "a")[0] == 409
        assert served.choose(None, "a")[0] == 409
        assert served.choose(0, "a")[0] == 200


def test_the_page_lets_nothing_in_from_elsewhere(serving: Any) -> None:
    with serving(toys()) as served:
        status, body, headers = served.fetch("GET", f"/?token={served.token}")
        text, policy = body.decode(), headers["Content-Security-Policy"]
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert status == 200
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert text.count(f'nonce="{nonce}"') == 2
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "before 0" not in text


def test_what_goes_wrong_is_raised_and_shown(serving: Any, tmp_path: Path) -> None:
    def broken() -> Iterator[Duel]:
        yield Duel("", "a", "b")
        raise RuntimeError("no more calls")

    with serving(broken()) as served:
        served.ask("GET", "/duel")
        assert json.loads(served.choose(0, "a")[1]) == {"done": True, "made": 1, "problem": "no more calls"}
        assert isinstance(served.made.get(timeout=10), RuntimeError)
    assert len(load(served.out)) == 1
    with serving(toys(), out=tmp_path) as served:  # a folder
        served.ask("GET", "/duel")
        assert served.choose(0, "a")[0] == 500
        assert isinstance(served.made.get(timeout=10), IsADirectoryError)
    with serving(iter([Duel("", "a", "b")])) as served:
        served.ask("GET", "/duel")
        assert json.loads(served.choose(0, "b")[1])["done"]
        assert served.made.get(timeout=10) == 1
    with pytest.raises(ValueError, match="1 or more"):
        serve(toys(), tmp_path / "none", n=0)


def test_a_person_chooses_by_button_and_by_key(serving: Any) -> None:
    from playwright.sync_api import expect

    size = {"width": 1000, "height": 700}
    with serving(toys(), n=4) as served:
        with browser_page(viewport=size) as (page, problems):
            page.goto(served.address)
            expect(page.locator("#count")).to_have_text("1 of 4")
            expect(page.locator("#a")).to_have_text("<b>left</b> 0")  # as text
            left, right = page.locator("#a").bounding_box(), page.locator("#b").bounding_box()
            assert left and right and left["y"] == right["y"] and left["x"] < right["x"]
            page.click("#choose-b")
            expect(page.locator("#count")).to_have_text("2 of 4")
            page.keyboard.press("ArrowLeft")
            expect(page.locator("#count")).to_have_text("3 of 4")
            page.reload()
            expect(page.locator("#prefix")).to_have_text("before 2")
            page.keyboard.press("Space")
            expect(page.locator("#count")).to_have_text("4 of 4")
            page.click("#quit")
            expect(page.locator("#status")).to_contain_text("3 choices are stored")
            assert not problems
        assert served.made.get(timeout=10) == 3
    assert [preference.choice for preference in load(served.out)] == ["b", "a", "tie"]


def test_calls_are_branched_and_played_on(serving: Any) -> None:
    before = len(Sandbox.list())
    with serving(call_agent_duels(seed=1), n=2) as served:
        duel = json.loads(served.ask("GET", "/duel")[1])
        assert duel["prefix"].startswith("caller: ")
        assert duel["a"].startswith("assistant: ")
        assert duel["a"] != duel["b"]
        served.choose(0, "a")
        served.choose(1, "b")
        assert served.made.get(timeout=10) == 2
    assert len(Sandbox.list()) == before
    first, second = load(served.out)
    assert first.about["actions_a"][0] != first.about["actions_b"][0]
    assert {"seed", "decision", "return_a", "return_b"} <= set(first.about)
    assert first.prefix != second.prefix
    again = next(duels := call_agent_duels(seed=1))
    duels.close()  # type: ignore[attr-defined]
    assert (again.prefix, again.a, again.b) == (first.prefix, first.a, first.b)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_command_ends_by_itself_or_by_interrupt(interrupted: bool, tmp_path: Path) -> None:
    out = tmp_path / "chosen.jsonl"
    command = [sys.executable, "-m", "sandbox_gym", "duel", "--n", "1", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        served = Served(process.stdout.readline().split()[-1], out, queue.Queue())
        assert served.ask("GET", "/duel")[0] == 200
        if interrupted:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert not out.exists()
        else:
            assert served.choose(0, "tie")[0] == 200
            assert process.wait(30) == 0
            assert "1 choices were added" in process.stdout.read()
            assert [preference.choice for preference in load(out)] == ["tie"]


def test_what_was_chosen_can_be_learnt() -> None:
    assert preferences.main() > 0.6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["duel", "--n", "0", "--out", str(tmp_path / "none")]) == 1
    assert "n is 1 or more" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["duel", "--port", str(port), "--out", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith(f"port {port} can't be had (Address already in use)")
    assert main(["duel", "--port", "99999", "--out", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
