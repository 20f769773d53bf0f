"""Actors that one call or one handle owns: started all or none, and asked with a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxTimeout


def start(
    kind: type, args: Sequence[Any], *, number: int, needs: Mapping[str, float], timeout: float
) -> tuple[list[Any], list[Any]]:
    """`number` actors of a class, spread over the nodes, and what `start()` of each has returned. `needs`: num_cpus and
    num_gpus of each.

    Raises:
        BackendUnavailable: the cluster hasn't the room, now or at all.
        Whatever `start()` raises. Those that had started are ended.
    """
    # Ray would wait for ever for what no node has.
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(
        all(node.get(name, 0) >= needs.get(f"num_{name.lower()}s", 0) for name in ("CPU", "GPU"))
        for node in nodes
    ):
        raise BackendUnavailable(f"no node of the cluster has {dict(needs)}: ask for less")
    made = ray.remote(kind).options(**needs, scheduling_strategy="SPREAD")
    actors: list[Any] = []
    try:
        actors += [made.remote(*args) for _ in range(number)]
        return actors, get([actor.start.remote() for actor in actors], timeout, f"{kind.__name__}.start")
    except BaseException as error:
        end(actors)
        if isinstance(error, SandboxTimeout):
            raise BackendUnavailable(
                f"{number} actors with {dict(needs)} each did not start within {timeout:.3g} s; free in the cluster: "
                f"{ray.available_resources()}. Free some, or ask for less"
            ) from None
        raise


def end(actors: Sequence[Any]) -> None:
    """Ends their processes, and with these all that they hold. Idempotent. Those of a Ray before are gone."""
    if not ray.is_initialized():  # else this would start another Ray
        return
    for actor in actors:
        with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):  # of a Ray before this one
            ray.kill(actor)


def get(refs: Any, timeout: float, what: str) -> Any:
    """`ray.get`, with what was raised elsewhere raised here as it was.

    Raises:
        SandboxTimeout: no answer within `timeout` seconds.
        SandboxDied: the actor, its node, or what it was to answer is gone.
    """
    if not ray.is_initialized():  # else this would start another Ray
        raise SandboxDied(f"{what}: Ray was shut down")
    try:
        return ray.get(refs, timeout=max(0.0, timeout))
    except ray.exceptions.GetTimeoutError:
        raise SandboxTimeout(f"{what}: no answer in time") from None
    except ray.exceptions.RayTaskError as error:
        vars(error.cause)["__notes__"] = [str(error)]  # add_note, from 3.11
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise SandboxDied(f"{what}: {error}") from None


class Deadline:
    """The moment at which a call's time is up."""

    def __init__(self, timeout: float) -> None:
        self._at = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds, 0 at least."""
        return max(0.0, self._at - time.monotonic())
