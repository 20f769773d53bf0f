"""An environment that is a web page, in a Chromium that Playwright drives."""

from __future__ import annotations

import functools
import http.server
import io
import os
import threading
from typing import Any

import gymnasium
import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 480, 240
BOXES = 3
_PROGRAMS = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_PATIENCE = 20_000  # milliseconds

Picture = np.ndarray[Any, np.dtype[np.uint8]]


class BoxesEnv(gymnasium.Env[Picture, np.int64]):
    """Opens one of the page's boxes in each of two rounds, by a click; the reward is what was in it.

    Observation: the page as it is seen, [240, 480, 3]. `info`: what its script knows of itself, and what the browser
    keeps of it.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(BOXES)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._address = _serve(os.path.dirname(__file__))
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=_program(), args=_FLAGS)
        self._page = self._browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        self._page.set_default_timeout(_PATIENCE)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Picture, dict[str, Any]]:
        super().reset(seed=seed)
        self._page.goto(f"{self._address}/page.html?seed={self.np_random.integers(2**31)}")
        self._page.fill("#name", "Ada")
        self._page.locator("button").first.scroll_into_view_if_needed()
        return self._look(), self._page.evaluate("state()")

    def step(self, action: np.int64) -> tuple[Picture, float, bool, bool, dict[str, Any]]:
        before = self._page.evaluate("total")
        self._page.locator("button").nth(int(action)).click()
        info = self._page.evaluate("state()")
        return self._look(), float(info["total"] - before), info["over"], False, info

    def render(self) -> Picture:
        return self._look()

    def close(self) -> None:
        self._browser.close()
        self._playwright.stop()

    def _look(self) -> Picture:
        with Image.open(io.BytesIO(self._page.screenshot())) as picture:
            return np.asarray(picture.convert("RGB"))


def _program() -> str:
    for path in _PROGRAMS:
        if os.path.exists(path):
            return path
    raise FileNotFoundError(
        "there is no Chromium: apt-get install chromium-headless-shell, or scripts/setup.sh"
    )


def _serve(folder: str) -> str:
    """A web server of this process's own, for a folder. Its address."""
    handler = functools.partial(_Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, across snapshots too

    def log_message(self, *_: Any) -> None:
        pass
