"""What an evaluation keeps to tell why episodes failed: traces, limits and groups; one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import ConfigError
from etude.simulation.demonstrations import Demonstrations
from etude.simulation.failures import (
    Episode,
    FailureGroup,
    Finding,
    UsualLimits,
    explain,
    find_limits,
    group_findings,
)
from etude.simulation.results import EpisodeRow
from etude.simulation.traces import TRACED, Array, EpisodeTrace

MOST_TRACES = 100
"""Episodes of an environment whose steps are kept, failures first; of the others, how they began and ended."""
MOST_STATE = 128
"""Numbers of a state that are kept at each step; of a larger one none."""
MOST_STARTS = 200
_KEY, _VERSION = "etude_diagnosis", 1


@dataclass(frozen=True)
class DiagnosisOptions:
    """What an evaluation keeps of its episodes beside their outcome.

    Args:
        demonstrations: A LeRobot dataset to compare with; None is the one that the policy's run names.
        samples: Plans drawn each time for the uncertainty of a policy that draws, in all episodes; 0 draws none.
        film_samples: The same in the episodes that are filmed, which are played once more.
    """

    demonstrations: Path | None = None
    samples: int = 0
    film_samples: int = 8

    def __post_init__(self) -> None:
        for name in ("samples", "film_samples"):
            if (count := getattr(self, name)) < 0 or count == 1:
                raise ConfigError(f"{name} is a number of plans to compare: 0 for none, or at least 2, got {count}")


@dataclass(frozen=True)
class EnvironmentDiagnosis:
    """Why episodes of one environment failed."""

    env: str
    rows: tuple[EpisodeRow, ...]
    traces: Mapping[int, EpisodeTrace]
    """By episode."""
    scenes: Mapping[int, Mapping[str, float]]
    """How each episode began."""
    limits: UsualLimits
    findings: tuple[Finding, ...]
    groups: tuple[FailureGroup, ...]
    starts: tuple[Mapping[str, float], ...] = ()
    """How demonstrations began, where that is known."""
    missing: str = ""
    """Why there is no distance to the demonstrations."""


@dataclass(frozen=True)
class Diagnosis:
    """Why episodes of an evaluation failed."""

    environments: tuple[EnvironmentDiagnosis, ...] = field(default_factory=tuple)

    @property
    def groups(self) -> list[FailureGroup]:
        """The groups of all environments."""
        return [group for one in self.environments for group in one.groups]

    def write(self, path: Path) -> Path:
        """Write the file; nothing in it is a pickle."""
        from safetensors.numpy import save

        from etude.runs.durable import write_output

        tensors: dict[str, Array] = {}
        described = []
        for place, one in enumerate(self.environments):
            kept = choose_traces(one.rows, MOST_TRACES)
            for episode in kept:
                trace = one.traces[episode]
                for name in TRACED:
                    values = np.ascontiguousarray(getattr(trace, name), np.float32)
                    if values.size and (name != "state" or values.shape[1] <= MOST_STATE):
                        tensors[f"{place}.{episode}.{name}"] = values
            described.append(_describe(one, kept))
        content = json.dumps({"version": _VERSION, "environments": described})
        return write_output(path, save(tensors, {_KEY: content}))


def read_diagnosis(path: Path) -> Diagnosis | None:
    """Read the file of a diagnosis; None if there is none, or nothing that this version understands."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            content = json.loads((file.metadata() or {})[_KEY])
            if content["version"] != _VERSION:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        found = [_restore(one, place, tensors) for place, one in enumerate(content["environments"])]
        return Diagnosis(tuple(found))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


def _describe(one: EnvironmentDiagnosis, kept: Sequence[int]) -> dict[str, Any]:
    first = next(iter(one.traces.values()))
    return {
        "env": one.env,
        "rows": [asdict(row) for row in one.rows],
        "scenes": {str(episode): dict(scene) for episode, scene in one.scenes.items()},
        "features": first.features,
        "names": first.names,
        "ended": {str(episode): one.traces[episode].ended for episode in kept},
        "limits": asdict(one.limits),
        "findings": [asdict(finding) for finding in one.findings],
        "groups": [asdict(group) for group in one.groups],
        "starts": [dict(start) for start in one.starts],
        "missing": one.missing,
    }


