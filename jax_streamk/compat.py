"""All that the package takes from JAX's internals, which may move between versions: the file to edit when they do."""

import copy
import dataclasses
import enum
import functools
import inspect
import math
import os
import pkgutil
import sys
from typing import Any

import jax
import jax.experimental.jet as _jet
import numpy as np
from jax._src import api_util as _api_util
from jax._src import array as _array
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import custom_derivatives as _custom_derivatives
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import hijax as _hijax
from jax._src import linear_util as _linear_util
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import state as _state
from jax._src import xla_bridge as _xla_bridge
from jax._src.custom_batching import custom_vmap_p
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow.loops import eval_jaxpr_p
from jax._src.lax.lax import dot_general_p, ragged_dot_general_p
from jax._src.state import discharge as _discharge
from jax.extend.core import jaxpr_as_fun as _jaxpr_as_fun
from jax.extend.core import primitives as _primitives

try:
    from jax._src.xla_metadata import xla_metadata_call_p
except ImportError:  # up to JAX 0.10
    from jax.experimental.scheduling_groups import xla_metadata_call_p

__all__ = [
    "Placement",
    "apply_primitive",
    "ask_policies",
    "batched_alike",
    "batched_dimensions",
    "called",
    "canonicalize_dtype",
    "canonicalize_precision",
    "canonicalize_sharding",
    "check_nan",
    "closed",
    "config",
    "convert_cotangent",
    "cotangent_sharding",
    "custom_vmap_p",
    "debug_info",
    "def_batching",
    "def_expansion",
    "def_jet",
    "def_sparse",
    "dot_general_p",
    "ends_like",
    "evaluated",
    "filled",
    "free_variables",
    "has_explicit_axes",
    "hi_with_params",
    "higher_order",
    "is_concrete",
    "is_eager",
    "is_hi",
    "is_of_current_trace",
    "is_placed_like",
    "is_plain_call",
    "is_reference",
    "is_sharded_by_type",
    "is_unreduced",
    "jvp_of",
    "local_aval",
    "lower_per_platform",
    "lowered_convert",
    "lowered_inline",
    "lowered_reshape",
    "lowered_transpose",
    "match_varying",
    "may_use_cuda",
    "named",
    "needs_devices",
    "new_eqn",
    "new_var",
    "no_tangent",
    "once_per_module",
    "outside_of_traces",
    "parameters",
    "place_of",
    "placement",
    "ragged_dot_general_p",
    "ragged_params",
    "sharded_alike",
    "sharded_like_product",
    "tell_apart",
    "traced_with_jaxpr",
    "transpose_behind",
    "unwrapped",
    "vary",
    "varying",
    "with_eqns",
    "with_mesh",
    "with_sharding_of",
    "with_weak_type",
    "wrapped",
]

apply_primitive = _dispatch.apply_primitive
canonicalize_precision = _lax.canonicalize_precision
canonicalize_sharding = _sharding_impls.canonicalize_sharding
config: Any = jax.config  # not every version declares its attributes

# The dtype that a user asked for; if 64-bit types are disabled, its 32-bit counterpart, with a warning.
canonicalize_dtype = _dtypes.check_and_canonicalize_user_dtype

# Makes operands of one primitive vary over the same axes of shard_map's mesh, so that their gradients are right.
match_varying = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary

# Primitives with parameters that are, or contain, jaxprs for XLA to compile, and none that must agree with the jaxprs.
higher_order = {
    _lax.composite_p,
    _custom_derivatives.remat_opt_p,
    _discharge.run_state_p,
    _shard_map.shard_map_p,
    eval_jaxpr_p,
    custom_vmap_p,
    xla_metadata_call_p,
    _hijax.call_hi_primitive_p,
    _primitives.call_p,
    _primitives.closed_call_p,
    _primitives.cond_p,
    _primitives.custom_jvp_call_p,
    _primitives.custom_vjp_call_p,
    _primitives.jit_p,
    _primitives.linear_solve_p,
    _primitives.remat_p,
    _primitives.scan_p,
    _primitives.while_p,
}

# "Hi" primitives: objects with a Python rule for each transformation, which are expanded before they are lowered.
_HiPrimitive = getattr(_hijax, "HiPrim", None) or _hijax.VJPHiPrimitive  # the latter up to JAX 0.11

outside_of_traces = _core.trace_state_clean

