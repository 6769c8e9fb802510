"""Describes the CUDA kernels, a row of cuda_kernels.csv each, so that a build without them can plan for GPUs.

``python -m jax_streamk kernels --csv --device h200`` prints the file, in a build with every kernel.
"""

import csv
import enum
import functools
import importlib.resources
import io
import typing

from jax_streamk import _ffi

_FILE = "cuda_kernels.csv"


def _text(value):
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value.name if isinstance(value, enum.Enum) else str(int(value) if isinstance(value, bool) else value)


def _value(type_, text):
    if typing.get_origin(type_) is list:
        (of,) = typing.get_args(type_)
        return [_value(of, word) for word in text.split()]
    if issubclass(type_, enum.Enum):
        return type_[text]
    return text == "1" if type_ is bool else type_(text)


def _row(kernel):
    return {name: _text(getattr(kernel, name)) for name, *_ in kernel.fields}


def _kernel(row):
    types = {name: type_ for name, type_, *_ in _ffi.KernelInfo.fields}
    return _ffi.KernelInfo(**{name: _value(types[name], text) for name, text in row.items()})


def write(kernels, file):
    """Writes a row for each of ``kernels``."""
    rows = list(map(_row, kernels))
    writer = csv.DictWriter(file, rows[0].keys() if rows else ["name"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def read(file):
    """An ``_ffi.KernelInfo`` for each row that ``write`` wrote."""
    return list(map(_kernel, csv.DictReader(file)))


@functools.cache
def text():
    """The text of the shipped file."""
    return importlib.resources.files("jax_streamk").joinpath(_FILE).read_text()


def cuda_kernels():
    """Every CUDA kernel of a full build."""
    return read(io.StringIO(text()))
