"""Compares a plan with XLA's own product, each in a program of dependent calls."""

import dataclasses
import itertools
import math
import statistics
import warnings
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jax_streamk import _ffi
from jax_streamk.plan import custom_call
from jax_streamk.product.dense import Dense
from jax_streamk.product.epilogue import Epilogue
from jax_streamk.product.ragged import Ragged
from jax_streamk.product.scaled import PARTS, Scaled
from jax_streamk.tuning import measure, timing
from jax_streamk.tuning.programs import Program, dependent, repeat, wall, wall_sample

_ROUNDS = 5  # in which ours and XLA's are timed in turn on a CPU
_LEAST_CALLS, _MOST_CALLS = 16, 64  # in a program: to outlast its launch, and to compile in time
_MOST_COPIED = 8e9  # bytes that lax's ragged product may take for copies


def xla_ratio(plan, memory, rounds):
    """XLA's time over a ``Plan``'s on the device of ``memory``: the largest ratio of at most ``rounds`` rounds.

    The first round that ours wins is the last. The ratio is 0 if XLA's product is less exact, if lax's ragged product
    has no such epilogue or copies too much, or, with a warning, if something failed. The plan must have a kernel.

    Raises:
      RuntimeError: measuring was stopped.
    """
    if plan.problem.math == _ffi.Math.tf32x3:  # XLA would multiply TF32 once
        return 0.0
    if plan.problem.second_column or (plan.problem.is_ragged and not _has_xlas(plan.problem)):
        return 0.0
    largest = 0.0
    try:
        with jax.enable_x64(True):  # a float64 problem may be tuned where 64-bit types are disabled
            operands = operands_of(plan, memory)
            programs = [dependent(product(plan), operands) for product in (ours, xlas)]
            for _ in range(rounds):
                memory.check_running()
                our_time, xla_time = map(wall_sample, programs)
                largest = max(largest, xla_time / our_time)
                if largest > 1:
                    break
    except Exception as error:  # running out of memory raises many types
        memory.check_running()
        warnings.warn(
            f"jax_streamk could not compare {plan.problem} with XLA's product: {type(error).__name__}: {error}"
        )
        return 0.0
    return largest


def times(plan, *, has_ours, has_xla):
    """Microseconds of a ``Plan``'s product and of XLA's on its device, which is of this process; None if not asked for.

    On a GPU it is the time of the kernels, on a CPU that of programs of dependent calls.

    Raises:
      ValueError: this process has not the device.
      RuntimeError: running failed.
    """
    memory = measure.Memory(plan.device)
    asked = {name: product(plan) for name, product, has in (("ours", ours, has_ours), ("xla", xlas, has_xla)) if has}
    known = dataclasses.replace(plan, microseconds=plan.microseconds or 1e3)  # which says how many calls to make
    with jax.enable_x64(True):  # types are the problem's, whatever programs may have elsewhere
        operands = operands_of(known, memory)
        if plan.device.platform == "cuda":
            microseconds = {name: _device_time(product, operands) for name, product in asked.items()}
        else:
            programs = {name: dependent(product, operands) for name, product in asked.items()}
            rounds = [{name: wall_sample(x) for name, x in programs.items()} for _ in range(_ROUNDS)]
            microseconds = {name: statistics.median(each[name] for each in rounds) for name in asked}
    return microseconds.get("ours"), microseconds.get("xla")


def _device_time(product, operands):
    one = jax.jit(product)
    program = Program(lambda: [one(*xs) for xs in operands], jax.block_until_ready, len(operands))
    repeat(program, 1)
    return timing.summary(timing.device_samples(program)[0])["median_us"]


def ours(plan):
    """A ``Plan``'s product as a function of its operands. They and D are flat, as long as strides reach."""
    _, d = measure.spans(plan.problem)["d"]
    workspace = jax.ShapeDtypeStruct((plan.workspace_bytes,), np.uint8)
    results = jax.ShapeDtypeStruct((d,), plan.problem.type_d.dtype), workspace
    call, attributes = jax.ffi.ffi_call(custom_call.target(plan), results), custom_call.attributes(plan)
    return lambda *operands: call(*operands, **attributes)[0]