# Pins a lowered value to the sharding that its type carries (explicit sharding).
with_sharding_of = _mlir.lower_with_sharding_in_types


def with_weak_type(x, weak):
    """``x`` with a dtype that, if weak, gives way in promotion, as Python's numbers do."""
    return x if jax.typeof(x).weak_type == weak else _lax._convert_element_type(x, weak_type=weak)


def convert_cotangent(x, aval):
    """A cotangent converted to the dtype and weak type of its primal."""
    return _lax._convert_element_type(x, aval.dtype, aval.weak_type, warn_on_complex_to_real_cast=False)


def cotangent_sharding(aval, permutation):
    """The explicit sharding of a cotangent whose dimensions were permuted; None without explicit axes."""
    if hasattr(aval, "to_cotangent_aval"):  # up to JAX 0.9 transpose rules get the primal's type
        aval = aval.to_cotangent_aval()
    sharding = aval.sharding
    partitions = getattr(sharding.spec, "partitions", sharding.spec)
    sharding = sharding.update(spec=sharding.spec.update(partitions=tuple(partitions[i] for i in permutation)))
    if sharding.mesh.empty and hasattr(_core, "get_cur_mesh_sharding"):
        sharding = _core.get_cur_mesh_sharding(jax.P(*[None] * aval.ndim))
    return canonicalize_sharding(sharding, "dot_general")


def sharded_like_product(others, lhs, rhs, **params):
    """``others``, each with the explicit sharding of the trailing dimensions of ``lax.dot_general(lhs, rhs, ...)``."""
    avals = [jax.typeof(x) for x in (lhs, rhs, *others)]
    if not others or all(aval.sharding.mesh.empty for aval in avals):
        return others
    # The types without varying axes of shard_map, which abstract_eval requires to be equal.
    lhs, rhs = (_core.ShapedArray(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals[:2])
    product, _ = dot_general_p.abstract_eval(lhs, rhs, **params)
    specs = [tuple(product.sharding.spec)[product.ndim - x.ndim :] for x in others]
    pairs = zip(others, avals[2:], specs)
    return [
        x if tuple(aval.sharding.spec) == spec else jax.sharding.reshard(x, jax.P(*spec)) for x, aval, spec in pairs
    ]


def sharded_alike(others, x):
    """``others``, each with the explicit sharding of ``x``."""
    return [placed_like(y, jax.typeof(x)) for y in others]


def placed_like(x, aval):
    """``x`` with the explicit sharding of a type."""
    spec = aval.sharding.spec
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def explicit_mesh(*avals):
    """The mesh of explicit axes by which values are divided; None if there is none."""
    return next((aval.sharding.mesh for aval in avals if is_explicit(aval.sharding.mesh)), None)


def is_explicit(mesh):
    """Whether a mesh has explicit axes."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def has_explicit_axes(sharding):
    """Whether a canonical sharding, or None, says anything: only axes that are explicit do."""
    return sharding is not None and is_explicit(sharding.mesh)


def divided(aval, mesh, specs):
    """A type whose dimensions are divided over axes of an explicit mesh.

    Raises:
      ShardingTypeError: two dimensions are divided over one axis.
    """
    axes = [axis for spec in specs if spec is not None for axis in (spec if isinstance(spec, tuple) else (spec,))]
    if len(set(axes)) < len(axes):
        raise _core.ShardingTypeError(
            f"ragged_dot: two dimensions of the result would be divided over one axis, by {tuple(specs)}: move an "
            "operand with jax.sharding.reshard"
        )
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, jax.P(*specs)))


def is_unreduced(aval):
    """Whether devices hold partial sums of a value instead of the value, by its explicit sharding."""
    return bool(getattr(aval.sharding.spec, "unreduced", None))


def ragged_params(eqn_params=None):
    """The parameters of ``ragged_dot_general_p`` besides those of the product itself: None in each, or given ones."""
    names = ("group_offset", *(("out_sharding",) if "out_sharding" in _OF_RAGGED else ()))
    return {name: (eqn_params or {}).get(name) for name in names}


_OF_RAGGED = inspect.signature(_lax.ragged_dot_general).parameters  # no sharding until JAX 0.10


def check_nan(primitive):
    """Makes ``checkify`` look for NaN in the primitive's results."""
    _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)


