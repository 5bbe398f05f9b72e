"""Films of episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.simulation.video import STILL_S, frame_stride, write_video

av = pytest.importorskip("av")


def test_a_film_has_its_pictures_and_stands_still_at_the_end(tmp_path: Path) -> None:
    pictures = [np.full((33, 48, 3), 20 * number, np.uint8) for number in range(10)]
    path = tmp_path / "films" / "x.mp4"
    write_video(path, pictures, 20.0)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 10 + round(STILL_S * 20)
    assert frames[0].shape == (32, 48, 3)
    assert frames[0].mean() < 5 < 170 < frames[-1].mean()
    assert [file.name for file in path.parent.iterdir()] == ["x.mp4"]


def test_films_play_in_real_time_with_few_pictures() -> None:
    assert [frame_stride(fps) for fps in (10.0, 30.0, 50.0, 80.0)] == [1, 1, 1, 2]


def test_a_film_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one picture"):
        write_video(tmp_path / "x.mp4", [], 20.0)
