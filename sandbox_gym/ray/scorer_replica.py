"""One replica of a `PolicyScorer`: it gathers the requests of many callers into batches for one torch module."""

from __future__ import annotations

import asyncio
import collections
import copy
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sandbox_gym.errors import BackendUnavailable, SandboxError

Array = npt.NDArray[Any]
Answer = tuple[Array, Array, int]  # logits [b, num_actions], values [b], the version that scored them

_MOST_LATENCIES = 10_000  # of the latest requests


@dataclass(eq=False)
class Request:
    """Observations [b, ...] that wait for their scores."""

    observations: Array
    answer: asyncio.Future[Answer]
    arrived: float  # time.perf_counter()

    @property
    def form(self) -> tuple[Any, ...]:
        """Only requests that are alike in this are scored in one batch."""
        return self.observations.dtype, self.observations.shape[1:]


@dataclass(frozen=True)
class Report:
    """What one replica has done so far. `latencies`: seconds in the replica, of the latest requests."""

    device: str
    version: int
    batch_sizes: dict[int, int]  # observations in a batch: how many such batches
    num_requests: int
    latencies: Array


class Replica:
    """The actor's class. Requests arrive in its event loop; one thread of its own does all that touches the module,
    so that a batch is scored by one version, and requests go on arriving meanwhile.
    """

    def __init__(self, module: Any, max_batch: int, max_wait: float) -> None:
        self._module = module
        self._name = f"{type(module).__module__}.{type(module).__qualname__}"
        self._device = "cpu"
        self._version = 0
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting: list[Request] = []
        self._num_waiting = 0  # observations
        self._worth_a_look = asyncio.Event()
        self._server: asyncio.Task[None] | None = None
        self._batch_sizes: collections.Counter[int] = collections.Counter()
        self._num_requests = 0
        self._latencies: collections.deque[float] = collections.deque(maxlen=_MOST_LATENCIES)

    async def start(self) -> None:
        """Raises BackendUnavailable."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._prepare)
        self._server = asyncio.create_task(self._serve())

    async def score(self, observations: Array) -> Answer:
        request = Request(observations, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._waiting.append(request)
        self._num_waiting += len(observations)
        if len(self._waiting) == 1 or self._full:
            self._worth_a_look.set()
        return await request.answer

    async def set_weights(self, state_dict: Mapping[str, Any], version: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load, state_dict, version)

    async def report(self) -> Report:
        latencies = np.array(self._latencies)
        return Report(self._device, self._version, dict(self._batch_sizes), self._num_requests, latencies)

    @property
    def _full(self) -> bool:
        return self._num_waiting >= self._max_batch

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._fill()
            batch = self._take()
            answers = await loop.run_in_executor(self._thread, self._score, batch)
            now = time.perf_counter()
            for request, answer in zip(batch, answers, strict=True):
                self._num_requests += 1
                self._latencies.append(now - request.arrived)
                if request.answer.done():  # its caller has cancelled it
                    continue
                if isinstance(answer, Exception):
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)

    async def _fill(self) -> None:
        """Until there is a full batch, or a request has waited for `max_wait`."""
        while not self._waiting:
            self._worth_a_look.clear()
            await self._worth_a_look.wait()
        deadline = self._waiting[0].arrived + self._max_wait
        while not self._full and (left := deadline - time.perf_counter()) > 0:
            self._worth_a_look.clear()
            try:
                await asyncio.wait_for(self._worth_a_look.wait(), left)
            except asyncio.TimeoutError:
                return

    def _take(self) -> list[Request]:
        """The oldest request, and as many of its form as a batch has room for."""
        form, size = self._waiting[0].form, 0
        batch: list[Request] = []
        left: list[Request] = []
        for request in self._waiting:
            fits = not batch or size + len(request.observations) <= self._max_batch
            if fits and request.form == form:
                batch.append(request)
                size += len(request.observations)
            else:
                left.append(request)
        self._waiting = left
        self._num_waiting -= size
        return batch

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        import ray
        import torch

        if ray.get_gpu_ids():
            if not torch.cuda.is_available():
                raise BackendUnavailable(
                    f"Ray gave the scorer a GPU, which torch {torch.__version__} can't use: install a torch with CUDA, "
                    "or PolicyScorer(..., gpus=0)"
                )
            self._device = "cuda"
        # Ray gave it one core, and batches are small: more threads would wait for each other.
        torch.set_num_threads(1)
        self._module = self._module.to(self._device).eval()

    def _load(self, state_dict: Mapping[str, Any], version: int) -> None:
        # Into a copy: a state_dict that doesn't fit leaves its module half changed.
        module = copy.deepcopy(self._module)
        try:
            module.load_state_dict(state_dict)
        except RuntimeError as error:
            raise ValueError(
                f"these weights don't fit {self._name}, which keeps its version {self._version}: {error}"
            ) from None
        self._module, self._version = module, version

    def _score(self, batch: list[Request]) -> list[Answer | Exception]:
        """An answer to each request, or the error that it alone is to blame for."""
        try:
            return self._score_together(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [answer for request in batch for answer in self._score([request])]

    def _score_together(self, batch: list[Request]) -> list[Answer | Exception]:
        # A fresh array: those that Ray hands over can't be written to, and torch wants one that can.
        observations = np.concatenate([request.observations for request in batch])
        logits, values = self._forward(observations)
        answers: list[Answer | Exception] = []
        start = 0
        for request in batch:
            rows = slice(start, start + len(request.observations))
            start = rows.stop
            wrong = np.isnan(logits[rows]).any() or (logits[rows] == np.inf).any()
            if wrong or not np.isfinite(values[rows]).all():
                answers.append(
                    ValueError(
                        f"{self._name}, version {self._version}, gave a NaN or an infinite number; only a prior logit "
                        "may be -inf"
                    )
                )
            else:
                answers.append((logits[rows], values[rows], self._version))
        return answers

    def _forward(self, observations: Array) -> tuple[Array, Array]:
        """(logits [b, num_actions], values [b]), at most max_batch observations at a time."""
        import torch

        logits: list[Array] = []
        values: list[Array] = []
        with torch.inference_mode():
            for part in torch.from_numpy(observations).split(self._max_batch):
                try:
                    found = self._module(part.to(self._device))
                except Exception as error:
                    raise SandboxError(
                        f"{self._name} can't score observations {list(part.shape)} of {part.dtype}: {error!r}"
                    ) from None
                for kept, output in zip((logits, values), self._checked(found, len(part)), strict=True):
                    kept.append(output.float().cpu().numpy())
                self._batch_sizes[len(part)] += 1
        return np.concatenate(logits), np.concatenate(values)

    def _checked(self, found: Any, b: int) -> tuple[Any, Any]:
        import torch

        if not isinstance(found, tuple) or len(found) != 2 or not all(map(torch.is_tensor, found)):
            raise ValueError(
                f"{self._name} gave {type(found).__name__}; expected (prior_logits, values) as tensors"
            )
        logits, values = found
        if logits.ndim != 2 or len(logits) != b or values.shape != (b,):
            raise ValueError(
                f"{self._name} gave prior_logits of shape {tuple(logits.shape)} and values of shape "
                f"{tuple(values.shape)}; expected ({b}, num_actions) and ({b},)"
            )
        return logits, values
