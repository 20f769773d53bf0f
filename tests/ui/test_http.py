"""The page's server by plain HTTP: what it tells, what it refuses, and that it changes nothing."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym import _audit, _tree
from sandbox_gym.cli import main
from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.ui.view import View
from tests.pages import Site

ROOT = Path(__file__).resolve().parent.parent.parent
Showing = Callable[..., AbstractContextManager[Site]]


def flush() -> None:
    assert _audit._log is not None
    _audit._log.flush()


def get(site: Site, path: str) -> Any:
    status, text = site.ask("GET", path)
    assert status == 200, text
    return json.loads(text)


def state(site: Site, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Once it is as it should be: it looks once a second."""
    deadline = time.monotonic() + 20
    while True:
        found: dict[str, Any] = get(site, "/state")
        if until(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def nodes(site: Site, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """By id, once they are as they should be."""

    def by_id(found: dict[str, Any]) -> dict[str, Any]:
        return {node["id"]: node for node in found["nodes"]}

    return by_id(state(site, lambda found: until(by_id(found))))


# ---- what it tells ------------------------------------------------------------------------------------------------


def test_the_tree_and_a_story_with_its_ancestors(showing: Showing, log: Path, box: Sandbox) -> None:
    box.shell("echo first")
    with showing(log) as site:
        (copy,) = box.fork(1, prefix="copy-")
        with copy:
            box.shell("echo not of the copy")
            copy.run_code("1/0")
            kept = copy.snapshot("kept")
            flush()
            found = nodes(site, lambda all: kept.id in all and copy.id in all)
            assert found[box.id]["state"] == "running" and found[box.id]["memory_bytes"] > 0
            assert (found[copy.id]["name"], found[copy.id]["branched_from"]) == ("copy-1", box.id)
            assert (found[kept.id]["above"], found[kept.id]["state"]) == (copy.id, "snapshot")
            assert found[kept.id]["name"] == "kept"
            story = get(site, f"/story?sandbox={copy.id}")
            assert [event["kind"] for event in story["events"]] == [
                *("restore", "shell", "snapshot", "restore", "code", "snapshot"),
            ]
            failed = story["events"][-2]
            assert failed["failed"] and failed["outcome"] == "ZeroDivisionError: division by zero"
            assert story["own"] == copy.id and story["verdicts"] == [] and story["frame"] is None
            assert get(site, f"/event?id={failed['id']}")["text"] == "1/0"
            of_snapshot = get(site, f"/story?sandbox={kept.id}")
            assert of_snapshot["events"] == story["events"] and of_snapshot["own"] == copy.id
            kept.delete()
        flush()
        found = nodes(site, lambda all: all.get(copy.id, {}).get("ended") is not None)
        assert (found[copy.id]["state"], found[copy.id]["above"]) == ("terminated", box.id)
        assert get(site, f"/story?sandbox={copy.id}")["events"][-1]["kind"] == "end"


def test_what_has_not_changed_is_not_sent_again(showing: Showing, log: Path, box: Sandbox) -> None:
    flush()
    with showing(log) as site:
        story = get(site, f"/story?sandbox={box.id}")
        again = get(site, f"/story?sandbox={box.id}&version={story['version']}")
        assert again == {"version": story["version"]}
        state = get(site, "/state")
        assert set(get(site, f"/state?version={state['version']}")) >= {"version", "now"}
        assert "nodes" in get(site, "/state?version=none")


def test_it_looks_once_a_second_for_all_pages(log: Path, box: Sandbox, monkeypatch: Any) -> None:
    looks: list[float] = []
    live = _tree.live

    def counted() -> list[dict[str, Any]]:
        looks.append(time.monotonic())
        return live()

    monkeypatch.setattr(_tree, "live", counted)
    view = View(str(log), control=False)
    began = time.monotonic()
    for _ in range(200):
        assert view.state({})["version"] > 0
    assert 1 <= len(looks) <= 1 + (time.monotonic() - began)
    view.close()


def test_without_a_log_and_with_one_that_comes_later(showing: Showing, box: Sandbox, tmp_path: Path) -> None:
    with showing(None) as site:
        assert nodes(site, lambda all: box.id in all)[box.id]["steps"] is None
        assert get(site, f"/story?sandbox={box.id}") == {"version": None}
        assert site.ask("GET", f"/frame?sandbox={box.id}")[0] == 404
        assert site.ask("GET", "/event?id=1")[0] == 404
    later = tmp_path / "later.db"
    with showing(later) as site:
        assert get(site, "/state")["logging"] is False
        _audit.set_audit(later)
        try:
            box.shell("true")
            flush()
            assert get(site, f"/story?sandbox={box.id}")["events"][-1]["kind"] == "shell"
        finally:
            _audit.set_audit(None)


def test_a_log_that_is_moved_away_and_another_in_its_place(showing: Showing, log: Path, box: Sandbox) -> None:
    box.shell("echo first")
    flush()
    with showing(log) as site:
        first = get(site, f"/story?sandbox={box.id}")
        assert first["events"]
        assert (get(site, "/state")["logging"], get(site, "/state")["lost"]) == (True, False)
        _audit.set_audit(None)
        log.rename(log.with_name("moved.db"))
        assert get(site, f"/story?sandbox={box.id}&version={first['version']}") == {"version": None}
        assert not state(site, lambda found: found["lost"])["logging"]
        _audit.set_audit(log)
        box.shell("echo second")
        flush()
        story = get(site, f"/story?sandbox={box.id}&version={first['version']}")
        assert [event["text"] for event in story["events"]] == ["echo second"]
        assert state(site, lambda found: found["logging"])["lost"] is False


def test_long_stories_and_long_texts_are_cut(showing: Showing, log: Path, box: Sandbox) -> None:
    for _ in range(410):
        _audit._note("snapshot", box, {"label": "x" * 3000}, None)
    box.run_code(f"#{'y' * 3000}")
    flush()
    with showing(log) as site:
        events = get(site, f"/story?sandbox={box.id}")["events"]
        assert len(events) == 400 and {len(event["text"]) for event in events} == {400}
        assert len(get(site, f"/event?id={events[-1]['id']}")["text"]) == 3001


# ---- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/state", {"X_Token": "wrong"}, 403),
        ("GET", "/state", {"X_Token": ""}, 403),
        ("GET", "/?token=wrong", {}, 403),
        ("GET", "/", {"X_Token": ""}, 403),
        ("POST", "/terminate", {"X_Token": "wrong"}, 403),
        ("GET", "/state", {"Host": "example.org"}, 403),
        ("GET", "/state", {"Host": "127.0.0.1:1"}, 403),
        ("GET", "/story?sandbox=x", {"Origin": "http://example.org"}, 403),
        ("POST", "/terminate", {"Origin": "null"}, 403),
        ("GET", "/terminate", {}, 405),
        ("POST", "/state", {}, 405),
        ("PUT", "/state", {}, 501),
        ("DELETE", "/state", {}, 501),
        ("GET", "/", {}, 404),
        ("GET", "/nothing", {}, 404),
        ("GET", "/../etc/passwd", {}, 404),
        ("GET", "/story", {}, 400),
        ("GET", "/event?id=x", {}, 400),
        ("GET", "/event?id=99999", {}, 404),
        ("GET", "/event?id=99999999999999999999999999", {}, 404),
        ("GET", "/event?id=-99999999999999999999999999", {}, 404),
        ("GET", f"/event?id={'9' * 5000}", {}, 400),
        ("GET", "/frame?sandbox=x", {}, 404),
        ("GET", f"/state?{'&'.join('a=1' for _ in range(99))}", {}, 400),
    ],
)
def test_what_is_refused(
    method: str, path: str, headers: dict[str, str], status: int, showing: Showing, log: Path, box: Sandbox
) -> None:
    flush()
    with showing(log, control=True) as site:
        assert site.ask(method, path, {"id": box.id}, **headers)[0] == status
    assert box.run_code("1").value == "1"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 4000, b"x" * 5000])
