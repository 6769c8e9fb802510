"""Lowers chains to one custom call each, or to their equations where that cannot be."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.interpreters import mlir

from jax_streamk import compat, schedules
from jax_streamk.device import Device, device_for_lowering
from jax_streamk.lower import lowering
from jax_streamk.plan import alternatives, custom_call, planner
from jax_streamk.product import kinds, rows
from jax_streamk.product.chain import chain_p
from jax_streamk.product.fused import fused_p
from jax_streamk.product.primitive import product_p

_ALIGNMENT = 256  # of values in the workspace, in bytes


class Broken(Exception):
    """Where a chain breaks, and why."""

    def __init__(self, eqn, why):
        place, names = compat.place_of(eqn)
        super().__init__(f"it breaks at {place or names or eqn.primitive.name}: {why}")


@dataclasses.dataclass(frozen=True)
class ProductStep:
    """A product, the variables of its operands, and that of its result.

    ``changes`` are what is done to the operands first, and ``types`` what they are then (``lowering.changes_of``).
    """

    way: alternatives.Way
    operands: tuple[Any, ...]
    changes: Sequence[Any]
    types: Sequence[Any]
    result: Any

    @property
    def made(self):
        return (self.result,)

    def reads(self):
        """The variables that it reads from memory."""
        return self.operands


@dataclasses.dataclass(frozen=True)
class Chain:
    """The steps of a chain on one device.

    Attributes:
      before: equations of what no product makes, which XLA computes.
      steps: ``ProductStep``s and ``rows.Program``s.
      places: by variable that a step stores, how many bytes from the start of the workspace, or -1 - the number of the
        result that it is.
      results: for each result of the chain, the variable that has its elements.
      workspace_bytes: of the values between, and of one product at a time.
    """

    before: tuple[Any, ...]
    steps: tuple[Any, ...]
    places: dict[Any, int]
    results: tuple[Any, ...]
    workspace_bytes: int

    @property
    def products(self):
        return [step for step in self.steps if isinstance(step, ProductStep)]

    def stored(self):
        """The variables that are results of the call, in order."""
        return sorted((x for x, place in self.places.items() if place < 0), key=lambda x: -self.places[x])

    def read(self):
        """The variables that the steps read and do not make: arguments, or results of ``before``."""
        reads = (x for step in self.steps for x in step.reads())
        return list(dict.fromkeys(x for x in reads if x not in self.places))


@functools.lru_cache(maxsize=64)
def chain_of(jaxpr, schedule, device):
    """The ``Chain`` of a closed jaxpr, with a schedule for products in it that are JAX's. Raises ``Broken``."""
    return Growing(schedule, device).chain(jaxpr)


