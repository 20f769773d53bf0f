"""matplotlib's backend in cells: Agg, whose figures `plt.show()` shows and closes. Only matplotlib imports it."""

from __future__ import annotations

from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from . import artifacts


class _Manager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *args: Any, **kwargs: Any) -> None:
        artifacts.show_figures()

    def show(self) -> None:
        artifacts.show(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    manager_class = _Manager
