"""`sandbox-gym ui`: a local web page of live sandboxes, the tree of their branches, and what each has done.

It looks at the list of live sandboxes and at an audit log; it changes nothing, unless it is started with `--control`.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable

from sandbox_gym._audit import VARIABLE
from sandbox_gym._pages import Pages, Read
from sandbox_gym.audit import check_there
from sandbox_gym.errors import SandboxError
from sandbox_gym.ui.page import page
from sandbox_gym.ui.view import View

__all__ = ["run", "serve"]


def run(options: argparse.Namespace) -> int:
    """The command. Its exit status: 130 after Ctrl-C, 1 where the page can't be shown."""

    def tell(address: str) -> None:
        print(f"Open {address}\nCtrl-C ends it; sandboxes go on.", flush=True)

    path = options.audit or os.environ.get(VARIABLE) or None
    try:
        if path is not None:
            check_there(path)  # a name that is mistyped would be waited for in silence
        serve(path, port=options.port, control=options.control, on_ready=tell)
    except KeyboardInterrupt:
        return 130
    except (SandboxError, OSError, OverflowError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def serve(
    audit: str | None,
    *,
    port: int = 0,
    control: bool = False,
    on_ready: Callable[[str], object] = print,
    until: threading.Event | None = None,
) -> None:
    """Shows the page until `until` is set. `audit`: the log's path, which need not be there yet. `control`: sandboxes
    can be ended from it. `on_ready` is given the page's address: whoever has it sees what the page shows.

    Raises SandboxError for what is no audit log; OSError for a port that can't be had.
    """
    view = View(audit, control=control)
    reads: dict[str, Read] = {
        "/state": view.state,
        "/story": view.story,
        "/event": view.event,
        "/frame": view.frame,
    }
    try:
        server = Pages(page, reads, {"/terminate": view.terminate}, port=port)
        with server.served():
            on_ready(server.address)
            (until or threading.Event()).wait()
    finally:
        view.close()