class Growing:
    """A chain that equations are added to. Arguments are as of ``chain_of``."""

    def __init__(self, schedule: Any, device: Device):
        self._schedule, self._device = schedule, device
        self._env: dict[Any, Any] = {}  # the variables of equations that were added
        self._before: list[Any] = []
        self._maker: dict[Any, Any] = {}  # of what is computed before
        self._made: set[Any] = set()  # what products, and what follows them, make
        self._root: dict[Any, Any] = {}  # the variable in memory that has the elements of another
        self._cut: dict[Any, Any] = {}  # of some columns: the variable that has all, their number, the first of these
        self._steps: list[Any] = []  # products, and Rows that may still grow
        self._makers: dict[Any, Any] = {}  # the equation that makes a variable of a step

    def add(self, eqn):
        """Adds an equation. Raises ``Broken`` if the chain cannot have it, and may have added part of it."""
        self._add_all([eqn], self._env)

    def chain(self, closed):
        """The ``Chain`` of a closed jaxpr, if nothing was added before."""
        jaxpr = getattr(closed, "jaxpr", closed)
        env = self._add_all(jaxpr.eqns, {})
        results = [self._rooted(x) for x in _variables(_resolved(jaxpr.outvars, env))]
        are_variables = bool(results) and len(results) == len(jaxpr.outvars)
        is_made = are_variables and self._made.issuperset(results) and self._cut.keys().isdisjoint(results)
        if jaxpr.eqns and not is_made:
            raise Broken(jaxpr.eqns[-1], "a result is not made by a product, or from one")
        return self._finished(results)

    def _add_all(self, eqns, env):
        """Adds equations; ``env`` has the variables that theirs stand for, and then also those of their results."""
        for eqn in eqns:
            invars = _resolved(eqn.invars, env)
            body = eqn.params["call_jaxpr"].jaxpr if eqn.primitive is fused_p else compat.called(eqn)
            is_mixed = body is not None and (_has_product(body.eqns) or not self._made.isdisjoint(_variables(invars)))
            if is_mixed:
                if body.constvars:
                    raise Broken(eqn, "a function in it closes over arrays: make them its arguments")
                inner = self._add_all(body.eqns, dict(zip(body.invars, invars)))
                env |= dict(zip(eqn.outvars, _resolved(body.outvars, inner)))
                continue
            outvars = [compat.new_var(x.aval) for x in eqn.outvars]
            env |= dict(zip(eqn.outvars, outvars))
            self._add(eqn.replace(invars=invars, outvars=outvars))
        return env

    def _add(self, eqn):
        if eqn.effects:
            raise Broken(eqn, f"{eqn.primitive.name} has effects")
        if (kind := kinds.KINDS.get(eqn.primitive)) is not None:
            if (why := kind.why_not(eqn)) is not None:
                raise Broken(eqn, why)
            eqn = kinds.of_ours(eqn, self._schedule)
        if eqn.primitive is product_p:
            product, last = self._product(eqn), self._steps[-1:]
            # Before a program that it needs nothing of, which may then grow by what reads the product.
            is_apart = last and isinstance(last[0], rows.Rows) and last[0].made.isdisjoint(product.operands)
            self._steps.insert(len(self._steps) - bool(is_apart), product)
        elif self._made.isdisjoint(_variables(eqn.invars)):
            self._before.append(eqn)
            self._maker.update((x, eqn) for x in eqn.outvars)
            return
        elif not self._is_added_to_last(eqn):
            columns, x = rows.first_columns(eqn), eqn.invars[0]
            if (rows.is_view(eqn) or columns is not None) and self._rooted(x) in self._cut:
                raise Broken(eqn, f"{eqn.primitive.name} is of some columns only")
            if rows.is_view(eqn):
                self._root[eqn.outvars[0]] = self._rooted(x)
            elif columns is not None:
                self._cut.update(
                    (out, (self._rooted(x), x.aval.shape[-1], at)) for out, at in zip(eqn.outvars, columns)
                )
            else:
                self._begin_rows(eqn)
        self._made.update(eqn.outvars)
        self._makers.update((x, eqn) for x in eqn.outvars)

    def _is_added_to_last(self, eqn):
        """Whether the last step is a program of rows that may have an equation, and now has."""
        last = self._steps[-1]
        if not isinstance(last, rows.Rows) or (rows.is_view(eqn) and eqn.invars[0] not in last.made):
            return False
        # A program does not read from memory what it stores itself.
        if any(x not in last.made and self._in_memory(x) in last.made for x in _variables(eqn.invars)):
            return False
        try:
            last.add(eqn)
        except rows.Unsupported:
            return False
        return True

    def _begin_rows(self, eqn):
        first = next(x for x in _variables(eqn.invars) if x in self._made)
        try:
            new = rows.Rows(first.aval.shape, self._maker, self._cut)
            new.add(eqn)
        except rows.Unsupported as why:
            raise Broken(eqn, why) from None
        self._steps.append(new)

    def _product(self, eqn):
        params, avals = eqn.params, [compat.local_aval(x.aval) for x in eqn.invars]
        product, operands, avals = params["product"].without_transposes(eqn.invars, avals, self._transpose_behind)
        try:
            way = alternatives.plan(product, product.by_role(avals), params["schedule"], self._device)
        except ValueError as why:
            raise Broken(eqn, why) from None
        if way.plan.kernel is None and way.arrangement is not None:  # XLA's alone may be faster, but ends the chain
            of_forward = schedules.of_forward(params["schedule"])
            way = dataclasses.replace(way, plan=planner.plan_with(way.plan.problem, of_forward, self._device, None))
        if way.instead is not None or way.plan.kernel is None:
            raise Broken(eqn, "; ".join(("no single kernel computes this product", *way.plan.reasons)))
        changes, types = lowering.changes_of(way, product, avals)
        for x, change in zip(operands, changes):
            if change is not None and x in self._made:
                raise Broken(eqn, f"its operand of shape {x.aval.shape} would be copied first")
            if self._rooted(x) in self._cut:
                raise Broken(eqn, f"its operand of shape {x.aval.shape} is of some columns only")
        if way.arrangement.permute_result is not None:
            raise Broken(eqn, "its result would be transposed afterwards")
        return ProductStep(way, tuple(map(self._rooted, operands)), changes, types, eqn.outvars[0])

    def _transpose_behind(self, x):
        eqn = self._maker.get(x)
        if eqn is None or eqn.primitive.name != "transpose":
            return None
        return eqn.invars[0], tuple(eqn.params["permutation"])

    def _rooted(self, x):
        while x in self._root:
            x = self._root[x]
        return x

    def _in_memory(self, x):
        """The variable in memory that has a variable's elements, perhaps among others."""
        return self._cut[x][0] if x in self._cut else self._rooted(x)

    def _finished(self, results):
        """The ``Chain``, once it is known which values later steps read."""
        read = [set(map(self._rooted, step.reads())) for step in self._steps]
        is_read_after = lambda x, at: any(x in later for later in read[at + 1 :])
        of_products = (step.way.plan.workspace_bytes for step in self._steps if isinstance(step, ProductStep))
        workspace = _Workspace(max((size or 0 for size in of_products), default=0))
        places = {x: -1 - at for at, x in enumerate(dict.fromkeys(results))}
        steps = []
        for at, step in enumerate(self._steps):
            stored = list(step.made)
            if isinstance(step, rows.Rows):
                stored = [x for x in stored if x in results or is_read_after(x, at)]
                step = self._program(step, stored)
            steps.append(step)
            places |= {x: workspace.taken(x.aval) for x in stored if x not in places}
            # The next step may begin before this one ends, but writes after it.
            for x in read[at]:
                if places.get(x, -1) >= 0 and not is_read_after(x, at):
                    workspace.give_back(places[x])
        return Chain(tuple(self._before), tuple(steps), places, tuple(results), workspace.bytes)

    def _program(self, step, stored):
        try:
            program = step.program(stored, self._device)
        except rows.Unsupported as why:
            raise Broken(self._makers[next(iter(step.made))], why) from None
        return dataclasses.replace(program, places=tuple(map(self._rooted, program.places)))


