"""Video in and out through PyAV: encode frame by frame, join without re-encoding, index, decode what is asked for."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError, MissingExtraError

Array = NDArray[Any]
Codec = Literal["h264", "av1"]

# A key frame every second frame, as lerobot does: any frame is then found by decoding two.
_KEY_FRAME_EVERY: Final = 2
_ENCODERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "h264": ("libx264", {"preset": "veryfast", "crf": "21", "bf": "0"}),
    "av1": ("libsvtav1", {"preset": "10", "crf": "30", "svtav1-params": "log-level=0:pred-struct=1"}),
}
_OPEN_FILES: Final = 8


def pyav() -> Any:
    """Import PyAV; name the extra if it is absent."""
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("videos need PyAV; run: pip install 'etude[sim]'") from error
    os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 prints a page of settings for every file otherwise
    av.logging.set_level(None)
    return av


def rate_of(fps: float) -> Fraction:
    """Return frames per second as a fraction that a video file can hold."""
    return Fraction(fps).limit_denominator(1001)


class VideoEncoder:
    """Writes pictures (H, W, C) uint8 to one mp4, as they come."""

    def __init__(self, path: Path, fps: float, shape: tuple[int, ...], codec: Codec = "h264") -> None:
        height, width, _ = shape
        if height % 2 or width % 2:
            raise DataError(f"{path.name}: video needs an even height and width, got {height} x {width}; use images")
        if codec not in _ENCODERS:
            raise DataError(f"video codec {codec!r} is unknown; there are {', '.join(_ENCODERS)}")
        name, options = _ENCODERS[codec]
        self._av = pyav()
        self._container = self._av.open(str(path), "w", format="mp4")
        self._stream = self._container.add_stream(name, rate_of(fps), options={**options, "g": str(_KEY_FRAME_EVERY)})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self.frames = 0

    def add(self, picture: Array) -> None:
        """Append one picture."""
        if picture.shape[2] == 1:
            picture = np.repeat(picture, 3, axis=2)
        frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame.pts = self.frames
        frame.time_base = 1 / Fraction(self._stream.codec_context.rate)
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._container is not None:
            if self.frames:
                self._container.mux(self._stream.encode(None))
            self._container.close()
            self._container = None


def join_videos(sources: Sequence[Path], target: Path, fps: float, lengths: Sequence[int]) -> None:
    """Put videos of one make one after the other into one file, without encoding them again."""
    av = pyav()
    rate = rate_of(fps)
    with av.open(str(target), "w", format="mp4") as output:
        stream, first = None, 0
        for source, length in zip(sources, lengths, strict=True):
            with av.open(str(source)) as container:
                origin = container.streams.video[0]
                if stream is None:
                    stream = output.add_stream_from_template(origin, opaque=True)
                shift = round(Fraction(first) / rate / origin.time_base)
                for packet in container.demux(origin):
                    if packet.dts is None:
                        continue  # the end of the file
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = stream
                    output.mux(packet)
            first += length


def cut_video(path: Path, begin_s: float, end_s: float) -> tuple[bytes, float]:
    """Return a part of a video as an mp4 of its own, not encoded again, and when the part begins in it.

    It begins earlier where there is no key frame at its beginning.
    """
    av = pyav()
    buffer = io.BytesIO()
    with _faults(path), av.open(str(path)) as container, av.open(buffer, "w", format="mp4") as output:
        origin = container.streams.video[0]
        base = origin.time_base
        # A little later than asked for: rounding must not lead to the key frame before.
        container.seek(round(begin_s / base) + 1, stream=origin, backward=True, any_frame=False)
        stream, shift = output.add_stream_from_template(origin, opaque=True), None
        for packet in container.demux(origin):
            if packet.dts is None:
                break
            if shift is None and not packet.is_keyframe:
                continue
            shift = packet.dts if shift is None else shift
            if float(packet.dts * base) >= end_s:
                break
            packet.pts -= shift
            packet.dts -= shift
            packet.stream = stream
            output.mux(packet)
    if shift is None:
        raise DataError(f"{path}: there is no picture at {begin_s:.3f} s; the video is too short")
    return buffer.getvalue(), max(0.0, begin_s - float(shift * base))


def make_of(path: Path) -> tuple[Any, ...]:
    """Return what must agree for videos to be joined."""
    with pyav().open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        return (
            stream.codec.canonical_name,
            context.width,
            context.height,
            context.pix_fmt,
            bytes(context.extradata or b""),
        )


def describe(path: Path, fps: float, channels: int) -> dict[str, Any]:
    """Return what lerobot notes about a video in `info.json`."""
    name, width, height, pixels, _ = make_of(path)
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": name,
        "video.pix_fmt": pixels,
        "video.is_depth_map": False,
        "video.fps": int(fps) if float(fps).is_integer() else fps,
        "video.channels": channels,
        "has_audio": False,
    }


class VideoIndex:
    """When each frame of a video is shown: presentation times in seconds, rising, and as the file counts them."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path = path
        stamps: list[int] = []
        with _faults(path), pyav().open(str(path)) as container:
            stream = container.streams.video[0]
            found = (stream.codec_context.height, stream.codec_context.width)
            base = stream.time_base
            for packet in container.demux(stream):
                if packet.pts is not None and packet.size:
                    if packet.is_corrupt:
                        raise DataError(f"{path}: the video is damaged at {float(packet.pts * base):.3f} s")
                    stamps.append(packet.pts)
        if found != shape[:2]:
            raise DataError(f"{path}: the video is {found[0]} x {found[1]}, but info.json says {shape[0]} x {shape[1]}")
        self.stamps = np.array(sorted(stamps), dtype=np.int64)
        self.times_s = self.stamps * float(base)

    def find(self, times_s: Array, tolerance_s: float) -> Array:
        """Return for each time the number of the frame nearest to it, or -1 if none is near enough."""
        if not len(self.times_s):
            return np.full(len(times_s), -1)
        right = np.clip(np.searchsorted(self.times_s, times_s), 1, max(1, len(self.times_s) - 1))
        candidates = np.stack([right - 1, np.minimum(right, len(self.times_s) - 1)])
        distances = np.abs(self.times_s[candidates] - times_s)
        nearest = np.where(distances[0] <= distances[1], candidates[0], candidates[1])
        return np.where(distances.min(0) <= tolerance_s, nearest, -1)


