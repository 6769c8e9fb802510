"""Split-K and Stream-K matrix products for JAX.

``matmul`` computes what ``jax.numpy.matmul`` computes, with CUTLASS kernels on NVIDIA GPUs and the same decompositions
on CPU threads. ``plan`` tells which kernel and schedule it would run, and why.
"""

import typing

from jax_streamk.checks import check_installation, version

if typing.TYPE_CHECKING:
    _ffi: typing.Any  # compiled, so that a clean checkout has none

check_installation()  # before imports whose messages would not tell what is wrong

from jax_streamk.accelerate.chains import chain
from jax_streamk.accelerate.rewrite import accelerate
from jax_streamk.api import (
    dot_general,
    einsum,
    gated_linear,
    kernels,
    linear,
    matmul,
    plan,
    ragged_dot,
    ragged_dot_general,
    ragged_gated,
)
from jax_streamk.device import A100, H100, H200, Device, check_gpus
from jax_streamk.plan.custom_call import EXPORT_CHECKS
from jax_streamk.plan.plan import Plan
from jax_streamk.product.primitive import dots_saveable, dots_with_no_batch_dims_saveable
from jax_streamk.quantized import QuantizedArray, from_words, quantize
from jax_streamk.schedules import Auto, DataParallel, PerPass, SplitK, StreamK
from jax_streamk.show.explain import Explanation
from jax_streamk.show.plot import plot_schedules
from jax_streamk.tuning.tune import tuning
from jax_streamk.tuning.tuned import use_tuned_plans

__version__ = version()
check_gpus()

__all__ = [
    "A100",
    "EXPORT_CHECKS",
    "H100",
    "H200",
    "Auto",
    "DataParallel",
    "Device",
    "Explanation",
    "PerPass",
    "Plan",
    "QuantizedArray",
    "SplitK",
    "StreamK",
    "__version__",
    "accelerate",
    "chain",
    "dot_general",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "einsum",
    "from_words",
    "gated_linear",
    "kernels",
    "linear",
    "matmul",
    "plan",
    "plot_schedules",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
    "ragged_gated",
    "tuning",
    "use_tuned_plans",
]
