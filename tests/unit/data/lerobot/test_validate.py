"""Damaged and wrong datasets: always one sentence that says what and where, never a wrong batch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from etude.data.lerobot import LeRobotDataset, LeRobotWriter
from etude.errors import DataError
from tests.unit.data.lerobot.recordings import FEATURES, everything, make_frame, record
from tests.unit.data.sources import same

FOREIGN = Path(__file__).parents[3] / "fixtures" / "lerobot_v3_foreign"
DATA = "data/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
BEGIN = "videos/observation.images.top/from_timestamp"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("sound") / "d", cameras=True)


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged, without the hashes that would tell so at once."""
    copy = shutil.copytree(sound, tmp_path / "d")
    (copy / "meta/etude.json").unlink()
    return copy


def edit_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def set_column(path: Path, name: str, change: Callable[[list[Any]], Any]) -> None:
    def changed(table: pa.Table) -> pa.Table:
        place = table.column_names.index(name)
        values = change(table.column(name).to_pylist())
        kind = table.schema.field(name).type
        array = values if isinstance(values, pa.Array) else pa.array(values, kind)
        return table.set_column(place, name, array)

    edit_table(path, changed)


def set_info(root: Path, **values: Any) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    info.update(values)
    (root / "meta/info.json").write_text(json.dumps(info))


def set_value(values: list[Any], row: int, value: Any) -> list[Any]:
    values[row] = value
    return values


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nan": (
        lambda root: set_column(root / DATA, "action", lambda v: set_value(v, 8, [0.0, float("nan")])),
        r"episode 1, frame 2: 'action' is NaN in dimension 1",
    ),
    "infinity": (
        lambda root: set_column(root / DATA, "observation.state", lambda v: set_value(v, 0, [0, float("inf"), 0, 0])),
        r"episode 0, frame 0: 'observation.state' is infinite in dimension 1",
    ),
    "missing value": (
        lambda root: set_column(root / DATA, "task_index", lambda v: set_value(v, 3, None)),
        r"column 'task_index' has nothing in row 3",
    ),
    "uneven shape": (
        lambda root: set_column(root / DATA, "action", lambda v: pa.array(set_value(v, 3, [1.0, 2.0, 3.0]))),
        r"column 'action' has shape \[3\] in row 3, but info.json says \[2\]",
    ),
    "wrong shape": (
        lambda root: set_column(root / DATA, "action", lambda v: pa.array([[1.0]] * len(v), pa.list_(pa.float32(), 1))),
        r"column 'action' has shape \[1\] in row 0",
    ),
    "wrong dtype": (
        lambda root: set_column(root / DATA, "action", lambda v: pa.array([["a", "b"]] * len(v))),
        r"column 'action'",
    ),
    "dropped frame": (
        lambda root: set_column(root / DATA, "timestamp", lambda v: [t + 0.1 * (9 <= i < 11) for i, t in enumerate(v)]),
        r"episode 1, frame 3: timestamp 0.4000 s after 0.2000 s, expected 0.3000 s",
    ),
    "missing column": (
        lambda root: edit_table(root / DATA, lambda table: table.drop_columns(["action"])),
        r"column 'action', which info.json promises, is missing",
    ),
    "missing rows": (
        lambda root: edit_table(root / DATA, lambda table: table.slice(0, 17)),
        r"episode 2 should have 7 frames, but the data has 6",
    ),
    "rows twice": (
        lambda root: edit_table(root / DATA, lambda table: pa.concat_tables([table, table.slice(0, 1)])),
        r"episode 0 should have 6 frames, but the data has 7",
    ),
    "frames out of order": (
        lambda root: set_column(root / DATA, "frame_index", lambda v: [v[1], v[0], *v[2:]]),
        r"episode 0, frame 0: index is 1, expected 0",
    ),
    "unknown task": (
        lambda root: set_column(root / DATA, "task_index", lambda v: set_value(v, 7, 5)),
        r"episode 1, frame 1: task_index is 5, but there are 2 tasks",
    ),
    "damaged image": (
        lambda root: set_column(
            root / DATA, "observation.images.wrist", lambda v: set_value(v, 12, {"bytes": b"no picture", "path": ""})
        ),
        r"episode 2, frame 1: camera 'observation.images.wrist': the picture cannot be decoded",
    ),
    "lost image": (
        lambda root: set_column(
            root / DATA, "observation.images.wrist", lambda v: set_value(v, 2, {"bytes": None, "path": "a.png"})
        ),
        r"image 'observation.images.wrist' in row 2 is only a path",
    ),
    "no video": (lambda root: (root / VIDEO).unlink(), r"file-000.mp4: no such file"),
    "no data": (lambda root: (root / DATA).unlink(), r"file-000.parquet: no such file"),
    "no info": (lambda root: (root / "meta/info.json").unlink(), r"info.json: no such file"),
    "no tasks": (lambda root: (root / "meta/tasks.parquet").unlink(), r"tasks.parquet: no such file"),
    "no episodes": (lambda root: (root / EPISODES).unlink(), r"no episodes are described there"),
    "empty episode": (
        lambda root: set_column(root / EPISODES, "length", lambda v: [6, 0, 12]) or _retile(root, [6, 0, 12]),
        r"episode",
    ),
    "episode count": (lambda root: set_info(root, total_episodes=4), r"counts 4 episodes, but 3 are described"),
    "frame count": (lambda root: set_info(root, total_frames=17), r"counts 17 frames, but the episodes have 18"),
    "frame rate": (lambda root: set_info(root, fps=11), r"episode 0, frame 2: timestamp 0.2000 s after 0.1000 s"),
    "no frame rate": (lambda root: set_info(root, fps=0), r"fps must be a positive number, got 0"),
    "version": (lambda root: set_info(root, codebase_version="v9.0"), r"version 'v9.0' is not supported"),
    "path out": (lambda root: set_info(root, data_path="../x/{chunk_index}.parquet"), r"is not a template of a path"),
    "path template": (lambda root: set_info(root, video_path="{nonsense}"), r"is not a template of a path"),
    "features": (lambda root: set_info(root, features=[]), r"'features' must describe"),
    "shifted video": (
        lambda root: set_column(root / EPISODES, BEGIN, lambda v: [0, 0.3, 1.1]),
        r"camera 'observation.images.top', episode 1",
    ),
    "camera size": (
        lambda root: set_info(root, features=_with_shape(root, "observation.images.top", [48, 32, 3])),
        r"the video is 32 x 48, but info.json says 48 x 32",
    ),
    "text for a table": (lambda root: (root / DATA).write_text("PAR1, not really"), r"not a readable parquet file"),
    "text for a video": (lambda root: (root / VIDEO).write_text("no video"), r"not a readable video"),
}  # fmt: skip


