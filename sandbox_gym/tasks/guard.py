"""Runs the Python programs of a check so that what they import can't end them with a success of its choice.

Copied into the sandbox of a check as `sitecustomize.py`, in a folder on PYTHONPATH: standard library only, and any
Python from 3.7 on. A Python program that the check starts, if an agent hasn't written it, is run again under a monitor:
a process that imports nothing of the agent's, and ends with 0 only when the program has come to its own end, with what
judges in it untouched. Else it ends with `TAMPERED`, and says why on stderr.

What is looked for: `os._exit` and the like, also from atexit or a finalizer (the program never says that it is done);
SystemExit, skips and expected failures raised by the agent's files; modules beside the tests that are named like those
of Python or pytest; functions of unittest, pytest, json and builtins that were replaced; and a test that must fail,
run after the others, and did not.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys

TAMPERED = 97
MARK = "sandbox-gym guard:"
FOLDER = "SANDBOX_GUARD"  # the variable that holds this file's folder
_INSIDE = "SANDBOX_GUARDED"  # set below a guarded program: what that starts is its own affair
_JUDGES = (
    *("unittest.case", "unittest.result", "unittest.runner", "unittest.suite", "unittest.main"),
    *("_pytest.runner", "_pytest.main", "_pytest.reports", "_pytest.python", "_pytest.outcomes"),
    *("_pytest.junitxml", "_pytest.terminal", "_pytest.skipping", "_pytest.assertion.rewrite"),
    *(
        "pluggy._callers",
        "pluggy._hooks",
        "pluggy._manager",
        "pluggy._result",
        "builtins",
        "json",
        "json.encoder",
    ),
)

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
        if len(head) < 2 or head[-2][-2:] != sys.argv[0]:  # glued together, as in -mpytest: left alone
            return
        options, kind, what = [*head[:-2], *_others(head[-2])], sys.argv[0], head[-1]
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


def _others(option: str) -> list[str]:
    """What else stands in one word with -m or -c: `-um` is -u and -m."""
    return [option[:-1]] if len(option) > 2 else []


def _is_agents(kind: str, what: str, config: dict[str, Any]) -> bool:
    """Whether an agent has written the program: that may end as it likes, and its check looks at what it did."""
    if kind == "file":
        return os.path.realpath(what) in config["agents"]
    if kind != "-m":
        return False
    top = what.partition(".")[0]
    places = [os.getcwd(), *sys.path]
    try:
        found = _Unshadowed(config, places).find_spec(top) or importlib.machinery.PathFinder.find_spec(
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


class _Unshadowed:
    """Finds a module of Python's or of what is installed in spite of a file that the agent has put before it."""

    def __init__(self, config: dict[str, Any], places: list[str] | None = None) -> None:
        self._new, self._places = config["new"], places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or not self._new:
            return None
        places = sys.path if self._places is None else self._places
        if _origin(importlib.machinery.PathFinder.find_spec(name, places)) not in self._new:
            return None
        if name in sys.builtin_module_names:
            return importlib.machinery.BuiltinImporter.find_spec(name)
        folders = {os.path.dirname(file) for file in self._new}
        others = [place for place in places if os.path.realpath(place or os.getcwd()) not in folders]
        return importlib.machinery.PathFinder.find_spec(name, others)


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
        _Program(kind, what, args, config, secret, write).run()  # never returns: SystemExit ends this process
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


# ---- the program -------------------------------------------------------------------------------------------------


