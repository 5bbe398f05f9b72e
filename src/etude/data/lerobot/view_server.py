"""`etude data view --serve`: a dataset of any size over HTTP on this machine; episodes come when they are looked at."""

from __future__ import annotations

import json
import re
from http.server import ThreadingHTTPServer
from typing import Any

from etude.data.lerobot.survey import Survey
from etude.data.lerobot.view_page import picture_kind, render_view
from etude.data.lerobot.view_parts import make_columns
from etude.data.lerobot.viewed import ViewedDataset
from etude.runs.local_server import Resource, make_local_server

# Addresses are numbers alone: no text of a request ever becomes part of a path.
_EPISODE = re.compile(r"/episode/([0-9]{1,9})")
_VIDEO = re.compile(r"/video/([0-9]{1,4})/([0-9]{1,9})")
_PICTURE = re.compile(r"/picture/([0-9]{1,4})/([0-9]{1,9})/([0-9]{1,9})")


class DatasetView:
    """Finds what the addresses of a view lead to.

    Args:
        dataset: What is shown.
        survey: What was found in it.
    """

    def __init__(self, dataset: ViewedDataset, survey: Survey) -> None:
        self._dataset, self._cameras = dataset, list(dataset.info.cameras)
        self._page = Resource.text(render_view(dataset, survey, is_served=True))

    def find(self, address: str) -> Resource | None:
        """Return what is at an address; None if nothing is."""
        if address == "/":
            return self._page
        if found := _EPISODE.fullmatch(address):
            return self._episode(int(found[1]))
        if found := _VIDEO.fullmatch(address):
            return self._video(int(found[1]), int(found[2]))
        if found := _PICTURE.fullmatch(address):
            return self._picture(*map(int, found.groups()))
        return None

    def _episode(self, episode: int) -> Resource | None:
        if episode >= len(self._dataset):
            return None
        cameras = [self._describe(place, episode) for place in range(len(self._cameras))]
        part = {"columns": make_columns(self._dataset, episode), "cameras": cameras}
        return Resource(json.dumps(part, allow_nan=False).encode(), "application/json")

    def _describe(self, place: int, episode: int) -> dict[str, Any]:
        camera = self._cameras[place]
        if self._dataset.info.features[camera].dtype != "video":
            count = int(self._dataset.episodes.lengths[episode])
            return {"name": camera, "kind": "pictures", "count": count, "address": f"/picture/{place}/{episode}/"}
        path, from_s = self._dataset.video_of(camera, episode)
        if not path.is_file():
            return {"name": camera, "kind": "none", "why": f"{path}: no such file"}
        return {"name": camera, "kind": "video", "src": f"/video/{place}/{episode}", "from_s": from_s}

    def _video(self, place: int, episode: int) -> Resource | None:
        if place >= len(self._cameras) or episode >= len(self._dataset):
            return None
        camera = self._cameras[place]
        if self._dataset.info.features[camera].dtype != "video":
            return None
        path = self._dataset.video_of(camera, episode)[0]
        return Resource(path, "video/mp4") if path.is_file() else None

    def _picture(self, place: int, episode: int, frame: int) -> Resource | None:
        if place >= len(self._cameras) or episode >= len(self._dataset):
            return None
        camera = self._cameras[place]
        if self._dataset.info.features[camera].dtype == "video":
            return None
        found = self._dataset.pictures(camera, episode)
        return Resource(found[frame], picture_kind(found[frame])) if frame < len(found) else None


def make_view_server(dataset: ViewedDataset, survey: Survey, port: int) -> ThreadingHTTPServer:
    """Return a server on this machine that shows a dataset; `serve_forever` answers."""
    return make_local_server(DatasetView(dataset, survey).find, port, index="the dataset")
