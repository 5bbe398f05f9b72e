"""The status page in a real browser, over a real server that trains and samples meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.policies.language import LanguageModel
from tests.browser import Browser, browsing
from tests.served import KEY, Served, connected

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]  # of the client's
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
STEPS_OF = """
const row = [...document.querySelectorAll('#models tbody tr')].find(one => one.innerText.includes(arguments[0]));
return row && Number(row.cells[1].innerText) >= arguments[1] && [...row.cells].map(cell => cell.innerText);
"""
CURVE = """
const chart = [...document.querySelectorAll('.chart')].find(one => one.querySelector('h3').innerText === arguments[0]);
const path = chart?.querySelector('g.linear .line')?.getAttribute('d');
return path !== arguments[1] && path;
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TILE = """
const tile = [...document.querySelectorAll('.tile')].find(one => one.querySelector('dt').innerText === arguments[0]);
return tile && parseFloat(tile.querySelector('dd').innerText.replaceAll(',', ''));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pages")
    LanguageModel.tiny().save_pretrained(folder / HOSTILE)
    (folder / "keys").write_text(f"ada {KEY}\n")
    options = ["--model", "tiny", "--model", str(folder / HOSTILE), "--keys", str(folder / "keys")]
    found = Served(folder / "state", *options).start()
    yield found
    found.stop()


def train(served: Served, trained: Any, steps: int, reward: float) -> None:
    """Make some steps, report a reward for each, under two names, and draw some tokens."""
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})
    name = trained.get_info().model_id
    for step in range(steps):
        trained.forward_backward([datum], "cross_entropy")
        trained.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        report = {"values": {"reward": reward + step / 100, HOSTILE: 1.0}}
        assert served.call(f"/api/v1/training_runs/{name}/curves", report)[0] == 200
    sampler = trained.save_weights_and_get_sampling_client()
    sampler.sample(tinker.ModelInput.from_ints([5]), 2, tinker.SamplingParams(max_tokens=8, stop=[])).result()


def test_the_page_lives_takes_a_key_and_lets_nothing_in(browser: Browser, served: Served, tmp_path: Path) -> None:
    browser.open(served.url)
    browser.wait("return !document.getElementById('key').hidden")
    assert (browser.text("#state"), browser.text("#live")) == ("key needed", "")
    with connected(served) as client:
        names = []
        for base in ("tiny", HOSTILE):
            trained = client.create_lora_training_client(base, rank=4, seed=1)
            names.append(trained.get_info().model_id)
            train(served, trained, 3, 0.25)
        enter = "const form = document.getElementById('key'); form.querySelector('input').value = arguments[0];"
        browser.run(f"{enter} form.requestSubmit()", KEY)

        # Models, steps, queue, tokens a second, curves.
        for name, base in zip(names, ("tiny", HOSTILE), strict=True):
            row = browser.wait(STEPS_OF, name, 3)
            assert (row[0], row[1], row[3], row[5], row[6]) == (name, "3", "0.27", base, "rank 4")  # names are text
            assert float(row[2]) > 0
        assert browser.text("#state") == "running"
        assert [browser.run(TILE, name) for name in ("Queue", "Steps", "Failures")] == [0, 6, 0]
        assert browser.wait(TILE, "Drawn") > 0 and browser.run(TILE, "Trained") > 0
        titles = browser.run("return [...document.querySelectorAll('.chart h3')].map(one => one.innerText)")
        assert titles == ["loss", "reward", HOSTILE]
        before = {title: browser.run(CURVE, title) for title in ("loss", "reward")}
        assert all(path.count("L") >= 1 or path.count(" ") >= 2 for path in before.values())

        # It goes on by itself: the same document, other figures.
        browser.run("window.marked = true")
        train(served, trained, 4, 0.5)
        assert browser.wait(STEPS_OF, names[1], 7)[3] == "0.53"
        for title, path in before.items():
            assert browser.wait(CURVE, title, path)
        assert browser.run("return window.marked") is True

    # Nothing was let in, and nothing is complained of.
    assert browser.run("return document.querySelectorAll('#live img, #live script').length") == 0
    assert browser.run("return document.title") == "Etude training service"
    assert browser.complaints() == []

    # Wide and on a phone, light and dark.
    grounds = set()
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        assert browser.run(OVERFLOW) <= 0
        for scheme in ("light", "dark"):
            browser.colors(scheme)  # type: ignore[arg-type]
            grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
            browser.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert len(grounds) == 2
    assert browser.run("return document.querySelector('.charts').clientWidth") <= 390

    # A service that is away is told of, and found again.
    served.stop()
    browser.wait("return document.getElementById('state').innerText === 'no answer'")
    served.start()
    browser.wait("return document.getElementById('state').innerText === 'running'")
    assert browser.wait(STEPS_OF, names[1], 7)
