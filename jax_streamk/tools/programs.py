"""Programs of users, from files that list them: each as written and under ``accelerate``, side by side."""

import dataclasses
import fnmatch
import functools
import importlib.util
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_streamk
from jax_streamk.tools.results import described, recorded
from jax_streamk.tools.sides import INVARIANT, OURS, XLA
from jax_streamk.tuning import timing
from jax_streamk.tuning.programs import Program, repeat, wall

FOLDER = "benchmarks/programs"
MEASURE = "step"
FEWEST_STEPS, MOST_STEPS, RUN_SECONDS = 10, 20, 0.3
WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
# float64 has no reference: the difference from XLA's result that rounding stays far below.
GROSS_DIFFERENCE = 1e-9
# An array that XLA has with a larger relative error, such as a gradient that should be zero, is not judged.
MEANINGLESS_ERROR = 0.1
# Adam divides gradients by their size, so elements that should be nearly zero may differ in sign: the worst array of
# ours may be this far off.
WORST_ERROR = 0.5


@dataclasses.dataclass(frozen=True)
class UserProgram:
    """A jitted step of a program, as a user writes it.

    Attributes:
      name: what ``bench --programs`` calls it.
      make: ``make(dtype, **size)`` returns (step, arguments). All arrays that the step computes with are among its
        arguments, which are a tuple of pytrees. A wider dtype makes the same step of arguments that are as wide.
      small: the size for a CPU in tests, as keyword arguments of ``make``.
      real: the size that users have.
      dtype: in which it computes.
      devices: how many it needs.
      carries: the step's first result takes the place of its first argument, which is donated.
      jit: what users compile it by.
      accelerate: what users accelerate it by.
    """

    name: str
    make: Callable[..., Any]
    small: dict[str, Any]
    real: dict[str, Any]
    dtype: str = "bfloat16"
    devices: int = 1
    carries: bool = False
    jit: Callable[..., Any] = jax.jit
    accelerate: Callable[..., Any] = jax_streamk.accelerate

    def __str__(self):
        return self.name


def chosen(names=()):
    """The programs of these names, or all of the repository's, by file and in their file's order.

    Args:
      names: each a file's name in ``benchmarks/programs`` without suffix, a program's name, a pattern of those such as
        ``"llama_decode_*"``, or the path of another file that ends in .py and has a list ``PROGRAMS``.

    Returns:
      A list of ``UserProgram``. A file that needs a package that is not installed is one program, which says so when it
      is made.

    Raises:
      OSError: there is no folder of programs, or no such file.
      ValueError: a name fits no program.
    """
    files = [name for name in names if name.endswith(".py")]
    names = [name for name in names if name not in files]
    by_name = {program.name: program for file in files for program in load(pathlib.Path(file))}
    if names or not files:
        every = {path.stem: load(path) for path in sorted(folder().glob("*.py"))}
        for name in names or every:
            here = every.get(name) or [
                program
                for programs in every.values()
                for program in programs
                if fnmatch.fnmatchcase(program.name, name)
            ]
            if not here:
                known = ", ".join(program.name for programs in every.values() for program in programs)
                raise ValueError(f"no program {name!r}; there are {known}")
            by_name |= {program.name: program for program in here}
    return list(by_name.values())


def folder():
    """``benchmarks/programs`` of the checkout that is the current folder or that this package lies in.

    Raises:
      FileNotFoundError: neither is a checkout.
    """
    roots = pathlib.Path.cwd(), pathlib.Path(jax_streamk.__file__).parents[1]
    for root in roots:
        if (root / FOLDER).is_dir():
            return root / FOLDER
    raise FileNotFoundError(
        f"no folder {FOLDER} in {' or '.join(map(str, roots))}: programs are part of the repository, not of the "
        "package. Run this in a checkout, or name files of your own"
    )


def load(path):
    """The programs that a file lists."""
    name = f"jax_streamk_program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # whatever ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their annotations up
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        return [UserProgram(path.stem, functools.partial(_raise, error), small={}, real={})]
    return module.PROGRAMS


def _raise(error, *_, **__):
    raise error


def measure(program, size, rounds, batch_invariant=False):
    """The row of a program in a result; ``size`` is "small" or "real"."""
    row: dict[str, Any] = dict(
        program=program.name, dtype=program.dtype, devices=program.devices, size=getattr(program, size), sides={}
    )
    if program.devices > (here := len(jax.devices())):
        return row | dict(skipped=f"needs {program.devices} devices, JAX has {here}")
    with jax.enable_x64(program.dtype == "float64"):
        try:
            step, arguments = program.make(jnp.dtype(program.dtype), **row["size"])
        except ModuleNotFoundError as error:
            return row | dict(skipped=f"not installed: {error.name}")
        except Exception as error:
            failed = dict(error=described(error))
            return row | dict(sides={XLA: failed, OURS: failed})
        steps = _begun(program, row, step, arguments, batch_invariant)
        del arguments
        _time(row, steps, rounds)
    return row


def _begun(program, row, step, arguments, batch_invariant):
    """The sides' steps, each after its first call; XLA's results and ours are compared."""
    steps, results = {}, {}
    functions = {XLA: step, OURS: program.accelerate(step)}
    if batch_invariant:
        functions[INVARIANT] = program.accelerate(step, schedule=jax_streamk.Auto(batch_invariant=True))
    for name, function in functions.items():
        side: dict[str, Any] = {}
        row["sides"][name] = side
        with recorded(side):
            one = _Step(program, function, jax.device_put(arguments, may_alias=False))
            side |= one.compiled()
            results[name], side["device_peak_bytes"] = one.first()
            steps[name] = Program(one, jax.block_until_ready, 1)
    if XLA in results and OURS in results:
        failed: dict[str, str] = {}
        with recorded(failed):
            _compare(program, row, arguments, results)
        if failed:
            row["not_compared"] = failed["error"]
    return steps


