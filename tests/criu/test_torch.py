"""A guest in the middle of a training: the threads, generators, optimizer and data loader of PyTorch go on alike."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_gym.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("nothing_stays")

_TRAINING = """
import os, threading, torch
from torch import nn
torch.set_num_threads(2)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
generator = torch.Generator().manual_seed(7)
def train(n):
    losses = []
    for _ in range(n):
        x = torch.randn(256, 64, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
        losses.append(loss.item())
    return losses
def threads(): return len(os.listdir("/proc/self/task"))
large = torch.randn(1200, 1200); large @ large  # starts the pool
first = train(4)
y = model(torch.ones(1, 64)).sum()  # a graph that waits for its backward
"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.create(memory="2Gi", cpus=None, env={"OMP_NUM_THREADS": "2"}) as sandbox:
        result = sandbox.run_code(_TRAINING, timeout=60)
        assert result.ok, result.error
        yield sandbox


def test_a_training_goes_on(box: Sandbox) -> None:
    assert int(box.run_code("threads()").value or 0) > 1
    snapshot = box.snapshot()
    assert snapshot.engine == "criu" and "threads" in snapshot.why
    copies = Sandbox.restore_many(snapshot, 2)
    try:
        expected = box.run_code("train(6), (large @ large).sum().item()").value
        for copy in copies:
            assert copy.run_code("train(6), (large @ large).sum().item()").value == expected
            assert copy.run_code("threads()").value == box.run_code("threads()").value
        gradient = "model.zero_grad(); y.backward(); [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None]"
        # Adam changed the parameters in place, which autograd finds by its version counters: a copy does too.
        assert all(copy.run_code(gradient).error is not None for copy in (box, *copies))
        with Sandbox.restore(snapshot) as fresh, Sandbox.restore(snapshot) as other:
            assert fresh.run_code(gradient).value == other.run_code(gradient).value is not None
    finally:
        snapshot.delete()
        for copy in copies:
            copy.terminate()


def test_a_loader_with_workers_in_the_middle_of_its_data(box: Sandbox) -> None:
    code = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.arange(96.0)), batch_size=8, num_workers=2, persistent_workers=True)
batches = iter(loader)
seen = [next(batches)[0].sum().item() for _ in range(3)]
"""
    result = box.run_code(code, timeout=60)
    assert result.ok, result.error and result.error.traceback
    rest = "[batch[0].sum().item() for batch in batches]"
    copies = box.fork(2)
    try:
        values = [sandbox.run_code(rest, timeout=60).value for sandbox in (*copies, box)]
        assert values == [str([float(sum(range(8 * i, 8 * i + 8))) for i in range(3, 12)])] * 3
    finally:
        for copy in copies:
            copy.terminate()
