"""scikit-build-core, with CUTLASS among the build requirements only where CUDA kernels will be built.

nvidia-cutlass is headers to us, but its wheel requires scipy, cuda-python and more: a CPU-only build should not wait
for them.
"""

import os

import cuda_toolkit
from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403  (the hooks we do not change)

CUTLASS = "nvidia-cutlass==4.2.0.0"


def _builds_cuda(config_settings):
    settings = dict(config_settings or {})
    defines = {key.split(".", 2)[2]: value for key, value in settings.items() if key.startswith("cmake.define.")}
    architectures = defines.get("CMAKE_CUDA_ARCHITECTURES", os.environ.get("CUDAARCHS", ""))
    return bool(cuda_toolkit.decide(defines.get("JAX_STREAMK_CUDA", "AUTO"), architectures)[0])


def get_requires_for_build_wheel(config_settings=None):
    extra = [CUTLASS] if _builds_cuda(config_settings) else []
    return _scikit_build.get_requires_for_build_wheel(config_settings) + extra


def get_requires_for_build_editable(config_settings=None):
    extra = [CUTLASS] if _builds_cuda(config_settings) else []
    return _scikit_build.get_requires_for_build_editable(config_settings) + extra
