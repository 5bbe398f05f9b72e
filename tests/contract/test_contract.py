"""Every engine and door keeps every guarantee or says why not, and the README says what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract import table
from tests.contract.probes import EXCEPTIONS, GUARANTEES
from tests.contract.subjects import ENGINES, SUBJECTS, Subject

FOUND: dict[tuple[str, Subject], str] = {}
ONE_WORKER = Subject("ray")
REPEATED = {(name, ONE_WORKER) for name in GUARANTEES if name != "parity"}
"""What one worker shows that two show by the same code, at 6 CPU seconds a start: probed by `make test-all`."""


@pytest.fixture(autouse=True, scope="module")
def _engines_are_imported_before_anything_is_forked() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    pytest.importorskip("ray")
    import etude.engines.huggingface.engine
    import etude.engines.lightning.engine
    import etude.engines.ray.engine  # noqa: F401
    import tests.contract.doors  # noqa: F401


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "guarantee, subject",
    [
        pytest.param(name, one, id=f"{name}-{one}", marks=[pytest.mark.nightly] if (name, one) in REPEATED else [])
        for name in GUARANTEES
        for one in SUBJECTS
    ],
)
def test_guarantee(guarantee: str, subject: Subject, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if subject.has_driver:
        request.getfixturevalue("on_ray_cluster")
    probe = GUARANTEES[guarantee][1]
    reason = EXCEPTIONS.get((guarantee, subject))
    if reason is not None:
        with pytest.raises(AssertionError):
            probe(subject, tmp_path)
        FOUND[guarantee, subject] = f"no: {reason}"
    else:
        FOUND[guarantee, subject] = probe(subject, tmp_path)


@pytest.mark.slow
def test_the_readme_shows_what_was_found(request: pytest.FixtureRequest) -> None:
    selected = [item for item in request.session.items if getattr(item, "originalname", "") == "test_guarantee"]
    if len(selected) < len(GUARANTEES) * len(SUBJECTS) - len(REPEATED):
        pytest.skip("only some guarantees were selected")
    for name, subject in REPEATED:
        FOUND.setdefault((name, subject), FOUND.get((name, replace(subject, ranks=2)), "not probed"))
    missing = [key for key in ((name, subject) for name in GUARANTEES for subject in SUBJECTS) if key not in FOUND]
    assert missing == [], "not probed, or failed"
    assert table.shown() == table.render(FOUND), "run `python -m tests.contract --write`"


def test_every_engine_is_under_contract() -> None:
    from etude.registry import ENGINE_REGISTRY

    own_probes = ["remote"]  # tests/unit/engines/remote; docs/howto/remote-engine.md says what it does not keep
    assert sorted([*ENGINES, *own_probes]) == sorted(ENGINE_REGISTRY.keys())


def test_the_readme_has_a_row_for_every_guarantee() -> None:
    rows = table.shown().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(GUARANTEES)