class _Program:
    """`finish` is all that the monitor believes."""

    def __init__(
        self, kind: str, what: str, args: list[str], config: dict[str, Any], secret: str, fd: int
    ) -> None:
        import atexit

        self._kind, self._what, self._args, self._config = kind, what, args, config
        self._code = 1
        self._why = ""
        send, number, me = os.write, os.getpid, os.getpid()

        def finish() -> None:
            if number() == me:  # not in a fork of it
                send(fd, f"{secret} {self._code} {self._why}".encode("utf-8", "replace")[:4000])

        atexit.register(
            finish
        )  # registered first, it is called last: after whatever the agent has registered
        self._prints = prints(_JUDGES)

    def suspect(self, why: str) -> None:
        self._why = self._why or why

    def run(self) -> None:
        import unittest

        watch_outcomes(unittest.SkipTest, self)
        self._prints.update(prints(_JUDGES))
        sys.meta_path.insert(0, _Unshadowed(self._config))
        try:
            self._execute()
            self._code = 0
        except SystemExit as error:
            self._code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if not isinstance(error.code, int) and error.code is not None:
                print(error.code, file=sys.stderr)
            if self._code == 0 and self.of_agent(error.__traceback__):
                self.suspect("SystemExit came from a file of the agent's")
        except KeyboardInterrupt:
            self._code = 130
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
        self._code &= 255
        self._look_back()
        sys.exit(self._code)

    def _execute(self) -> None:
        import types

        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if self._kind == "-m":
            import runpy

            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *self._options(self._what)]
            runpy.run_module(self._what, run_name="__main__", alter_sys=True)
            return
        if self._kind == "file":
            main.__file__ = self._what
            sys.path[0] = os.path.dirname(os.path.realpath(self._what))
            sys.argv = [self._what, *self._options(os.path.basename(self._what))]
            with open(self._what, "rb") as file:
                code = compile(file.read(), self._what, "exec")
        else:
            sys.path[0] = ""
            sys.argv = [self._kind, *self._args]
            text = self._what if self._kind == "-c" else sys.stdin.read()
            code = compile(text, "<string>" if self._kind == "-c" else "<stdin>", "exec")
        exec(code, main.__dict__)

    def _options(self, name: str) -> list[str]:
        """The program's arguments; pytest's with a plugin of ours, and with the report where one is wanted."""
        if name not in ("pytest", "py.test"):
            return self._args
        import types

        plugin = types.ModuleType("sandbox_gym_guard", "PYTEST_DONT_REWRITE")
        plugin.__dict__.update(hooks(self))
        sys.modules[plugin.__name__] = plugin
        report = [f"--junitxml={self._config['junit']}"] if self._config["junit"] else []
        return ["-p", plugin.__name__, "-p", "no:cacheprovider", *self._args, *report]

    def of_agent(self, traceback: Any) -> bool:
        """Whether a file of the agent's stands on the way from the program to where this was raised."""
        while traceback is not None:
            if os.path.realpath(traceback.tb_frame.f_code.co_filename) in self._config["agents"]:
                return True
            traceback = traceback.tb_next
        return False

    def asked_by_agent(self, frame: Any) -> bool:
        """Whether the agent's code is what called a function of unittest's or pytest's, by its nearest frames."""
        for _ in range(8):
            if frame is None:
                return False
            if os.path.realpath(frame.f_code.co_filename) in self._config["agents"]:
                return True
            if os.path.basename(frame.f_code.co_filename) not in (
                "outcomes.py",
                "case.py",
                "sitecustomize.py",
            ):
                return False
            frame = frame.f_back
        return False

    def taken(self, modules: tuple[str, ...]) -> None:
        self._prints.update({key: value for key, value in prints(modules).items() if key not in self._prints})

    def _look_back(self) -> None:
        """Whether what judges is still what it was, and still says no."""
        import unittest

        now = prints(_JUDGES)
        for key, value in self._prints.items():
            there = now.get(key, (None, None))
            if there[0] is not value[0] or there[1] is not value[1]:
                self.suspect(f"{key} was replaced")
        result = unittest.TestResult()
        unittest.FunctionTestCase(_must_fail).run(result)
        if len(result.failures) != 1:
            self.suspect("a test that must fail did not")


def _must_fail() -> None:
    assert os.getpid() == 0


def watch_outcomes(kind: Any, program: _Program) -> None:
    """Suspects the program when the agent's code raises a test's outcome: a skip, an expected failure, an end."""
    made = kind.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        if program.asked_by_agent(sys._getframe(1)):
            program.suspect(f"{kind.__name__} was raised by a file of the agent's")
        made(self, *args, **kwargs)

    kind.__init__ = watched


def prints(modules: tuple[str, ...]) -> dict[str, Any]:
    """What the functions and classes of modules are, those that are loaded: to tell later what was replaced."""
    found: dict[str, Any] = {}
    for name in modules:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else []:
            if isinstance(value, type):
                if value.__module__ != name:
                    continue
                for inner, part in list(vars(value).items()):
                    if callable(part):
                        found[f"{name}.{key}.{inner}"] = _print_of(part)
            if callable(value) and key != "_":
                found[f"{name}.{key}"] = _print_of(value)
    return found


def _print_of(value: Any) -> tuple[Any, Any]:
    return value, getattr(value, "__code__", None)


# ---- in pytest ---------------------------------------------------------------------------------------------------


def hooks(program: _Program) -> dict[str, Any]:
    """A pytest plugin: no test ran, the agent skipped some, or a test that must fail passed: each is suspect."""
    import pytest

    seen = {"ran": 0}

    class _MustFail(pytest.Item):
        def runtest(self) -> None:
            _must_fail()

    def pytest_configure(config: Any) -> None:
        from _pytest import outcomes

        for kind in (outcomes.OutcomeException, outcomes.Exit):
            watch_outcomes(kind, program)
        program.taken(_JUDGES)

    def pytest_runtest_logreport(report: Any) -> None:
        seen["ran"] += report.when == "call"

    def pytest_sessionfinish(session: Any, exitstatus: Any) -> None:
        from _pytest import runner

        if int(exitstatus) not in (0, 1):  # ended early: not a success anyway
            return
        if not seen["ran"]:
            program.suspect("no test ran")
        canary = _MustFail.from_parent(session, name=f"test_{os.urandom(4).hex()}")
        reports = runner.runtestprotocol(canary, nextitem=None, log=False)
        if [report.outcome for report in reports if report.when == "call"] != ["failed"]:
            program.suspect("a test that must fail did not")

    return {name: value for name, value in locals().items() if name.startswith("pytest_")}


if __name__ == "__main__":
    monitor()
elif __name__ == "sitecustomize":
    start()
    _next_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
