"""`etude data view`: a dataset as one page, over HTTP, and as a file for Rerun."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import av
import numpy as np
import pytest
from PIL import Image

from etude.data.lerobot import LeRobotDataset, LeRobotWriter, view_page
from etude.data.lerobot.page import write_page
from etude.data.lerobot.rerun_file import write_rerun
from etude.data.lerobot.video import cut_video
from etude.data.lerobot.view_page import why_too_large, write_view
from etude.data.lerobot.view_server import make_view_server
from etude.data.lerobot.viewed import ViewedDataset
from etude.errors import DataError, MissingExtraError
from tests.served import ServedPages
from tests.unit.data.lerobot.plain import smooth, write_plain
from tests.unit.data.lerobot.recordings import FEATURES, make_frame, record
from tests.unit.data.lerobot.test_reader import as_version_2
from tests.unit.runs.strict_page import Page

EVIL = "<img src=x onerror='document.title=666'><script>document.title=666</script>\"'& \u00fc\u6f22\U0001f916"
FIXTURE = Path(__file__).parents[3] / "fixtures/lerobot_v3_foreign"


def write(root: Path, output: Path) -> tuple[str, str]:
    dataset = ViewedDataset(root)
    note = write_view(dataset, dataset.survey(), output)
    return output.read_text(), note


def parts_of(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', page, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def test_a_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    page, note = write(root, tmp_path / "out/d.html")
    Page(page.replace("<br>", ""))
    assert note == "" and "http://" not in page and "https://" not in page
    parts = parts_of(page)
    index = parts["index"]
    assert index["lengths"] == [6, 5, 7] and index["texts"] == {"0": "push the block", "1": "lift the block"}
    (state, action) = parts["part-1"]["columns"]
    assert state["labels"] == ["x", "y", "z", "grip"] and action["labels"] == ["0", "1"]
    values = np.frombuffer(base64.b64decode(state["data"]), dtype="<f4").reshape(5, 4)
    assert np.array_equal(values, LeRobotDataset(root, [1]).source.columns["observation.state"][6:11].numpy())
    top, wrist = parts["part-1"]["cameras"]
    assert (top["kind"], wrist["kind"]) == ("video", "pictures")
    assert len(wrist["src"]) == 5 and wrist["src"][0].startswith("data:image/png;base64,")


def test_a_cut_video_has_the_pictures_of_its_episode(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    dataset = ViewedDataset(root)
    path, begin_s = dataset.video_of("observation.images.top", 1)
    data, from_s = cut_video(path, begin_s, begin_s + 0.45)
    (tmp_path / "cut.mp4").write_bytes(data)
    with av.open(str(tmp_path / "cut.mp4")) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert from_s == 0.0 and [round(time, 3) for time, _ in frames] == [0.0, 0.1, 0.2, 0.3, 0.4]
    expected = LeRobotDataset(root, [1]).source.columns["observation.images.top"][6:11].numpy()
    for (_, picture), wanted in zip(frames, expected, strict=True):
        assert np.abs(picture.transpose(2, 0, 1).astype(int) - wanted).max() <= 8
    with pytest.raises(DataError, match="no such file"):
        cut_video(tmp_path / "none.mp4", 0.0, 1.0)


def test_text_of_a_dataset_is_text_in_the_page(tmp_path: Path) -> None:
    features = {EVIL.replace("/", "|"): {"dtype": "float32", "shape": (2,), "names": [EVIL, "b"]}, **FEATURES}
    with LeRobotWriter(tmp_path / "d", features, 10, EVIL) as writer:
        for episode in range(3):
            for frame in range(6):
                writer.add_frame(make_frame(episode, frame, features))
            writer.save_episode(EVIL)
    page, _ = write(tmp_path / "d", tmp_path / "d.html")
    found = Page(page.replace("<br>", ""))
    assert [tag for tag, _ in found.tags if tag == "img"] == []
    assert "onerror" not in {name for _, attributes in found.tags for name in attributes}
    assert parts_of(page)["index"]["texts"]["0"] == EVIL
    assert EVIL in "".join(found.text), "it is shown as it is"


def test_broken_values_reach_the_page(tmp_path: Path) -> None:
    made = smooth(3)
    made["action"][4, 0], made["action"][5, 1], made["observation.state"][6, 2] = np.nan, 1e300, -np.inf
    page, _ = write(write_plain(tmp_path / "d", made), tmp_path / "d.html")
    state, action = parts_of(page)["part-0"]["columns"]
    assert (state["type"], action["type"]) == ("f4", "f8")
    values = np.frombuffer(base64.b64decode(action["data"]), dtype="<f8").reshape(-1, 3)
    assert np.isnan(values[4, 0]) and values[5, 1] == 1e300
    assert "not finite" in page


def test_values_whose_differences_overflow_make_a_page(tmp_path: Path) -> None:
    made = smooth(10)
    made["action"][::7, 0], made["action"][3::7, 0] = 1.7e308, -1.7e308
    made["next.reward"] = made["action"][:, :1].copy()
    page, _ = write(write_plain(tmp_path / "d", made), tmp_path / "d.html")
    assert "Infinity" not in json.dumps(parts_of(page)["index"]) and "NaN" not in json.dumps(parts_of(page)["index"])


def test_one_frame_and_no_camera_make_a_page(tmp_path: Path) -> None:
    page, _ = write(record(tmp_path / "d", (1,)), tmp_path / "d.html")
    assert "Choose an episode" in page and "The first states do not differ" in page


def test_a_missing_or_broken_video_is_said_in_the_page(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    video = root / "videos/observation.images.top/chunk-000/file-000.mp4"
    video.write_bytes(video.read_bytes()[:200])
    page, _ = write(root, tmp_path / "d.html")
    assert "not a readable video" in parts_of(page)["part-0"]["cameras"][0]["why"]
    video.unlink()
    page, _ = write(root, tmp_path / "d.html")
    assert "no such file" in parts_of(page)["part-0"]["cameras"][0]["why"]
    assert "missing videos" in page and parts_of(page)["part-0"]["cameras"][1]["kind"] == "pictures"


def test_one_episode_of_a_dataset_that_training_refuses_is_shown(tmp_path: Path) -> None:
    made = smooth(3, 20)
    made["observation.state"][5, 1] = np.nan
    root = write_plain(tmp_path / "nan", {**made, "next.reward": made["action"][:, :1]})
    for episode in (0, 1):
        page = write_page(ViewedDataset(root), episode, tmp_path / "one.html").read_text()
        assert ("1 value not finite" in " ".join(" ".join(Page(page).text).split())) == (episode == 0)
        assert "<h3>next.reward</h3>" in page
    root = record(tmp_path / "d", cameras=True)
    next(root.glob("videos/**/*.mp4")).unlink()
    page = write_page(ViewedDataset(root), 1, tmp_path / "one.html").read_text()
    assert "no such file" in page and page.count("data:image/png;base64") == 5, "the pictures of the other camera"


def test_the_pictures_of_one_episode_are_its_own(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    page = write_page(ViewedDataset(root), 1, tmp_path / "one.html").read_text()
    first = re.findall(r"data:image/jpeg;base64,([^\"]+)", page)
    assert len(first) == 5
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(first[3]))), dtype=np.float64)
    source = LeRobotDataset(root, [1]).source
    camera = next(name for name in source.info.cameras if source.info.features[name].dtype == "video")
    stored = source.columns[camera][source.episodes.rows([1])[3:4]]
    assert np.abs(np.asarray(stored)[0].transpose(1, 2, 0) - shown).mean() < 8


def test_what_is_no_dataset_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no complete LeRobot dataset"):
        ViewedDataset(tmp_path)
    root = record(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": 0, "total_frames": 0}))
    with pytest.raises(DataError, match="0 episodes, but 3 are described"):
        ViewedDataset(root)


def test_a_file_holds_what_it_should_and_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = record(tmp_path / "d", (6, 5, 7, 8), cameras=True)
    assert why_too_large(ViewedDataset(root)) == ""
    monkeypatch.setattr(view_page, "MOST_EPISODES", 3)
    assert why_too_large(ViewedDataset(root)) == "4 episodes"
    page, note = write(root, tmp_path / "d.html")
    assert set(parts_of(page)) == {"index", "part-0", "part-1", "part-2"}
    assert note.startswith("This file holds 3 of 4 episodes") and note.replace("`", "") in page.replace("`", "")
    monkeypatch.setattr(view_page, "MOST_EPISODES", 10)
    monkeypatch.setattr(view_page, "MOST_PICTURE_BYTES", 1000)
    assert "MB of video" in why_too_large(ViewedDataset(root))
    page, note = write(root, tmp_path / "d.html")
    assert note.startswith("The videos of 4 episodes are left out")
    assert parts_of(page)["part-0"]["cameras"][0]["why"] == "its pictures are left out of this file"
    monkeypatch.setattr(view_page, "MOST_VALUES", 80)
    assert why_too_large(ViewedDataset(root)) == "156 numbers"
    assert write(root, tmp_path / "d.html")[1].startswith("This file holds 2 of 4 episodes")


def test_rewards_and_success_are_shown_where_there_are_such_columns(tmp_path: Path) -> None:
    made = smooth(10)
    rows = len(made["action"])
    ends = np.cumsum(made["lengths"])
    reached = np.zeros((rows, 1), dtype=bool)
    reached[ends[:4] - 1] = True
    made |= {"next.success": reached, "next.reward": np.ones((rows, 1), dtype=np.float32)}
    page, _ = write(write_plain(tmp_path / "d", made), tmp_path / "d.html")
    index = parts_of(page)["index"]
    assert index["success"] == [True] * 4 + [False] * 6 and index["returns"] == [float(one) for one in made["lengths"]]
    assert "40.0%" in page and "Summed reward" in page
    assert index["odd"] == {}


def serve(root: Path) -> ServedPages:
    dataset = ViewedDataset(root)
    return ServedPages(make_view_server(dataset, dataset.survey(), 0))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("served") / "d", cameras=True)


@pytest.fixture(scope="module")
def answers(recorded: Path) -> Iterator[ServedPages]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ETUDE_CACHE", str(recorded.parent / "cache"))
        made = serve(recorded)
    with made:
        yield made


def test_a_server_gives_episodes_when_they_are_asked_for(answers: ServedPages) -> None:
    status, page, headers = answers.get("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert parts_of(page.decode())["index"]["served"] and list(parts_of(page.decode())) == ["index"]
    assert "connect-src &#39;self&#39;" in page.decode() or "connect-src 'self'" in page.decode()
    status, text, _ = answers.get("/episode/1")
    top, wrist = json.loads(text)["cameras"]
    assert status == 200
    assert (top["kind"], top["src"], round(top["from_s"], 3)) == ("video", "/video/0/1", 0.6)
    assert wrist["address"] == "/picture/1/1/"
    status, picture, headers = answers.get("/picture/1/1/4")
    assert status == 200 and headers["Content-Type"] == "image/png" and picture.startswith(b"\x89PNG")


def test_videos_are_served_by_the_byte(answers: ServedPages, recorded: Path) -> None:
    whole = (recorded / "videos/observation.images.top/chunk-000/file-000.mp4").read_bytes()
    assert answers.get("/video/0/0")[:2] == (200, whole)
    for asked, expected in (
        ("bytes=0-9", whole[:10]), ("bytes=10-", whole[10:]), ("bytes=-5", whole[-5:]), ("bytes=5-99999999", whole[5:]),
    ):  # fmt: skip
        status, part, headers = answers.get("/video/0/2", Range=asked)
        assert (status, part) == (206, expected)
        assert headers["Content-Range"].endswith(f"/{len(whole)}") and int(headers["Content-Length"]) == len(expected)
    for asked in (f"bytes={len(whole)}-", "bytes=-", "bytes=5-2", "lines=1-2", "bytes=0-1,3-4", f"bytes={'9' * 40}-"):
        assert answers.get("/video/0/0", Range=asked)[0] == 416


@pytest.mark.parametrize(
    "path",
    [
        "/video/0/3", "/video/1/0", "/video/2/0", "/video/-1/0", "/video/0/../../meta/info.json", "/meta/info.json",
        "/../d/meta/info.json", "/video/%2e%2e/0", "/episode/3", "/episode/1/", "/episode/x", "/picture/0/0/0",
        "/picture/1/0/6", "/picture/9/0/0", "/episode/" + "9" * 60, "/episode/\u0661",
    ],
)  # fmt: skip
def test_other_addresses_lead_nowhere(answers: ServedPages, path: str) -> None:
    assert answers.get(quote(path, safe="/%"))[0] == 404


def test_a_server_answers_to_this_machine_alone(answers: ServedPages) -> None:
    assert answers.server.server_address[0] == "127.0.0.1"
    assert answers.get("/", Host="evil.example")[0] == 403
    assert answers.get("/", Host="localhost:1")[0] == 200


def test_a_served_dataset_without_its_video_still_answers(tmp_path: Path) -> None:
    root = write_plain(tmp_path / "d", smooth(3), cameras={"observation.images.top": (32, 32, 3)})
    with serve(root) as answers:
        assert "no such file" in json.loads(answers.get("/episode/0")[1])["cameras"][0]["why"]
        assert answers.get("/video/0/0")[0] == 404


def test_a_dataset_of_others_is_shown(tmp_path: Path) -> None:
    page, note = write(FIXTURE, tmp_path / "d.html")
    assert note == "" and len(parts_of(page)) == 1 + len(ViewedDataset(FIXTURE))


def test_an_older_version_is_shown_alike(tmp_path: Path) -> None:
    root = record(tmp_path / "new", cameras=True)
    old, new = (parts_of(write(one, tmp_path / "page.html")[0]) for one in (as_version_2(root, tmp_path / "old"), root))
    assert old["part-1"]["columns"] == new["part-1"]["columns"]
    assert old["part-1"]["cameras"][1] == new["part-1"]["cameras"][1], "its pictures; no video was copied"


# -- Rerun ------------------------------------------------------------------------------------------------------


def test_without_rerun_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(MissingExtraError, match="pip install rerun-sdk"):
        write_rerun(ViewedDataset(record(tmp_path / "d")), None, tmp_path / "d.rrd")


@pytest.mark.slow
def test_a_file_for_rerun_can_be_read_by_it(tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    root = record(tmp_path / "d", cameras=True)
    dataset = ViewedDataset(root)

    def ask(*command: str) -> str:
        full = [sys.executable, "-m", "rerun", "rrd", *command]
        done = subprocess.run(full, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    for episodes, frames in ((None, 18), ([1], 5)):
        target = tmp_path / "out/d.rrd"
        assert write_rerun(dataset, episodes, target) == []
        ask("verify", str(target))
        shown = ask("print", str(target))
        for name in ("observation.state", "action", "observation.images.top", "observation.images.wrist", "notes"):
            assert f"/{name} " in shown
        counted = re.findall(r"with (\d+) rows .* - /observation.state - data columns: \[Scalars", shown)
        assert sum(map(int, counted)) == frames
    with pytest.raises(DataError, match="no episode 9; there are 0 to 2"):
        write_rerun(dataset, [9], tmp_path / "e.rrd")
    (root / "videos/observation.images.top/chunk-000/file-000.mp4").unlink()
    (note,) = write_rerun(ViewedDataset(root), None, tmp_path / "e.rrd")
    assert "no such file" in note
