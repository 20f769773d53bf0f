"""What cells show: figures, pictures and tables come out as bytes, from code as a notebook has it."""

from __future__ import annotations

import io
import json
import time

import numpy as np
import pytest
from PIL import Image

from sandbox_gym.api import Artifact, CodeResult
from sandbox_gym.errors import ProtocolError
from sandbox_gym.guest import artifacts
from sandbox_gym.sandbox import Sandbox

PYPLOT = "import matplotlib.pyplot as plt\n"
DATAFRAMES = {"pandas": "import pandas as lib\n", "polars": "import polars as lib\n"}


def pixels(artifact: Artifact) -> np.ndarray:
    """[height, width, 3]."""
    assert artifact.mime == "image/png"
    return np.asarray(Image.open(io.BytesIO(artifact.data)).convert("RGB"))


def shown(result: CodeResult) -> list[str]:
    assert result.error is None and not result.timed_out, result
    return [artifact.mime for artifact in result.artifacts]


@pytest.fixture
def drawing(box: Sandbox) -> Sandbox:
    """A sandbox whose interpreter has imported pyplot, in as long as that takes."""
    assert box.run_code(PYPLOT, timeout=100).ok
    return box


def test_a_cell_that_shows_nothing_has_none(box: Sandbox) -> None:
    result = box.run_code("print('x'); [1, 2]")
    assert result.artifacts == () and result.notes == ()
    assert (
        box.run_code("import sys; [m for m in ('matplotlib', 'PIL', 'plotly') if m in sys.modules]").value
        == "[]"
    )


def test_show_shows_and_closes(drawing: Sandbox) -> None:
    result = drawing.run_code("for n in range(3):\n    plt.plot([0, n])\n    plt.show()\nplt.get_fignums()")
    assert shown(result) == ["image/png"] * 3 and result.value == "[]" and result.stderr == ""
    assert len({artifact.data for artifact in result.artifacts}) == 3  # each one line, not one, two, three
    assert all(pixels(artifact).std() > 1 for artifact in result.artifacts)


def test_figures_open_at_the_end_are_shown_and_closed(drawing: Sandbox) -> None:
    code = (
        "fig, ax = plt.subplots(facecolor='red')\nax.set_axis_off()\nplt.figure().text(0.5, 0.5, 'two')\nNone"
    )
    result = drawing.run_code(code)
    assert shown(result) == ["image/png"] * 2
    assert (pixels(result.artifacts[0]) == [255, 0, 0]).all()
    assert drawing.run_code("plt.get_fignums()").value == "[]"


def test_a_figure_is_shown_once(drawing: Sandbox) -> None:
    assert shown(drawing.run_code("fig, ax = plt.subplots(); ax.plot([1, 2])\nfig")) == ["image/png"]
    assert shown(drawing.run_code("fig")) == ["image/png"]  # it is closed by now, and a value like another
    assert shown(drawing.run_code("fig; None")) == []
    assert shown(drawing.run_code("plt.figure()")) == []  # nothing was drawn


def test_figures_of_a_cell_that_fails_are_shown(drawing: Sandbox) -> None:
    result = drawing.run_code("plt.plot([1, 2])\n1 / 0")
    assert result.error is not None and result.error.type == "ZeroDivisionError"
    assert [artifact.mime for artifact in result.artifacts] == ["image/png"]


def test_a_figure_that_cannot_be_drawn_is_told_of(drawing: Sandbox) -> None:
    result = drawing.run_code("plt.title(r'$\\frac{$'); plt.show()")
    assert shown(result) == [] and "ParseSyntaxException" in result.notes[0]
    assert shown(drawing.run_code("plt.plot([1]); plt.show()")) == ["image/png"]


def test_a_backend_of_ones_own_stays(box: Sandbox) -> None:
    result = box.run_code(
        "import matplotlib; matplotlib.use('svg')\n" + PYPLOT + "plt.get_backend()", timeout=100
    )
    assert result.value == "'svg'"
    assert shown(box.run_code("plt.plot([1]); None")) == ["image/png"]
    program = "import os, matplotlib; print(os.environ.get('MPLBACKEND'), matplotlib.get_backend())"
    assert (
        box.exec(["python3", "-c", program], timeout=100).stdout == "None agg\n"
    )  # programs see nothing of it


@pytest.mark.parametrize("engine", ["fork", "criu"])
def test_copies_draw_on(drawing: Sandbox, engine: str) -> None:
    drawing.run_code("fig, ax = plt.subplots(); plt.close(fig); line = ax.plot([1, 2])")
    snapshot = drawing.snapshot(engine=engine)  # type: ignore[arg-type]
    with Sandbox.restore(snapshot) as copy:
        snapshot.delete()
        assert shown(copy.run_code("fig")) == ["image/png"]
        assert shown(copy.run_code("plt.plot([3]); plt.show()")) == ["image/png"]


def test_pictures(box: Sandbox) -> None:
    code = "from PIL import Image\nred = Image.new('RGB', (4, 2), 'red')\nred"
    result = box.run_code(code)
    assert shown(result) == ["image/png"] and result.value is not None and "PIL.Image" in result.value
    assert (pixels(result.artifacts[0]) == np.full((2, 4, 3), [255, 0, 0])).all()
    for line in ("red.show()", "display(red)", "Image.new('CMYK', (2, 2))"):
        assert shown(box.run_code(line)) == ["image/png"]


