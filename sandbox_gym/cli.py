"""The command line: `sandbox-gym COMMAND`, or `python -m sandbox_gym COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import sandbox_gym
from sandbox_gym._table import size, span, table

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. `argv`: without the program's name; None takes sys.argv."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-gym", description=(sandbox_gym.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"sandbox-gym {sandbox_gym.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor", help="what works on this machine, and the command that mends what does not"
    )
    doctor.set_defaults(run=_doctor)

    ls = commands.add_parser("ls", help="live sandboxes and snapshots of all clients on this machine")
    ls.set_defaults(run=_ls)

    tree = commands.add_parser("tree", help="which live sandbox and snapshot came from which")
    tree.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    tree.set_defaults(run=_tree)

    audit = commands.add_parser("audit", help="what an audit log holds: every command, cell, file write, ...")
    audit.add_argument("file", nargs="?", metavar="FILE", help="the log; by default $SANDBOX_GYM_AUDIT")
    audit.add_argument(
        "--sandbox", metavar="ID", help="of one (or its name), with what its ancestors did before it branched"
    )
    audit.add_argument("--json", action="store_true", help="all that is kept of each, as JSON, one a line")
    audit.set_defaults(run=_audit)

    gc = commands.add_parser("gc", help="remove what clients that were killed have left")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.set_defaults(run=_gc)

    page = commands.add_parser("ui", help="a local web page: live sandboxes, their tree, what each has done")
    page.add_argument("--audit", metavar="FILE", help="the log to show; by default $SANDBOX_GYM_AUDIT")
    page.add_argument("--port", type=int, default=0, metavar="N", help="any that is free by default")
    page.add_argument("--control", action="store_true", help="the page may end sandboxes")
    page.set_defaults(run=_ui)

    _add_template(commands)
    _add_agents(commands)
    _add_eval(commands)

    demo = commands.add_parser(
        "demo", help="play a game in sandboxes, branch it, search it; ends within two minutes"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("demo-output"), metavar="FOLDER", help="where pictures go"
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_template(commands: _Commands) -> None:
    template = commands.add_parser("template", help="sandboxes that were set up once, to start from")
    actions = template.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="all of them, with their size on disk and when they were used last")
    build = actions.add_parser("build", help="make a sandbox, set it up, and keep it")
    build.add_argument("name", metavar="NAME")
    build.add_argument(
        "--image",
        metavar="IMAGE",
        help="an archive, a root file system's folder, or docker's name for one; else this host's Python",
    )
    build.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="for the shell; again for more"
    )
    delete = actions.add_parser("delete", help="take one from the disk")
    delete.add_argument("name", metavar="NAME")
    prune = actions.add_parser("prune", help="delete those used least lately until the others fit")
    prune.add_argument("size", metavar="SIZE", help="such as 10Gi")
    template.set_defaults(run=_template)


def _add_agents(commands: _Commands) -> None:
    mcp = commands.add_parser("mcp", help="an MCP server over stdio: a fresh sandbox and its tools")
    start = mcp.add_mutually_exclusive_group()
    start.add_argument("--image", metavar="IMAGE", help="to start from, as in `template build`")
    start.add_argument("--template", metavar="NAME", help="to start from")
    mcp.add_argument(
        "--allow", action="append", default=[], metavar="HOST", help="what it may reach; again for more"
    )
    mcp.set_defaults(run=_mcp)

    duel = commands.add_parser("duel", help="choose between two continuations of a call, on a local web page")
    duel.add_argument(
        "--out", type=Path, default=Path("preferences.jsonl"), metavar="FILE", help="where choices are added"
    )
    duel.add_argument("--n", type=int, default=10, metavar="N", help="how many, at most")
    duel.add_argument("--seed", type=int, default=0, metavar="SEED")
    duel.add_argument("--port", type=int, default=0, metavar="N", help="any that is free by default")
    duel.set_defaults(run=_duel)


def _add_eval(commands: _Commands) -> None:
    evaluation = commands.add_parser("eval", help="a policy on a data set of tasks: pass@k, and a report")
    evaluation.add_argument("tasks", metavar="TASKS", help="a data set: a .jsonl or .json file, or a folder")
    evaluation.add_argument(
        "--policy", required=True, metavar="MODULE:FUNCTION", help="a function of a task and a sandbox"
    )
    evaluation.add_argument("-k", type=int, default=1, metavar="K", help="attempts at each task (1)")
    evaluation.add_argument("--workers", type=int, metavar="N", help="attempts at a time (one a processor)")
    evaluation.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="of the policy, for an attempt (1800)",
    )
    evaluation.add_argument(
        "--backend", default="native", metavar="NAME", help="what makes sandboxes (native)"
    )
    evaluation.add_argument(
        "--repos", type=Path, metavar="FOLDER", help="with the repositories of SWE-bench's rows"
    )
    evaluation.add_argument(
        "--out",
        type=Path,
        default=Path("eval-output"),
        metavar="FOLDER",
        help="for results and report (eval-output); what is there already is not run again",
    )
    evaluation.add_argument("--anew", action="store_true", help="delete the results in it, and run all again")
    evaluation.set_defaults(run=_eval)


def _doctor(_: argparse.Namespace) -> int:
    from sandbox_gym import doctor

    return doctor.report()


def _ls(_: argparse.Namespace) -> int:
    from sandbox_gym import _tree

    rows = sorted(_tree.live(), key=lambda row: (row["owner_pid"], -row["age"]))
    if not rows:
        print("No sandboxes are live.")
        return 0
    head = ("ID", "NAME", "STATE", "AGE", "FROM", "MEMORY", "CLIENT")
    cells = [
        (
            row["id"],
            row["name"] if row["name"] != row["id"] else "",
            row["state"],
            span(row["age"]),
            row["parent"] or "",
            size(row["memory_bytes"]),
            str(row["owner_pid"]),
        )
        for row in rows
    ]
    print(table(head, cells, right=(3, 5, 6)))
    return 0


def _tree(options: argparse.Namespace) -> int:
    from sandbox_gym import _tree

    _tree.show(watch=options.watch)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from sandbox_gym import _audit, audit
    from sandbox_gym.errors import SandboxError

    path = options.file or os.environ.get(_audit.VARIABLE)
    if not path:
        print(f"Name the log's file, or set {_audit.VARIABLE}", file=sys.stderr)
        return 2
    try:
        events = audit.read(path, sandbox=options.sandbox)
        if options.json:
            for line in audit.lines(events):
                print(line)
        else:
            print(audit.as_table(events))
            counted = audit.steps(path, sandbox=options.sandbox)
            if counted:
                print(f"\n{audit.steps_as_table(counted)}")
    except (SandboxError, OSError, KeyError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(error.args[0] if error.args else error, file=sys.stderr)
        return 1
    return 0


def _gc(options: argparse.Namespace) -> int:
    from sandbox_gym import _tree
    from sandbox_gym.backends.shared import registry

    removed = registry.collect(dry_run=options.dry_run)
    if _tree.has_docker():
        from sandbox_gym.backends.docker import owners

        removed += owners.collect_all(dry_run=options.dry_run)
    for path in removed:
        print(f"{'would remove' if options.dry_run else 'removed'} {path}")
    if not removed:
        print("Nothing to remove.")
    return 0


def _template(options: argparse.Namespace) -> int:
    from sandbox_gym.errors import SandboxError
    from sandbox_gym.template import Template

    try:
        if options.action == "build":
            old = options.name in [kept.name for kept in Template.list()]
            built = Template.build(options.name, options.image, options.setup)
            print(
                f"built {built.name}, {size(built.size_bytes)}{', in place of an older one' if old else ''}"
            )
        elif options.action == "delete":
            Template.get(options.name).delete()
        elif options.action == "prune":
            for name in Template.prune(options.size):
                print(f"deleted {name}")
        else:
            rows = []
            for kept in Template.list():
                try:
                    taken = size(kept.size_bytes)
                except SandboxError:
                    taken = "damaged"
                rows.append((kept.name, taken, f"{span(time.time() - kept.used)} ago"))
            print(table(("NAME", "SIZE", "USED"), rows, right=(1, 2)) if rows else "No templates are kept.")
    except (SandboxError, KeyError, ValueError) as error:
        print(error.args[0] if error.args else error, file=sys.stderr)
        return 1
    return 0


def _mcp(options: argparse.Namespace) -> int:
    from sandbox_gym.agents import mcp

    return mcp.serve(options)


def _duel(options: argparse.Namespace) -> int:
    from sandbox_gym.duel import call_agent_duels, serve
    from sandbox_gym.errors import SandboxError

    def tell(address: str) -> None:
        print(f"Open {address}\nCtrl-C ends it; what was chosen by then is kept.", flush=True)

    try:
        duels = call_agent_duels(seed=options.seed)
        made = serve(duels, options.out, n=options.n, on_ready=tell, port=options.port)
    except KeyboardInterrupt:
        return 130
    except (SandboxError, OSError, OverflowError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{made} choices were added to {options.out}")
    return 0


def _ui(options: argparse.Namespace) -> int:
    from sandbox_gym import ui

    return ui.run(options)


def _eval(options: argparse.Namespace) -> int:
    from sandbox_gym.evals import command

    return command.run(options)


def _demo(options: argparse.Namespace) -> int:
    try:
        from sandbox_gym import demo
    except ModuleNotFoundError as error:
        print(f"The demo needs {error.name}: pip install 'sandbox-gym[demo]'", file=sys.stderr)
        return 1
    return demo.main(options.out)
