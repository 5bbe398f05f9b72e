"""How an error travels from a worker to the driver: the same class, the same message, and where it was raised."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from etude.errors import Interrupted, RankError

PLAIN = (str, int, float, bool, type(None))


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """Put an error into plain words and numbers, which every process can read."""
    if isinstance(error, Interrupted):
        return {"error": {"signal": error.signum, "message": error.message}}
    kind = type(error)
    described = {
        "module": kind.__module__, "type": kind.__qualname__, "message": str(error), "rank": rank,
        "args": list(error.args) if all(isinstance(arg, PLAIN) for arg in error.args) else None,
        "text": "".join(traceback.format_exception(error)).rstrip(),
    }  # fmt: skip
    return {"error": described}


def revive(described: dict[str, Any]) -> BaseException:
    """Return the error that a worker described, to be raised in the driver."""
    if "signal" in described:
        return Interrupted(described["signal"], described["message"])
    error = _remake(described) or RuntimeError(f"{described['type']}: {described['message']}")
    error.add_note(f"raised in rank {described['rank']} of the Ray workers:\n{described['text']}")
    return error


def _remake(described: dict[str, Any]) -> BaseException | None:
    """Return an error of the same class and words, if the class is known here and can be made from its arguments."""
    kind: Any = sys.modules.get(described["module"])
    for name in described["type"].split("."):
        kind = getattr(kind, name, None)
    if described["args"] is None or not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    try:
        error = kind(*described["args"])
    except Exception:  # noqa: BLE001 - a class of a user's may refuse in any way; the text remains
        return None
    return error if str(error) == described["message"] else None


def explain_failure(error: BaseException, max_failures: int) -> RankError:
    """Say in a sentence why Ray gave its workers up, when none of them had the time to say so itself."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    if not failures:
        cause = getattr(error, "controller_failure", error)
        return RankError(f"Ray could not run the workers: {_first_line(cause)}")
    # Ranks that saw another one die say which; the dead one says nothing.
    witnesses = [str(e) for e in map(_inner, failures.values()) if isinstance(e, RankError)]
    ranks = ", ".join(str(rank) for rank in sorted(failures))
    what = witnesses[0] if witnesses else f"rank {ranks} of the Ray workers died"
    remedy = (
        "engine.params.max_failures lets Ray start the group again" if not max_failures
        else f"Ray had started the group again {max_failures} times, as engine.params.max_failures allows"
    )  # fmt: skip
    return RankError(f"{what}; {remedy}; the next run goes on from the last checkpoint")


def _inner(error: BaseException) -> BaseException:
    inner: BaseException = getattr(error, "_base_exc", error)
    return inner


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