def xlas(plan):
    """XLA's product of the same operands. D is contiguous, even if the plan's strides interleave its dimensions."""
    p = plan.problem
    if p.is_ragged:
        return _xlas_ragged(p)
    batch, of_a, of_b = (
        (p.batch,) if p.batch > 1 and stride else () for stride in (1, p.batch_stride_a, p.batch_stride_b)
    )
    row_a, row_b = (major == _ffi.Major.row for major in (p.major_a, p.major_b))
    both = of_a and of_b
    a, b = (*of_a, *((p.m, p.k) if row_a else (p.k, p.m))), (*of_b, *((p.k, p.n) if row_b else (p.n, p.k)))
    bias = (*batch, p.n) if p.batch > 1 and p.batch_stride_bias else (p.n,)
    bias_batch, contract_b = len(bias) - 1 if both else 0, len(of_b) + 1 - row_b
    gate = None if not p.gated else "stacked" if p.up_offset else "pair"
    if gate == "stacked":
        # The matrices are one after the other, or line by line.
        at = len(of_b) + (p.up_offset < p.ldb)
        b, bias, contract_b = (*b[:at], 2, *b[at:]), (*bias[:-1], 2, p.n), contract_b + (at <= contract_b)
    pairs = 1 + (gate == "pair")
    shapes = [a, *[b] * pairs, *[bias] * (p.has_bias * pairs)]
    shapes += [(*(both or of_a), p.m, *([] if both else of_b), p.n)] * p.has_residual
    activation = None if p.activation == _ffi.Activation.none else p.activation.name
    numbers = ((len(of_a) + row_a,), (contract_b,)), ((0,), (0,)) if both else ((), ())
    epilogue = Epilogue(activation, p.alpha, p.beta, p.has_bias, bias_batch, p.has_residual, gate)
    product = Dense(numbers, None, p.type_d.dtype, epilogue)
    product, of_parts = _by_numbers(product, p, a, b)
    shapes += of_parts
    return lambda *operands: product.by_xla(*(x.reshape(shape) for x, shape in zip(operands, shapes))).reshape(-1)


