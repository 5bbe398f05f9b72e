"""What `etude data view` finds odd: each fault in a dataset made for it, and nothing in one that is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.data.lerobot.survey import MOST_DIMENSIONS, Survey
from etude.data.lerobot.viewed import ViewedDataset
from tests.unit.data.lerobot.plain import smooth, write_plain
from tests.unit.data.lerobot.recordings import record


def look(root: Path) -> Survey:
    return ViewedDataset(root).survey()


def kinds(found: Survey) -> dict[int, list[str]]:
    return {episode: [mark.kind for mark in marks] for episode, marks in found.marks.items()}


def rows_of(made: dict[str, Any], episode: int) -> slice:
    ends = np.cumsum(made["lengths"])
    return slice(int(ends[episode] - made["lengths"][episode]), int(ends[episode]))


@pytest.mark.parametrize("seed", range(4))
def test_a_sound_dataset_has_nothing_odd(tmp_path: Path, seed: int) -> None:
    found = look(write_plain(tmp_path / "d", smooth(seed=seed)))
    assert found.marks == {} and found.notes == []
    assert [(one.feature, one.label) for one in found.distributions][:2] == [
        ("observation.state", "x"), ("observation.state", "y"),
    ]  # fmt: skip
    assert all(sum(one.counts) for one in found.distributions)


def test_lengths_are_compared_within_a_task(tmp_path: Path) -> None:
    short, long = smooth(20, 30, seed=1), smooth(20, 300, seed=2)
    made = {name: np.concatenate([short[name], long[name]]) for name in short}
    tasks = [0] * 20 + [1] * 20
    assert look(write_plain(tmp_path / "d", made, tasks=("a", "b"), task_of=tasks)).marks == {}
    one = smooth(1, 300, seed=3)
    made = {name: np.concatenate([short[name], one[name]]) for name in short}
    found = look(write_plain(tmp_path / "e", made))
    assert kinds(found) == {20: ["length"]}
    assert "are usual for its task" in found.marks[20][0].text


def test_a_jump_names_its_frame_and_dimension(tmp_path: Path) -> None:
    made = smooth()
    at = rows_of(made, 7).start + 20
    made["observation.state"][at : rows_of(made, 7).stop, :2] += 1.5
    (marks,) = look(write_plain(tmp_path / "d", made)).marks.values()
    assert (marks[0].kind, marks[0].episode, marks[0].frame) == ("jump", 7, 20)
    assert marks[0].text == ("observation.state x jumps by 1.493 at frame 20, 40 times the usual largest step; also y")


def test_a_jump_is_found_in_a_few_episodes_too(tmp_path: Path) -> None:
    made = smooth(2)
    made["observation.state"][10, 2] += 3.0
    assert kinds(look(write_plain(tmp_path / "d", made)))[0][0] == "jump"


def test_dimensions_that_stand_still_are_said_once_or_where_they_do(tmp_path: Path) -> None:
    made = smooth()
    made["observation.state"][rows_of(made, 3), 1] = 0.25
    made["action"][:, 2] = 1.0
    found = look(write_plain(tmp_path / "d", made))
    assert kinds(found) == {3: ["constant"]}
    assert "observation.state y stays 0.25, though it moves in 98% of the episodes" in found.marks[3][0].text
    assert found.notes == ["action is the same in every frame in grip"]


def test_repeated_frames_and_a_stuck_sensor_are_told_apart(tmp_path: Path) -> None:
    made = smooth()
    begin = rows_of(made, 5).start
    for name in ("observation.state", "action"):
        made[name][begin + 10 : begin + 25] = made[name][begin + 10]
    begin = rows_of(made, 6).start
    made["observation.state"][begin + 10 : begin + 25] = made["observation.state"][begin + 10]
    found = look(write_plain(tmp_path / "d", made))
    texts = {episode: next(mark for mark in marks if mark.kind == "repeat") for episode, marks in found.marks.items()}
    assert set(texts) == {5, 6}
    assert "the same values repeat for 15 frames (1.5 s) from frame 10" in texts[5].text
    assert "states stand still while actions change" in texts[6].text and texts[6].frame == 10


def test_a_dataset_that_repeats_throughout_is_said_once(tmp_path: Path) -> None:
    made = smooth(20)
    doubled = {name: np.repeat(values, 2, 0) for name, values in made.items() if name != "lengths"}
    found = look(write_plain(tmp_path / "d", {**doubled, "lengths": made["lengths"] * 2}))
    assert not any("repeat" in some for some in kinds(found).values())
    assert found.notes == ["50% of all frames repeat the states and actions of the frame before"]


def test_copies_are_found(tmp_path: Path) -> None:
    made = smooth(12)
    parts = {name: [made[name], made[name][rows_of(made, 4)]] for name in ("observation.state", "action")}
    lengths = [*made["lengths"], made["lengths"][4]]
    found = look(write_plain(tmp_path / "d", {"lengths": lengths, **{n: np.concatenate(p) for n, p in parts.items()}}))
    assert kinds(found) == {12: ["copy"]} and "episode 4" in found.marks[12][0].text


def test_actions_out_of_range_are_found(tmp_path: Path) -> None:
    made = smooth()
    made["action"][rows_of(made, 9).start + 30, 0] = 40.0
    found = look(write_plain(tmp_path / "d", made))
    assert set(found.marks) == {9} and "range" in kinds(found)[9]
    text = next(mark.text for mark in found.marks[9] if mark.kind == "range")
    assert "action dx is 40 at frame 30; 98 % of all lie between" in text
    (shown,) = (one for one in found.distributions if one.label == "dx")
    assert shown.greatest == 40 and shown.high < 5 and shown.beyond == 1, "one value does not set the scale"


def test_values_that_are_none_are_shown_not_refused(tmp_path: Path) -> None:
    made = smooth()
    begin = rows_of(made, 2).start
    made["observation.state"][begin + 4, 1] = np.nan
    made["action"][begin + 5 : begin + 7, 0] = np.inf
    made["action"][rows_of(made, 8).start, 1] = 1e300
    found = look(write_plain(tmp_path / "d", made))
    assert set(found.marks) == {2, 8}
    assert [mark.text for mark in found.marks[2]] == [
        "action dx is not finite in 2 frames, first at 5", "observation.state y is not finite in frame 4",
    ]  # fmt: skip
    assert "range" in kinds(found)[8]
    assert [one.broken for one in found.distributions] == [0, 1, 0, 2, 0, 0]


def test_times_that_do_not_fit_are_found(tmp_path: Path) -> None:
    made = smooth(10)
    stamps = np.concatenate([np.arange(length) / 10 for length in made["lengths"]])
    part = rows_of(made, 6)
    stamps[part.start + 12 : part.stop] += 0.1  # a frame was dropped
    found = look(write_plain(tmp_path / "d", made, timestamps=stamps))
    assert kinds(found) == {6: ["time"]}
    assert found.marks[6][0].text.startswith("frame 12 is at 1.300 s, expected 1.200 s at 10 a second, and")


def test_a_missing_video_is_said(tmp_path: Path) -> None:
    root = write_plain(tmp_path / "d", smooth(3), cameras={"observation.images.top": (32, 32, 3)})
    found = look(root)
    assert kinds(found) == {0: ["video"], 1: ["video"], 2: ["video"]}
    assert "videos/observation.images.top/chunk-000/file-000.mp4" in found.marks[0][0].text


def test_one_frame_is_enough(tmp_path: Path) -> None:
    found = look(record(tmp_path / "d", (1,)))
    assert found.marks == {} and found.coverage is None
    found = look(write_plain(tmp_path / "e", {"lengths": [1], "action": np.array([[np.nan, 1.0, 2.0]])}))
    assert kinds(found) == {0: ["values"]}


def test_the_map_of_first_states_says_what_its_axes_are(tmp_path: Path) -> None:
    made = smooth(30)
    starts = np.cumsum(made["lengths"]) - made["lengths"]
    made["observation.state"][starts[4], 0] = np.nan
    cover = look(write_plain(tmp_path / "d", made)).coverage
    assert cover is not None and len(cover.x) == len(cover.y) == 30
    assert [n for n, x in enumerate(cover.x) if x is None] == [4]
    assert cover.x_title.startswith("component 1 (") and "of the variance; mostly state" in cover.x_title
    flat = {"lengths": made["lengths"], "observation.state": made["observation.state"] * [1.0, 0.0, 1.0]}
    cover = look(write_plain(tmp_path / "e", flat)).coverage
    assert cover is not None and (cover.x_title, cover.y_title) == ("state x", "state z")


def test_wide_features_are_surveyed_in_part_and_that_is_said(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).normal(size=(100, MOST_DIMENSIONS + 5))
    found = look(write_plain(tmp_path / "d", {"lengths": [50, 50], "observation.state": wide}, names=False))
    assert len(found.distributions) == MOST_DIMENSIONS
    assert found.notes == ["observation.state has 133 dimensions, of which the first 128 are surveyed"]


def test_a_survey_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    made, counted = smooth(10), []
    root = write_plain(tmp_path / "d", made)
    first = ViewedDataset(root).survey(lambda done, total: counted.append(done))
    assert counted == [1, 2, 3, 4, 5, 6]
    assert ViewedDataset(root).survey(lambda done, total: counted.append(done)) == first and len(counted) == 6
    made["action"][5, 0] = np.nan
    write_plain(root, made)
    assert set(ViewedDataset(root).survey(lambda done, total: counted.append(done)).marks) == {0} and len(counted) == 12
