"""The conformance suite: what every backend must do, and that what one declares not to do is true.

A test of a backend "mine", in pytest or by hand:

    @pytest.mark.parametrize("check", sandbox_gym.testing.checks("mine"))
    def test_conformance(check):
        check()

    python -m sandbox_gym.testing mine

Where a backend's `deviations` name a check it is run all the same, and must be refused: it ends with BackendUnavailable
or SnapshotError, whose message says what can't be had, and the sandboxes that it has made go on. One that passes, or
that ends by anything else (an assertion, a time-out, a sandbox that died), does not conform.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_gym.backends import lookup
from sandbox_gym.errors import BackendUnavailable, SnapshotError
from sandbox_gym.testing.subject import PATIENCE, Behaviour, Subject, catalogue, until, value

TOPICS = (
    "creating",
    "running",
    "files",
    "processes",
    "limits",
    "snapshots",
    "memories",
    "copies",
    "isolation",
    "network",
    "failures",
    "images",
    "environments",
)
_REFUSALS = (BackendUnavailable, SnapshotError)


class NotConforming(AssertionError):
    """A backend does not do what it must, or not what it declares."""


@dataclass(frozen=True)
class Result:
    """Of one check. `verdict`: "ok", "deviates" (as declared) or "failed"; `why`: the declared reason, or what went
    wrong; `seconds`: how long it took.
    """

    check: str
    verdict: str
    why: str
    seconds: float


class Check:
    """A behaviour of one backend; called, it raises NotConforming where that is not so."""

    def __init__(self, behaviour: Behaviour, backend: str, image: Any, why: str | None) -> None:
        self.name = self.__name__ = behaviour.name  # by which pytest shows it
        self.meaning = behaviour.meaning
        self.why = why  # it deviates; None: it is to pass
        self._run = behaviour.run
        self.backend = backend
        self._image = image

    def __call__(self) -> None:
        before = self._living()
        subject = Subject(self.backend, self._image)
        try:
            if self.why is None:
                self._must_pass(subject)
            else:
                self._must_be_refused(subject)
        finally:
            subject.close()
        try:
            until(lambda: self._living() <= before, "all that it made is gone", PATIENCE)
        except AssertionError as error:
            raise NotConforming(f"{self.name}: {error}: {sorted(self._living() - before)}") from None

    def _living(self) -> set[str]:
        return {str(row["id"]) for row in lookup.get(self.backend).list()}

    def _must_pass(self, subject: Subject) -> None:
        try:
            self._run(subject)
        except _REFUSALS as error:
            raise NotConforming(
                f"{self.name}: {self.meaning} Refused: {error}\n"
                f"What backend {self.backend!r} can't do belongs into its deviations."
            ) from error
        except Exception as error:
            raise NotConforming(
                f"{self.name}: {self.meaning} Not so with {self.backend!r}: {_told(error)}"
            ) from error

    def _must_be_refused(self, subject: Subject) -> None:
        try:
            self._run(subject)
        except _REFUSALS as refusal:
            if not str(refusal):
                raise NotConforming(f"{self.name}: refused, but without a word why") from refusal
        except Exception as error:
            raise NotConforming(
                f"{self.name}: declared as a deviation ({self.why}), which has to end with BackendUnavailable or "
                f"SnapshotError, and ended with {_told(error)}"
            ) from error
        else:
            raise NotConforming(
                f"{self.name}: declared as a deviation ({self.why}), but it works: take it out of the deviations"
            )
        for box in [box for box in subject.boxes if box.status == "running"]:
            try:
                value(box, "6 * 7")
            except Exception as error:
                raise NotConforming(
                    f"{self.name}: refused, but that has harmed sandbox {box.name}: {_told(error)}"
                ) from error

    def __repr__(self) -> str:
        return f"<Check {self.name} of {self.backend}>"


def behaviours() -> dict[str, Behaviour]:
    """All there are, by name, topic after topic."""
    for topic in TOPICS:
        importlib.import_module(f"sandbox_gym.testing.topics.{topic}")
    return catalogue


def checks(backend: str, only: Sequence[str] = (), *, image: Any = None) -> list[Check]:
    """Every check of a backend, each to be called; `only`: of these topics, or names. `image`: what its sandboxes are
    made of, as for `Sandbox.create`; Gymnasium has to be in it.

    Raises NotConforming: the backend's deviations name a check that there is not, or one twice.
    """
    known = behaviours()
    declared: dict[str, str] = {}
    for deviation in lookup.deviations(backend):
        if deviation.check not in known:
            raise NotConforming(
                f"{backend!r} declares to deviate in {deviation.check!r}: no check has that name"
            )
        if deviation.check in declared or not deviation.why:
            raise NotConforming(f"{backend!r} declares {deviation.check!r} twice, or without a reason")
        declared[deviation.check] = deviation.why
    for wish in only:
        if not any(wish in (name, name.partition(".")[0]) for name in known):
            raise ValueError(f"no check or topic {wish!r}: there are {', '.join(known)}")
    chosen = [name for name in known if not only or {name, name.partition(".")[0]} & set(only)]
    return [Check(known[name], backend, image, declared.get(name)) for name in chosen]


def conformance(
    backend: str,
    only: Sequence[str] = (),
    *,
    image: Any = None,
    progress: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Runs `checks`, each followed by `progress(result)`. Raises NotConforming at the end, with all that failed."""
    results = []
    for check in checks(backend, only, image=image):
        started = time.perf_counter()
        verdict, why = ("ok", "") if check.why is None else ("deviates", check.why)
        try:
            check()
        except Exception as error:
            verdict, why = "failed", str(error)
        results.append(Result(check.name, verdict, why, time.perf_counter() - started))
        progress(results[-1])
    failed = [result.why for result in results if result.verdict == "failed"]
    if failed:
        raise NotConforming(
            f"backend {backend!r} fails {len(failed)} of {len(results)} checks:\n" + "\n".join(failed)
        )
    return results


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
