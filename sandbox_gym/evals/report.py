"""An eval as one HTML page that needs nothing else."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from sandbox_gym.errors import SandboxError
from sandbox_gym.evals.attempts import Attempt
from sandbox_gym.evals.summary import Summary, TaskRow

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3em .8em; border-bottom: 1px solid #ddd }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.cell { display: inline-block; width: 1em; height: 1em; margin-right: 2px; border-radius: 2px; vertical-align: middle }
.solved { background: #2a8f4d } .failed { background: #c6c6c6 } .part { background: #e3b341 }
.error { background: #c43c3c } .flagged { background: #7d3cc4 }
pre { background: #f6f6f6; padding: .6em; overflow-x: auto; max-height: 24em } summary { cursor: pointer }
"""
_LEGEND = (("solved", "solved"), ("part", "in part"), ("failed", "not solved"), ("flagged", "tampered with"))
_MOST_SHOWN = 3000  # characters of an output


def write(path: Path, summary: Summary) -> None:
    """The page is there whole or not at all. Raises SandboxError where it can't be written."""
    draft = path.with_suffix(".part")
    try:
        draft.write_text(_page(summary), encoding="utf-8", errors="backslashreplace")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise SandboxError(
            f"{path} can't be written ({error.strerror}): make room, and run the same again"
        ) from None


def _page(summary: Summary) -> str:
    estimates = "".join(
        f"<tr><td>pass@{k}</td><td class=number>{100 * at.value:.1f} %</td>"
        f"<td class=number>{100 * at.low:.1f} to {100 * at.high:.1f} %</td><td class=number>{at.tasks}</td></tr>"
        for k, at in summary.pass_at.items()
    )
    score = "" if summary.mean_score is None else f"Mean score {summary.mean_score:.3f}. "
    legend = " ".join(
        f'<span class="cell {kind}"></span>{said}' for kind, said in (*_LEGEND, ("error", "error"))
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(summary.policy)}</title>
<style>{_STYLE}</style></head><body><h1>{escape(summary.policy)}</h1>
<table><tr><th></th><th class=number>estimate</th><th class=number>95 % interval</th><th class=number>tasks</th></tr>
{estimates}</table>
<p>{score}{summary.errors} attempts have no score, since something else than the agent's work failed.
The attempts took {summary.attempt_seconds:.1f} s, added up.
Intervals are Wilson's, with each task as one observation.</p><p>{legend}</p>
<table><tr><th>task</th><th>attempts</th><th class=number>solved</th><th class=number>score</th>
<th class=number>seconds</th></tr>{"".join(map(_row, summary.rows))}</table>
<h2>Attempts</h2>{"".join(_details(attempt) for row in summary.rows for attempt in row.attempts)}
</body></html>
"""


def _row(row: TaskRow) -> str:
    cells = "".join(
        f'<a href="#{_anchor(attempt)}" class="cell {_kind(attempt)}" title="{escape(_reason(attempt)[:300])}"></a>'
        for attempt in row.attempts
    )
    score = "" if row.mean_score is None else f"{row.mean_score:.3f}"
    return (
        f"<tr><td>{escape(row.task)}</td><td>{cells}</td><td class=number>{row.solved} of {row.graded}</td>"
        f"<td class=number>{score}</td><td class=number>{row.mean_seconds:.1f}</td></tr>"
    )


def _details(attempt: Attempt) -> str:
    verdict = attempt.verdict or {}
    output = "\n".join(str(verdict.get(name, "")) for name in ("stdout", "stderr")).strip() or attempt.error
    flags = "".join(f"<p>Flag: {escape(str(flag))}</p>" for flag in verdict.get("flags", ()))
    return (
        f'<details id="{_anchor(attempt)}"><summary><span class="cell {_kind(attempt)}"></span>{escape(attempt.task)}, '
        f"attempt {attempt.number + 1}: {escape(_reason(attempt)[:300])}</summary>{flags}"
        f"<pre>{escape(output[-_MOST_SHOWN:])}</pre></details>"
    )


def _anchor(attempt: Attempt) -> str:
    return f"a-{attempt.digest[:16]}-{attempt.number}"


def _kind(attempt: Attempt) -> str:
    if attempt.score is None:
        return "error"
    if (attempt.verdict or {}).get("flags"):
        return "flagged"
    return "solved" if attempt.solved else "part" if attempt.score > 0 else "failed"


def _reason(attempt: Attempt) -> str:
    if attempt.status == "timed_out":
        return "the policy took too long"
    return attempt.error or str((attempt.verdict or {}).get("reason", ""))
