"""One step of many guests whose observations are no single arrays: dicts, texts, sequences."""

from __future__ import annotations

import contextlib
import copy as copying
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from sandbox_gym._exchange import GRACE, Collected, Failure
from sandbox_gym.channel import Channel
from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxTimeout
from sandbox_gym.guest.wire import Op, WireError
from sandbox_gym.hosting import Remote


class ValueExchange:
    """An `Exchange` for all that `RawExchange` does not take."""

    def __init__(self, n: int, remote: Remote, timeout: float) -> None:
        self._n = n
        self._remote = remote
        self._timeout = timeout
        self._channels: list[Channel | None] = [None] * n
        self._last: list[Any] = [None] * n

    def connect(self, lane: int, channel: Channel) -> None:
        self._channels[lane] = channel

    def disconnect(self, lane: int) -> None:
        self._channels[lane] = None

    def get(self, lane: int) -> Any:
        return copying.deepcopy(self._last[lane])

    def set(self, lane: int, observation: Any) -> None:
        self._last[lane] = observation

    def batch(self, *, copy: bool) -> Any:
        space = self._remote.hosting.observation_space
        empty: Any = create_empty_array(space, self._n)
        batch = concatenate(space, self._last, empty)
        return copying.deepcopy(batch) if copy else batch

    def post(
        self, actions: Any, each: Callable[[Any], Sequence[Any]], lanes: Sequence[int], again: Sequence[int]
    ) -> None:
        singles = each(actions)
        frames = [(lane, self._remote.actions.encode(singles[lane])) for lane in lanes]
        for lane in again:
            channel = self._channels[lane]
            if channel is not None:
                with contextlib.suppress(SandboxDied, SandboxTimeout):
                    channel.post(Op.STEP, timeout=self._timeout)
        for lane, (meta, *data) in frames:
            channel = self._channels[lane]
            if channel is not None:
                with contextlib.suppress(SandboxDied, SandboxTimeout):
                    channel.post(Op.STEP, meta, *data, timeout=self._timeout)

    def collect(self, lanes: Sequence[int]) -> Collected:
        rewards = np.zeros(self._n, np.float64)
        terminations, truncations = np.zeros(self._n, np.bool_), np.zeros(self._n, np.bool_)
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, Exception] = {}
        deadline = time.monotonic() + self._timeout
        for lane in lanes:
            channel = self._channels[lane]
            try:
                if channel is None:
                    raise SandboxDied(f"lane {lane} has no sandbox: it failed, and was not reset")
                left = deadline - time.monotonic()
                if left <= 0 and not _has_begun(channel):
                    raise SandboxTimeout(
                        f"sandbox {channel.name} did not answer a step within {self._timeout} s"
                    )
                frame = channel.wait(Op.STEP, timeout=max(GRACE, left))
                step = self._remote.read_step(frame.meta, frame.data)
            except Failure as error:
                failures[lane] = error
            except WireError as error:
                failures[lane] = ProtocolError(f"lane {lane}: {error}")
            else:
                self._last[lane], rewards[lane], terminations[lane], truncations[lane], infos[lane] = step
        ended = set(np.flatnonzero(terminations | truncations).tolist())
        return rewards, terminations, truncations, ended, infos, failures


def _has_begun(channel: Channel) -> bool:
    """Whether an answer, or its beginning, is there; so also where waiting for it tells at once that none can come."""
    if channel.sock.fileno() < 0:
        return True
    arrivals = select.poll()
    arrivals.register(channel.sock, select.POLLIN)
    return bool(arrivals.poll(0))
