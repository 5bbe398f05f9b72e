"""Make the pictures of the documentation from real runs: films of a policy, and pages as a browser shows them.

    python -m scripts.pictures           # those that are missing in docs/pictures
    python -m scripts.pictures --again   # all of them

The runs are made in /tmp/etude-pictures, with the commands that the pages name, and take some minutes of one core.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES, WORK = ROOT / "docs/pictures", Path(tempfile.gettempdir()) / "etude-pictures"
QUICKSTART = ("quickstart", "--dir", "runs/quickstart")


@dataclass(frozen=True)
class Page:
    """A page to be photographed, and the commands that make it."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    path: str
    """The page, below the folder of the runs; a fragment may follow."""
    height: int = 900
    heading: str = ""
    """The section that the picture begins with; the top of the page unless given."""
    shown: tuple[tuple[str, ...], ...] = ()
    """Commands whose output is the page, as a terminal shows it; they come after the others."""
    is_served: bool = False
    """Whether the last command serves the page, until it has been photographed."""


TOP_OF = """const found = [...document.querySelectorAll("h2")].find(one => one.innerText.trim() === arguments[0]);
return found.getBoundingClientRect().top + scrollY - 16"""
PICK_PLACE = ("--env", "metaworld/pick-place")
STRESS = "stress_policy.py"
"""The example with a simulator and a policy of some lines, in which a search takes seconds."""
PAGES = (
    Page("report", (QUICKSTART,), "runs/quickstart/report.html", 950),
    Page(
        "data",
        (
            ("record", *PICK_PLACE, "--episodes", "20", "--cameras", "corner2", "--size", "160", "--root", "data/seen"),
            ("data", "view", "data/seen", "-o", "data.html"),
        ),
        "data.html",
        1100,
    ),
    Page(
        "failures",
        (
            ("record", *PICK_PLACE, "--episodes", "10", "--root", "data/few"),
            ("train", "metaworld-act", "data.params.root=data/few", "callbacks=[]", "training.best_metric=eval/loss",
             "training.best_mode=min", "run.name=few"),
            ("evaluate", "few", *PICK_PLACE, "--episodes", "50", "--video", "6"),
            ("report", "few"),
        ),
        "runs/few/report.html",
        1100,
        "Why it failed",
    ),
    Page("acted", (
        QUICKSTART,
        # A machine that does something else meanwhile is late; that is counted, and does not end it.
        ("act", "runs/quickstart", *PICK_PLACE, "--episodes", "3", "--record", "data/acted", "--watchdog-s", "30",
         "--max-misses", "1000"),
        ("data", "view", "data/acted", "-o", "acted.html"),
    ), "acted.html", 950, "Episodes"),
    Page("exchange", (
        ("record", "--env", "pusht", "--episodes", "20"),
        ("train", "pusht-act", "callbacks=[]", "training.training_steps=300", "training.best_metric=eval/loss",
         "training.best_mode=min", "training.evaluate_every=100", "run.name=act"),
    ), "exchange.html", shown=(
        ("export", "runs/act", "--format", "lerobot", "--output", "exported/act"),
        ("import", "exported/act", "--output", "policies/act"),
    )),
    Page("redteam", (
        ("redteam", "train", "--scorer", "vader-signed", "--algorithm", "ppo", "--output", "auditor", "--run",
         "auditor"),
        ("redteam", "evaluate", "auditor/best", "--rollouts", "16"),
    ), "auditor/best-evaluation/redteam.html", 1000),
    Page("stress", (
        ("redteam", "robot", f"{STRESS}:lazy", "--env", "gate", "--episodes", "100", "--video", "2", "-o", "stress"),
    ), "stress/stress.html", 700),
    Page("compare", (
        ("train", "digits", "--seeds", "3", "training.lr=1e-4", "run.name=slow"),
        ("train", "digits", "--seeds", "3", "training.lr=2e-3", "run.name=fast"),
        ("compare", "runs/slow-seeds/*", "runs/fast-seeds/*", "-o", "compare.html"),
    ), "compare.html"),
    Page("watch", (
        ("train", "digits", "--seeds", "3", "training.lr=1e-4", "run.name=slow"),
        ("train", "digits", "--seeds", "3", "training.lr=2e-3", "run.name=fast"),
        ("watch", "runs/slow-seeds/slow-seed-0", "runs/fast-seeds/fast-seed-0", "--port", "0"),
    ), "", is_served=True),
    Page("sweep", (
        ("sweep", "digits", "training.lr=log(1e-4,1e-1)", "training.batch_size=32,64,128", "--trials", "16",
         "training.training_steps=200", "training.evaluate_every=50"),
    ), "runs/digits-sweep/sweep.html", 1100),
)  # fmt: skip


