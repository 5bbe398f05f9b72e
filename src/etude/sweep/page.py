"""The page of a sweep: what matters, how the search went, what each parameter did, and every trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from etude.runs.charts import Dot, Series, plan_chart, plan_scatter, tame_limit
from etude.runs.directory import Run
from etude.runs.durable import write_output
from etude.runs.metrics import read_metrics
from etude.runs.page import format_number, render, spread
from etude.runs.progress import format_duration
from etude.secrets import redact
from etude.sweep.objective import Objective, points
from etude.sweep.space import SearchChoice, SearchParameter
from etude.sweep.study import TrialRecord, TrialStudy

PAGE = "sweep.html"
MOST_CURVES = 60
POINTS_OF_A_CHART = 6000
MOST_CATEGORIES = 12
LONGEST_VALUE = 60


def write_page(
    folder: Path, study: TrialStudy, *, name: str, trials: int, command_again: Callable[[dict[str, Any]], str],
    about: str = "", importances: Mapping[str, float] | None = None,
) -> Path:  # fmt: skip
    """Write the page of a sweep into its folder, and return its path.

    Args:
        folder: The folder, with a run for each trial.
        study: What was tried.
        name: What the sweep is called.
        trials: How many trials it is to have.
        command_again: Returns the command that trains with the values of a trial.
        about: How it searches, in a line.
        importances: The share of each parameter; None says that it is told at the end.
    """
    shares = None if importances is None else {redact(key): share for key, share in importances.items()}
    page = _render(folder, study, redact(name), trials, command_again, redact(about), shares)
    return write_output(folder / PAGE, page)


def _render(
    folder: Path, study: TrialStudy, name: str, trials: int, command_again: Callable[[dict[str, Any]], str], about: str,
    importances: Mapping[str, float] | None,
) -> str:  # fmt: skip
    records, best, objective = study.records(), study.best(), study.objective
    states = [record.state for record in records]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    parameters = study.space.parameters
    return render(
        "sweep/sweep.html",
        name=name,
        facts=[f"{len(records)} of {trials} trials: {counts or 'none yet'}", about],
        objective=objective,
        best=best,
        best_values=[] if best is None else _shown(best, parameters),
        best_value="-" if best is None or best.value is None else _number(best.value),
        command="" if best is None else redact(command_again(dict(best.values))),
        importances=importances,
        plots=_plot_parameters(records, best, parameters, objective),
        history=_plot_history(records, best, objective),
        curves=_plan_curves(folder, records, objective),
        most_curves=MOST_CURVES,
        keys=[redact(one.key) for one in parameters],
        space=[(redact(one.key), redact(str(one))) for one in parameters],
        rows=[_row(folder, record, parameters, best) for record in records],
    )


def _scored(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.value is not None]


def _dot(record: TrialRecord, x: float, best: TrialRecord | None, parameters: Sequence[SearchParameter]) -> Dot:
    kind = "best" if best is not None and record.number == best.number else record.state
    values = ", ".join(f"{key} {value}" for key, value in _shown(record, parameters))
    assert record.value is not None
    return Dot(x, record.value, kind, f"trial {record.number}: {_number(record.value)} ({values})")


def _plot_history(
    records: Sequence[TrialRecord], best: TrialRecord | None, objective: Objective
) -> dict[str, Any] | None:
    scored = _scored(records)
    finished = [record for record in scored if record.state == "finished"]
    if not scored:
        return None
    values = accumulate((record.value or 0.0 for record in finished), max if objective.is_large else min)
    trace = [(float(record.number), value) for record, value in zip(finished, values, strict=True)]
    if trace:
        trace.append((float(records[-1].number), trace[-1][1]))
    dots = [_dot(record, record.number, best, ()) for record in scored]
    return plan_scatter(f"{objective.metric} by trial", dots, is_large=objective.is_large, trace=trace)


def _plot_parameters(
    records: Sequence[TrialRecord], best: TrialRecord | None, parameters: Sequence[SearchParameter],
    objective: Objective,
) -> list[dict[str, Any]]:  # fmt: skip
    plots = []
    for parameter in parameters:
        key = parameter.key
        scored = [record for record in _scored(records) if key in record.values]
        if not scored:
            continue
        if isinstance(parameter, SearchChoice):
            options = parameter.options
            dots = [_dot(one, options.index(str(one.values[key])), best, parameters) for one in scored]
            names = [redact(option) for option in options] if len(options) <= MOST_CATEGORIES else [""] * len(options)
            plots.append(plan_scatter(redact(key), dots, is_large=objective.is_large, categories=names))
        else:
            dots = [_dot(one, float(one.values[key]), best, parameters) for one in scored]
            plots.append(plan_scatter(redact(key), dots, is_large=objective.is_large, log_x=parameter.is_log))
    return plots


def _plan_curves(folder: Path, records: Sequence[TrialRecord], objective: Objective) -> dict[str, Any] | None:
    """Return the curves of the trials; those that are far off are left out, for they would flatten all others."""
    values = [record.value for record in records if record.value is not None]
    limit = tame_limit(values, objective.is_large) if values else 0.0
    far = {one.number for one in records if one.value is not None and objective.is_better(limit, one.value)}
    series = []
    for record in spread([record for record in records if record.number not in far], MOST_CURVES):
        found = points(read_metrics(Run(folder / record.name).metrics_path), objective.metric)
        if found:
            steps, values = [step for step, _ in found], [value for _, value in found]
            series.append(Series(f"trial {record.number}", steps, values, colour=record.number))
    buckets = max(12, POINTS_OF_A_CHART // (2 * len(series))) if series else 0
    if not series:
        return None
    left_out = f"{len(far)} far off {'are' if len(far) > 1 else 'is'} left out" if far else ""
    return plan_chart(objective.metric, series, buckets=buckets) | {"note": left_out}


def _row(
    folder: Path, record: TrialRecord, parameters: Sequence[SearchParameter], best: TrialRecord | None
) -> Mapping[str, Any]:
    status = Run(folder / record.name).status()
    return {
        "record": record,
        "is_best": best is not None and best.number == record.number,
        "link": f"{record.name}/report.html" if (folder / record.name / "report.html").is_file() else "",
        "value": "-" if record.value is None else _number(record.value),
        "values": [value for _, value in _shown(record, parameters)],
        "step": "-" if status.get("step") is None else format_number(status["step"]),
        "duration": format_duration(float(status.get("duration_s", 0.0))) if status else "-",
        "note": redact(record.error) or (f"given up at step {record.step}" if record.state == "pruned" else ""),
    }


def _shown(record: TrialRecord, parameters: Sequence[SearchParameter]) -> list[tuple[str, str]]:
    """Return keys and values of a trial for people."""
    shown = []
    for parameter in parameters:
        value = record.values.get(parameter.key, "-")
        text = _number(value) if isinstance(value, int | float) else str(value)
        text = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
        shown.append((redact(parameter.key), redact(text)))
    return shown


def _number(value: float) -> str:
    return format_number(float(f"{value:.4g}"))
