"""AlphaZero-style training over live snapshots: `python -m examples.alphazero`, or `train()`."""

from examples.alphazero.training import Row, Settings, Training, train

__all__ = ["Row", "Settings", "Training", "train"]