def test_bodies_that_are_none(body: bytes, showing: Showing, box: Sandbox) -> None:
    with showing(None, control=True) as site:
        assert site.ask("POST", "/terminate", body)[0] == 400
    assert box.run_code("1").value == "1"


def test_it_only_reads(showing: Showing, log: Path, box: Sandbox) -> None:
    box.shell("true")
    _audit.set_audit(None)
    before = hashlib.sha256(log.read_bytes()).hexdigest()
    with showing(log) as site:
        nodes(site, lambda all: box.id in all)
        assert get(site, f"/story?sandbox={box.id}")["events"]
        status, text = site.ask("POST", "/terminate", {"id": box.id})
        assert status == 403 and "--control" in text
        assert get(site, "/state")["control"] is False
    assert box.run_code("1").value == "1"
    assert hashlib.sha256(log.read_bytes()).hexdigest() == before


def test_the_page_lets_nothing_in_from_elsewhere(showing: Showing) -> None:
    with showing(None) as site:
        status, body, headers = site.fetch("GET", f"/?token={site.token}")
        text, policy = body.decode(), headers["Content-Security-Policy"]
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert status == 200 and policy.startswith("default-src 'none'")
        assert text.count(f'nonce="{nonce}"') == 2 and "@" not in text.partition("@media")[0]
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text
        with pytest.raises(ConnectionRefusedError):  # no other interface
            socket.create_connection(("127.0.0.2", site.port), timeout=5)


