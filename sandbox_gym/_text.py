"""What a command or a cell said, as one bounded text for a reader: an agent, or a person."""

from __future__ import annotations

from sandbox_gym.api import CodeResult, ExecResult

_NOTE = 64  # characters; the note on what was cut takes no more


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer than `most` characters, and how much is missing between."""
    if len(text) <= most:
        return text
    kept = most - _NOTE
    note = f"\n[... {len(text) - kept} characters cut ...]\n"
    return text[: kept // 2] + note + text[len(text) - (kept - kept // 2) :]


def show(result: CodeResult | ExecResult, *, timeout: float, most: int) -> str:
    """Both streams, then the last expression's value or the traceback (a cell), or the exit code where it isn't zero (a
    command), then what ended it early. `timeout` in seconds, `most` in characters.
    """
    parts = [_stream(result.stdout, result.stdout_cut), _stream(result.stderr, result.stderr_cut)]
    if isinstance(result, ExecResult):
        if result.limit:
            parts.append(f"[killed at the limit of {result.limit}]")
        elif result.exit_code and not result.timed_out:
            parts.append(f"[exit code {result.exit_code}]")
    else:
        parts += [result.value or "", result.error.traceback or str(result.error) if result.error else ""]
    if result.timed_out:
        parts.append(f"[timed out after {timeout:g} s]")
    return cut("\n".join(part.rstrip("\n") for part in parts if part), most)


def _stream(text: str, dropped: int) -> str:
    return text.rstrip("\n") + f"\n[{dropped} more bytes were not kept]" if dropped else text
