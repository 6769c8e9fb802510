"""Fuses what follows a product into its kernel's epilogue, in the equations of a jaxpr, where that pays.

- A bias saves a rounding at least, and so does a conversion of a small result to a wider type.
- A scale costs nothing if its result is stored. Otherwise XLA merges it with what reads it.
- A residual saves a pass over the result if the sum is stored, or read more than once.
- An activation saves one if its result is stored. If only elementwise operations and reductions read it, XLA merges it
  with them, and a kernel would do no less.
- A gate saves reading one operand twice, storing both products and a launch.

The kernel must not take longer, by the model, than that saves, nor a gated one longer than its products apart. What
``tuning()`` measured of a product with the equations around it decides instead. Batch-invariant products are fused
whatever the number of rows, with all epilogues except a conversion to a wider type.

The kernel keeps the equations that it replaces as its derivative: a program that is differentiated later has that of
the program as it was written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jax_streamk import compat
from jax_streamk.accelerate import activations
from jax_streamk.accelerate.equations import Equations, bytes_of, is_merged, is_view, variables
from jax_streamk.accelerate.followers import Addend, Follower, Tail, may_have_epilogue
from jax_streamk.device import Device
from jax_streamk.plan import alternatives, cost_model
from jax_streamk.product.epilogue import Epilogue
from jax_streamk.product.fused import fused_p
from jax_streamk.product.primitive import product_p
from jax_streamk.tuning import tuned

# How many times as long a kernel may take to save a rounding, and to leave a result unrounded, by which routers choose.
_FREE, _WIDER = 1.01, 1.05
_SMALL = 1 / 4  # of the operands' bytes: reading such a result in a wider type costs little


def fused(
    program: Equations, device: Device, measured: Mapping[Any, tuned.FragmentTimes] | None = None
) -> list[Any] | None:
    """The equations of a program with epilogues in our products; None if there is nothing to fuse.

    ``measured``: what tuning found, by the results of products.
    """
    taken, needless = set[int](), set[int]()
    calls: dict[int, Any] = {}
    times: dict[Any, float | None] = {}  # of products, which repeat from layer to layer
    # The last product first: its residual may be the sum that ends another's tail.
    for at in reversed(range(len(program.eqns))):
        if at in taken or not may_have_epilogue(program.eqns[at]):
            continue
        fragment_times = (measured or {}).get(program.eqns[at].outvars[0])
        if fragment_times is not None and fragment_times.winner != "fused":
            continue
        follower = Follower(program, at, taken)
        for tail in reversed([*follower.tails()]):
            fusion = _Fusion(follower, tail, at, device, times, is_measured=fragment_times is not None)
            if (call := fusion.call()) is not None:
                program.live.update(variables(call))
                taken.update((at, *tail.taken))
                calls[tail.taken[-1]] = call
                needless.update(fusion.steps)
                break
    return _with_calls(program, calls, taken, needless) if calls else None


def _with_calls(program: Equations, calls: dict[int, Any], taken: set[int], needless: set[int]) -> list[Any]:
    """The equations with ``calls`` for those ``taken``, without ``needless`` ones that nothing else reads."""
    used, out = set(program.live), []
    for at in reversed(range(len(program.eqns))):
        eqn = calls.get(at, None if at in taken else program.eqns[at])
        if eqn is None or (at in needless and used.isdisjoint(eqn.outvars)):
            continue
        used.update(variables(eqn))
        out.append(eqn)
    return out[::-1]


class _Fusion:
    """A tail as one kernel.

    Attributes:
      steps: the program's equations that make its operands from those of the kernel.
    """

    def __init__(
        self,
        follower: Follower,
        tail: Tail,
        at: int,
        device: Device,
        times: dict[Any, float | None],
        is_measured: bool,
    ):
        self._program, self._product, self._taken = follower.program, follower.product, follower.taken
        self._is_in_memory, self._tail, self._at, self._device = follower.is_in_memory, tail, at, device
        self._times, self._is_measured = times, is_measured
        self.steps: tuple[int, ...] = ()

    def call(self) -> Any:
        """The call that replaces the tail; None if that does not pay, or no kernel can do it."""
        tail = self._tail
        if tail.last == "layout" or (tail.last == "wider" and not self._is_widened()):
            return None
        if self._product.is_ragged and tail.activation == "sigmoid" and not tail.matrices:
            return None  # rows in no group are 0.5 in the program, and 0 in the kernel
        needs_a_pass = tail.activation is not None or tail.residual is not None or tail.last == "scale"
        if needs_a_pass and not tail.matrices and not self._is_measured and not self._saves_a_pass():
            return None
        inside = self._ragged_kernel() if self._product.is_ragged else self._kernel()
        if inside is None:
            return None
        read = compat.free_variables(inside)
        # What the kernel reads is an argument, also of what it replaces.
        steps = (at for at in self.steps if self._program.eqns[at].outvars[0] not in read)
        replaced = [self._program.eqns[at] for at in sorted({self._at, *tail.taken, *steps})]
        inputs = list({**compat.free_variables(replaced), **read})
        jaxprs = dict(
            call_jaxpr=compat.closed(inputs, inside, inside[-1].outvars[0]),
            written=compat.closed(inputs, replaced, tail.out),
        )
        return self._product.eqn.replace(primitive=fused_p, params=jaxprs, invars=inputs, outvars=[tail.out])

    def _kernel(self) -> list[Any] | None:
        """The kernel's equation, after those of its operands; sets ``steps``."""
        tail, eqn, dtype = self._tail, self._product.eqn, self._tail.out.aval.dtype
        lead, rows, columns = self._product.sizes(tail.swapped)
        biases = [bias for bias in (tail.bias, tail.second_bias) if bias is not None]
        epilogue = Epilogue(
            activation=tail.activation,
            alpha=tail.alpha,
            beta=1.0 if tail.residual is None else tail.residual.scale,
            has_bias=bool(biases),
            bias_batch=0 if not biases else biases[0].batch,
            has_residual=tail.residual is not None,
            gate=(None, "stacked", "pair")[len(tail.matrices)],
        )
        operands = list(eqn.invars[1::-1] if tail.swapped else eqn.invars[:2])
        numbers, inside = self._product.product.numbers, list[Any]()
        if epilogue.is_pair:
            operands[1:] = tail.matrices
        elif epilogue.gate:
            stacked = _Stacked(eqn, self._program)
            if stacked.value is None:
                return None
            operands[1], columns = stacked.value, (2, math.prod(columns) // 2)
            numbers = stacked.dimension_numbers
            inside += stacked.eqns
        for operand, shape in (
            *((bias, (*lead[: epilogue.bias_batch], *columns)) for bias in biases),
            (tail.residual, (*lead, *rows, *columns)),
        ):
            if operand is None:
                continue
            placed = _Placement(eqn, operand, dtype, shape, is_small=operand is not tail.residual)
            if placed.value is None or (operand is tail.residual and not self._is_in_memory(placed.source)):
                return None
            operands.append(placed.value)
            inside += placed.eqns
            self.steps += placed.steps
        kernel = self._product_of([*operands, *eqn.invars[2:]], numbers, epilogue, dtype)
        return None if kernel is None else inside + kernel

    def _product_of(self, operands: list[Any], numbers: Any, epilogue: Epilogue, dtype: Any) -> list[Any] | None:
        tail, eqn = self._tail, self._product.eqn
        before = self._product.product
        product = before.replaced(numbers=numbers, preferred_element_type=dtype, epilogue=epilogue, permutation=None)
        if tail.swapped:
            product = product.turned
        params = eqn.params | dict(product=product)
        if tail.swapped or before.permutation is not None or epilogue.gate == "stacked":
            call = compat.new_eqn(eqn, product_p, *operands, **params)
        else:  # its type is known, and finding it takes as long as all else here
            result = compat.new_var(eqn.outvars[0].aval.update(dtype=dtype, weak_type=False))
            call = eqn.replace(params=params, invars=operands, outvars=[result])
        added = [x for role, x in product.by_role(operands).items() if role in ("bias", "up_bias", "residual")]
        if call is None or not all(compat.ends_like(call.outvars[0].aval, x.aval) for x in added):
            return None
        if not self._is_faster(self._time(operands, product)):
            return None
        if call.outvars[0].aval.shape == tail.out.aval.shape:
            is_alike = epilogue.gate != "stacked" or compat.is_placed_like(call.outvars[0].aval, tail.out.aval)
            return [call] if is_alike else None
        back = compat.reshaped(self._program.eqns[tail.taken[-1]], call.outvars[0], tail.out.aval.shape)
        return None if back is None or not compat.is_placed_like(back.outvars[0].aval, tail.out.aval) else [call, back]

    def _ragged_kernel(self) -> list[Any] | None:
        """The kernel's equation, of the program's own operands."""
        tail, eqn = self._tail, self._product.eqn
        gate, *up = tail.matrices or (eqn.invars[1],)
        operands = [eqn.invars[0], gate, *up, *eqn.invars[2:]]
        epilogue = Epilogue(activation=tail.activation, gate="pair" if up else None)
        product = self._product.product.replaced(preferred_element_type=tail.out.aval.dtype, epilogue=epilogue)
        if not self._is_faster(self._time(operands, product)):
            return None
        call = compat.new_eqn(eqn, product_p, *operands, **eqn.params | dict(product=product))
        return None if call is None or not compat.is_placed_like(call.outvars[0].aval, tail.out.aval) else [call]

    @property
    def _is_invariant(self) -> bool:
        return self._product.is_invariant

    def _is_widened(self) -> bool:
        """Whether a small product is only converted to a wider type; where XLA splits K, it does not round it."""
        if self._is_invariant:  # the number of rows must not decide
            return False
        tail, operands = self._tail, self._product.eqn.invars[:2]
        is_small = bytes_of(tail.out.aval) <= _SMALL * sum(bytes_of(x.aval) for x in operands)
        return is_small and tail == Tail(tail.out, tail.taken, last="wider")

    def _saves_a_pass(self) -> bool:
        """Whether XLA would store what the tail makes, or what it is made of would be read or written more often."""
        tail = self._tail
        if self._program.is_stored(tail.out, self._taken) or tail.last == "narrower":
            return True
        return tail.residual is not None and tail.activation is None and len(self._program.uses[tail.out]) > 1

    def _is_faster(self, time: float | None) -> bool:
        """Whether a kernel with an epilogue takes no longer than one without and what the epilogue saves."""
        if self._tail.matrices or self._is_measured or self._is_invariant:
            return time is not None
        plain = self._time(self._product.eqn.invars, self._product.product)
        if time is None or plain is None:
            return False
        tail = self._tail
        is_cheap = tail.residual is None and tail.activation is None
        most = _WIDER if tail.last == "wider" else _FREE if is_cheap else 1
        return time <= most * plain + self._saved()

    def _time(self, operands: Sequence[Any], product: Any) -> float | None:
        """The expected time of a product, in microseconds; None if no kernel runs it, or a gated one is slower."""
        avals, schedule = [x.aval for x in operands], self._product.eqn.params["schedule"]
        key = *avals, product, schedule
        if key not in self._times:
            plan = alternatives.plan_or_none(product, product.by_role(avals), schedule, self._device)
            has_kernel = plan is not None and plan.kernel is not None
            is_apart = self._tail.matrices and has_kernel and not plan.problem.gated
            self._times[key] = plan.microseconds if has_kernel and not is_apart else None
        return self._times[key]

    def _saved(self) -> float:
        """The time of the passes that a tail saves: of all readers', or of one reader of a sum."""
        program, out = self._program, self._tail.out
        size = bytes_of(out.aval)
        if not self._saves_a_pass():
            return 0.0
        if self._tail.last == "narrower":
            return self._passing(2 * (bytes_of(self._product.eqn.outvars[0].aval) - size), 0)
        readers = [program.eqns[at] for at in program.uses[out] if at not in self._taken]
        is_read_elsewhere = any(is_merged(eqn) and not is_view(eqn) for eqn in readers)
        is_alone = program.is_stored(out, self._taken) and not is_read_elsewhere
        return self._passing(2 * size, 1) if is_alone else self._passing(size, 0)

    def _passing(self, size: int, launches: int) -> float:
        """The expected time, in microseconds, of moving bytes; on a CPU any epilogue is shorter."""
        return cost_model.moving(size, self._device, launches) if self._device.arch else math.inf


class _Stacked:
    """The rhs of a product whose columns are those of two matrices, as the kernel wants it: stacked.

    Attributes:
      value: a variable; None if it cannot be one.
      eqns: the new equations that make it.
      dimension_numbers: of the product with it.
    """

    def __init__(self, eqn: Any, program: Equations):
        (lhs_contract, contract), (lhs_batch, batch) = eqn.params["product"].numbers
        rhs = eqn.invars[1]
        order = range(rhs.aval.ndim)
        free = [i for i in order if i not in (*contract, *batch)]
        if (maker := program.eqn_of(rhs)) is not None and maker.primitive is lax.transpose_p:
            # Lowering folds a transpose into the product only if nothing lies between.
            rhs, order = maker.invars[0], maker.params["permutation"]
        contract, batch, free = ([order[i] for i in dims] for dims in (contract, batch, free))
        self.value, self.eqns, shape = rhs, list[Any](), rhs.aval.shape
        if len(free) == 1:
            (at,) = free
            contract, batch = ([i + (i > at) for i in dims] for dims in (contract, batch))
            reshape = compat.reshaped(eqn, rhs, (*shape[:at], 2, shape[at] // 2, *shape[at + 1 :]))
            self.value, self.eqns = (None, []) if reshape is None else (reshape.outvars[0], [reshape])
        elif len(free) != 2 or shape[free[0]] != 2 or free != sorted(free):
            self.value = None
        self.dimension_numbers = ((lhs_contract, tuple(contract)), (lhs_batch, tuple(batch)))


class _Placement:
    """A bias or residual as the kernel wants it.

    Attributes:
      value: a variable of the dtype and shape; None if it cannot be one.
      source: the program's value that it is made from.
      eqns: the new equations that make it.
      steps: the program's equations that made it from the same source.
    """

    def __init__(self, like: Any, operand: Addend, dtype: Any, shape: tuple[int, ...], is_small: bool):
        self._like = like
        self.eqns: list[Any] = []
        of_dtype = operand.values.get(dtype)
        # A bias may be converted to a dtype that holds it; a residual would be another pass.
        first = next(iter(operand.values.values()))
        self.source, self.steps = of_dtype or first
        self.value = self.source
        if of_dtype is None:
            is_held = is_small and activations.holds(dtype, self.value.aval.dtype)
            self._then(lax.convert_element_type_p if is_held else None, new_dtype=dtype, weak_type=False, sharding=None)
        if self.value is not None and self.value.aval.shape != shape:
            self._then(lax.reshape_p, new_sizes=shape, dimensions=None, sharding=None)
        self._vary()
        if is_small and operand.scale == -1:
            self._then(lax.neg_p)

    def _then(self, called: Any, **params: Any) -> None:
        eqn = None if called is None or self.value is None else compat.new_eqn(self._like, called, self.value, **params)
        self.value = None
        if eqn is not None:
            self.eqns.append(eqn)
            self.value = eqn.outvars[0]

    def _vary(self) -> None:
        if self.value is None:
            return
        missing = compat.varying(self._like.outvars[0].aval) - compat.varying(self.value.aval)
        if missing and self.value.aval.sharding.mesh.empty:  # an array that the function closes over
            self.value = None
        elif missing:
            self.eqns.append(compat.vary(self._like, self.value, missing))
            self.value = self.eqns[-1].outvars[0]