class _Workspace:
    """Places of values between steps, after the one that products use in turns."""

    def __init__(self, of_products):
        self.bytes = _aligned(of_products)
        self._sizes, self._free = {}, []

    def taken(self, aval):
        size = _aligned(aval.size * aval.dtype.itemsize)
        fitting = [place for place in self._free if self._sizes[place] >= size]
        if fitting:
            place = min(fitting, key=self._sizes.__getitem__)
            self._free.remove(place)
            return place
        place = self.bytes
        self._sizes[place] = size
        self.bytes += size
        return place

    def give_back(self, place):
        self._free.append(place)


def _aligned(size):
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _variables(operands):
    return [x for x in operands if isinstance(x, Var)]


def _resolved(variables, env):
    return [x if isinstance(x, Literal) else env.get(x, x) for x in variables]


def _has_product(eqns):
    bodies = ((eqn, compat.called(eqn)) for eqn in eqns)
    are_products = {product_p, fused_p, *kinds.KINDS}
    return any(eqn.primitive in are_products or (body and _has_product(body.eqns)) for eqn, body in bodies)


def _lower(ctx, *operands, **params):
    rules = {platform: functools.partial(_lower_on, platform=platform) for platform in ("cpu", "cuda")}
    return compat.lower_per_platform(ctx, rules, _lower_apart, *operands, **params)


