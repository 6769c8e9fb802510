"""Split-K and Stream-K matrix products for JAX.

``matmul`` computes what ``jax.numpy.matmul`` computes, with CUTLASS kernels on NVIDIA GPUs and the same decompositions on CPU
threads. ``plan`` tells which kernel and schedule it would run, and why.
"""

from jax_streamk.api import kernels, matmul, plan
from jax_streamk.planner import Plan
from jax_streamk.problem import Device
from jax_streamk.schedules import Auto, DataParallel, SplitK, StreamK

__all__ = ["Auto", "DataParallel", "Device", "Plan", "SplitK", "StreamK", "kernels", "matmul", "plan"]
