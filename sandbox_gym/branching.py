"""What every sandboxed environment can do: be captured, gone back to, and multiplied."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import gymnasium
from gymnasium.utils import seeding

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.api import Rng
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.seeds import copy_seeds

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_THREADS = 32


@dataclass(frozen=True)
class Branch:
    """A copy of an environment, and what its first step gave."""

    env: Any
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Pristine:
    """The snapshot that episodes start from, shared by an environment and its branches; the last closed deletes it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._users = 1
        self._lock = threading.Lock()

    def acquire(self) -> Pristine:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.snapshot.delete()


class BranchableEnv(gymnasium.Env[Any, Any]):
    """An environment in a sandbox of its own. A subclass makes the sandbox and calls `_open`, steps it, and says in
    `_begin` how an episode starts and in `_recall` what was last seen at a snapshot.
    """

    _box: Sandbox | None = None
    _pristine: Pristine | None = None
    _fresh = True  # nothing has happened since the pristine snapshot

    def _open(self, box: Sandbox) -> None:
        self._pristine = Pristine(box.snapshot("pristine"))
        self._box = box

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError

    def _recall(self, snapshot: Snapshot) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError

    @property
    def _kind(self) -> str:
        """See `Snapshot.kind`."""
        raise NotImplementedError

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox that it lives in. Raises ClosedEnvironmentError after `close`."""
        if self._box is None:
            raise gymnasium.error.ClosedEnvironmentError("this environment is closed: make another")
        return self._box

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Restores the state right after the environment was made, then starts an episode, with `options` passed on.

        `options={"snapshot": s}` starts at that moment instead: its observation and info come back, and its random
        numbers go on as they did, or from `seed`; `"rng"` beside it does what it does in `restore`.

        Raises:
            SandboxTimeout: no answer within `reset_timeout`; the sandbox was killed, and the next reset starts anew.
            SnapshotError: the snapshot is gone.
        """
        super().reset(seed=seed)
        if options and "snapshot" in options:
            unknown = set(options) - {"snapshot", "rng"}
            if unknown:
                raise ValueError(
                    f"beside a snapshot, options take 'rng' and nothing else, not {sorted(unknown)}"
                )
            rng = options.get("rng", "same" if seed is None else seed)
            return self.restore(options["snapshot"], rng=rng)
        return self._begin(seed, options)

    def snapshot(self, label: str | None = None) -> Snapshot:
        """This very moment of the episode, and of all else in the sandbox; the environment goes on.

        Raises SnapshotError when the state can't be captured: the message says what stands in the way.
        """
        snapshot = self.sandbox.snapshot(label)
        snapshot.kind = self._kind
        return snapshot

    def restore(self, snapshot: Snapshot, *, rng: Rng = "same") -> tuple[Any, dict[str, Any]]:
        """Back to a moment, in place. Returns its observation and info.

        `rng`: "same" goes on exactly as the origin did; "diverge" reseeds what it draws from (np_random of the
        environment and its wrappers, their spaces, `random`, NumPy's global state) from the system, an int from itself.
        Any snapshot of the same hosted environment will do, a branch's too. Raises SnapshotError when it is gone.
        """
        snapshot.check_kind(self._kind)
        self._rewind(snapshot, rng)
        return self._recall(snapshot)

    @overload
    def branch(self, n: int, *, rng: Rng = "same") -> list[Self]: ...
    @overload
    def branch(self, *, actions: Sequence[Any], rng: Rng = "same") -> list[Branch]: ...
    def branch(
        self, n: int | None = None, *, actions: Sequence[Any] | None = None, rng: Rng = "same"
    ) -> list[Self] | list[Branch]:
        """Independent environments at this very state, sealed from each other and from this one, which goes on.

        `n` of them; or one for each of `actions`, which it has taken. `rng` as in `restore`; copies that diverge differ
        from each other too. Wrappers put around this environment from outside are not copied. Close each.

        Raises SnapshotError, LimitExceeded; and what a step raises, with every copy closed.
        """
        if (n is None) == (actions is None):
            raise TypeError("branch takes a number of copies, or actions=")
        count = n if n is not None else len(actions or ())
        if actions is not None and not count:
            return []
        boxes = self.sandbox.fork(count, rng=rng)
        children = [self._adopt(box, seed) for box, seed in zip(boxes, copy_seeds(rng, count), strict=True)]
        if actions is None:
            return children
        try:
            # Each child steps in its own process: side by side costs the slowest step, not the sum.
            with ThreadPoolExecutor(min(count, _MAX_THREADS)) as pool:
                steps = list(pool.map(lambda child, action: child.step(action), children, actions))
        except BaseException:
            for child in children:
                child.close()
            raise
        return [Branch(child, *step) for child, step in zip(children, steps, strict=True)]

    def close(self) -> None:
        """Kills the sandbox and frees what it held. Idempotent. Snapshots that you took, and branches, live on."""
        box, self._box = self._box, None
        pristine, self._pristine = self._pristine, None
        if box is not None:
            box.terminate()
        if pristine is not None:
            pristine.release()

    def _adopt(self, box: Sandbox, seed: int | None) -> Self:
        """Another of this kind, around a copy of this one's sandbox."""
        child = copy.copy(self)
        child._box = box
        child._pristine = self._pristine.acquire() if self._pristine is not None else None
        child.action_space = copy.deepcopy(self.action_space)
        child._np_random = copy.deepcopy(self._np_random)
        if seed is not None:
            child._np_random, child._np_random_seed = seeding.np_random(seed)
            child.action_space.seed(seed % 2**31)
        return child

    def _rewind(self, snapshot: Snapshot, rng: Rng = "same") -> None:
        box = self.sandbox
        self._fresh = False
        if box.status == "terminated":
            self._box = Sandbox.restore(snapshot, rng=rng)
        else:
            box.rewind(snapshot, rng=rng)

    def _rewind_to_start(self) -> Sandbox:
        """The sandbox as it was when made: itself, if nothing has happened yet."""
        box = self.sandbox
        assert self._pristine is not None
        if not (self._fresh and box.status == "running"):
            self._rewind(self._pristine.snapshot)
        self._fresh = False
        return self.sandbox