def may_use_cuda():
    """Whether JAX is to use NVIDIA GPUs, as far as it can be told before it looks for devices."""
    allowed = (config.jax_platforms or "cuda").split(",")
    plugins = pkgutil.iter_modules(getattr(_xla_bridge.jax_plugins, "__path__", ()))
    return not {"cuda", "gpu"}.isdisjoint(allowed) and any(x.name.startswith("xla_cuda") for x in plugins)


def needs_devices(primitive):
    """Makes JAX pass a program's devices to the primitive's lowering rules, for partitioning."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def ask_policies(primitive, question):
    """Makes ``jax.checkpoint`` ask its policies about another primitive instead.

    ``question(*avals, **params)`` returns what to ask about, as ``((primitive, *avals), params)``.
    """

    def rule(policy, unknown, instantiated, eqn):
        missing = [x for x, is_there in zip(eqn.invars, instantiated) if isinstance(x, _core.Var) and not is_there]
        if any(unknown):
            return None, eqn, [True], [True], missing
        asked, params = question(*(x.aval for x in eqn.invars), **eqn.params)
        decision: Any = _partial_eval.ensure_enum(policy(*asked, **params))
        if eqn.effects or decision is _partial_eval.Saveable:
            return eqn, None, [False], [False], []
        if decision is _partial_eval.Recompute:
            return eqn, eqn, [False], [True], missing
        (out,) = eqn.outvars
        stored = _core.Var(out.aval.update(memory_space=_core.mem_kind_to_space(decision.dst)))
        store, load = _moved(eqn, out, stored), _moved(eqn, stored, out)
        # A rule returns one known equation: a call that computes the product and stores it.
        debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()
        inputs = list(dict.fromkeys(x for x in eqn.invars if isinstance(x, _core.Var)))
        both = _core.Jaxpr((), inputs, [out, stored], [eqn, store], eqn.effects, debug_info)
        params = dict(call_jaxpr=_partial_eval.close_jaxpr(both))
        known = eqn.replace(primitive=_primitives.closed_call_p, params=params, invars=inputs, outvars=[out, stored])
        return known, load, [False], [True], [stored]

    _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def _moved(eqn, source, target):
    """The equation that copies ``source`` to the memory space of ``target``, with the context of ``eqn``."""
    shape = jax.ShapeDtypeStruct(source.aval.shape, source.aval.dtype)
    move = jax.make_jaxpr(lambda x: jax.device_put(x, target.aval.memory_space, may_alias=False))
    (put,) = move(shape).eqns
    put = put.replace(invars=[source], outvars=[target])
    return put.replace(source_info=eqn.source_info, ctx=eqn.ctx)


def def_batching(primitive, rule):
    """``rule(axis_data, operands, dims, **params)`` batches the primitive; axis_data has the mapped axis's sharding."""
    _batching.fancy_primitive_batchers[primitive] = rule
    # JAX 0.9 calls the rule even if no operand is mapped, unless told not to.
    if hasattr(_batching, "skippable_batchers"):
        _batching.skippable_batchers[primitive] = lambda params: ()


def def_jet(primitive, function, is_bilinear=lambda **params: False):
    """Makes ``jet`` expand a primitive as ``function(*operands, **params)`` where it is not bilinear."""

    def rule(primals, series, **params):
        if is_bilinear(**params):
            if len(primals) != 2:
                raise NotImplementedError(f"Taylor-mode differentiation for '{primitive}' of groups not implemented")
            return _jet._bilinear_taylor_rule(primitive, primals, series, **params)
        # Rules get the coefficients of powers; jet takes derivatives.
        series = [[math.factorial(i) * x for i, x in enumerate(terms, 1)] for terms in series]
        out, terms = _jet.jet(functools.partial(function, **params), primals, series)
        return out, [x / math.factorial(i) for i, x in enumerate(terms, 1)]

    rules: dict[Any, Any] = _jet.jet_rules
    rules[primitive] = rule


