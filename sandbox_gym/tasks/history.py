"""A repository as it was at one commit: nothing later is in it, by no name and as no object."""

from __future__ import annotations

import secrets

from sandbox_gym.errors import TaskError
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks.task import Task

_TIMEOUT = 600.0
# Every way to what is later goes: branches, tags, stashes, remotes, notes, work trees, what was fetched, logs; then the
# objects that nothing leads to. Commits before it stay, with their objects.
_FORGET = """
set -e
base=$(git rev-parse --verify --quiet "$1^{commit}")
git checkout --quiet --force --detach "$base"
git remote | while read -r name; do git remote remove "$name"; done
git for-each-ref --format='delete %(refname)' | git update-ref --stdin
folder=$(git rev-parse --git-dir)
rm -rf "$folder/logs" "$folder/worktrees" "$folder"/*_HEAD "$folder/refs/original"
git checkout --quiet -B main "$base"
rm -rf "$folder/logs"
git -c gc.reflogExpire=now -c gc.reflogExpireUnreachable=now gc --quiet --prune=now
rm -rf "$folder/logs"
test "$(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$')" = \\
    "$(git rev-list --count HEAD)"
"""


def clone(box: Sandbox, task: Task) -> None:
    """Brings the host's repository into the sandbox, all of it: `forget_later` comes after. Raises TaskError."""
    assert task.repo is not None
    place = f"/tmp/{secrets.token_hex(8)}"
    box.upload(task.repo, place)
    result = box.shell(
        'git clone --quiet --no-hardlinks "$PLACE" "$WORK" && rm -rf "$PLACE"',
        _TIMEOUT,
        cwd="/",
        env={"PLACE": place, "WORK": task.workdir},
    )
    if not result.ok:
        raise TaskError(f"task {task.id}: field 'repo': it can't be cloned: {result.stderr[-2000:]}")


def forget_later(box: Sandbox, task: Task) -> None:
    """Leaves `base_commit` and what came before it. Raises TaskError when that can't be had."""
    result = box.exec(["/bin/sh", "-c", _FORGET, "sh", str(task.base_commit)], _TIMEOUT, cwd=task.workdir)
    if not result.ok:
        raise TaskError(
            f"task {task.id}: field 'base_commit': {task.base_commit!r} can't be made the last commit of "
            f"{task.workdir}: {result.stderr[-2000:] or 'there is no such commit, or later ones are still there'}"
        )
