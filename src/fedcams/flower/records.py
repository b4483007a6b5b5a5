"""Convert the core's messages and vectors to Flower's records, and back."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedcams.errors import UpdateError

INSTRUCTION, REPLY, REST, ABOUT = "fedcams.instruction", "fedcams.reply", "fedcams.rest", "fedcams"
"""Keys of our records in a Flower message: the core's message, arrays that neither train nor are averaged, and
other values."""
MESSAGE = "fedcams.message"
"""The `stype` of an array that holds part of one of our messages; Flower does not read such arrays as numbers."""
NUMPY = "numpy.ndarray"
"""The `stype` of Flower's own arrays: NumPy's file format."""
SHIFT = "fedcams.shift"
"""The arrays that an app adds to its gradients, for methods with control variates."""
EXAMPLES, STEPS, LOSSES = "num-examples", "num-steps", ("train_loss", "train-loss", "loss")
"""The app's metrics that the core reads."""
SHIFTED = "shift-applied"
"""The metric that an app sets to 1 to confirm that it added the shift to its gradients."""
LONGEST = 300
"""The most characters of a client's text, such as a reason or a note, that are kept; clients choose the text."""
MOST_METRICS, LONGEST_NAME = 1000, 100
"""The most numbers in a client's metrics, and the most characters of a metric's name."""
MOST_AXES, LONGEST_TYPE = 64, 64
"""The most axes of an array, as in NumPy, and the most characters of its type; headers are cached for both."""


def message_record(parts: Sequence[bytes], shared: dict[int, Array] | None = None) -> ArrayRecord:
    """Return a message's parts as arrays; those in `shared` are reused, so they are hashed and sent only once."""
    shared = {} if shared is None else shared
    return ArrayRecord({str(i): shared.get(id(part)) or _opaque(part) for i, part in enumerate(parts)})


def share(messages: Iterable[Sequence[bytes]]) -> dict[int, Array]:
    """Return arrays for the parts that several messages share, by the `id` of the part: keep the parts alive."""
    uses: dict[int, list[bytes]] = {}
    for part in itertools.chain.from_iterable(messages):
        uses.setdefault(id(part), []).append(part)
    return {name: _opaque(parts[0]) for name, parts in uses.items() if len(parts) > 1}


def message_parts(record: ArrayRecord, limit: int) -> list[bytes]:
    """Return the parts in a record; refuses a record without our message, and one longer than `limit` bytes."""
    keys = [str(i) for i in range(len(record))]
    if sorted(record) != sorted(keys) or any(array.stype != MESSAGE for array in record.values()):
        found = ", ".join(sorted({array.stype for array in record.values()})) or "nothing"
        raise UpdateError(f"the record contains {found}, not a fedcams message")
    parts = [record[key].data for key in keys]
    if (size := sum(map(len, parts))) > limit:
        raise UpdateError(f"a message of {size} bytes; at most {limit} are accepted for this model")
    return parts


def _opaque(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype=MESSAGE, data=data)


def to_array(values: NDArray[Any]) -> Array:
    """Return numbers as an array in Flower's format; copies them once."""
    values = np.asarray(values, order="C")
    data = b"".join([_head(values.dtype, values.shape), values.reshape(-1).view(np.uint8).data])
    return Array(dtype=str(values.dtype), shape=tuple(values.shape), stype=NUMPY, data=data)


def from_array(array: Array) -> NDArray[Any]:
    """Return the numbers of an array as a read-only view; refuses an array that is not in NumPy's format."""
    if array.stype != NUMPY:
        raise UpdateError(f"an array of type {array.stype!r}; expected {NUMPY!r}")
    try:
        if len(array.shape) > MOST_AXES or len(array.dtype) > LONGEST_TYPE:
            raise ValueError(f"{len(array.shape)} axes of {array.dtype!r}")
        head = _head(np.dtype(array.dtype), array.shape)
        if array.data.startswith(head):  # exactly as NumPy writes it, so there is nothing to parse
            return np.frombuffer(array.data, array.dtype, math.prod(array.shape), len(head)).reshape(array.shape)
        stream = io.BytesIO(array.data)
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"version {version} of NumPy's format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        values = np.frombuffer(array.data, dtype, math.prod(shape), stream.tell())  # fails if the data is too short
        return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
    except Exception as error:  # NumPy parses the header as Python source, which can fail in many ways
        raise UpdateError(f"an array that cannot be read ({type(error).__name__}: {error})"[:300]) from None


@functools.lru_cache(4096)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of NumPy's file format."""
    head = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue()


def only_arrays(content: RecordDict, key: str) -> ArrayRecord:
    """Return the model's arrays in an app's message: the record named `key`, or the only one there is."""
    records = content.array_records
    if key in records:
        return records[key]
    if len(records) != 1:
        found = ", ".join(records) or "none"
        raise UpdateError(f"array records: {found}; expected one, or one named {key!r}")
    return next(iter(records.values()))


def told_by_metrics(content: RecordDict, weighting: str) -> tuple[int, int, float]:
    """Return the examples, the steps and the loss in an app's metrics; zero for each one that is missing.

    Refuses metrics without the number of examples if the method weights updates by it.
    """
    metrics = app_metrics(content)
    if weighting == "examples" and EXAMPLES not in metrics:
        found = ", ".join(metrics) or "none"
        raise UpdateError(f"weighting={weighting} needs the metric {EXAMPLES!r}, but the app reports {found}; add it")
    loss = next((metrics[name] for name in LOSSES if name in metrics), 0.0)
    if not isinstance(loss, int | float):
        raise UpdateError(f"the app's metrics say loss={loss!r}; expected a number")
    return _count(metrics, EXAMPLES), _count(metrics, STEPS), float(loss)


def app_metrics(content: RecordDict) -> dict[str, Any]:
    """Return all metrics of an app's message."""
    return {name: value for record in content.metric_records.values() for name, value in record.items()}


def _count(metrics: Mapping[str, Any], name: str) -> int:
    value = metrics.get(name, 0)
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 2**63:
        raise UpdateError(f"the app's metrics say {name}={value!r}; expected a finite number from 0 to 2**63 - 1")
    return int(value)


def about(**values: Any) -> ConfigRecord:
    """Return our record of small values."""
    return ConfigRecord(values)


def about_of(content: RecordDict) -> Mapping[str, Any] | None:
    """Return our record of small values in a message; None if there is none."""
    return content.config_records.get(ABOUT)


def readable(text: object) -> str:
    """Return a client's text for logs and files: in one line, bounded, and with escapes for what is not printable."""
    cut = str(text)[:LONGEST]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)[:LONGEST]


def bounded_metrics(content: RecordDict) -> RecordDict:
    """Return the metric records of a client's message; refuses more numbers or longer names than the server keeps."""
    names = [*content.metric_records, *app_metrics(content)]
    numbers = sum(
        len(value) if isinstance(value, list) else 1
        for record in content.metric_records.values()
        for value in record.values()
    )
    if numbers > MOST_METRICS or len(names) > 2 * MOST_METRICS or any(len(name) > LONGEST_NAME for name in names):
        raise UpdateError(
            f"metrics of {numbers} numbers; at most {MOST_METRICS}, under names of at most {LONGEST_NAME} characters, "
            "are kept"
        )
    return RecordDict(dict(content.metric_records))