def def_sparse(primitives):
    """Makes ``sparsify`` call a function in place of a primitive, as ``function(*operands, **params)``.

    ``primitives`` maps primitives to functions. Called wherever products are traced, since importing
    ``jax.experimental.sparse`` takes long, and a process that has not imported it does not need the rules.
    """
    transform: Any = sys.modules.get("jax.experimental.sparse.transform")
    # Another thread may be importing the module, or registering the rules.
    if not hasattr(transform, "sparsify") or list(primitives)[-1] in transform.sparse_rules_bcsr:
        return

    def rule(function, env, *values, **params):
        out = transform.sparsify(functools.partial(function, **params))(*transform.spvalues_to_arrays(env, values))
        return transform.arrays_to_spvalues(env, [out])

    for primitive, function in primitives.items():
        for rules in (transform.sparse_rules_bcoo, transform.sparse_rules_bcsr):
            rules[primitive] = functools.partial(rule, function)


def batched_dimensions(axis_data, ndims, dims, dimension_numbers, out_sharding):
    """A dot_general whose lhs and rhs are mapped over dimensions ``dims``, one of which may be None (not mapped).

    Returns:
      The new dimension_numbers, the mapped dimension of the result, and the result's sharding.
    """
    numbers, out_dim = _lax._dot_general_batch_dim_nums(ndims, dims, dimension_numbers)
    if out_sharding is not None:
        out_sharding = _batching.get_sharding_for_vmap(axis_data, out_sharding, out_dim)
    return numbers, int(out_dim), out_sharding


class Placement(enum.Enum):
    """Who partitions the product that is lowered: nobody, XLA with our rule, or (if UNKNOWN) perhaps XLA without it."""

    ONE_DEVICE = enum.auto()
    PARTITIONED = enum.auto()
    UNKNOWN = enum.auto()


def placement(ctx):
    axes = ctx.module_context.axis_context
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        return Placement.ONE_DEVICE if set(axes.manual_axes) == set(axes.mesh.axis_names) else Placement.UNKNOWN
    if getattr(axes, "num_devices", 1) == 1:
        return Placement.ONE_DEVICE
    # Our rule is a callback into this process, and needs a mesh.
    here = axes.device_assignment is not None and not ctx.module_context.lowering_parameters.for_export
    return Placement.PARTITIONED if here and _mesh(axes) is not None else Placement.UNKNOWN


def where_unknown(ctx):
    """What a product whose placement is UNKNOWN is lowered in."""
    if isinstance(ctx.module_context.axis_context, _sharding_impls.SPMDAxisContext):
        return "a shard_map that leaves mesh axes automatic"
    if ctx.module_context.lowering_parameters.for_export:
        return "an export for several devices"
    return "a program for several devices without a mesh"


def is_sharded_by_type(ctx):
    """Whether types say how all values that are lowered are divided: all axes of their mesh are explicit."""
    mesh = ctx.avals_out[0].sharding.mesh
    return not mesh.empty and mesh.are_all_axes_explicit


def _mesh(axes):
    """The mesh of a program's arguments, or else the mesh that is set; None if there is neither."""
    if axes.abstract_mesh is not None:
        return axes.abstract_mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size != axes.num_devices else mesh


def with_mesh(ctx):
    """The context of a lowering rule, with the mesh that partitioning needs. For ``PARTITIONED`` products."""
    axes = ctx.module_context.axis_context
    axes = dataclasses.replace(axes, abstract_mesh=_mesh(axes))
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))


def lower_per_platform(ctx, rules, default, *operands, **params):
    """Lowers by the rule of the platform, or by the default; a program for several platforms has a branch for each.

    JAX does the same for rules registered per platform, but (as of 0.11) only if it may cache them.
    """
    ctx = ctx.replace(avals_out=list(ctx.avals_out))
    return _mlir.lower_per_platform(ctx, str(ctx.primitive), rules, default, _core.no_effects, *operands, **params)


def once_per_module(ctx, key, make):
    """``make()``, the first time that a program's lowering asks for it by this key."""
    cache = ctx.module_context.cached_primitive_lowerings
    if key not in cache:
        cache[key] = make()
    return cache[key]


def lowered_transpose(value, permutation):
    """A lowered value, transposed."""
    return _mlir.hlo.transpose(value, _mlir.dense_int_array(permutation))


def lowered_convert(value, dtype):
    """A lowered value, converted from one floating-point dtype to another."""
    type_ = _mlir.ir.RankedTensorType.get(value.type.shape, _mlir.dtype_to_ir_type(np.dtype(dtype)))
    return _mlir.hlo.convert(type_, value)


def lowered_reshape(value, shape):
    """A lowered value in another shape."""
    if tuple(value.type.shape) == tuple(shape):
        return value
    return _mlir.hlo.reshape(_mlir.ir.RankedTensorType.get(shape, value.type.element_type), value)


