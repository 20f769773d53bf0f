"""What a cell shows beside text: charts and pictures as PNG, tables as CSV, with no change in its code.

As in a notebook: a figure by `plt.show()`, or at the cell's end while it is open; a picture, chart or table that is the
last expression; whatever is given to `display`. Nothing is imported for it, and what no cell has imported costs a look
into sys.modules.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
from collections.abc import Callable
from typing import Any

MAX_COUNT = 32  # artifacts of a cell
MAX_BYTES = 16 << 20  # of one
MAX_TOTAL = 64 << 20  # of a cell's
MAX_NOTES = 32
MAX_NOTE = 500  # characters
PNG = b"\x89PNG\r\n\x1a\n"
_MAX_TABLE = 1 << 20  # bytes of a table's CSV
_MAX_ROWS, _MAX_COLUMNS = 1000, 256

_shown: list[dict[str, Any]] = []  # of the present cell
_notes: list[str] = []


def begin() -> None:
    """A cell begins."""
    _shown.clear()
    _notes.clear()


def taken() -> dict[str, Any]:
    """`artifacts` and `notes` of `CodeResult`."""
    return {"artifacts": list(_shown), "notes": list(_notes)}


def display(*values: Any) -> None:
    """A notebook's: shows each, what is no picture, chart or table by its repr."""
    for value in values:
        if not show(value):
            print(repr(value))


def show(value: Any) -> bool:
    """Adds a picture, chart or table to the cell's artifacts; False for what is none."""
    kind = _kind(value)
    if kind is None:
        return False
    try:
        kind(value)
    except Exception as error:  # a drawing or table that fails is told of, and the cell goes on
        note(f"a {type(value).__name__} could not be shown: {type(error).__name__}: {error}")
    return True


def show_figures() -> None:
    """Shows pyplot's open figures, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "close"):  # half imported: its import failed
        return
    for number in pyplot.get_fignums():
        show(pyplot.figure(number))
    pyplot.close("all")


def is_open(value: Any) -> bool:
    """Whether it is a figure that `show_figures` will show."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    number = getattr(value, "number", None)
    return (
        type(number) is int
        and pyplot is not None
        and _kind(value) is _figure
        and pyplot.fignum_exists(number)
    )


def note(text: str) -> None:
    """Tells the caller what is missing, and why."""
    if len(_notes) < MAX_NOTES:
        _notes.append(text[:MAX_NOTE])


def _kind(value: Any) -> Callable[[Any], None] | None:
    for module, name, kind in _KINDS:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(value, found):
            return kind
    return _picture if callable(getattr(type(value), "_repr_png_", None)) else None


def _add(mime: str, data: bytes) -> None:
    if len(_shown) >= MAX_COUNT:
        note(f"more than {MAX_COUNT} artifacts in a cell: the others were left out")
    elif len(data) > MAX_BYTES or len(data) + sum(len(other["data"]) for other in _shown) > MAX_TOTAL:
        note(
            f"{len(data)} bytes of {mime} were left out: over {MAX_BYTES}, or over {MAX_TOTAL} with the others"
        )
    else:
        _shown.append({"mime": mime, "data": data})


# ---- kinds --------------------------------------------------------------------------------------------------------


def _figure(figure: Any) -> None:
    if figure.axes or figure.lines or figure.images or figure.texts:  # else it was opened and never drawn on
        target = io.BytesIO()
        figure.savefig(target, format="png", bbox_inches="tight")
        _add("image/png", target.getvalue())


def _picture(value: Any) -> None:
    data = value._repr_png_()
    pillow = sys.modules.get("PIL.Image")
    if data is None and pillow is not None and isinstance(value, pillow.Image):  # CMYK, say
        data = value.convert("RGB")._repr_png_()
    if not isinstance(data, bytes) or not data.startswith(PNG):
        raise ValueError("it gave no PNG")
    _add("image/png", data)


def _plotly(figure: Any) -> None:
    """A PNG, which plotly leaves to kaleido and a Chrome; where they are not, the figure's JSON."""
    pio = sys.modules["plotly.io"]
    try:
        data = pio.to_image(figure, format="png", validate=False)
    except Exception as error:
        why = " ".join(str(error).split())
        note(
            f"a plotly figure is there as JSON (plotly.io.from_json), not as PNG: {type(error).__name__}: {why}"
        )
        _add("application/vnd.plotly.v1+json", pio.to_json(figure, validate=False).encode())
    else:
        _add("image/png", data)


def _pandas(table: Any) -> None:
    _csv(table.shape, table.iloc[:_MAX_ROWS, :_MAX_COLUMNS].to_csv())


def _polars(table: Any) -> None:
    _csv(table.shape, table[:_MAX_ROWS, :_MAX_COLUMNS].write_csv())


def _csv(shape: tuple[int, int], text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > _MAX_TABLE:
        data = data[: data.rfind(b"\n", 0, _MAX_TABLE) + 1]
        note(f"a table of {shape[0]} rows and {shape[1]} columns: cut after {len(data)} bytes")
    elif shape[0] > _MAX_ROWS or shape[1] > _MAX_COLUMNS:
        kept = f"the first {min(shape[0], _MAX_ROWS)} rows and {min(shape[1], _MAX_COLUMNS)} columns are here"
        note(f"a table of {shape[0]} rows and {shape[1]} columns: {kept}")
    _add("text/csv", data)


_KINDS: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
    ("matplotlib.figure", "FigureBase", _figure),
    ("plotly.basedatatypes", "BaseFigure", _plotly),
    ("pandas", "DataFrame", _pandas),
    ("polars", "DataFrame", _polars),
)


# ---- what libraries show by themselves ----------------------------------------------------------------------------


def _after_matplotlib(matplotlib: Any) -> None:
    if "MPLBACKEND" not in os.environ:  # which programs that a cell starts would inherit, without this module
        matplotlib.rcParams["backend"] = f"module://{__package__}.figures"


def _after_pillow(image_show: Any) -> None:
    image_show.register(_Viewer(), 0)


def _after_plotly(pio: Any) -> None:
    if "PLOTLY_RENDERER" not in os.environ:
        base = pio.base_renderers.ExternalRenderer
        pio.renderers["sandbox"] = type(
            "Sandbox", (base,), {"render": lambda self, figure: _plotly(figure)}
        )()
        pio.renderers.default = "sandbox"


class _Viewer:
    """Pillow's `Image.show` has no other in here."""

    def show(self, image: Any, **options: Any) -> bool:
        return show(image)


_AFTER: dict[str, Callable[[Any], None]] = {
    "matplotlib": _after_matplotlib,
    "PIL.ImageShow": _after_pillow,
    "plotly.io": _after_plotly,
}


class Hook:
    """On sys.meta_path: a library that shows figures is told of `show` once it has been imported."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        after = _AFTER.get(name)
        if after is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                _then(spec.loader, after)
                return spec  # type: ignore[no-any-return]
        return None


def _then(loader: Any, after: Callable[[Any], None]) -> None:
    """Calls `after(module)` once the loader has filled its module."""
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module  # of the instance: the class's is there again
        original(module)
        try:
            after(module)
        except (
            Exception
        ) as error:  # a release that is unlike all that were tried: its figures are shown by `display`
            note(f"{module.__name__} does not show by itself here: {type(error).__name__}: {error}")

    loader.exec_module = exec_module