def _restore(content: Mapping[str, Any], place: int, tensors: Mapping[str, Array]) -> EnvironmentDiagnosis:
    scenes = {int(key): {str(n): float(v) for n, v in scene.items()} for key, scene in content["scenes"].items()}
    env, features, names = str(content["env"]), tuple(content["features"]), tuple(map(str, content["names"]))
    traces = {}
    for key, ended in content["ended"].items():
        arrays = {name: tensors.get(f"{place}.{int(key)}.{name}", np.zeros(0, np.float32)) for name in TRACED}
        traces[int(key)] = EpisodeTrace(env, int(key), features, names, scenes[int(key)], bool(ended), **arrays)
    findings = [Finding(**{**one, "facts": tuple(one["facts"])}) for one in content["findings"]]
    groups = [FailureGroup(**{**one, "episodes": tuple(one["episodes"])}) for one in content["groups"]]
    return EnvironmentDiagnosis(
        env, tuple(EpisodeRow(**row) for row in content["rows"]), traces, scenes,
        UsualLimits(**content["limits"]), tuple(findings), tuple(groups), tuple(content["starts"]),
        str(content["missing"]),
    )  # fmt: skip


def choose_traces(rows: Sequence[EpisodeRow], most: int) -> list[int]:
    """Return the episodes whose steps are kept: failures first."""
    ranked = sorted(rows, key=lambda row: (row.success is not False, row.episode))
    return sorted(row.episode for row in ranked[:most])


def diagnose(
    rows: Sequence[EpisodeRow],
    traces: Mapping[tuple[str, int], EpisodeTrace],
    demonstrations: Mapping[str, Demonstrations | str],
) -> Diagnosis:
    """Return why episodes failed: a function of how they went, what was kept of them, and the demonstrations.

    Args:
        rows: How the episodes went.
        traces: What was kept of them, by environment and episode; their distances are filled in.
        demonstrations: Those of each environment, or why there are none.
    """
    found = []
    for env in dict.fromkeys(row.env for row in rows):
        own = tuple(row for row in rows if row.env == env and (env, row.episode) in traces)
        shown = demonstrations.get(env, "it is not known what the policy was trained on")
        if own:
            found.append(_diagnose_one(env, own, {row.episode: traces[env, row.episode] for row in own}, shown))
    return Diagnosis(tuple(found))


def _diagnose_one(
    env: str, rows: tuple[EpisodeRow, ...], traces: Mapping[int, EpisodeTrace], shown: Demonstrations | str
) -> EnvironmentDiagnosis:
    names = next(iter(traces.values())).names
    if isinstance(shown, Demonstrations) and shown.states_NS.shape[1] != len(names):
        shown = f"the demonstrations have {shown.states_NS.shape[1]} numbers of state, the environment {len(names)}"
    known = shown if isinstance(shown, Demonstrations) else None
    if known is not None:
        ends = np.cumsum([len(trace.steps) for trace in traces.values()])
        distances = known.distances(np.concatenate([trace.state for trace in traces.values()]))
        for trace, own in zip(traces.values(), np.split(distances, ends[:-1]), strict=True):
            trace.distance = own
    episodes = [Episode(bool(row.success), row.steps, traces[row.episode]) for row in rows if row.success is not None]
    failures = [one for one in episodes if not one.success]
    limits = find_limits(episodes, known)
    findings = explain(failures, episodes, limits, known) if failures else []
    scenes = {episode: trace.scene for episode, trace in traces.items()}
    starts = [] if known is None else [dict(zip(names, row.tolist(), strict=True)) for row in known.starts_ES]
    return EnvironmentDiagnosis(
        env, rows, traces, scenes, limits, tuple(findings), tuple(group_findings(env, findings, episodes)),
        tuple(starts[:MOST_STARTS]), shown if isinstance(shown, str) else "",
    )  # fmt: skip