def main() -> int:
    """Make what is missing; say what cannot be made here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="make all of them, and their runs, again")
    again = parser.parse_args().again
    if again:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    shutil.copy(ROOT / "examples" / STRESS, WORK)
    if again or not (PICTURES / "acting.webp").exists():
        etude(QUICKSTART)
        films = sorted((WORK / "runs/quickstart/evaluation/videos").glob("*-success.mp4"))
        write_strip(films[:4], PICTURES / "acting.webp")
    wanted = [page for page in PAGES if again or not (PICTURES / f"{page.name}.webp").exists()]
    if wanted and not shutil.which("chromedriver"):
        sys.exit("pictures: there is no Chromium here to show pages in; make setup EXTRAS=service installs it")
    for page in wanted:
        for command in page.commands[: -1 if page.is_served else None]:
            etude(command)
        if page.shown:
            write_terminal({command: etude(command) for command in page.shown}, WORK / page.path)
        if page.is_served:
            with serving(page.commands[-1]) as address:
                photograph(page, address)
        else:
            photograph(page, f"file://{WORK / page.path}")
    return 0


def etude(command: Sequence[str]) -> str:
    """Run a command where the pictures' runs are and return what it said; one that has been run is not run again."""
    done = WORK / "done" / "-".join(command).replace("/", "_")
    if not done.exists():
        print("etude", *command, flush=True)
        called = subprocess.run(
            [sys.executable, "-m", "etude", *command], cwd=WORK, env=_environment(), check=True, timeout=1800,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        done.parent.mkdir(exist_ok=True)
        done.write_text(called.stdout)
    return done.read_text()


@contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """Context with the address that a command says it serves at."""
    called = [sys.executable, "-m", "etude", *command]
    with subprocess.Popen(called, cwd=WORK, env=_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, f"{' '.join(command)} does not say where it serves"
            yield found.group()
        finally:
            process.send_signal(signal.SIGINT)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}


def write_terminal(said: Mapping[tuple[str, ...], str], target: Path) -> None:
    """Write a page with commands and what they said, as a terminal shows them."""
    parts = [f"<b>$ etude {html.escape(' '.join(command))}</b>\n{html.escape(text)}" for command, text in said.items()]
    style = "body{margin:0;background:#16181d}pre{margin:0;padding:20px 24px;color:#d5d8de;font:15px/1.5 monospace}"
    style += "pre{white-space:pre-wrap}b{color:#8fc7ff}"
    target.write_text(f'<!doctype html><meta charset="utf-8"><style>{style}</style><pre>{chr(10).join(parts)}</pre>')


def write_strip(films: Sequence[Path], target: Path, width: int = 240, fps: int = 20) -> None:
    """Write films side by side as one moving picture; those that end early stand still."""
    import av
    from PIL import Image

    rows: list[list[Image.Image]] = []
    for path in films:
        with av.open(str(path)) as film:
            frames = [frame.to_image() for frame in film.decode(video=0)]
            rate = film.streams.video[0].average_rate or fps
        rows.append(frames[:: max(1, round(rate / fps))])
    height = round(width * rows[0][0].height / rows[0][0].width)
    pictures = []
    for number in range(max(map(len, rows))):
        picture = Image.new("RGB", (width * len(rows), height))
        for place, row in enumerate(rows):
            picture.paste(row[min(number, len(row) - 1)].resize((width, height)), (place * width, 0))
        pictures.append(picture)
    pictures[0].save(
        target, save_all=True, append_images=pictures[1:], duration=1000 // fps, loop=0, quality=55, method=6
    )


def photograph(page: Page, address: str) -> None:
    """Write what a window shows of a page, in light colours."""
    from PIL import Image

    from tests.browser import browsing

    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder)) as browser:
        browser.colors("light")
        browser.resize(1200, page.height)
        browser.open(address)
        browser.wait("return document.readyState === 'complete'")
        top = int(browser.run(TOP_OF, page.heading)) if page.heading else 0
        height = min(page.height, int(browser.run("return document.querySelector('.page, pre').scrollHeight")) - top)
        browser.resize(1200, top + height)
        shot = Path(folder) / "shot.png"
        browser.screenshot(shot)
        picture = Image.open(shot).convert("RGB").crop((0, top, 1200, top + height))
        picture.save(PICTURES / f"{page.name}.webp", quality=80, method=6)


if __name__ == "__main__":
    sys.exit(main())
