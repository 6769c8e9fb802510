"""Times calls on the device, from a profile of everything that it ran."""

import math
import pathlib
import tempfile

import jax
import numpy as np

from jax_streamk.tuning.programs import repeat

# Kernels, copies and memsets in XLA's CUPTI trace have one of these, and nothing else has. This includes those inside a
# CUDA graph, unless the profiler's gpu_enable_cupti_activity_graph_trace is set.
_DETAILS = {"kernel_details", "memcpy_details", "memset_details"}


def device_work(profile):
    """Kernels, copies and memsets of a ``jax.profiler.ProfileData``: (start in ns, duration in ns, name), by start."""
    return sorted(
        (event.start_ns, event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:")
        for line in plane.lines
        for event in line.events
        if any(name.lower() in _DETAILS for name, _ in event.stats)
    )


def per_call(work, calls):
    """Microseconds of each of ``calls`` equal calls that did this work; their mean if the calls cannot be told apart.

    Time in which kernels overlap counts once.
    """
    size, rest = divmod(len(work), calls)
    if rest:
        return [busy(work) / calls / 1e3]
    return [busy(work[i * size : (i + 1) * size]) / 1e3 for i in range(calls)]


def busy(work):
    """Length of the union of the intervals (start, duration, name), which are sorted by start."""
    total, until = 0, -math.inf
    for start, duration, _ in work:
        total += max(start + duration - max(start, until), 0)
        until = max(until, start + duration)
    return total


def profile(run):
    """The ``jax.profiler.ProfileData`` of ``run()`` on devices, without the host."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(path))


def device_samples(program, least=20):
    """(microseconds on the device of each of at least ``least`` calls, names of what ran there).

    Raises:
      RuntimeError: the profile has no kernel of a GPU.
    """
    repeats = -(-least // program.calls)
    work = device_work(profile(lambda: repeat(program, repeats)))
    if not work:
        raise RuntimeError("the profile has no kernel of a GPU: CUPTI is missing, or another profiler has it")
    return per_call(work, repeats * program.calls), sorted({name for _, _, name in work})


def summary(samples):
    """Median, quartiles and number of samples in microseconds, as results store them."""
    low, median, high = np.percentile(samples, [25, 50, 75])
    return dict(median_us=float(median), quartiles_us=[float(low), float(high)], samples=len(samples))