@contextlib.contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Turn whatever PyAV says about a broken file into one sentence."""
    av = pyav()
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the dataset is not complete, so fetch or record it again") from None
    except (av.FFmpegError, OSError, ValueError, IndexError, TypeError, AttributeError, EOFError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable video ({text[:160]}); it may be truncated") from error


class VideoDecoder:
    """An open video file, ready to give frames by presentation stamp.

    Args:
        path: The file.
        strict: Refuse AV1 that breaks its standard: each tile must end in the padding that its arithmetic code leads
            to. Without it 38 of 200 damaged files gave other pictures in silence, with it 4.
    """

    def __init__(self, path: Path, *, strict: bool = True) -> None:
        self.path = path
        with _faults(path):
            self._container = pyav().open(str(path))
            self._stream = self._container.streams.video[0]
            # Files are decoded side by side; threads within one would only add waiting.
            self._stream.codec_context.thread_count = 1
            is_strict = strict and self._stream.codec.canonical_name == "av1"
            self._stream.codec_context.options = {"err_detect": "explode", **({"strict": "1"} if is_strict else {})}

    def read(self, stamps: Array, channels: int, receive: Callable[[int, Array], None]) -> None:
        """Decode the frames with these presentation stamps (rising), calling `receive(number, picture)` for each."""
        wanted = {int(stamp): number for number, stamp in enumerate(stamps)}
        pixels = "rgb24" if channels == 3 else "gray"
        last = int(stamps[-1])
        with _faults(self.path):
            self._container.seek(int(stamps[0]), stream=self._stream, backward=True, any_frame=False)
            for frame in self._container.decode(self._stream):
                if frame.is_corrupt:
                    raise DataError(f"{self.path}: the video is damaged at {frame.time:.3f} s")
                number = wanted.pop(frame.pts, None)
                if number is not None:
                    picture = frame.to_ndarray(format=pixels)
                    receive(number, picture if channels == 3 else picture[..., None])
                if not wanted or frame.pts >= last:
                    break
        if wanted:
            stamp = next(iter(wanted))
            at_s = float(stamp * self._stream.time_base)
            raise DataError(f"{self.path}: the frame at {at_s:.3f} s cannot be decoded; the video may be damaged")

    def close(self) -> None:
        """Close the file."""
        self._container.close()


class DecoderPool:
    """Open decoders of each thread and process, the most recently used ones."""

    def __init__(self, strict: bool = True) -> None:
        self._strict = strict
        self._local = threading.local()

    def get(self, path: Path) -> VideoDecoder:
        """Return a decoder that only this thread uses."""
        # A forked worker must not read through its parent's open file.
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.open = os.getpid(), OrderedDict[Path, VideoDecoder]()
        opened: OrderedDict[Path, VideoDecoder] = self._local.open
        if path not in opened:
            while len(opened) >= _OPEN_FILES:
                opened.popitem(last=False)[1].close()
            opened[path] = VideoDecoder(path, strict=self._strict)
        opened.move_to_end(path)
        return opened[path]

    def __getstate__(self) -> dict[str, Any]:
        return {"strict": self._strict}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._strict = state["strict"]
        self._local = threading.local()