def test_display_takes_anything(box: Sandbox) -> None:
    result = box.run_code("from PIL import Image\ndisplay(1, Image.new('L', (1, 1)), 'two')")
    assert shown(result) == ["image/png"] and result.stdout == "1\n'two'\n"


def test_whatever_has_a_png_of_itself(box: Sandbox) -> None:
    code = "class P:\n    def _repr_png_(self): return {}\nP()"
    result = box.run_code(code.format(b"\x89PNG\r\n\x1a\n..."))
    assert [artifact.data for artifact in result.artifacts] == [b"\x89PNG\r\n\x1a\n..."]
    result = box.run_code(code.format("b'<script>'"))
    assert shown(result) == [] and "no PNG" in result.notes[0]


@pytest.mark.parametrize("library", DATAFRAMES)
def test_tables(box: Sandbox, library: str) -> None:
    head = DATAFRAMES[library]
    result = box.run_code(head + "lib.DataFrame({'a': [1, 2], 'b': ['x', 'é,']})", timeout=100)
    assert shown(result) == ["text/csv"] and result.value is not None
    lines = result.artifacts[0].data.decode().splitlines()
    assert lines[0].endswith("a,b") and lines[1].endswith("1,x") and lines[2].endswith('2,"é,"')
    result = box.run_code("lib.DataFrame({'a': range(5000)})")
    assert len(result.artifacts[0].data.splitlines()) == 1001 and "5000 rows" in result.notes[0]
    result = box.run_code("lib.DataFrame({'a': ['x' * 100_000] * 50})")
    assert len(result.artifacts[0].data) < 1 << 20 and "cut after" in result.notes[0]


def test_a_plotly_figure_without_a_browser_is_json(box: Sandbox) -> None:
    head = "import sys; sys.modules['kaleido'] = None\nimport plotly.graph_objects as go\n"
    result = box.run_code(head + "fig = go.Figure(go.Scatter(y=[1, 5]))\nfig.show()", timeout=100)
    assert shown(result) == ["application/vnd.plotly.v1+json"]
    assert json.loads(result.artifacts[0].data)["data"][0]["y"] == [1, 5]
    assert "not as PNG" in result.notes[0] and "kaleido" in result.notes[0].lower()
    assert shown(box.run_code("fig")) == ["application/vnd.plotly.v1+json"]


def test_a_plotly_figure_with_one_is_a_png(box: Sandbox) -> None:
    head = "import plotly.graph_objects as go\n"
    result = box.run_code(head + "go.Figure(go.Scatter(y=[1, 5])).show()", timeout=100)
    assert shown(result) == ["image/png"] and result.notes == ()
    assert pixels(result.artifacts[0]).shape == (500, 700, 3)
    snapshot = box.snapshot()
    assert snapshot.engine == "fork"  # nothing of the browser is left running
    snapshot.delete()


def test_bounds(box: Sandbox) -> None:
    code = "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n' + bytes({})\n"
    code += "for _ in range({}): display(P())"
    result = box.run_code(code.format(0, 40))
    assert shown(result) == ["image/png"] * artifacts.MAX_COUNT and len(result.notes) == 8
    result = box.run_code(code.format(artifacts.MAX_BYTES, 1))
    assert shown(result) == [] and "left out" in result.notes[0]
    result = box.run_code(code.format(artifacts.MAX_BYTES - 8, 6))
    assert shown(result) == ["image/png"] * 4 and len(result.notes) == 2


def test_a_drawing_that_takes_too_long_is_interrupted(drawing: Sandbox) -> None:
    code = "import time\nclass P:\n    def _repr_png_(self): time.sleep(60)\nplt.plot([1])\nP()"
    started = time.monotonic()
    result = drawing.run_code(code, timeout=0.3)
    assert result.timed_out and time.monotonic() - started < 2.0
    assert shown(drawing.run_code("None")) == ["image/png"]  # what the interrupted cell left open


@pytest.mark.parametrize(
    "taken",
    [
        "{'artifacts': [{'mime': 'image/png', 'data': b'<html>'}], 'notes': []}",
        "{'artifacts': [{'mime': 'text/html', 'data': b''}], 'notes': []}",
        "{'artifacts': [{'mime': 'text/csv', 'data': 'text'}], 'notes': []}",
        "{'artifacts': [{'mime': ['text/csv'], 'data': b''}], 'notes': []}",
        "{'artifacts': [{'mime': 'text/csv', 'data': b''}] * 33, 'notes': []}",
        "{'artifacts': [{'mime': 'text/csv', 'data': bytes(1 << 24)}] * 5, 'notes': []}",
        "{'artifacts': [7], 'notes': []}",
        "{'artifacts': 7, 'notes': []}",
        "{'artifacts': []}",
        "{'artifacts': [], 'notes': ['x' * 501]}",
        "{'artifacts': [], 'notes': ['x'] * 33}",
        "{'artifacts': [], 'notes': [7]}",
    ],
)
def test_a_guest_that_lies_is_killed(box: Sandbox, taken: str) -> None:
    with pytest.raises(ProtocolError, match=box.name):
        box.run_code(f"import sandbox_gym_guest.artifacts as own\nown.taken = lambda: {taken}")
    assert box.status == "dead"
