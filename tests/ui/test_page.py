"""The page in headless Chromium, over what another process does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym._audit import set_audit
from sandbox_gym.sandbox import Sandbox
from tests.pages import Site, browser_page
from tests.ui.scene import AGENT, GAME, TRIES, client

Showing = Callable[..., AbstractContextManager[Site]]
SIZE = {"width": 1280, "height": 800}


def row(page: Any, name: str) -> Any:
    """The row of the sandbox that is called so."""
    return page.locator(f".row:not(.client):has(.name:text-is({name!r}))")


def test_a_person_watches(showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    with client(log) as acting, showing(log) as site, browser_page(viewport=SIZE) as (page, problems):
        page.goto(site.address)
        expect(page.locator("#empty")).to_be_visible()
        acting.do(AGENT)
        expect(row(page, "try-3")).to_be_visible()
        expect(row(page, "agent").locator(".denied")).to_have_text("1 denied")

        # The tree: copies are right of their origin, and below it.
        places = [row(page, name).locator(".dot").bounding_box() for name in ("agent", "try-1", "try-2")]
        assert places[0]["x"] < places[1]["x"] == places[2]["x"]
        assert places[0]["y"] < places[1]["y"] < places[2]["y"]
        assert page.locator("#edges path").get_attribute("d").count("Q") >= 3

        row(page, "try-2").click()
        expect(page.locator("#name")).to_have_text("try-2")
        expect(page.locator("#path")).to_contain_text("agent")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#facts")).to_contain_text(f"process {acting.process.pid}")
        expect(page.locator("#story .branch")).to_contain_text("branched from agent")
        expect(page.locator("#story li.inherited .text").nth(1)).to_contain_text("mkdir -p app")
        expect(page.locator("#verdicts li").first).to_contain_text("deniedhttp example.org:80")
        expect(page.locator("#verdicts li").last).to_contain_text("allowedhttp api:80")
        expect(page.locator("#end")).to_be_hidden()

        # Live, as it happens, and whole, at a click.
        acting.do(TRIES)
        written = page.locator("#story .line:has-text('app/NOTES.md')")
        expect(written).to_be_visible()
        written.click()
        expect(page.locator("#story dl")).to_contain_text("double was off by one")
        written.click()
        expect(page.locator("#story dl")).to_have_count(0)
        row(page, "try-3").click()
        failed = page.locator("#story .outcome[data-failed=yes]", has_text="ZeroDivisionError")
        expect(failed).to_be_visible()
        assert not problems


@pytest.mark.parametrize(("scheme", "ink"), [("light", "rgb(27, 35, 48)"), ("dark", "rgb(228, 232, 239)")])
def test_a_person_finds_the_way(scheme: str, ink: str, showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    how = {"viewport": SIZE, "color_scheme": scheme}
    with client(log) as acting, showing(log) as site, browser_page(**how) as (page, problems):
        acting.do(AGENT + TRIES)
        page.goto(site.address)
        row(page, "try-3").click()

        # By key, by the path above it, by filter; and its address keeps what was chosen.
        page.locator("#tree").focus()
        page.keyboard.press("ArrowUp")
        expect(page.locator("#name")).to_have_text("final-2")
        page.reload()
        expect(page.locator("#name")).to_have_text("final-2")
        page.click("#path button >> text=try-2")
        expect(page.locator("#name")).to_have_text("try-2")
        row(page, "try-2").locator(".fold").click()
        expect(row(page, "final-1")).to_have_count(0)
        row(page, "try-2").locator(".fold").click()
        page.fill("#filter", "FINAL-1")
        expect(row(page, "try-3")).to_have_count(0)
        expect(row(page, "agent")).to_be_visible()  # above what matches
        page.fill("#filter", "")

        # Ended ones, if asked for.
        acting.do("final[1].terminate()")
        expect(row(page, "final-2")).to_have_count(0)
        page.check("#ended")
        expect(row(page, "final-2").locator(".dot")).to_have_attribute("data-state", "terminated")
        row(page, "final-2").click()
        expect(page.locator("#story .kind").last).to_have_text("end")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZE["width"]
        assert not problems
        assert page.evaluate("getComputedStyle(document.body).color") == ink


def test_steps_and_pictures_of_an_environment(showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    with client(log) as acting, showing(log) as site, browser_page(viewport=SIZE) as (page, problems):
        acting.do(GAME)
        first = acting.do("answer = env.unwrapped.sandbox.id")
        page.goto(f"{site.address}#{first}")
        expect(page.locator("#facts dt:text-is('steps') + dd")).to_have_text("30")
        picture = page.locator("#frame")
        expect(picture).to_be_visible()
        assert picture.evaluate(
            "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"
        ) == [
            *(600, 400),
        ]
        expect(row(page, "decision").locator(".dot")).to_have_attribute("data-state", "snapshot")
        before = picture.get_attribute("src")
        acting.do("_ = [env.step(0) for _ in range(5)], env.render()")
        expect(page.locator("#facts dt:text-is('steps') + dd")).to_have_text("35")
        expect(picture).not_to_have_attribute("src", before)
        # A copy that has drawn nothing yet shows what its origin drew last before it branched.
        bare = acting.do("copy, = branches[0].branch(1); answer = copy.sandbox.id")
        page.locator(f".row[data-id='{bare}']").click()
        expect(page.locator("#frame-caption")).to_contain_text("before it branched")
        row(page, "decision").click()
        expect(page.locator("#facts")).to_contain_text("taken of")
        assert not problems


def test_what_sandboxes_write_is_text(showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    evil = "<script>window.evil=1</script><img src=x onerror='window.evil=2'>"
    with client(log) as acting, showing(log, control=True) as site, browser_page() as (page, problems):
        acting.do(f"evil = {evil!r}\nbox = Sandbox.create(evil)\nbox.shell('echo ' + repr(evil) + '; false')")
        acting.do("box.run_code('raise ValueError(' + repr(evil) + ')')\nsnap = box.snapshot(evil)")
        page.goto(site.address)
        page.fill("#filter", f"client:{acting.process.pid}")  # others may use this machine too
        expect(page.locator(".row .name")).to_have_text([evil, evil])
        page.locator(".row .name").first.click()
        expect(page.locator("#name")).to_have_text(evil)
        expect(page.locator("#story .line")).to_have_count(4)
        page.locator("#story .line").nth(1).click()
        expect(page.locator("#story dl")).to_contain_text(evil)
        page.click("#end")
        expect(page.locator("#sure-name")).to_have_text(evil)
        assert page.evaluate("window.evil") is None
        assert page.locator("script").count() == 1 and page.locator("img").count() == 1
        assert not problems


def test_it_ends_sandboxes_if_told(showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    with client(log) as acting, showing(log, control=True) as site, browser_page() as (page, problems):
        acting.do("a = Sandbox.create('a')\nb, = a.fork(1, prefix='b-')\ns = a.snapshot('kept')")
        page.goto(site.address)
        row(page, "kept").click()
        expect(page.locator("#state")).to_have_text("snapshot")
        expect(page.locator("#end")).to_be_hidden()
        row(page, "a").click()
        page.click("#end")
        page.click("#sure-no")
        expect(page.locator("#sure")).to_be_hidden()
        assert acting.do("answer = a.run_code('1').value") == "1"
        page.click("#end")
        page.click("#sure-yes")
        expect(page.locator("#sure")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("gone")
        expect(page.locator("#end")).to_be_hidden()
        told = acting.do("try: a.run_code('1')\nexcept Exception as error: answer = str(error)")
        assert "terminated on the page of sandbox-gym ui" in told
        expect(page.locator("#state")).to_have_text("dead")  # its client knows, and so does the log
        assert acting.do("answer = b.run_code('6 * 7').value") == "42"
        assert not problems


def test_it_says_when_its_server_has_gone(showing: Showing) -> None:
    from playwright.sync_api import expect

    with browser_page() as (page, _):
        with showing(None) as site:
            page.goto(site.address)
            expect(page.locator("#lamp")).to_have_text("live")
        expect(page.locator("#lamp")).to_contain_text("has ended")


def test_five_hundred_sandboxes(showing: Showing, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    log = tmp_path / "audit.db"
    with client(log) as acting, showing(log) as site, browser_page(viewport=SIZE) as (page, problems):
        acting.do("root = Sandbox.create('root')\nmany = root.fork(499, prefix='m-')")
        page.goto(site.address)
        own = f"client:{acting.process.pid}"
        page.fill("#filter", own)
        expect(page.locator(".row:not(.client)")).to_have_count(500, timeout=30_000)
        row(page, "m-400").click()
        expect(page.locator("#name")).to_have_text("m-400")
        took = "(() => { const began = performance.now(); tree.lay(); return performance.now() - began; })()"
        assert min(page.evaluate(took) for _ in range(5)) < 100  # milliseconds of each second
        page.fill("#filter", f"{own} m-49")
        expect(page.locator(".row:not(.client)")).to_have_count(1 + 11)
        acting.do("for box in many: box.terminate()")
        page.fill("#filter", own)
        expect(page.locator(".row:not(.client)")).to_have_count(
            2, timeout=30_000
        )  # and the one that is chosen
        assert not problems


def test_a_person_sees_that_the_log_is_gone(showing: Showing, log: Path, box: Sandbox) -> None:
    from playwright.sync_api import expect

    box.shell("echo first")
    with showing(log) as site, browser_page(viewport=SIZE) as (page, problems):
        page.goto(site.address)
        row(page, box.name).click()
        expect(page.locator("#story")).to_contain_text("echo first")
        set_audit(None)
        log.rename(log.with_name("moved.db"))
        expect(page.locator("#story-note")).to_have_text("The audit log was deleted or moved away.")
        set_audit(log)
        box.shell("echo second")
        expect(page.locator("#story")).to_contain_text("echo second")
        expect(page.locator("#story-note")).to_have_text("")
        assert not problems
