"""What the model wrote, in the report: by step and by prompt, harmless, and readable whatever is in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.runs.report import write_report
from etude.runs.transcripts import MOST_STEPS, MOST_VISITS, TITLE
from etude.secrets import register_secret
from tests.unit.runs.strict_page import Page

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)></div>&amp;"


def row(step: int, *chosen: str, text: str = "four", **fields: Any) -> dict[str, Any]:
    made = {"prompt_id": "a", "prompt": "2+2=", "text": text, "reward": 0.5, "advantage": 1.25, "group_reward": 0.25}
    return {"step": step, "chosen": list(chosen), **made, **fields}


def show(run: Path, rows: list[Any]) -> tuple[str, Page]:
    run.mkdir(exist_ok=True)
    (run / "status.json").write_text('{"state": "finished", "step": 8}')
    (run / "transcripts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    html = write_report(run).read_text(encoding="utf-8")
    return html, Page(html)


def passages(page: Page) -> list[str]:
    return [text.strip() for text in page.text if text.strip()]


def test_a_run_without_text_has_no_such_section(tmp_path: Path) -> None:
    html, _ = show(tmp_path, [])
    assert TITLE not in html


def test_steps_show_prompt_completion_reward_and_advantage(tmp_path: Path) -> None:
    rows = [row(1, "best", text="4"), row(1, "worst", text="five", reward=0.0, advantage=-0.5), row(1, "random")]
    html, page = show(tmp_path, rows)
    texts = passages(page)
    assert TITLE in texts and "Step 1" in texts
    assert [text for text in texts if text in ("best", "worst", "random")] == ["best", "worst", "random"]
    assert {"2+2=", "4", "five", "advantage +1.25", "advantage -0.50"} <= set(texts)
    # Colours go from the lowest reward to the highest.
    assert html.count('class="reward r0"') == 2 and html.count('class="reward r4"') == 3


def test_the_same_prompt_is_followed_over_the_steps(tmp_path: Path) -> None:
    rows = [row(step, "followed", text=f"at {step}", finish_reason="length") for step in range(1, 31)]
    texts = passages(show(tmp_path, rows)[1])
    shown = [text for text in texts if text.startswith("at ")]
    assert len(shown) == MOST_VISITS and shown[0] == "at 1" and shown[-1] == "at 30"
    assert texts.count("2+2=") == 1
    assert {"mean of its group 0.25", "cut at the longest length"} <= set(texts)


def test_many_steps_are_thinned_and_the_last_one_stays(tmp_path: Path) -> None:
    texts = passages(show(tmp_path, [row(step, "best") for step in range(1, 31)])[1])
    steps = [text for text in texts if text.startswith("Step ")]
    assert len(steps) == MOST_STEPS and steps[0] == "Step 1" and steps[-1] == "Step 30"
    assert "Best, worst and random (8 of 30 steps in transcripts.jsonl)" in texts


def test_markup_in_texts_is_shown_and_never_interpreted(tmp_path: Path) -> None:
    rows = [row(1, "best", text=MARKUP), row(1, "followed", prompt=MARKUP, turns=[["model", MARKUP], ["other", "x"]])]
    html, page = show(tmp_path, rows)
    assert passages(page).count(MARKUP) == 3
    assert [tag for tag, _ in page.tags].count("script") == 1  # our own
    assert "img" not in [tag for tag, _ in page.tags]
    assert "<script>alert" not in html


def test_long_texts_are_folded(tmp_path: Path) -> None:
    long, many = "word " * 200, "\n".join("abcdefghij")
    _, page = show(tmp_path, [row(1, "best", text=long), row(1, "worst", text=many), row(1, "random", text="")])
    assert [fields.get("class") for tag, fields in page.tags if tag == "details"] == ["long", "long"]
    assert long in page.text and many in page.text
    assert "(nothing)" in page.text


def test_control_characters_and_broken_text_can_be_shown(tmp_path: Path) -> None:
    _, page = show(tmp_path, [row(1, "best", text="a\x00b\x1b[31m\ud83d")])
    assert "a\u2400b\u241b[31m?" in page.text


def test_what_is_no_row_of_ours_is_passed_over(tmp_path: Path) -> None:
    odd = [
        [1], {"step": 1}, row(1, "best", reward="much"), row(1, "best", reward=None), row(1, "best", text=None),
        row(1, chosen=3), row(1, "best", reward=True), row(1, "best", turns=[["x"], 3], advantage="a", text="kept"),
    ]  # fmt: skip
    texts = passages(show(tmp_path, odd)[1])
    assert texts.count("best") == 1 and "kept" in texts


def test_a_conversation_shows_who_said_what(tmp_path: Path) -> None:
    html, page = show(tmp_path, [row(1, "best", turns=[["model", "5?"], ["other", "lower"], ["model", "4?"]])])
    assert [text for text in passages(page) if text in ("5?", "lower", "4?")] == ["5?", "lower", "4?"]
    assert html.count('class="turn other"') == 1


def test_what_evaluations_wrote_is_shown_by_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir(parents=True)
    for step in (5, 10):
        rows = [{"prompt": f"{n}+1=", "text": f"answer {n} at {step}", "reward": n, "turns": 1} for n in range(5)]
        (folder / f"step-{step:08d}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in [*rows, 3]) + "{torn")
    texts = passages(show(tmp_path, [])[1])
    assert "Prompts that are not trained on, and how the answers change" in texts
    answers = [text for text in texts if text.startswith("answer")]
    assert answers == [f"answer {n} at {step}" for n in range(3) for step in (5, 10)]


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    register_secret("correct-horse-battery")
    html, _ = show(tmp_path, [row(1, "best", text="it is correct-horse-battery!")])
    assert "correct-horse" not in html
