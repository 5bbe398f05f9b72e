"""`etude data view` in a real Chromium: wide and phone-sized, light and dark, small and of 10,000 episodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from etude.data.lerobot import LeRobotWriter
from etude.data.lerobot.view_page import write_view
from etude.data.lerobot.viewed import ViewedDataset
from tests.browser import Browser, browsing
from tests.unit.data.lerobot.plain import smooth, write_plain
from tests.unit.data.lerobot.recordings import CAMERAS, FEATURES, make_frame
from tests.unit.data.lerobot.test_view import EVIL, serve
from tests.unit.runs.test_pages_in_browser import CUT

pytestmark = pytest.mark.slow
READY = "return document.getElementById('episode').dataset.shown === arguments[0]"
FRAME = "return +document.getElementById('cursor').value"
VIDEO = "document.querySelector('#cameras video')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


def record_films(root: Path) -> Path:
    """Record four episodes with a video each, the last with a jump, for tasks whose texts are markup."""
    features = {**FEATURES, **CAMERAS}
    with LeRobotWriter(root, features, 10) as writer:
        for episode in range(4):
            for frame in range(30):
                made = make_frame(episode, frame % 12, features)
                made["observation.state"] = np.sin(np.arange(4) + 0.2 * frame + episode).astype(np.float32)
                made["observation.state"][1] += 40 * (episode == 3 and frame == 17)
                made["action"] = np.cos(np.arange(2) + 0.2 * frame).astype(np.float32)
                writer.add_frame(made)
            writer.save_episode(f"{EVIL} {episode % 2}")
    return root


def choose(browser: Browser, field: str, value: str) -> None:
    browser.run(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
        "one.dispatchEvent(new Event(one.tagName === 'INPUT' ? 'input' : 'change'))", field, value,
    )  # fmt: skip


def test_a_page_plays_filters_and_points(browser: Browser, tmp_path: Path) -> None:
    dataset = ViewedDataset(record_films(tmp_path / "films"))
    write_view(dataset, dataset.survey(), tmp_path / "films.html")
    browser.resize(1280, 900)
    browser.open((tmp_path / "films.html").as_uri())
    browser.wait(READY, "0")
    browser.wait(f"return {VIDEO}.readyState >= 2")
    # The cursor moves with the video, and ends with the episode.
    choose(browser, "rate", "4")
    browser.run("document.getElementById('play').click()")
    browser.wait(f"{FRAME} > 3")
    browser.wait(f"{FRAME} === 29 && {VIDEO}.paused")
    # The video moves with the cursor: by the slider, by keys and by pointing at a curve.
    choose(browser, "cursor", "12")
    browser.wait(f"return Math.abs({VIDEO}.currentTime - 1.25) < 0.01 && !{VIDEO}.seeking")
    keys = "document.querySelector('.plot svg').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    browser.run(keys)
    assert browser.run(FRAME) == 13
    browser.run(
        "const svg = document.querySelector('.plot svg'), box = svg.getBoundingClientRect();"
        "svg.setPointerCapture = () => {};"
        "svg.dispatchEvent(new PointerEvent('pointerdown', {clientX: box.right - 8, clientY: box.top + 20}))"
    )
    assert browser.run(FRAME) == 29
    shown = "return document.querySelector('.plot .legend output').textContent"
    assert browser.run(shown) == f"{np.float32(np.sin(0.2 * 29)):.4g}"
    # What looks odd leads to its frame.
    browser.run("document.querySelector('table.odd a[href*=frame]').click()")
    browser.wait(READY, "3")
    assert browser.run(FRAME) in (17, 18)
    assert "jumps by" in browser.text("#marks")
    # Filters.
    choose(browser, "task", "1")
    assert browser.run("return [...document.querySelectorAll('.row b')].map(one => one.textContent)") == ["1", "3"]
    choose(browser, "odd", "any")
    assert browser.text("#count") == "1 of 4 episodes"
    choose(browser, "odd", "")
    choose(browser, "task", "")
    choose(browser, "search", "2")
    assert browser.run("return [...document.querySelectorAll('.row')].map(one => one.dataset.episode)") == ["2"]
    choose(browser, "search", "")
    browser.run("document.querySelector('.row[data-episode=\"1\"]').click()")
    browser.wait(READY, "1")
    assert browser.run("return document.title") == "films - Etude data", "no text of the dataset became a script"
    assert EVIL in browser.text("#text")
    assert browser.complaints() == []


def test_a_page_is_whole_on_a_phone_and_in_the_dark(browser: Browser, tmp_path: Path) -> None:
    made = smooth(30)
    made["observation.state"][100, 1] = np.nan
    made["action"][700, 0] = 1e300
    broken = str(np.searchsorted(np.cumsum(made["lengths"]), 100, side="right"))
    tasks = [EVIL, "a" * 300, "lift"]
    root = write_plain(
        tmp_path / ("long-name-" * 8), made, tasks=tasks, task_of=np.arange(30) % 3, cameras={EVIL[:40]: (8, 8, 3)}
    )
    dataset = ViewedDataset(root)
    write_view(dataset, dataset.survey(), tmp_path / "d.html")
    seen = set()
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        browser.open("about:blank")
        browser.open((tmp_path / "d.html").as_uri() + f"#episode={broken}")
        browser.wait(READY, broken)
        assert browser.run(CUT) == []
        names = "[...document.querySelectorAll('.plot h3')]"
        assert browser.run(f"return {names}.length && {names}.every(one => one.offsetHeight < 34)"), (
            "names do not break"
        )
        assert "no such file" in browser.text("#cameras"), "a video that is missing is said"
        assert "not finite" in browser.text("#marks")
    for scheme in ("light", "dark"):
        browser.colors(scheme)  # type: ignore[arg-type]
        seen.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    assert browser.run("return document.querySelectorAll('img, main script:not([type])').length") == 0
    assert browser.complaints() == []


def test_ten_thousand_episodes_are_a_small_page(browser: Browser, tmp_path: Path) -> None:
    tasks = [f"task {number}" for number in range(50)]
    made = smooth(10_000, 12)
    with serve(write_plain(tmp_path / "d", made, tasks=tasks, task_of=np.arange(10_000) % 50)) as answers:
        browser.resize(1280, 900)
        browser.open(answers.url)
        browser.wait(READY, "0")
        assert browser.run("return document.querySelectorAll('*').length") < 1500, "rows that are not seen do not exist"
        assert browser.run("return document.querySelector('html').outerHTML.length") < 1_000_000
        browser.run("document.getElementById('list').scrollTop = 1e9")
        browser.wait("return !!document.querySelector('.row[data-episode=\"9999\"]')")
        browser.run("document.querySelector('.row[data-episode=\"9999\"]').click()")
        browser.wait(READY, "9999")
        choose(browser, "task", "7")
        assert browser.text("#count") == "200 of 10,000 episodes"
        assert browser.complaints() == []


def test_a_served_video_is_sought_in_the_file_it_shares(browser: Browser, tmp_path: Path) -> None:
    with serve(record_films(tmp_path / "films")) as answers:
        browser.open(f"{answers.url}#episode=2&frame=5")
        browser.wait(READY, "2")
        browser.wait(f"return {VIDEO}.readyState >= 2 && Math.abs({VIDEO}.currentTime - 6.55) < 0.01")
        browser.wait("return document.querySelector('#cameras img').naturalWidth === 16")
        assert browser.run("return document.querySelector('#cameras img').getAttribute('src')") == "/picture/1/2/5"
        assert browser.complaints() == []