def _by_numbers(product, p, a, b):
    """The product by numbers, if these have scales, and the shapes of what belongs to each block of them."""
    parts = [part for part, has in zip(PARTS, (p.scale_rows, p.has_zero, p.has_offset)) if has]
    if not parts:
        return product, []

    def of_blocks(shape, blocks, major):
        *lead, rows, columns = shape
        blocks = blocks[:: 1 if major == _ffi.Major.row else -1]
        return (*lead, rows // blocks[0], columns // blocks[1])

    shapes = [of_blocks(b, (p.scale_rows, p.scale_columns), p.major_b)] * len(parts)
    if not p.scale_rows_of_a:
        return Scaled.by(product, p.type_a.dtype, tuple(parts)), shapes
    shapes.append(of_blocks(a, (p.scale_rows_of_a, p.scale_columns_of_a), p.major_a))
    return Scaled.by(product, p.type_d.dtype, tuple(parts), of_both=True), shapes


def _has_xlas(p):
    """Whether a ragged product is compared with lax's: without epilogue and rows before the groups, if that fits."""
    copies = p.batch * p.m * p.k * p.type_a.dtype.itemsize
    is_plain = p.activation == _ffi.Activation.none and not (p.has_bias or p.gated or p.leading_rows or p.gathered_rows)
    return is_plain and copies <= _MOST_COPIED


def _xlas_ragged(p):
    row_a, row_b = (major == _ffi.Major.row for major in (p.major_a, p.major_b))
    a = (p.m, p.k) if row_a else (p.k, p.m)
    along_m = p.ragged == _ffi.Ragged.m
    b = (*[p.batch] * along_m, *((p.k, p.n) if row_b else (p.n, p.k)))
    contract = (((int(row_a),), (along_m + (not row_b),)), ((), ()))
    numbers = lax.RaggedDotDimensionNumbers(contract, (int(row_a != along_m),), (0,) * along_m)
    product, of_parts = _by_numbers(Ragged(numbers, None, p.type_d.dtype), p, a, b)
    shapes = [a, b, (p.batch,), *of_parts]
    return lambda *operands: product.by_xla(*(x.reshape(shape) for x, shape in zip(operands, shapes))).reshape(-1)


def operands_of(plan, memory):
    """The operands of each call: enough sets to keep the larger operand out of L2, but at most ``_MOST_CALLS``."""
    spans = measure.spans(plan.problem)
    parts = {role: (size, type_.dtype) for role, (type_, size) in spans.items() if role not in ("d", "group_sizes")}
    larger = max(size * t.itemsize for size, t in (parts["a"], parts["b"]))
    rotated = math.ceil(measure.ROTATED_BYTES[memory.device.platform] / larger)
    calls = max(1, min(max(_LEAST_CALLS, rotated), _MOST_CALLS, int(measure.LONGEST_PASS / plan.microseconds)))
    sets = min(rotated, calls)

    def put(size, dtype):
        return [
            memory.put(x) for x in np.split(measure.random_bytes(dtype, sets * size * dtype.itemsize).view(dtype), sets)
        ]

    drawn = {role: put(*part) for role, part in parts.items()}
    if "group_sizes" in spans:
        drawn["group_sizes"] = [memory.put(measure.group_sizes(plan.problem))] * sets
    in_order = (drawn[role] for role in _ffi.roles if role in drawn)
    return [*itertools.islice(itertools.cycle(zip(*in_order)), calls)]


def fragment_programs(variants, memory):
    """The ``Program`` of each variant of a fragment, a closed jaxpr by name, on the same random operands."""
    avals = variants["xla"].in_avals
    link = _link(variants["xla"])
    rotated = math.ceil(measure.ROTATED_BYTES[memory.device.platform] / max(x.size * x.dtype.itemsize for x in avals))
    one = dependent(_first_of(variants["xla"], avals[link].ndim), [*zip(*(_random(x, 1, memory) for x in avals))], link)
    repeat(one, 1)  # compiles it
    microseconds = wall(one, 1) * 1e6
    calls = max(1, min(max(_LEAST_CALLS, rotated), _MOST_CALLS, int(measure.LONGEST_PASS / microseconds)))
    sets = zip(*(_random(x, min(rotated, calls), memory) for x in avals))
    operands = [*itertools.islice(itertools.cycle(sets), calls)]
    return {name: dependent(_first_of(closed, avals[link].ndim), operands, link) for name, closed in variants.items()}


def _link(closed):
    """The smallest operand that a product of a fragment depends on: not one number, by which results could grow."""
    jaxpr = getattr(closed, "jaxpr", closed)
    needed = set[Any]()
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    for eqn in reversed(jaxpr.eqns):
        if eqn in products or not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if not hasattr(x, "val"))
    sizes = {i: x.aval.size for i, x in enumerate(jaxpr.invars) if x in needed}
    return min(sizes, key=lambda i: (sizes[i] == 1, sizes[i]))


def _first_of(closed, ndim):
    """A function of a fragment's operands that returns one element, after all results are there."""

    def run(*operands):
        first, *_ = lax.optimization_barrier(tuple(jaxpr_as_fun(closed)(*operands)))
        return first.reshape(-1)[:1].reshape((1,) * ndim)

    return run


def has_64_bits(closed):
    """Whether a fragment has values of 64-bit types."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = (x for eqn in jaxpr.eqns for x in (*eqn.invars, *eqn.outvars))
    return any(x.aval.dtype.itemsize == 8 for x in values)


def _random(aval, sets, memory):
    """Arrays of a type: of random numbers, or of zeros and ones."""
    shape = (sets, *aval.shape)
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating) or aval.dtype == np.int8:
        arrays = (
            measure.random_bytes(aval.dtype, sets * aval.size * aval.dtype.itemsize).view(aval.dtype).reshape(shape)
        )
    else:
        arrays = np.random.default_rng().integers(0, 2, shape).astype(aval.dtype)
    return [memory.put(x) for x in arrays]