def _lower_apart(ctx, *operands, jaxpr, schedule):
    del schedule
    return compat.lowered_inline(ctx, *operands, call_jaxpr=jaxpr)


def _lower_on(ctx, *operands, platform, jaxpr, schedule):
    """Lowers to one call, or to the equations where devices divide them, or a rule has changed them."""
    apart = functools.partial(_lower_apart, ctx, *operands, jaxpr=jaxpr, schedule=schedule)
    if not lowering.is_on_one_device(ctx) or lowering.why_not_here(ctx, platform, schedule) is not None:
        return apart()
    lowering.check_build(platform)
    try:
        chain = chain_of(jaxpr, schedule, device_for_lowering(platform))
    except Broken:
        return apart()
    invars = list(getattr(jaxpr, "jaxpr", jaxpr).invars)
    values = dict(zip(invars, operands))
    computed = [x for x in chain.read() if x not in values]
    if computed:
        before = compat.closed(invars, list(chain.before), *computed)
        lowered = compat.lowered_inline(ctx.replace(avals_out=before.out_avals), *operands, call_jaxpr=before)
        values |= dict(zip(computed, lowered))
    return _Call(ctx, chain, values, platform).results()


class _Call:
    """The custom call of a chain.

    Attributes:
      arguments: once ``attributes`` have been asked for: the lowered value and its type, by what it is of.
    """

    def __init__(self, ctx, chain, values, platform):
        self._ctx, self._chain, self._values, self._platform = ctx, chain, values, platform
        self.arguments = {}

    def results(self):
        attributes = {name: mlir.ir_attribute(value) for name, value in self.attributes().items()}
        given, types = zip(*self.arguments.values())
        stored = [compat.local_aval(x.aval) for x in self._chain.stored()]
        workspace = stored[0].update(shape=(self._chain.workspace_bytes,), dtype=np.dtype(np.uint8))
        call = jax.ffi.ffi_lowering(custom_call.CHAIN_TARGETS[self._platform], backend_config=attributes)
        with compat.named(self._ctx, "chain"):
            out = call(self._ctx.replace(avals_in=list(types), avals_out=[*stored, workspace]), *given)
            by_root = dict(zip(self._chain.stored(), out))
            pairs = zip(self._chain.results, self._ctx.avals_out)
            return [compat.lowered_reshape(by_root[x], aval.shape) for x, aval in pairs]

    def attributes(self):
        """What the call carries: a dictionary for each step, in the order of their names."""
        steps = [self._of_product(x) if isinstance(x, ProductStep) else self._of_rows(x) for x in self._chain.steps]
        return {
            f"step_{at:06}": fields | dict(places=np.array(list(map(self._number, places)), np.int64))
            for at, (fields, places) in enumerate(steps)
        }

    def _number(self, place):
        """A place as handlers read it: results follow arguments."""
        return -1 - place.at if isinstance(place, _Argument) else place if place >= 0 else place - len(self.arguments)

    def _place(self, x, aval=None, change=None):
        """The place of a variable; of an argument, as ``change`` makes it, which has the type ``aval`` then."""
        if x in self._chain.places:
            return self._chain.places[x]
        aval = aval or compat.local_aval(x.aval)
        key = (x,) if change is None else (x, *change.args)
        if key not in self.arguments:
            value = self._values[x]
            self.arguments[key] = (value if change is None else change(self._ctx, value)), aval
        return _Argument([*self.arguments].index(key))

    def _of_rows(self, program):
        return dict(rows=program.attributes()), list(map(self._place, program.places))

    def _of_product(self, step):
        places = list(map(self._place, step.operands, step.types, step.changes))
        if step.way.arrangement.swapped:
            places[:2] = places[1::-1]
        product = custom_call.attributes(step.way.plan)
        return dict(product=product), [*places[:2], self._chain.places[step.result], *places[2:], 0]


@dataclasses.dataclass(frozen=True)
class _Argument:
    """The place of an argument, by its number."""

    at: int


mlir.register_lowering(chain_p, _lower, cacheable=False)
