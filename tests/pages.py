"""Local pages as tests meet them: by plain HTTP, and in Debian's headless Chromium."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@dataclass
class Site:
    """A page's server, by the address that it printed."""

    address: str

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return urlsplit(self.address).query.removeprefix("token=")

    def fetch(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers. `body`: bytes, or what goes as JSON."""
        given = {"X-Token": self.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        status, text, _ = self.fetch(method, path, body, **headers)
        return status, text.decode()


@contextmanager
def browser_page(**how: Any) -> Iterator[tuple[Any, list[str]]]:
    """A new page, and what its scripts raised, which grows. `how`: Playwright's arguments of a page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_program(), args=[*_FLAGS])
        try:
            page = browser.new_page(**how)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            yield page, problems
        finally:
            browser.close()


def _program() -> str:
    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert found, "there is no Chromium: apt-get install chromium-headless-shell, or scripts/setup.sh"
    return found
