"""One step of many guests at once: every request out, then every reply in.

Where an observation is a single array, all goes in raw bytes and straight into its row of the batch. There a guest
costs two system calls a step: a send, and a receive into its row of head (header, flags, reward), observation, and room
for an info. The kernel keeps the deadline (SO_RCVTIMEO).
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from sandbox_gym.channel import Channel, GuestError
from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxTimeout
from sandbox_gym.guest import wire
from sandbox_gym.guest.codec import Codec
from sandbox_gym.guest.wire import HEADER, STEP_RESULT, Op, Status, WireError
from sandbox_gym.hosting import Remote

_HEAD = HEADER.size + STEP_RESULT.size
_START = struct.Struct("<QQ??")  # a header, as two numbers; terminated, truncated
_TAIL = 4096  # bytes of info that come in with the same system call
_ALIGNED = 64  # bytes, a cache line
_STEP = int(Op.STEP)
GRACE = 0.25  # seconds that a reply which has begun to come may take when the time is over
_PATIENT = 0.9  # of the time for a step: as long as that is left, nobody looks at the clock for a lane


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


class Replies:
    """Where a step's replies come to lie: a row a lane, of head, observation, and room for what an info takes."""

    def __init__(self, n: int, dtype: Any, shape: tuple[int, ...], nbytes: int) -> None:
        size = _HEAD + nbytes + _TAIL
        layout: Any = {
            "names": ["start", "reward", "observation"],
            "formats": [(np.uint8, _START.size), "<f8", (dtype, shape)],
            "offsets": [0, _HEAD - 8, _HEAD],
            "itemsize": -(-size // _ALIGNED) * _ALIGNED,
        }
        whole: Any = np.zeros(n, np.dtype(layout))
        self.starts, self.rewards, self.observations = whole["start"], whole["reward"], whole["observation"]
        view = memoryview(whole.view(np.uint8))
        every = whole.dtype.itemsize
        self.rows = [view[i * every : i * every + size] for i in range(n)]


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
        noticed by `collect`. Where an action can't be sent at all, this raises before any is.
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
        self._replies, self._earlier = (Replies(n, *codec.array, codec.nbytes) for _ in range(2))
        self._bools = codec.array[0] == np.bool_

    def connect(self, lane: int, channel: Channel) -> None:
        self._channels[lane] = channel
        self._send[lane] = channel.sock.sendall
        self._receive[lane] = channel.sock.recv_into
        channel.limit(self._timeout)

    def disconnect(self, lane: int) -> None:
        self._channels[lane] = None
        self._send[lane] = self._receive[lane] = _refuse

    def get(self, lane: int) -> Any:
        return self._codec.unpack(bytes(self._replies.rows[lane][_HEAD : self._usual]))

    def set(self, lane: int, observation: Any) -> None:
        self._replies.observations[lane] = observation

    def batch(self, *, copy: bool) -> Any:
        observations = self._replies.observations
        return observations.copy() if copy else observations

    def post(
        self, actions: Any, each: Callable[[Any], Sequence[Any]], lanes: Sequence[int], again: Sequence[int]
    ) -> None:
        self._seq = (self._seq + 1) & 0xFFFF
        frames, send = self._requests.pack(actions, self._seq), self._send
        encoded = []
        if frames is None:
            singles = each(actions)
            encoded = [(lane, self._actions.encode(singles[lane])) for lane in lanes]
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
        for lane, (meta, *data) in encoded:
            channel = self._channels[lane]
            if channel is None:
                continue
            try:
                wire.send(channel.sock, _STEP, 0, self._seq, meta, *data)
            except OSError:
                continue

    def collect(self, lanes: Sequence[int]) -> Collected:
        self._replies, self._earlier = self._earlier, self._replies
        replies, earlier = self._replies, self._earlier
        usual = _START.pack(_STEP | self._seq << 16, STEP_RESULT.size + self._nbytes, False, False)
        if len(lanes) < self._n:
            idle = sorted(set(range(self._n)).difference(lanes))
            replies.starts[idle] = np.frombuffer(usual, np.uint8)
            replies.rewards[idle] = 0
            replies.observations[idle] = earlier.observations[idle]
        deadline = time.monotonic() + self._timeout
        expected = usual * self._n
        terminations, truncations = np.zeros(self._n, np.bool_), np.zeros(self._n, np.bool_)
        ended: set[int] = set()
        infos: dict[int, dict[str, Any]] = {}
        odd, failures = self._receive_all(lanes, deadline)
        # The guests wait from here on, so a step in which nothing ends or fails is one comparison of bytes.
        starts = replies.starts.tobytes()
        if odd or failures or starts != expected:
            size = len(usual)
            other = {lane for lane in range(self._n) if starts[lane * size : (lane + 1) * size] != usual}
            for lane in sorted(other.union(odd) - failures.keys()):
                try:
                    if lane in odd or replies.starts[lane, : HEADER.size].tobytes() != usual[: HEADER.size]:
                        until = max(deadline, time.monotonic() + GRACE)
                        infos[lane] = self._read(lane, odd.get(lane, self._usual), until)
                except Failure as error:
                    failures[lane] = error
                    continue
                terminations[lane], truncations[lane] = replies.starts[lane, HEADER.size :]
                if terminations[lane] or truncations[lane]:
                    ended.add(lane)
            for lane in failures:
                replies.rewards[lane] = 0
        if self._bools:  # whose bytes a guest may have made up
            np.not_equal(replies.observations.view(np.uint8), 0, out=replies.observations)
        rewards = replies.rewards.copy()
        if not math.isfinite(sum(rewards.tolist())):
            for lane in np.flatnonzero(~np.isfinite(rewards)).tolist():
                failures[lane] = ProtocolError(f"{self._name(lane)}: a reward of {rewards[lane]}")
                rewards[lane] = terminations[lane] = truncations[lane] = 0
        for lane in failures:
            replies.observations[lane] = earlier.observations[lane]
        return rewards, terminations, truncations, ended, infos, failures

    def _receive_all(
        self, lanes: Sequence[int], deadline: float
    ) -> tuple[dict[int, int], dict[int, Exception]]:
        """One system call a lane: the replies of unusual length, with what came of them, and the failures."""
        rows, receive, usual, now = self._replies.rows, self._receive, self._usual, time.monotonic
        odd: dict[int, int] = {}
        failures: dict[int, Exception] = {}
        hurried: list[Channel] = []
        late = deadline - _PATIENT * self._timeout
        flags = 0
        for lane in reversed(lanes):  # the last is ready last: one wait for it, and hardly any for the others
            if now() > late and not flags:
                flags = self._hurry(lane, deadline, hurried)
            try:
                count = receive[lane](rows[lane], 0, flags)
                if count != usual:
                    odd[lane] = count
            except BlockingIOError:
                failures[lane] = self._timed_out(lane)
                flags = socket.MSG_DONTWAIT  # the time is over for all that have not answered by now
            except OSError as error:
                failures[lane] = SandboxDied(f"{self._name(lane)} is gone ({error.strerror or error})")
        for channel in hurried:
            with contextlib.suppress(OSError):
                channel.limit(self._timeout)
        return odd, failures

    def _hurry(self, lane: int, deadline: float, hurried: list[Channel]) -> int:
        """The kernel's clock begins anew with each lane: sets it to what is left. The flags to receive with."""
        channel, left = self._channels[lane], deadline - time.monotonic()
        if left <= 0:
            return socket.MSG_DONTWAIT
        if channel is not None:
            hurried.append(channel)
            with contextlib.suppress(OSError):  # it is closed, as receiving will tell
                channel.limit(left)
        return 0

    def _read(self, lane: int, count: int, deadline: float) -> dict[str, Any]:
        """The info of a reply that has not come in one piece of the usual length, but with `count` bytes so far."""
        if count == 0 or self._channels[lane] is None:
            raise SandboxDied(f"{self._name(lane)} is gone")
        row = self._replies.rows[lane]
        while count < HEADER.size:
            count += self._more(lane, row[count:], deadline)
        op, status, seq, meta_length, data_length = HEADER.unpack_from(row)
        end = HEADER.size + data_length + meta_length
        if meta_length > wire.MAX_META or data_length > wire.MAX_DATA or count > end:
            raise ProtocolError(f"{self._name(lane)}: a frame of {meta_length} + {data_length} bytes")
        if op != _STEP or seq != self._seq:
            raise ProtocolError(f"{self._name(lane)} answered op {op} seq {seq}, not STEP {self._seq}")
        while count < min(end, len(row)):
            count += self._more(lane, row[count:end], deadline)
        rest = bytearray(row[self._usual : end])
        block = memoryview(bytearray(min(end - count, 1 << 20)))
        while count < end:
            more = self._more(lane, block[: end - count], deadline)
            rest += block[:more]
            count += more
        try:
            if status != Status.OK:
                body = memoryview(b"".join((row[: self._usual], rest)))[HEADER.size : end]
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

    def _more(self, lane: int, target: memoryview, deadline: float) -> int:
        """Receives a lane's next bytes; how many."""
        channel = self._channels[lane]
        assert channel is not None
        try:
            count = channel.sock.recv_into(target)
        except BlockingIOError:
            raise self._timed_out(lane) from None
        except OSError as error:
            raise SandboxDied(f"{self._name(lane)} is gone ({error.strerror})") from None
        if not count:
            raise SandboxDied(f"{self._name(lane)} is gone")
        if time.monotonic() > deadline:  # one that dribbles restarts the kernel's clock, not ours
            raise self._timed_out(lane)
        return count

    def _timed_out(self, lane: int) -> SandboxTimeout:
        return SandboxTimeout(f"{self._name(lane)} did not answer a step within {self._timeout} s")

    def _name(self, lane: int) -> str:
        channel = self._channels[lane]
        return f"lane {lane}" if channel is None else f"sandbox {channel.name}"


def _refuse(*_: Any) -> Any:
    raise OSError("no sandbox: it failed, and was not reset")
