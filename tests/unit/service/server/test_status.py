"""The status page of a service, over HTTP: what it shows, to whom, and that it lets nothing in."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from tests.served import KEY, Served, connected

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the client's
OTHER_KEY = "tml-the-key-of-another"
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("status")
    (folder / "keys").write_text(f"ada {KEY}\nbob {OTHER_KEY}\n")
    found = Served(folder / "state", "--keys", str(folder / "keys")).start()
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def run(served: Served) -> str:
    """Train for three steps, report a reward for each, and return the name of the run."""
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})
    with connected(served) as client:
        trained = client.create_lora_training_client("tiny", rank=4, seed=1)
        name: str = trained.get_info().model_id
        for step in range(3):
            trained.forward_backward([datum], "cross_entropy")
            trained.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            report = {"values": {"reward": 0.25 * (step + 1), EVIL: 1.0}}
            assert served.call(f"/api/v1/training_runs/{name}/curves", report) == (200, {"step": step + 1})
    return name


def page(served: Served, key: str) -> str:
    status, content = served.call("/", key=key)
    assert status == 200
    return str(content.decode())


def test_the_page_shows_models_steps_queue_rates_and_curves(served: Served, run: str) -> None:
    shown = page(served, KEY)
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", shown)).split())
    assert re.search(rf"{run} 3 [\d.]+ 0\.75 0 tiny rank 4 ", text)
    assert "0 to train, 0 to draw" in text
    assert len(re.findall(r"<small>tokens/s</small>", shown)) == 2
    titles = [unescape(one) for one in re.findall(r"<h3>(.*?)</h3>", shown)]
    assert titles == ["loss", "reward", EVIL]
    curves = re.findall(r'<path class="line" d="([^"]+)"', shown)
    assert len(curves) >= 3
    assert "min 0.25, max 0.75" in text


def test_the_page_is_refreshed_with_the_same(served: Served, run: str) -> None:
    status, seen = served.call("/status")
    assert status == 200
    [model] = seen["models"]
    assert {"id": run, "base": "tiny", "rank": 4, "steps": 3, "reward": 0.75, "waiting": 0}.items() <= model.items()
    assert model["loss"] > 0
    assert seen["waiting"] == {"training": 0, "sampling": 0, "live": 0}
    assert seen["tokens_per_s"]["trained"] > 0
    models = re.search(r'<section id="models">.*?</section>', seen["html"], re.DOTALL)
    assert models is not None
    assert models[0] in page(served, KEY)
    assert run in seen["html"]


def test_nothing_is_let_in_or_fetched_from_elsewhere(served: Served, run: str) -> None:
    shown = page(served, KEY)
    assert EVIL not in shown
    assert EVIL not in served.call("/status")[1]["html"]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', shown)
    scripts = re.findall(r"<script>(.*?)</script>", shown, re.DOTALL)
    assert policy is not None
    assert len(scripts) == 1
    allowed = unescape(policy[1])
    digest = base64.b64encode(hashlib.sha256(unescape(scripts[0]).encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in allowed
    assert "default-src 'none'" in allowed
    assert "connect-src 'self'" in allowed
    assert not re.search(r'(?:src|href)="(?!#)', shown)


def test_a_stranger_is_asked_for_a_key_and_others_see_their_own(served: Served, run: str) -> None:
    shown = page(served, "tml-nobody-knows-this")
    assert '<form id="key">' in shown
    assert run not in shown
    assert "tiny" not in shown
    status, said = served.call("/status", key="tml-nobody-knows-this")
    assert status == 401
    assert "key" in said["detail"]
    assert '<form id="key" hidden>' in page(served, OTHER_KEY)
    assert run not in page(served, OTHER_KEY)
    assert served.call("/status", key=OTHER_KEY)[1]["models"] == []
    assert served.call(f"/api/v1/training_runs/{run}/curves", {"values": {"reward": 1}}, key=OTHER_KEY)[0] == 404


@pytest.mark.parametrize("body", [{}, {"values": {}}, {"values": {"": 1}}, {"values": {"a": "x"}}, {"wish": 1}])
def test_a_report_that_says_nothing_is_refused(served: Served, run: str, body: Any) -> None:
    status, said = served.call(f"/api/v1/training_runs/{run}/curves", body)
    assert status == 422
    assert said["detail"]
