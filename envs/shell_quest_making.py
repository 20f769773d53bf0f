"""What the quests of `ShellQuest-v0` are made of."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox_gym.envs.shell_quest_files import Entry, Files

MENU_SIZE = 12
_LOOKS = (  # change nothing
    *(
        "ls -R",
        "find . -type f | sort | head -20",
        "head -3 *",
        "wc -l *",
        "stat -c %a *",
        "pwd",
        "cat answer",
    ),
)
WORDS = (
    *(
        "amber",
        "basil",
        "cedar",
        "delta",
        "ember",
        "fjord",
        "grove",
        "heron",
        "ivory",
        "jetty",
        "kelp",
        "lotus",
    ),
    *("maple", "nectar", "onyx", "pearl", "quartz", "raven", "sable", "tulip", "umber", "velvet", "willow"),
    *("yarrow", "zephyr", "birch", "coral", "dune", "flint", "gale", "hazel", "iris"),
)

Check = Callable[[Files], bool]


@dataclass(frozen=True)
class Quest:
    """A task in a folder. `files`: what lies there first; `setup`: a command line that runs then. `reference`: commands
    that solve it, one after the other; `distractors`: others that seem to the point. `goals`: what a folder must
    be like, none of them so at first; they are looked at on the host, and only the host knows what they look for.
    """

    kind: str
    prompt: str
    files: Mapping[str, Entry]
    reference: tuple[str, ...]
    distractors: tuple[str, ...]
    goals: tuple[Check, ...]
    setup: str = ""
    menu: tuple[str, ...] = ()  # MENU_SIZE commands, the reference among them

    def progress(self, files: Files) -> float:
        """The share of its goals that a folder fulfils: 1.0 is solved."""
        return sum(goal(files) for goal in self.goals) / len(self.goals)


def with_menu(quest: Quest, rng: random.Random) -> Quest:
    """The quest with reference, distractors and looks in a random order."""
    commands = [*quest.reference, *quest.distractors]
    commands += rng.sample(_LOOKS, max(0, MENU_SIZE - len(commands)))
    if len(commands) != MENU_SIZE or len(set(commands)) != MENU_SIZE:
        raise ValueError(f"quest {quest.kind} has {len(commands)} commands, not {MENU_SIZE} different ones")
    rng.shuffle(commands)
    return Quest(**{**vars(quest), "menu": tuple(commands)})


def text(content: str, mode: int = 0o644) -> Entry:
    return Entry("file", mode, content.encode())


def lines(items: list[str]) -> str:
    return "".join(f"{item}\n" for item in items)


def tar_gz(files: Mapping[str, str]) -> Entry:
    """The same bytes each time."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w:") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return gz(spool.getvalue())


def gz(data: bytes) -> Entry:
    return Entry("file", 0o644, gzip.compress(data, mtime=0))


def says(path: str, content: str) -> Check:
    """A file holds this text, spaces around it aside."""
    return lambda files: (
        path in files and files[path].data.decode("utf-8", "replace").strip() == content.strip()
    )


def holds(wanted: Mapping[str, str]) -> Check:
    """All these files are there, letter by letter."""
    return lambda files: all(
        path in files and files[path].data == content.encode() for path, content in wanted.items()
    )


def commits(steps: list[str]) -> str:
    """A command line that makes a repository: each step a change, committed under "change N"."""
    when = "2024-01-01T00:00:00Z"
    names = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a"
    made = [f"{names} GIT_AUTHOR_DATE={when} GIT_COMMITTER_DATE={when}", "git init -q --template="]
    for number, step in enumerate(steps, 1):
        made += [step, "git add -A", f"git commit -q -m 'change {number}'"]
    return " && ".join(made)
