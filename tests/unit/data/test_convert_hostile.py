"""Recordings that try to run code or to read other files are refused before anything in them is read."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("h5py")
pytest.importorskip("zarr")

import h5py
import zarr

from etude.data.convert import convert
from etude.data.convert.harmless import CODECS
from etude.errors import DataError
from tests.unit.data.test_convert import write_robomimic, write_zarr


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(source: Path, tmp_path: Path, said: str) -> None:
    with pytest.raises(DataError, match=said):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "out").exists()


def write_pickled(store: Path, tmp_path: Path) -> None:
    """Put an array of objects into a store whose bytes, unpickled, would make a file."""
    payload = b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "owned").encode()
    array = store / "data" / "note"
    array.mkdir()
    metadata = {
        "zarr_format": 2, "shape": [12], "chunks": [12], "dtype": "|O", "fill_value": None, "order": "C",
        "compressor": None, "filters": [{"id": "pickle", "protocol": 0}],
    }  # fmt: skip
    (array / ".zarray").write_text(json.dumps(metadata))
    (array / "0").write_bytes(payload)


def test_a_pickle_in_a_zarr_store_is_never_read(tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr")
    write_pickled(store, tmp_path)
    refused(store, tmp_path, r"data/note/.zarray asks for the codec 'pickle', which could run code|arrays of objects")


def test_a_pickle_in_a_zip_is_never_read(tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr")
    write_pickled(store, tmp_path)
    packed = tmp_path / "b.zarr.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in store.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(store))
    refused(packed, tmp_path, "which could run code")


@pytest.mark.parametrize("codec", ["pickle", "json2", "msgpack2", "vlen-utf8", "vlen-array", "my_plugin"])
@pytest.mark.parametrize("place", ["filters", "compressor", "consolidated"])
def test_codecs_that_are_not_on_the_list_are_refused_wherever_they_stand(
    tmp_path: Path, codec: str, place: str
) -> None:
    store = write_zarr(tmp_path / "a.zarr")
    if place == "consolidated":
        inner = {"data/action/.zarray": {"filters": [{"id": codec}]}}
        (store / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": inner}))
    else:
        edit(store / "data" / "action" / ".zarray", **{place: [{"id": codec}] if place == "filters" else {"id": codec}})
    refused(store, tmp_path, f"asks for the codec {codec!r}")


@pytest.mark.parametrize("nested", [False, True])
def test_codecs_of_the_third_version_are_looked_at_too(tmp_path: Path, nested: bool) -> None:
    store = write_zarr(tmp_path / "a.zarr", version=3)
    codec: dict[str, Any] = {"name": "numcodecs.pickle", "configuration": {}}
    if nested:
        codec = {"name": "sharding_indexed", "configuration": {"codecs": [codec], "index_codecs": []}}
    edit(store / "data" / "action" / "zarr.json", codecs=[codec])
    refused(store, tmp_path, "asks for the codec 'numcodecs.pickle'")


def test_metadata_that_is_no_metadata_is_one_sentence(tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr")
    (store / "data" / "action" / ".zarray").write_text("[" * 100_000)
    refused(store, tmp_path, "is not JSON")
    (tmp_path / "b.zip").write_bytes(b"PK nonsense")
    refused(tmp_path / "b.zip", tmp_path, "cannot be read as Zarr")


def test_attributes_may_say_anything(tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr")
    zarr.open_group(store, mode="a")["data"].attrs["filters"] = [{"id": "pickle"}]
    convert(store, tmp_path / "out")


@pytest.mark.parametrize("codec", sorted(CODECS & {"blosc", "gzip", "lz4", "zlib", "zstd", "bz2", "lzma"}))
def test_common_compressors_are_read(tmp_path: Path, codec: str) -> None:
    import numcodecs

    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    compressor = numcodecs.get_codec({"id": codec})
    for name, values in {
        "data/state": np.zeros((4, 2), np.float32), "data/action": np.zeros((4, 2), np.float32),
        "meta/episode_ends": np.array([4]),
    }.items():  # fmt: skip
        group.create_array(name, data=values, compressors=compressor)
    assert convert(tmp_path / "a.zarr", tmp_path / "out").frames == 4


def hostile(tmp_path: Path, kind: str) -> Path:
    path = write_robomimic(tmp_path / "demo.hdf5")
    secret = tmp_path / "secret.hdf5"
    with h5py.File(secret, "w") as other:
        other["numbers"] = np.arange(40.0).reshape(10, 4)
    with h5py.File(path, "a") as file:
        observations = file["data/demo_2/obs"]
        if kind == "link":
            observations["leak"] = h5py.ExternalLink(str(secret), "/numbers")
        elif kind == "group link":
            file["elsewhere"] = h5py.ExternalLink(str(secret), "/")
            observations["leak"] = h5py.SoftLink("/elsewhere/numbers")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((10, 4), np.float64)
            layout[:] = h5py.VirtualSource(str(secret), "numbers", (10, 4))
            observations.create_virtual_dataset("leak", layout)
        elif kind == "bytes":
            observations.create_dataset("leak", (10,), np.float32, external=[("/etc/passwd", 0, 40)])
        else:
            # Filter 32001 is blosc's: HDF5 would look for a library of that number in its plugin path.
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((10,))
            plist.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, ())
            space = h5py.h5s.create_simple((10,))
            h5py.h5d.create(observations.id, b"leak", h5py.h5t.NATIVE_FLOAT, space, plist)
    return path


@pytest.mark.parametrize(
    "kind, said",
    [
        ("link", "demo_2/obs/leak is a link to the file"), ("group link", "elsewhere is a link to the file"),
        ("virtual", "takes its numbers from other files"), ("bytes", "takes its numbers from other files"),
        ("filter", "compressed by filter 32001, which HDF5 would load as a plugin"),
    ],
)  # fmt: skip
def test_an_hdf5_file_that_reaches_out_of_itself_is_refused(tmp_path: Path, kind: str, said: str) -> None:
    refused(hostile(tmp_path, kind), tmp_path, said)