def _time(row, steps, rounds):
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in [*steps, *reversed(steps)] * rounds:
        side = row["sides"][name]
        if "error" in side:
            continue
        with recorded(side):
            repeat(steps[name], 2)
            if "steps" not in row:
                row["steps"] = min(MOST_STEPS, max(FEWEST_STEPS, round(RUN_SECONDS / wall(steps[name], 2))))
            samples[name].append(wall(steps[name], row["steps"]) * 1e6)
    for name, side in row["sides"].items():
        if "error" not in side:
            side[MEASURE] = timing.summary(samples[name])
    xla, *others = row["sides"].values()
    for side in others:
        if MEASURE in xla and MEASURE in side:
            side["ratio"] = {MEASURE: xla[MEASURE]["median_us"] / side[MEASURE]["median_us"]}


class _Step:
    """A compiled step and its arguments, with which it goes on at every call."""

    def __init__(self, program, function, arguments, **options):
        donated = dict(donate_argnums=0) if program.carries else {}
        self._jitted = program.jit(function, **donated, **options)
        self._carries = program.carries
        self._arguments = arguments

    def __call__(self):
        out = self._jitted(*self._arguments)
        if self._carries:
            self._arguments = (out[0], *self._arguments[1:])
        return out

    def compiled(self):
        """What XLA made of it: our calls, copies and transposes in the optimized HLO, and bytes on a device."""
        program = self._jitted.lower(*self._arguments).compile()
        text, memory = program.as_text(), program.memory_analysis()
        return dict(
            custom_calls=text.count('custom_call_target="jax_streamk_'),
            copies=len(re.findall(r" copy(?:-start)?\(", text)),
            transposes=len(re.findall(r" transpose\(", text)),
            argument_bytes=memory.argument_size_in_bytes,
            peak_bytes=memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        )

    def first(self):
        """The arrays of result and arguments after the first call, and the most bytes that it added to a device's.

        These bytes are None where the backend does not count them, or where something before needed more.
        """
        device = jax.devices()[0]
        before = device.memory_stats()
        arrays = jax.block_until_ready(jax.tree.leaves((self(), self._arguments)))
        if not before:
            return arrays, None
        after = device.memory_stats()["peak_bytes_in_use"]
        return arrays, after - before["bytes_in_use"] if after > before["peak_bytes_in_use"] else None


def _compare(program, row, arguments, results):
    """Adds to each side's record how far its result is from that of a wider dtype, in its worst array.

    Ours is ``wrong`` if the median array is more than twice as far as XLA's, rounding apart, or the worst too far.
    """
    xla, ours = row["sides"][XLA], row["sides"][OURS]
    if program.dtype not in WIDER:
        difference = max(_relative_errors(results[OURS], results[XLA]), default=0.0)
        ours |= dict(relative_error=_finite(difference), wrong=not difference <= GROSS_DIFFERENCE)
        return
    wanted = _wider(program, row["size"], arguments)
    with jax.enable_x64(True):
        errors = {name: _relative_errors(arrays, wanted) for name, arrays in results.items()}
    judged = [at for at, error in enumerate(errors[XLA]) if error <= MEANINGLESS_ERROR]
    errors = {name: sorted(values[at] for at in judged) or [0.0] for name, values in errors.items()}
    xla["relative_error"], worst = (errors[name][-1] for name in (XLA, OURS))
    median = {name: values[len(values) // 2] for name, values in errors.items()}
    is_right = median[OURS] <= 2 * median[XLA] + float(jnp.finfo(program.dtype).eps) and worst <= WORST_ERROR
    ours |= dict(relative_error=_finite(worst), wrong=not is_right)


def _wider(program, size, arguments):
    """What ``_Step.first`` returns of the step in a wider dtype, on the same numbers."""
    wide = WIDER[program.dtype]
    with jax.enable_x64(wide == "float64"), jax.default_matmul_precision("highest"):
        steps = []

        def shaped():
            step, arguments = program.make(jnp.dtype(wide), **size)
            steps.append(step)
            return arguments

        structure: Any = jax.tree.structure(jax.eval_shape(shaped))

        def cast(x):
            return x.astype(jnp.promote_types(x.dtype, wide)) if _is_rounded(x) else x

        wider = structure.unflatten(map(cast, jax.tree.leaves(arguments)))
        # XLA's autotuning would take time for what runs once.
        options = dict(compiler_options={"xla_gpu_autotune_level": 0}) if program.jit is jax.jit else {}
        return _Step(program, steps[0], wider, **options).first()[0]


@jax.jit
def _relative_norms(arrays, wanted):
    def relative(x, y):
        wide = jnp.promote_types(x.dtype, y.dtype)
        x, y = x.astype(wide), y.astype(wide)
        return jnp.linalg.norm((x - y).ravel()) / jnp.maximum(jnp.linalg.norm(y.ravel()), jnp.finfo(wide).tiny)

    return [relative(x, y) for x, y in zip(arrays, wanted)]


def _is_rounded(x):
    """Whether a wider dtype makes its numbers more exact: not those of quantized weights, which are given."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _relative_errors(arrays, wanted):
    """The error of each array of floating-point numbers, in root mean square; infinite where it is not finite."""
    floating = [(x, y) for x, y in zip(arrays, wanted) if _is_rounded(x)]
    errors = map(float, _relative_norms(*map(list, zip(*floating))))
    return [error if math.isfinite(error) else math.inf for error in errors]


def _finite(error):
    return error if math.isfinite(error) else None
