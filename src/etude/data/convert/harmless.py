"""Look at a recording before it is opened: nothing in it may name code to run, or another file to read."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.errors import DataError

# Codecs that turn bytes into numbers and nothing else. Those that make objects (pickle, json2, msgpack2, vlen-*) are
# not among them: a file that names one decides what runs here.
CODECS = frozenset({
    "adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian", "fixedscaleoffset",
    "fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits", "quantize", "sharding_indexed", "shuffle",
    "transpose", "zlib", "zstd",
})  # fmt: skip
_METADATA = (".zarray", ".zgroup", ".zmetadata", "zarr.json")
_CODEC_KEYS = ("compressor", "filters", "codecs", "index_codecs", "storage_transformers")
_MOST_BYTES = 64 << 20
# deflate, shuffle, fletcher32, szip, nbit, scaleoffset, lzf: built into HDF5 and h5py. Others are loaded as plugins.
FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})


def check_zarr(path: Path) -> None:
    """Refuse a Zarr store whose metadata names a codec that is not known to be harmless, or arrays of objects."""
    for name, text in _metadata(path):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: {name} is not JSON ({str(error)[:80]})") from None
        for what in _offences(content):
            raise DataError(
                f"{path}: {name} asks for {what}, which could run code that the file brings; convert it where you "
                f"trust it, to one of {', '.join(sorted(CODECS))}"
            )


def _metadata(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] in _METADATA]
            if twice := {name for name in names if names.count(name) > 1}:
                raise DataError(f"{path}: holds {min(twice)} twice")
            for name in names:
                if archive.getinfo(name).file_size > _MOST_BYTES:
                    raise DataError(f"{path}: {name} is larger than metadata can be")
                yield name, archive.read(name)
        return
    for folder, _, files in os.walk(path, followlinks=True):
        for name in files:
            if name in _METADATA:
                file = Path(folder) / name
                if file.stat().st_size > _MOST_BYTES:
                    raise DataError(f"{file}: is larger than metadata can be")
                yield str(file.relative_to(path)), file.read_bytes()


def _offences(content: Any) -> Iterator[str]:
    """Yield what is not on the list, wherever in the metadata it stands; attributes are the author's own text."""
    if isinstance(content, list):
        for item in content:
            yield from _offences(item)
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if key in _CODEC_KEYS:
            for codec in value if isinstance(value, list) else [value]:
                name = codec.get("id", codec.get("name")) if isinstance(codec, Mapping) else codec
                if name is not None and str(name).removeprefix("numcodecs.") not in CODECS:
                    yield f"the codec {name!r}"
        if key in ("dtype", "data_type") and _holds_objects(value):
            yield "arrays of objects"
        if key != "attributes" and not str(key).endswith(".zattrs"):
            yield from _offences(value)


def _holds_objects(dtype: Any) -> bool:
    if isinstance(dtype, str):
        return dtype.lstrip("|<>=").startswith("O")
    return isinstance(dtype, list) and any(_holds_objects(item) for item in dtype)


def check_hdf5(file: Any, path: Path) -> None:
    """Refuse an open HDF5 file that reaches out of itself: links to other files, foreign bytes, filters of plugins."""
    import h5py  # type: ignore[import-untyped]

    def look(name: str, link: Any) -> str | None:  # must not raise: HDF5 calls it
        if isinstance(link, h5py.ExternalLink):
            return f"{name} is a link to the file {link.filename!r}; copy what it needs into one file"
        found = file.get(name) if isinstance(link, h5py.HardLink) else None  # soft ones stay inside this file
        if not isinstance(found, h5py.Dataset):
            return None
        if found.is_virtual or found.external:
            return f"{name} takes its numbers from other files; copy them into this one"
        pipeline = found.id.get_create_plist()
        foreign = {pipeline.get_filter(number)[0] for number in range(pipeline.get_nfilters())} - FILTERS
        if foreign:
            what = f"{name} is compressed by filter {min(foreign)}, which HDF5 would load as a plugin"
            return f"{what}; repack it with gzip (h5repack -f GZIP=4)"
        return None

    offence = file.visititems_links(look)
    if offence is not None:
        raise DataError(f"{path}: {offence}")
