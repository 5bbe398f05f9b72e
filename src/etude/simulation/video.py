"""Short films of episodes, for people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from etude.extras import import_extra
from etude.simulation.environments.base import Array

MOST_FRAMES_PER_S = 40.0
STILL_S = 0.6
"""How long the last picture stands, so that one sees how it ended."""


def frame_stride(fps: float) -> int:
    """Return how many steps lie between two pictures of a film, so that it plays in real time and stays small."""
    return max(1, round(fps / MOST_FRAMES_PER_S))


def write_video(path: Path, pictures: Sequence[Array], fps: float) -> None:
    """Write pictures (height, width, 3) uint8 as an mp4 that browsers play."""
    if not pictures:
        raise ValueError(f"{path}: a video needs at least one picture")
    av = import_extra("av", "sim")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.mp4")
    height, width = (size - size % 2 for size in pictures[0].shape[:2])  # h264 halves the colours
    still = [pictures[-1]] * round(STILL_S * fps)
    try:
        with av.open(str(aside), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            rate = Fraction(fps).limit_denominator(1001)
            stream = container.add_stream("libx264", rate, options={"crf": "26", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.thread_count = 1
            for picture in (*pictures, *still):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture[:height, :width].copy(), "rgb24")))
            container.mux(stream.encode(None))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