def _retile(root: Path, lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    set_column(root / EPISODES, "dataset_from_index", lambda _: [0, *ends[:-1]])
    set_column(root / EPISODES, "dataset_to_index", lambda _: ends)


def _with_shape(root: Path, name: str, shape: list[int]) -> dict[str, Any]:
    features: dict[str, Any] = json.loads((root / "meta/info.json").read_text())["features"]
    features[name]["shape"] = shape
    return features


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_sentence(root: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(root)
    with pytest.raises(DataError, match=message) as caught:
        LeRobotDataset(root)
    assert "\n" not in str(caught.value)


def test_a_wrong_video_is_noticed_before_the_first_batch_even_without_a_cache(root: Path) -> None:
    data = (root / VIDEO).read_bytes()
    (root / VIDEO).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="may be truncated"):
        LeRobotDataset(root, cache_gb=0.0)


def test_a_video_that_is_too_short_names_the_frame(root: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "short", (6, 5, 3), cameras=True)
    shutil.copy(other / VIDEO, root / VIDEO)
    with pytest.raises(DataError, match=r"episode 2, frame 3: 'observation.images.top' has no picture of its own"):
        LeRobotDataset(root)


def test_rows_in_any_order_are_put_in_order(root: Path, sound: Path) -> None:
    before = everything(LeRobotDataset(sound))
    order = np.random.default_rng(0).permutation(18)
    edit_table(root / DATA, lambda table: table.take(order))
    assert same(before, everything(LeRobotDataset(root)))


def test_timestamps_may_be_off_by_the_tolerance_asked_for(root: Path) -> None:
    set_column(root / DATA, "timestamp", lambda v: [t + 0.03 * (i % 2) for i, t in enumerate(v)])
    with pytest.raises(DataError, match=r"episode 0, frame 1: timestamp.*tolerance_s is 0.01"):
        LeRobotDataset(root)
    assert len(LeRobotDataset(root, tolerance_s=0.04)) == 18


def test_long_episodes_are_not_taken_for_gaps(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "d", {"action": FEATURES["action"]}, 30) as writer:
        frame = {"action": make_frame(0, 0, FEATURES)["action"]}
        for _ in range(20_000):
            writer.add_frame(frame)
        writer.save_episode("long")
    assert len(LeRobotDataset(tmp_path / "d", tolerance_s=1e-4)) == 20_000


def nudge(values: list[Any], row: int) -> list[Any]:
    """Change one number by a thousandth of its size, as a flipped bit does."""
    values[row] = [value * 1.001 + 1e-3 for value in values[row]]
    return values


NOTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "number": (
        lambda root: set_column(root / DATA, "observation.state", lambda v: nudge(v, 8)),
        r"episode 1: the mean of 'observation.state' in dimension 0 is .*, but .* was noted",
    ),
    "extreme": (
        lambda root: set_column(root / DATA, "action", lambda v: nudge(v, 17)),
        r"episode 2: the max of 'action' in dimension 0",
    ),
    "time": (
        lambda root: set_column(root / DATA, "timestamp", lambda v: set_value(v, 3, v[3] + 0.002)),
        r"episode 0: the mean of 'timestamp'",
    ),
    "task": (
        lambda root: set_column(root / DATA, "task_index", lambda v: set_value(v, 7, 0)),
        r"episode 1 has frames for the task 'push the block', but \['lift the block'\] was noted",
    ),
    "text of a task": (
        lambda root: set_column(root / "meta/tasks.parquet", "__index_level_0__", lambda v: ["push thx block", v[1]]),
        r"episode 0 has frames for the task 'push thx block'",
    ),
    "swapped pictures": (
        lambda root: set_column(root / DATA, "observation.images.wrist", lambda v: [*v[11:], *v[6:11], *v[:6]][:18]),
        r"episode \d: camera 'observation.images.wrist' has a mean of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", NOTED)
def test_what_contradicts_the_notes_of_the_writer_is_refused(root: Path, fault: str) -> None:
    damage, message = NOTED[fault]
    damage(root)
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(DataError, match=message + r".*cross_check: false") as caught:
            LeRobotDataset(root)
    assert "\n" not in str(caught.value)
    assert len(LeRobotDataset(root, cross_check=False)) == 18
    with pytest.raises(DataError, match=message):
        LeRobotDataset(root)


def test_a_video_that_begins_a_frame_late_is_refused(root: Path) -> None:
    set_column(root / EPISODES, BEGIN, lambda v: [v[0], v[1] + 0.1, v[2]])
    set_column(root / EPISODES, BEGIN.replace("from", "to"), lambda v: [v[0], v[1] + 0.1, v[2]])
    with pytest.raises(DataError, match=r"episode 2, frame 0: 'observation.images.top' has no picture of its own"):
        LeRobotDataset(root)


def test_statistics_may_be_missing(root: Path, sound: Path) -> None:
    (root / "meta/stats.json").unlink()
    edit_table(root / EPISODES, lambda t: t.select([name for name in t.column_names if not name.startswith("stats/")]))
    assert same(everything(LeRobotDataset(root)), everything(LeRobotDataset(sound)))


def test_statistics_of_the_whole_serve_where_none_of_episodes_are(root: Path) -> None:
    edit_table(root / EPISODES, lambda t: t.select([name for name in t.column_names if not name.startswith("stats/")]))
    assert len(LeRobotDataset(root)) == 18
    set_column(root / DATA, "action", lambda v: set_value(v, 17, [9999.0, 9999.0]))
    with pytest.raises(DataError, match=r"stats.json: the max of 'action' in dimension 0 is said to be"):
        LeRobotDataset(root)


def test_means_that_were_added_up_in_float32_are_no_fault(tmp_path: Path) -> None:
    root = tmp_path / "d"
    with LeRobotWriter(root, {"action": FEATURES["action"]}, 30) as writer:
        for _ in range(20_000):
            writer.add_frame({"action": np.array([0.1, 1000.3], np.float32)})
        writer.save_episode("long")
    (root / "meta/etude.json").unlink()
    drifted = np.full((20_000, 2), [0.1, 1000.3], np.float32).mean(0)
    assert abs(drifted[0] - 0.1) > 1e-5
    set_column(root / EPISODES, "stats/action/mean", lambda v: [drifted.tolist()])
    assert len(LeRobotDataset(root)) == 20_000


def test_a_flipped_bit_in_the_pixels_of_a_png_is_found(root: Path) -> None:
    def flip_pixels(values: list[Any]) -> list[Any]:
        data = bytearray(values[4]["bytes"])
        data[data.index(b"IDAT") + 40] ^= 1
        return set_value(values, 4, {"bytes": bytes(data), "path": ""})

    set_column(root / DATA, "observation.images.wrist", flip_pixels)
    with pytest.raises(DataError, match=r"episode 0, frame 4: camera 'observation.images.wrist'.*checksum"):
        LeRobotDataset(root)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in (".json", ".parquet", ".mp4"))


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def flip(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def overwrite(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    noise = chance.randbytes(min(64, len(data) - place))
    return data[:place] + noise + data[place + len(noise) :]


def check_never_wrong(root: Path, expected: dict[str, torch.Tensor] | None) -> bool:
    """Open a damaged dataset; return whether it was refused."""
    try:
        batch = everything(LeRobotDataset(root))
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return True
    if expected is not None:
        assert same({name: batch.get(name) for name in expected}, expected)
    return False


@pytest.mark.parametrize("damage", [truncate, flip, overwrite])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_random_damage_is_found_or_harmless(
    sound: Path, tmp_path: Path, damage: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    chance = random.Random(seed)
    expected = everything(LeRobotDataset(sound))
    copy = shutil.copytree(sound, tmp_path / "d")
    refused = 0
    for file in files_of(copy):
        before = file.read_bytes()
        for _ in range(2 if seed == 0 else 12):
            file.write_bytes(damage(before, chance))
            refused += check_never_wrong(copy, expected)
        file.write_bytes(before)
    assert refused >= 4
    assert same(everything(LeRobotDataset(copy)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip, overwrite])
def test_random_damage_to_what_others_wrote_is_told_in_words(
    tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    chance = random.Random(7)
    expected = everything(LeRobotDataset(FOREIGN))
    copy = shutil.copytree(FOREIGN, tmp_path / "d")
    for file in files_of(copy):
        before = file.read_bytes()
        for _ in range(25):
            file.write_bytes(damage(before, chance))
            if file.suffix != ".mp4":
                check_never_wrong(copy, expected)
            else:
                check_pictures_hardly_differ(copy, expected)
        file.write_bytes(before)


def check_pictures_hardly_differ(root: Path, expected: dict[str, torch.Tensor]) -> None:
    """A video without a checksum may hide a flipped bit, but no picture that is quite another."""
    try:
        batch = everything(LeRobotDataset(root))
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return
    name = "observation.images.top"
    off = (batch.pop(name).float() - expected[name].float()).abs().mean((1, 2, 3)) / 255
    assert off.max() < 0.05
    assert same(batch, {key: value for key, value in expected.items() if key != name})


@pytest.mark.slow
def test_random_changes_of_the_description_are_told_in_words(sound: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    copy = shutil.copytree(sound, tmp_path / "d")
    expected = everything(LeRobotDataset(sound))
    original = json.loads((copy / "meta/info.json").read_text())
    junk = [None, -1, 0, 1, 2.5, "", "x", [], [1, 2], {}, True, 1 << 70, float("nan"), "{a.b}", "../../etc"]
    for _ in range(120):
        info = json.loads(json.dumps(original))
        place = info if chance.random() < 0.5 else info["features"][chance.choice(sorted(info["features"]))]
        name = chance.choice(sorted(place))
        place[name] = chance.choice(junk)
        (copy / "meta/info.json").write_text(json.dumps(info))
        try:
            batch = everything(LeRobotDataset(copy))
        except DataError as error:
            assert "\n" not in str(error)
            continue
        assert same({key: batch.get(key) for key in expected}, expected), (name, place[name])
