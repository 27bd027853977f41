"""Named arrays in one file of the safetensors layout: the same arrays give the same bytes, and a doubt is a refusal.

A file is 8 bytes of header length (little endian), that much JSON (name -> dtype, shape, data_offsets), and the data.
Wide items come first, so that every array is aligned. Source: the format description in the safetensors repository,
github.com/huggingface/safetensors.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Refused(ValueError):
    """Say why a file is not taken: what, got and expected."""


def pack(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Write arrays of int64, int32, uint8 and bool with string metadata.

    Raises:
        TypeError: an array of another dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, end = [], 0
    for name in sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize):  # stable: else in the order given
        array = arrays[name]
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": _code(name, array), "shape": list(array.shape), "data_offsets": offsets}
        parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read what `pack` or any other writer of the layout wrote: arrays by name, and the metadata.

    Raises:
        Refused: cut short, with bytes that belong to no array or to two, not the layout, or of a dtype not read here.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Refused(f"file: got {len(data)} bytes, expected 8 and a header of {length}")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_object)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Refused(f"header: got bytes that are no JSON ({error}), expected JSON") from error
    if not isinstance(header, dict):
        raise Refused(f"header: got {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(f"__metadata__: got {metadata!r}, expected an object of strings")
    spans = {name: _span(name, entry) for name, entry in header.items()}
    body = bytearray(data[8 + length :])  # writable, as torch wants its memory
    end = 0
    for name, (_, _, begin, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise Refused(f"{name}: got data from byte {begin} on, expected {end}: no gap and no overlap")
        end = stop
    if end != len(body):
        raise Refused(f"file: got {len(body)} bytes of data, expected {end}")
    return {name: _array(name, body, *span) for name, span in spans.items()}, metadata


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a SHA-256 in hexadecimal that no layout enters.

    In the order of the names' bytes, each array gives one line, `name dtype sizes` (sizes with commas), and its data.
    """
    total = hashlib.sha256()
    for name in sorted(arrays, key=str.encode):
        array = arrays[name]
        total.update(f"{name} {_code(name, array)} {','.join(map(str, array.shape))}\n".encode())
        total.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).data)
    return total.hexdigest()


def _code(name: str, array: np.ndarray) -> str:
    code = _CODES.get(array.dtype.newbyteorder("<"))
    if code is None:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected int64, int32, uint8 or bool")
    return code


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Refused(f"{max(names, key=names.count)}: got the name twice in one JSON object, expected it once")
    return found


def _span(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(dtype, str) and all(type(one) is int and one >= 0 for one in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or len(entry) != 3:
        raise Refused(f"{name}: got {entry!r}, expected dtype, shape and two data_offsets")
    if dtype not in DTYPES:
        raise Refused(f"{name}: got dtype {dtype}, expected one of {', '.join(DTYPES)}")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise Refused(f"{name}: got {end - begin} bytes, expected shape {list(shape)} of {dtype}")
    return DTYPES[dtype], shape, begin, end


def _array(name: str, body: bytearray, dtype: np.dtype, shape: tuple[int, ...], begin: int, end: int) -> np.ndarray:
    if dtype == np.bool_ and (np.frombuffer(body, np.uint8, end - begin, begin) > 1).any():
        raise Refused(f"{name}: got a byte above 1, expected 0 or 1 for a BOOL")
    array = (
        np.frombuffer(body, dtype, math.prod(shape), begin).reshape(shape) if end > begin else np.zeros(shape, dtype)
    )
    return array if array.flags.aligned else array.copy()