# ---- --control ----------------------------------------------------------------------------------------------------


def test_it_ends_a_sandbox_of_another_client_who_is_told_why(
    showing: Showing, client: Callable[..., subprocess.Popen[str]]
) -> None:
    process = client(
        "a = Sandbox.create('a'); b, = a.fork(1); s = a.snapshot()\nprint(a.id, b.id, s.id, flush=True)\ninput()\n"
        "try: a.run_code('1')\nexcept Exception as error: print(type(error).__name__, error)\n"
        "print(b.run_code('6 * 7').value, flush=True)\n"
    )
    assert process.stdin is not None and process.stdout is not None
    a, b, s = process.stdout.readline().split()
    with showing(None, control=True) as site:
        found = nodes(site, lambda all: {a, b, s} <= all.keys())
        assert (found[a]["can_end"], found[s]["can_end"]) == (True, False)
        assert found[a]["client"] == str(process.pid)
        assert site.ask("POST", "/terminate", {"id": s})[0] == 404
        assert site.ask("POST", "/terminate", {"id": "000000000000"})[0] == 404
        assert site.ask("POST", "/terminate", {"id": [a]})[0] == 404
        assert site.ask("POST", "/terminate", {"id": a}) == (200, json.dumps({"terminated": a}))
        assert a not in nodes(site, lambda all: a not in all)
        assert site.ask("POST", "/terminate", {"id": a})[0] == 404
    process.stdin.write("\n")
    process.stdin.flush()
    told = process.stdout.readline()
    assert told.startswith(SandboxDied.__name__) and "terminated on the page of sandbox-gym ui" in told
    assert process.stdout.readline() == "42\n"


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox_gym", "ui", "--audit", str(tmp_path / "empty.db")]
    (tmp_path / "empty.db").touch()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        site = Site(process.stdout.readline().split()[-1])
        assert len(site.token) > 30
        assert site.ask("GET", f"/?token={site.token}")[0] == 200
        assert get(site, "/state")["audit"] == str(tmp_path / "empty.db")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_what_it_cannot_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.db"
    assert main(["ui", "--audit", str(missing)]) == 1
    assert f"no audit log {missing}: set_audit(path), or" in capsys.readouterr().err
    assert not missing.exists()
    other = tmp_path / "other.db"
    other.write_text("no database")
    assert main(["ui", "--audit", str(other)]) == 1
    assert "no audit log" in capsys.readouterr().err
    with pytest.raises(SandboxError):
        View(str(other), control=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"port {port} can't be had (Address already in use): give another (--port), or 0")
    assert main(["ui", "--port", "99999"]) == 1