def transpose_behind(value):
    """(operand, permutation) if a lowered value is the result of a transpose, else None."""
    operation = value.owner
    if getattr(operation, "name", None) != "stablehlo.transpose":
        return None
    return operation.operands[0], tuple(operation.attributes["permutation"])


def tell_apart(value, meaning):
    """Attaches ``meaning`` to the operation that produces a lowered value.

    A program's text names a function that XLA partitions by the address of a Python object only: without this, the
    persistent compilation cache could take one program for another.
    """
    attributes, ir = value.owner.attributes, _mlir.ir
    name = "mhlo.frontend_attributes"
    present = {named.name: named.attr for named in attributes[name]} if name in attributes else {}
    attributes[name] = ir.DictAttr.get(present | {"jax_streamk": ir.StringAttr.get(meaning)})


def named(ctx, scope):
    """A context in which a lowering rule's operations have names in this scope, as in ``jax.named_scope``."""
    return _mlir.source_info_to_location(ctx.module_context, ctx.primitive, ctx.name_stack.extend(scope), ctx.traceback)


def local_aval(aval):
    """The type without shardings and varying axes, which tracing inside a lowering rule does not need."""
    return _core.ShapedArray(aval.shape, aval.dtype)


def _abstract(like, primitive, *avals, **params):
    """The type of a primitive's result in the place of an equation; None if it has no result for these types."""
    try:
        with like.ctx.manager:
            out, _ = primitive.abstract_eval(*avals, **params)
    except (TypeError, ValueError, NotImplementedError, _core.ShardingTypeError):
        return None
    # JAX does not say over what results vary outside of shard_map: here, over what their operands all do.
    return varying_over(out, varying(avals[0]))


def new_var(aval):
    return _core.Var(aval)


def new_eqn(like, primitive, *operands, **params):
    """An equation in the place of another, with a variable of its own; None if its types do not fit."""
    out = _abstract(like, primitive, *(x.aval for x in operands), **params)
    if out is None:
        return None
    return like.replace(primitive=primitive, params=params, invars=list(operands), outvars=[new_var(out)])


def reshaped(like, x, shape):
    """The equation that reshapes ``x``; None as of ``new_eqn``."""
    return new_eqn(like, _lax.reshape_p, x, new_sizes=shape, dimensions=None, sharding=None)


def vary(like, x, axes):
    """The equation after which ``x`` varies over more axes of shard_map's mesh."""
    out = new_var(varying_over(x.aval, varying(x.aval) | axes))
    return like.replace(primitive=_core.pvary_p, params=dict(axes=tuple(sorted(axes))), invars=[x], outvars=[out])


def varying_over(aval, axes):
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=aval.mat.update(varying=axes))
    return aval.update(vma=axes)


def varying(aval):
    """The axes of shard_map's mesh that a value varies over."""
    return frozenset(aval.mat.varying if hasattr(aval, "mat") else aval.vma)


def ends_like(product, other):
    """Whether another value has the explicit sharding of a product's last dimensions, and varies over the same axes."""
    specs = [tuple(aval.sharding.spec) for aval in (product, other)]
    return specs[0][product.ndim - other.ndim :] == specs[1] and varying(product) == varying(other)


def is_placed_like(x, other):
    """Whether two types differ at most in how they promote: shape, dtype, explicit sharding and varying axes agree."""
    specs = [tuple(aval.sharding.spec) for aval in (x, other)]
    is_same_array = (x.shape, x.dtype) == (other.shape, other.dtype)
    return is_same_array and specs[0] == specs[1] and varying(x) == varying(other)


def is_hi(value):
    """Whether a parameter of an equation is a "hi" primitive of JAX's own, which may hold jaxprs and rules."""
    return isinstance(value, _HiPrimitive) and type(value).__module__.startswith("jax.")


def hi_with_params(hi, params):
    """The same "hi" primitive with other parameters."""
    new = copy.copy(hi)
    new.params = params
    new.__dict__.update(params)
    return new


def traced_with_jaxpr(traced, jaxpr):
    """A ``jax.stages.Traced`` of another jaxpr with the same types."""
    new = copy.copy(traced)
    new._params = traced._params | dict(jaxpr=jaxpr)
    for derived in ("_lojax", "_closure_converted"):
        if hasattr(new, derived):
            setattr(new, derived, None)
    return new


