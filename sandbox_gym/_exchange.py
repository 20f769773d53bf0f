"""One step of many guests at once: every request out, then every reply in.

Where an observation is a single array, all goes in raw bytes and straight into its row of the batch. There a guest
costs two system calls a step: a send, and a receive that scatters its reply into the head (header, reward, flags), the
observation's row, and a tail for infos. The kernel keeps the deadline (SO_RCVTIMEO).
"""

from __future__ import annotations

import contextlib
import copy as copying
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from sandbox_gym.channel import Channel, GuestError
from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxTimeout
from sandbox_gym.guest import wire
from sandbox_gym.guest.codec import Codec
from sandbox_gym.guest.wire import HEADER, STEP_RESULT, Op, Status, WireError
from sandbox_gym.hosting import Remote

_HEAD = HEADER.size + STEP_RESULT.size
_START = struct.Struct("<QQ??")  # a header, as two numbers; terminated, truncated
_TAIL = 4096  # bytes of info that come in with the same system call
_STEP = int(Op.STEP)
_GRACE = 0.25  # seconds that replies which have begun to come may take when the time is over


class Requests:
    """A batch of actions as ready frames, one a lane."""

    def __init__(self, n: int, codec: Codec) -> None:
        self._codec = codec
        self._frames: list[memoryview] | None = None
        if codec.array is None:
            return
        self._dtype, self._shape = codec.array
        row = np.dtype([("first", "<u8"), ("length", "<u8"), ("action", self._dtype, self._shape)])
        rows = np.zeros(n, row)  # [num_envs]
        rows["length"] = codec.nbytes
        self._first, self._actions = rows["first"], rows["action"]
        view = memoryview(rows.view(np.uint8))  # type: ignore[arg-type]  # an array is a buffer
        self._frames = [view[i * row.itemsize : (i + 1) * row.itemsize] for i in range(n)]
        self._whole = isinstance(codec.space, spaces.Discrete)
        self._batch_shape = (n, *self._shape)

    def pack(self, actions: Any, seq: int) -> list[memoryview] | None:
        """The frames, valid until the next `pack`; None for a batch that is not exactly of the space's form.

        An integer array of another width does for a Discrete space.
        """
        if self._frames is None or type(actions) is not np.ndarray or actions.shape != self._batch_shape:
            return None
        if actions.dtype != self._dtype and not (
            self._whole and actions.dtype.kind in "iu" and np.can_cast(actions.dtype, self._dtype)
        ):
            return None
        self._first.fill(_STEP | seq << 16)
        self._actions[...] = actions
        return self._frames


Collected = tuple[Any, Any, Any, set[int], dict[int, dict[str, Any]], dict[int, Exception]]
"""Rewards, terminations, truncations [num_envs], the lanes that one of the last two is True for, then infos and
failures by lane.
"""
Failure = (GuestError, SandboxTimeout, SandboxDied, ProtocolError)


class Exchange(Protocol):
    """The connections to all lanes' guests, and the last observation of each."""

    def connect(self, lane: int, channel: Channel) -> None:
        """Also after any other call on the channel: this sets its deadline again."""

    def disconnect(self, lane: int) -> None:
        """The lane's steps fail from now on."""

    def post(
        self, actions: Any, each: Callable[[Any], Sequence[Any]], lanes: Sequence[int], again: Sequence[int]
    ) -> None:
        """Sends a step to each of `lanes`, and to those of `again` that they begin their next episode in place.
        `each(actions)` gives the actions one by one, for a batch that has to go so. A guest that can't be reached is
        noticed by `collect`.
        """

    def collect(self, lanes: Sequence[int]) -> Collected:
        """What the lanes answered. One that failed, and the others, keep their last observation, with zeros beside."""

    def get(self, lane: int) -> Any:
        """A fresh copy of its last observation."""

    def set(self, lane: int, observation: Any) -> None: ...

    def batch(self, *, copy: bool) -> Any:
        """All lanes' last observations, batched. Without `copy`, they may change with the step after the next."""


