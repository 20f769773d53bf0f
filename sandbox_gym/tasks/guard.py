"""Runs the Python programs of a check so that what they import can't end them with a success of its choice.

Copied into the sandbox of a check as `sitecustomize.py`, in a folder on PYTHONPATH, with `guarded` beside it: standard
library only. A Python program that the check starts, if an agent hasn't written it, is run again under a monitor:
a process that imports nothing of the agent's, and ends with 0 only when the program has come to its own end, with what
judges in it untouched. Else it ends with `TAMPERED`, and says why on stderr.

What is looked for: `os._exit` and the like, also from atexit or a finalizer (the program never says that it is done);
SystemExit, skips and expected failures raised by the agent's files; modules beside the tests that are named like those
of Python or pytest; functions of unittest, pytest, json and builtins that were replaced; and a test that must fail,
run after the others, and did not.
"""

from __future__ import annotations

import os
import sys

PATHS = "SANDBOX_GUARD_PATHS"  # what the check would have in PYTHONPATH: it comes in once Python has started
PLACES = list(sys.path)
if __name__ in ("__main__", "sitecustomize"):
    _paths = [os.path.abspath(place) for place in os.environ.get(PATHS, "").split(os.pathsep) if place]
    if __name__ == "sitecustomize":  # which comes first in each Python: the program's own finds them there
        PLACES[:0] = _paths
    # What is imported here comes from no folder that an agent writes to.
    _given = {
        os.path.abspath(place) for place in (*_paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    }
    _given -= {os.path.dirname(os.path.abspath(file)) for file in (os.__file__, __file__)}
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) not in _given]

import importlib  # noqa: E402
import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402

TAMPERED = 97
MARK = "sandbox-gym guard:"
FOLDER = "SANDBOX_GUARD"  # the variable that holds this file's folder
_INSIDE = "SANDBOX_GUARDED"  # set below a guarded program: what that starts is its own affair

TYPE_CHECKING = False  # typing is slow to import, and a check may start many Pythons
if TYPE_CHECKING:
    from typing import Any


# ---- as sitecustomize --------------------------------------------------------------------------------------------


def start() -> None:
    """Runs the program again under the monitor, if it is the check's own. Returns else."""
    folder = os.environ.get(FOLDER)
    if folder is None or _INSIDE in os.environ or not hasattr(sys, "orig_argv"):
        return
    config = _config(folder)
    args = sys.argv[1:]
    head = sys.orig_argv[1 : len(sys.orig_argv) - len(args)]
    if sys.argv[0] in ("-m", "-c"):
        kind = sys.argv[0]
        if head[-1].startswith(kind):  # glued together, as in -mpytest
            options, what = head[:-1], head[-1][2:]
        else:  # with others in one word, as in -um
            options, what = [*head[:-2], *([head[-2][:-1]] if len(head[-2]) > 2 else [])], head[-1]
    elif sys.argv[0] in ("", "-"):
        if os.isatty(0):
            return
        options, kind, what = [option for option in head if option != "-"], "-", "-"
    else:
        options, kind, what = head[:-1], "file", os.path.abspath(sys.argv[0])
    if _is_agents(kind, what, config):
        return
    os.environ[_INSIDE] = "1"
    os.execv(
        sys.executable,
        [sys.executable, *options, os.path.join(folder, "sitecustomize.py"), kind, what, *args],
    )


def _is_agents(kind: str, what: str, config: dict[str, Any]) -> bool:
    """Whether an agent has written the program: that may end as it likes, and its check looks at what it did."""
    if kind == "file":
        return os.path.realpath(what) in config["agents"]
    if kind != "-m":
        return False
    top = what.partition(".")[0]
    places = [os.getcwd(), *PLACES]
    try:
        found = Unshadowed(config, places).find_spec(top) or importlib.machinery.PathFinder.find_spec(
            top, places
        )
    except (ImportError, ValueError):
        return False
    return _origin(found) in config["agents"] or (
        found is not None
        and os.path.join(next(iter(found.submodule_search_locations or [""])), "__main__.py")
        in config["agents"]
    )


def _config(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "config.json")) as file:
        config: dict[str, Any] = json.load(file)
    config["agents"], config["new"] = set(config["agents"]), set(config["new"])
    return config


def _next_sitecustomize(folder: str) -> None:
    """The machine's own, which ours stands in front of."""
    places = [place for place in sys.path if os.path.abspath(place) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class Unshadowed:
    """Finds a module of Python's or of what is installed in spite of a file that the agent has put before it."""

    def __init__(self, config: dict[str, Any], places: list[str] | None = None) -> None:
        self._new, self._places = config["new"], places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or not self._new:
            return None
        places = sys.path if self._places is None else self._places
        found = importlib.machinery.PathFinder.find_spec(name, places)
        if _origin(found) not in self._new:
            return None
        for place in places:
            found = importlib.machinery.PathFinder.find_spec(name, [place])
            if found is not None and found.origin and _origin(found) not in self._new:
                return found
        return None


def _origin(spec: Any) -> str:
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else ""


# ---- the monitor -------------------------------------------------------------------------------------------------


def monitor() -> None:
    """Forks: the child runs the program, and this one ends as the child says."""
    kind, what, *args = sys.argv[1:]
    config = _config(os.environ[FOLDER])
    changed = [path for path, digest in config["hidden"].items() if _digest(path) != digest]
    if changed:  # by a program that the check has run before
        _end(f"{changed[0]} was written to")
    watched = [*config["hidden"], *config["protected"]]
    stamps = list(map(_stamp, watched))
    secret = os.urandom(16).hex()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        guarded = importlib.import_module("sandbox_gym_guarded")
        program = guarded.Program(kind, what, args, config, secret, write)
        program.run(Unshadowed(config), PLACES)  # ends this process
    os.close(write)
    _seal()
    said, status = _listen(read, child)
    for path, stamp in zip(watched, stamps):
        if _stamp(path) != stamp:
            _end(f"{path} was written to")
    word, _, rest = said.decode("utf-8", "replace").partition(" ")
    if word == secret and rest:
        code, _, why = rest.partition(" ")
        if why:
            _end(why)
        os._exit(int(code))
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    if os.WEXITSTATUS(status) == 0:
        _end("the program was ended before it came to its own end")
    os._exit(os.WEXITSTATUS(status))


def _digest(path: str) -> str:
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _stamp(path: str) -> tuple[int, int]:
    """Which file it is, and when it was changed last: no program can set that."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_ino, status.st_ctime_ns


def _listen(read: int, child: int) -> tuple[bytes, int]:
    """What the child says as it ends, and its status. What it has forked may hold the pipe open for ever."""
    import select

    said, ended, status = b"", 0, 0
    while True:
        if not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
        if not said and select.select([read], [], [], 0.0 if ended else 0.02)[0]:
            said = os.read(read, 4096)  # one write, shorter than what a pipe takes at once
            if not said and not ended:  # closed: it only has to end
                ended, status = os.waitpid(child, 0)
        if said and not ended:
            ended, status = os.waitpid(child, 0)
        if ended:
            return said, status


def _end(why: str) -> None:
    os.write(2, f"\n{MARK} {why}\n".encode("utf-8", "replace"))
    os._exit(TAMPERED)


def _seal() -> None:
    """No program of the sandbox reads or writes this process's memory."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        pass


if __name__ == "__main__":
    monitor()
elif __name__ == "sitecustomize":
    start()
    sys.path[:] = PLACES
    _next_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
