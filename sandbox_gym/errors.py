"""What can go wrong, as one tree.

SandboxError
├── SandboxTimeout (TimeoutError)      a call did not end in time; what it started has been killed
├── SandboxDied (ConnectionError)      the guest, or the supervisor, is gone
├── LimitExceeded                      memory, sandboxes, depth: the message says which limit
│   └── BudgetExceeded                 what all sandboxes and snapshots of this process may hold (set_budget)
├── SnapshotError                      this state can't be captured or restored; the message says why
├── ImageError (ValueError)            an image is damaged, means harm, or is for another machine
├── BackendUnavailable                 this machine lacks something; the message names the command that mends it
├── TaskError (ValueError)             a task's record is wrong: the message names where and which field
├── GraderError                        a check can't be trusted to judge: there is no reward, not even 0
├── ProtocolError                      a guest sent what no guest of ours sends; it has been killed
└── ItemFailed                         an item of a job over a cluster failed as often as it was tried

Failures of the guest's own program (an exit code, an exception in run_code, its time-out) are results, not errors.
"""

from __future__ import annotations


class SandboxError(Exception):
    """The base of every error that sandbox_gym raises by itself."""


class SandboxTimeout(SandboxError, TimeoutError):
    """A call did not end within its timeout; everything that it started has been killed."""


class SandboxDied(SandboxError, ConnectionError):
    """The sandbox is gone: killed, crashed, expired, or its supervisor ended."""


class LimitExceeded(SandboxError):
    """A limit was reached: the sandbox's memory, the number of live sandboxes, the depth of snapshots."""


class BudgetExceeded(LimitExceeded):
    """The sandboxes and snapshots of this process hold as much as `set_budget` allows."""


class SnapshotError(SandboxError):
    """A snapshot can't be taken of this state, or can't be restored. The source goes on unharmed."""


class ImageError(SandboxError, ValueError):
    """An image is damaged, would write where it must not, or is not for this machine. Nothing of it is kept."""


class BackendUnavailable(SandboxError):
    """The machine lacks what the backend, or a limit that was asked for, needs."""


class TaskError(SandboxError, ValueError):
    """A task's record is wrong; the message names the file, the line and the field."""


class GraderError(SandboxError):
    """A check could not run as it must: it has not judged anything, so there is no reward."""


class ProtocolError(SandboxError):
    """The guest broke the protocol."""


class ItemFailed(SandboxError):
    """An item of a job failed as often as it was tried; `cause` is what the last attempt raised (SandboxTimeout when it
    took too long, SandboxDied when its worker did), with its traceback over there as its own cause.
    """

    index: int
    item: object
    attempts: int
    cause: BaseException