class RawExchange:
    """An `Exchange` for observations that are single arrays. They alternate between two buffers, so that the last ones
    are there when a reply fails.
    """

    def __init__(self, n: int, remote: Remote, timeout: float) -> None:
        codec = remote.observations
        assert codec.array is not None and codec.nbytes is not None
        self._n = n
        self._actions = remote.actions
        self._codec = codec
        self._timeout = timeout
        self._seq = 0
        self._nbytes = codec.nbytes
        self._usual = _HEAD + self._nbytes
        self._channels: list[Channel | None] = [None] * n
        self._send: list[Callable[[Any], Any]] = [_refuse] * n
        self._receive: list[Callable[..., Any]] = [_refuse] * n
        self._requests = Requests(n, self._actions)
        self._heads = np.zeros((n, _HEAD), np.uint8)
        self._words = self._heads.view("<u8")  # [n, 4]: header, header, flags, reward
        self._starts = self._heads[:, : _START.size]  # alike in all replies of a usual step
        self._rewards = self._heads.view("<f8")[:, 3]
        dtype, shape = codec.array
        self._sides = [np.zeros((n, *shape), dtype) for _ in range(2)]
        self._tails = np.zeros((n, _TAIL), np.uint8)
        self._targets = [self._scatter(side) for side in self._sides]
        self._side = 0

    def _scatter(self, batch: Any) -> list[list[memoryview]]:
        rows = batch.reshape(self._n, -1).view(np.uint8) if self._nbytes else np.zeros((self._n, 0), np.uint8)
        return [
            [memoryview(self._heads[i]), memoryview(rows[i]), memoryview(self._tails[i])]
            for i in range(self._n)
        ]

    def connect(self, lane: int, channel: Channel) -> None:
        self._channels[lane] = channel
        self._send[lane] = channel.sock.sendall
        self._receive[lane] = channel.sock.recvmsg_into
        channel.limit(self._timeout)

    def disconnect(self, lane: int) -> None:
        self._channels[lane] = None
        self._send[lane] = self._receive[lane] = _refuse

    def get(self, lane: int) -> Any:
        return self._codec.unpack(bytes(self._targets[self._side][lane][1]))

    def set(self, lane: int, observation: Any) -> None:
        self._sides[self._side][lane] = observation

    def batch(self, *, copy: bool) -> Any:
        side = self._sides[self._side]
        return side.copy() if copy else side

    def post(
        self, actions: Any, each: Callable[[Any], Sequence[Any]], lanes: Sequence[int], again: Sequence[int]
    ) -> None:
        self._seq = (self._seq + 1) & 0xFFFF
        frames, send = self._requests.pack(actions, self._seq), self._send
        singles = each(actions) if frames is None else ()
        if again:
            begin = HEADER.pack(_STEP, 0, self._seq, 0, 0)
            for lane in again:
                try:
                    send[lane](begin)
                except OSError:
                    continue
        if frames is not None:
            for lane in lanes:
                try:
                    send[lane](frames[lane])
                except OSError:
                    continue
            return
        for lane in lanes:
            channel = self._channels[lane]
            if channel is None:
                continue
            meta, *data = self._actions.encode(singles[lane])
            try:
                wire.send(channel.sock, _STEP, 0, self._seq, meta, *data)
            except OSError:
                continue

    def collect(self, lanes: Sequence[int]) -> Collected:
        last, self._side = self._side, 1 - self._side
        side = self._sides[self._side]
        first, second = _STEP | self._seq << 16, STEP_RESULT.size + self._nbytes
        if len(lanes) < self._n:
            idle = sorted(set(range(self._n)).difference(lanes))
            self._words[idle] = first, second, 0, 0
            side[idle] = self._sides[last][idle]
        deadline = time.monotonic() + self._timeout
        usual = _START.pack(first, second, False, False) * self._n
        terminations, truncations = np.zeros(self._n, np.bool_), np.zeros(self._n, np.bool_)
        ended: set[int] = set()
        infos: dict[int, dict[str, Any]] = {}
        odd, failures = self._receive_all(lanes)
        # The guests wait from here on, so a step in which nothing ends or fails is one comparison of bytes.
        starts = self._starts.tobytes()
        if odd or failures or starts != usual:
            deadline = max(deadline, time.monotonic() + _GRACE)
            for lane, start in enumerate(_START.iter_unpack(starts)):
                flags = start[2:]
                if lane in failures:
                    continue
                if lane in odd or start[:2] != (first, second):
                    try:
                        infos[lane] = self._read(lane, odd.get(lane, self._usual), deadline)
                    except Failure as error:
                        failures[lane] = error
                        continue
                    flags = _START.unpack_from(self._heads[lane])[2:]
                if True in flags:
                    terminations[lane], truncations[lane] = flags
                    ended.add(lane)
            for lane in failures:
                self._words[lane] = 0
        rewards = self._rewards.copy()
        if not math.isfinite(sum(rewards.tolist())):
            for lane in np.flatnonzero(~np.isfinite(rewards)).tolist():
                failures[lane] = ProtocolError(f"{self._name(lane)}: a reward of {rewards[lane]}")
                rewards[lane] = terminations[lane] = truncations[lane] = 0
        for lane in failures:
            side[lane] = self._sides[last][lane]
        return rewards, terminations, truncations, ended, infos, failures

    def _receive_all(self, lanes: Sequence[int]) -> tuple[dict[int, int], dict[int, Exception]]:
        """One system call a lane: the replies of unusual length, with what came of them, and the failures."""
        targets, receive, usual = self._targets[self._side], self._receive, self._usual
        odd: dict[int, int] = {}
        failures: dict[int, Exception] = {}
        flags = 0
        for lane in reversed(lanes):  # the last is ready last: one wait for it, and hardly any for the others
            try:
                count = receive[lane](targets[lane], 0, flags)[0]
                if count != usual:
                    odd[lane] = count
            except BlockingIOError:
                failures[lane] = self._timed_out(lane)
                flags = socket.MSG_DONTWAIT  # the time is over for all that have not answered by now
            except OSError as error:
                failures[lane] = SandboxDied(f"{self._name(lane)} is gone ({error.strerror or error})")
        return odd, failures

    def _read(self, lane: int, count: int, deadline: float) -> dict[str, Any]:
        """The info of a reply that has not come in one piece of the usual length, but with `count` bytes so far."""
        if count == 0 or self._channels[lane] is None:
            raise SandboxDied(f"{self._name(lane)} is gone")
        while count < HEADER.size:
            count += self._more(lane, count, deadline)
        op, status, seq, meta_length, data_length = HEADER.unpack_from(self._heads[lane])
        end = HEADER.size + data_length + meta_length
        if meta_length > wire.MAX_META or data_length > wire.MAX_DATA or count > end:
            raise ProtocolError(f"{self._name(lane)}: a frame of {meta_length} + {data_length} bytes")
        if op != _STEP or seq != self._seq:
            raise ProtocolError(f"{self._name(lane)} answered op {op} seq {seq}, not STEP {self._seq}")
        while count < min(end, self._usual + _TAIL):
            count += self._more(lane, count, deadline)
        rest = bytearray(self._tails[lane, : max(0, end - self._usual)])
        while count < end:
            most = min(end - count, 1 << 20)
            rest += self._receive_or_raise(lane, methodcaller("recv", most), deadline)
            count = self._usual + len(rest)
        try:
            if status != Status.OK:
                head, row, _ = self._targets[self._side][lane]
                body = memoryview(b"".join((head, row, rest)))[HEADER.size : end]
                info = wire.decode(bytes(body[data_length:]), body[:data_length])
                raise GuestError(info if isinstance(info, dict) else {})
            beyond = data_length - STEP_RESULT.size - self._nbytes  # bytes of data that belong to the info
            if beyond < 0:
                raise WireError("a step's reply that is too short")
            info = wire.decode(bytes(rest[beyond:]), memoryview(rest)[:beyond])
            if not isinstance(info, (dict, type(None))):
                raise WireError(f"an info that is no dict but {type(info).__name__}")
        except WireError as error:
            raise ProtocolError(f"{self._name(lane)}: {error}") from None
        return info or {}

    def _more(self, lane: int, count: int, deadline: float) -> int:
        """Receives into a lane's head, row and tail from their byte `count` on."""
        views: list[memoryview] = []
        for view in self._targets[self._side][lane]:
            if count < len(view):
                views.append(view[count:])
            count = max(0, count - len(view))
        return int(self._receive_or_raise(lane, lambda sock: sock.recvmsg_into(views)[0], deadline))

    def _receive_or_raise(self, lane: int, receive: Callable[[socket.socket], Any], deadline: float) -> Any:
        channel = self._channels[lane]
        assert channel is not None
        try:
            got = receive(channel.sock)
        except BlockingIOError:
            raise self._timed_out(lane) from None
        except OSError as error:
            raise SandboxDied(f"{self._name(lane)} is gone ({error.strerror})") from None
        if not got:
            raise SandboxDied(f"{self._name(lane)} is gone")
        if time.monotonic() > deadline:  # one that dribbles restarts the kernel's clock, not ours
            raise self._timed_out(lane)
        return got

    def _timed_out(self, lane: int) -> SandboxTimeout:
        return SandboxTimeout(f"{self._name(lane)} did not answer a step within {self._timeout} s")

    def _name(self, lane: int) -> str:
        channel = self._channels[lane]
        return f"lane {lane}" if channel is None else f"sandbox {channel.name}"


