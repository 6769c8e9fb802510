"""The CUDA kernels as data, a row of cuda_kernels.csv each, by which a build without them plans for GPUs.

``python -m jax_streamk info --kernels FILE`` writes the file, in a build that has all of them.
"""

import csv
import functools
import importlib.resources
import io

from jax_streamk import _ffi

_FILE = "cuda_kernels.csv"
_NUMBERS = ("align_a", "align_b", "align_d", "stages", "threads", "shared_memory", "promotion_k")
_ENUMERATIONS = {
    "family": _ffi.Family,
    "type_ab": _ffi.Type,
    "type_d": _ffi.Type,
    "math": _ffi.Math,
    "major_a": _ffi.Major,
    "major_b": _ffi.Major,
}


def _row(kernel):
    names = {name: getattr(kernel, name.replace("type_ab", "type_a")).name for name in _ENUMERATIONS}
    reductions = {
        f"{kind}_reductions": " ".join(x.name for x in getattr(kernel, f"{kind}_reductions"))
        for kind in ("split_k", "stream_k")
    }
    return dict(
        name=kernel.name,
        **names,
        tile=f"{kernel.tile_m}x{kernel.tile_n}x{kernel.tile_k}",
        cluster=f"{kernel.cluster_m}x{kernel.cluster_n}",
        warp_schedule=kernel.warp_schedule,
        swap_ab=int(kernel.swap_ab),
        **reductions,
        **{name: getattr(kernel, name) for name in _NUMBERS},
    )


def _kernel(row):
    fields = dict(row)
    fields |= {name: type_[row[name]] for name, type_ in _ENUMERATIONS.items()}
    fields |= {name: tuple(map(int, row[name].split("x"))) for name in ("tile", "cluster")}
    fields |= {
        name: [_ffi.Reduction[x] for x in row[name].split()] for name in ("split_k_reductions", "stream_k_reductions")
    }
    fields |= {name: int(row[name]) for name in _NUMBERS}
    return _ffi.KernelInfo(**fields | dict(swap_ab=row["swap_ab"] == "1"))


def write(kernels, file):
    """Describes the CUDA kernels among ``kernels``, which are not of the host."""
    rows = [_row(kernel) for kernel in kernels if kernel.family != _ffi.Family.host]
    writer = csv.DictWriter(file, rows[0].keys() if rows else ["name"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def read(file):
    """The ``_ffi.KernelInfo`` of each row that ``write`` wrote."""
    return list(map(_kernel, csv.DictReader(file)))


@functools.cache
def text():
    """What the shipped file says."""
    return importlib.resources.files("jax_streamk").joinpath(_FILE).read_text()


def cuda_kernels():
    """Every CUDA kernel that the tables have, whatever this build has."""
    return read(io.StringIO(text()))
