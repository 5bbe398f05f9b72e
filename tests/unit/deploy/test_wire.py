"""Messages hold what they should, and whatever else comes is one clear error."""

from __future__ import annotations

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from etude.deploy.wire import DTYPES, WireError, pack, unpack  # noqa: E402


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    back = unpack(pack({"type": "act", "value": array}))["value"]
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_views_and_foreign_byte_order_come_back_in_order() -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    assert np.array_equal(unpack(pack({"type": "act", "value": array}))["value"], array)


@pytest.mark.parametrize(
    "value, complaint",
    [
        ({"dtype": "object", "shape": [1], "bytes": b"12345678"}, "dtype 'object'"),
        ({"dtype": "float32", "shape": [2], "bytes": b"1234"}, "needs 8 bytes, 4 bytes came"),
        ({"dtype": "float32", "shape": [-1], "bytes": b"1234"}, "shape"),
        ({"dtype": "float32", "shape": [True], "bytes": b"1234"}, "shape"),
        ({"dtype": "float32", "shape": [2**62, 2**62], "bytes": b"1234"}, "needs"),
        ({"dtype": "float32", "shape": [1] * 9, "bytes": b"1234"}, "shape"),
        ({"dtype": "float32", "shape": [1], "bytes": "1234"}, "str came"),
        ({"dtype": ["x"], "shape": [1], "bytes": b"1234"}, "dtype"),
        (msgpack.ExtType(5, b"x"), "extension type 5"),
    ],
)
def test_arrays_that_lie_are_refused(value: object, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        unpack(msgpack.packb({"type": "act", "value": value}))


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x81", msgpack.packb([1]), msgpack.packb({"type": 1}), b"\x91" * 5000, "text",
              msgpack.packb({1: 2}), msgpack.packb({"type": "act"}) + b"x"],
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(frame: bytes | str) -> None:
    with pytest.raises(WireError):
        unpack(frame)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(frame: bytes) -> None:
    try:
        unpack(frame)
    except WireError as error:
        assert "\n" not in str(error)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(WireError, match="object"):
        pack({"type": "act", "value": object()})