class ValueExchange:
    """An `Exchange` for all other observations: dicts, texts, sequences."""

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
        for lane in again:
            channel = self._channels[lane]
            if channel is not None:
                with contextlib.suppress(SandboxDied, SandboxTimeout):
                    channel.post(Op.STEP, timeout=self._timeout)
        for lane in lanes:
            channel = self._channels[lane]
            if channel is not None:
                meta, *data = self._remote.actions.encode(singles[lane])
                with contextlib.suppress(SandboxDied, SandboxTimeout):
                    channel.post(Op.STEP, meta, *data, timeout=self._timeout)

    def collect(self, lanes: Sequence[int]) -> Collected:
        rewards = np.zeros(self._n, np.float64)
        terminations, truncations = np.zeros(self._n, np.bool_), np.zeros(self._n, np.bool_)
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, Exception] = {}
        patience = self._timeout
        for lane in lanes:
            channel = self._channels[lane]
            try:
                if channel is None:
                    raise SandboxDied(f"lane {lane} has no sandbox: it failed, and was not reset")
                frame = channel.wait(Op.STEP, timeout=patience)
                step = self._remote.read_step(frame.meta, frame.data)
            except Failure as error:
                failures[lane] = error
                if isinstance(error, SandboxTimeout):
                    patience = _GRACE  # the time is over for all that have not answered by now
            except WireError as error:
                failures[lane] = ProtocolError(f"lane {lane}: {error}")
            else:
                self._last[lane], rewards[lane], terminations[lane], truncations[lane], infos[lane] = step
        ended = set(np.flatnonzero(terminations | truncations).tolist())
        return rewards, terminations, truncations, ended, infos, failures


def _refuse(*_: Any) -> Any:
    raise OSError("no sandbox: it failed, and was not reset")