def parameters(eqn):
    """The parameters of an equation; if it calls a "hi" primitive of JAX's own, those of that."""
    return next((value.params for value in eqn.params.values() if is_hi(value)), eqn.params)


def called(eqn):
    """The jaxpr of a call of a function that JAX can differentiate forward; None for other equations."""
    name = _BODIES.get(eqn.primitive)
    if name is not None:
        body = eqn.params[name]
    else:
        params = parameters(eqn)
        body = params["traced"].jaxpr if "jvp_rule" in params else None  # of a "hi" primitive
    return getattr(body, "jaxpr", body)


_BODIES = {
    _primitives.jit_p: "jaxpr",
    _primitives.call_p: "call_jaxpr",
    _primitives.closed_call_p: "call_jaxpr",
    _primitives.custom_jvp_call_p: "call_jaxpr",
}


def place_of(eqn):
    """Where the user's code makes an equation: such as "model.py:12 (mlp)", and the names of scopes around it."""
    source = eqn.source_info
    frames = (x for x in _source_info_util.user_frames(source.traceback) if not x.file_name.startswith(_OWN))
    frame = next(frames, None)
    if frame is None:
        return "", str(source.name_stack)
    function = frame.function_name.rpartition("<locals>.")[2]
    of = "" if function.startswith("<") else f" ({function})"
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}{of}", str(source.name_stack)


_OWN = os.path.dirname(__file__) + os.sep


def is_plain_call(eqn):
    """Whether a call says nothing of how its arguments and results are laid out, or how it is compiled."""
    if eqn.primitive is not _primitives.jit_p:
        return True
    params = eqn.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    asked = (*params["in_layouts"], *params["out_layouts"], *params["donated_invars"], *params["compiler_options_kvs"])
    return all(isinstance(x, _sharding_impls.UnspecifiedValue) for x in shardings) and not any(asked)


# Lowers an equation as those of its parameter ``call_jaxpr``, in place.
lowered_inline = _custom_derivatives._custom_jvp_vjp_call_lowering


def jvp_of(closed, primals, tangents):
    """The results of a closed jaxpr and their tangents, which may be ``ad.Zero`` as those of the operands."""
    are_zero = [type(x) is _ad.Zero for x in tangents]
    jvp, are_nonzero = _ad.jvp_jaxpr(closed, [not x for x in are_zero], False)
    given = (x for x, is_zero in zip(tangents, are_zero) if not is_zero)
    out = _jaxpr_as_fun(jvp)(*primals, *given)
    results, moving = out[: len(closed.out_avals)], iter(out[len(closed.out_avals) :])
    return results, [next(moving) if moves else _ad.Zero.from_primal_value(x) for x, moves in zip(results, are_nonzero)]


def filled(cotangents):
    """Cotangents as arrays, zeros included."""
    return list(map(_ad.instantiate_zeros, cotangents))


def no_tangent(x):
    """The tangent of a value that does not change."""
    return _ad.Zero.from_primal_value(x)


def batched_alike(axis_data, dims, closed, *others):
    """Closed jaxprs of mapped operands, and the mapped dimensions of their results: those of the first one's."""
    batched, out_dims = _batching.batch_jaxpr2(closed, axis_data, tuple(dims))
    return [batched, *(_batching.batch_jaxpr_axes(x, axis_data, tuple(dims), out_dims)[0] for x in others)], out_dims


def free_variables(eqns):
    """What equations read and do not make, in order."""
    defined = {x for eqn in eqns for x in eqn.outvars}
    return dict.fromkeys(x for eqn in eqns for x in eqn.invars if isinstance(x, _core.Var) and x not in defined)


def closed(inputs, eqns, *outs):
    """The jaxpr from variables ``inputs`` to ``outs``, without constants."""
    is_high = any(eqn.primitive.is_high(*(x.aval for x in eqn.invars), **eqn.params) for eqn in eqns)
    return _partial_eval.close_jaxpr(_core.Jaxpr((), inputs, list(outs), eqns, set(), _no_debug_info(), is_high))


def def_expansion(primitive, *jaxprs):
    """Makes JAX expand the "hi" primitives in parameters ``jaxprs`` of a primitive before it is lowered."""
    expanded: Any = getattr(_partial_eval, "lower_jaxpr2", None) or _partial_eval.lower_jaxpr

    def expand(*operands, **params):
        return primitive.bind(*operands, **params | {name: expanded(params[name]) for name in jaxprs})

    primitive.is_high = lambda *_, **params: any(params[name].is_high for name in jaxprs)
    primitive.to_lojax = expand


@functools.cache
def _no_debug_info():
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()


def evaluated(closed, *args):
    """The results of a closed jaxpr by the current trace, with the weak types that it says.

    Where that trace makes another jaxpr, equations are copied: binding each again takes as long as tracing them did.
    """
    jaxpr, trace = getattr(closed, "jaxpr", closed), _core.trace_ctx.trace
    may_copy = isinstance(trace, _partial_eval.DynamicJaxprTrace) and not (jaxpr.is_high and trace.requires_low)
    if may_copy and not jaxpr.effects:
        return _copied(trace, jaxpr, closed.consts, *args)
    # A literal has lost the weak type of the number that it was.
    results = zip(jax.core.eval_jaxpr(jaxpr, closed.consts, *args), closed.out_avals)
    return [with_weak_type(x, True) if getattr(aval, "weak_type", False) else x for x, aval in results]


def _copied(trace, jaxpr, consts, *args):
    """The results of a jaxpr whose equations become those of the one that is being made."""
    here = _source_info_util.current()
    given = (trace.to_jaxpr_tracer(x, source_info=here) for x in (*consts, *args))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given))

    def read(x):
        return _partial_eval.DynamicJaxprTracer(trace, x.aval, x, here) if isinstance(x, _core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        if here.name_stack.stack:
            source = source.replace(name_stack=here.name_stack + source.name_stack)
        operands, avals = [*map(read, eqn.invars)], [x.aval for x in eqn.outvars]
        results = trace.emit_eqn(operands, avals, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)
        values |= zip(eqn.outvars, results)
    trace.frame.is_high |= jaxpr.is_high  # or its "hi" primitives would not be expanded before they are lowered
    return [*map(read, jaxpr.outvars)]


def is_reference(x):
    """Whether ``x`` refers to an array that changes in place: ``jax.new_ref`` makes such references."""
    return isinstance(x.aval if isinstance(x, _core.Tracer) else x, (_core.Ref, _state.AbstractRef))


def debug_info(fn, args, kwargs, is_named):
    """The names of ``fn``, and of those leaves of its arguments that ``is_named``, for JAX's messages."""
    info = _api_util.debug_info("accelerate", fn, args, kwargs)
    names = info.arg_names
    if names is None or len(names) != len(is_named):
        return info.with_unknown_names()
    return info._replace(arg_names=tuple(name for name, named in zip(names, is_named) if named))


def is_eager():
    """Whether what is called here runs at once, perhaps transformed, instead of becoming part of a jaxpr."""
    trace = _core.trace_ctx.trace
    if not isinstance(trace, _core.EvalTrace) and not jax.sharding.get_abstract_mesh().empty:
        return False  # the transpose of a program with a gather mixes meshes (JAX 0.9 to 0.12)
    while not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        parent = getattr(trace, "parent_trace", None)
        if parent is None:
            break
        trace = parent
    return isinstance(trace, _core.EvalTrace)


def is_concrete(x):
    """Whether ``x`` is an array of numbers or booleans, not a tracer. Faster than ``isinstance``."""
    return type(x) is _array.ArrayImpl


def is_of_current_trace(x):
    """Whether ``x`` is a tracer of the current trace, and so must not outlive it."""
    return isinstance(x, _core.Tracer) and x._trace is _core.trace_ctx.trace


def with_eqns(jaxpr, eqns):
    """A jaxpr with other equations. Until JAX 0.11 a ClosedJaxpr is not a Jaxpr."""
    if isinstance(jaxpr, _core.Jaxpr):
        return jaxpr.replace(eqns=eqns)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=eqns))


def wrapped(fn, like):
    """``fn`` in the wrapper that JAX's internals pass around, with the debug names of ``like``, such a wrapper."""
    return _linear_util.wrap_init(fn, debug_info=like.debug_info)


def unwrapped(fn):
    """The function in such a wrapper, under its debug names."""

    def function(*args):
        return fn.call_wrapped(*args)

    function.__fun_debug_info__ = fn.debug_info
    return function
