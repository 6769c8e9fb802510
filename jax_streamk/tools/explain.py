r"""``python -m jax_streamk explain``: what a product would run, in figures, and who works on which tile as a picture.

examples:
  python -m jax_streamk explain 128 4096 4096 --device h200
      the plan for a GPU that need not be here
  python -m jax_streamk explain 128 4096 4096 --device h200 --schedule split-k:4 --plot plan.svg
      one schedule, drawn
  python -m jax_streamk explain 1536 2816 4096 --device h200 --plot schedules.png \
      --schedule data-parallel --schedule stream-k --kernel sm90_bf16_bf16_rr_128x256x64_1x2_coop
      two schedules of one kernel below each other
  python -m jax_streamk explain 8192 768 2048 --groups 128 --device h200
      a ragged product, whose group sizes are data
"""

import argparse

import jax
import jax.numpy as jnp

import jax_streamk
from jax_streamk import schedules
from jax_streamk.device import NAMED, device_named
from jax_streamk.product import ragged
from jax_streamk.show.explain import on_kernel, work_units
from jax_streamk.show.plot import plot_schedules
from jax_streamk.tools import shapes

_SCHEDULES = "auto, batch-invariant, data-parallel, split-k:SPLITS[:REDUCTION] or stream-k[:REDUCTION]"


def add_arguments(parser):
    for name, what in (
        ("m", "rows of A and of the result"),
        ("n", "columns of B and of the result"),
        ("k", "extent of the sum"),
    ):
        parser.add_argument(name, metavar=name.upper(), type=shapes.positive, help=what)
    parser.add_argument("--batch", type=shapes.positive, default=1, help="products of these extents (%(default)s)")
    parser.add_argument(
        "--groups",
        type=shapes.positive,
        help="of the rows of A as stored: of M, each with a B of its own, or, with --trans-a, of K, each with a result",
    )
    parser.add_argument("--trans-a", action="store_true", help="A is stored (K, M)")
    parser.add_argument("--trans-b", action="store_true", help="B is stored (N, K)")
    parser.add_argument("--dtype", type=shapes.dtype, default="bfloat16", help="of operands (%(default)s)")
    parser.add_argument("--out-dtype", type=shapes.dtype, help="of the result (of int8 int32, else JAX's choice)")
    parser.add_argument("--precision", choices=["default", "high", "highest"], default="default", help="of float32")
    parser.add_argument(
        "--schedule",
        action="append",
        type=schedule,
        help=f"{_SCHEDULES}; may be given several times (auto)",
    )
    parser.add_argument("--kernel", metavar="NAME", help="for all schedules (of each, the planner's)")
    parser.add_argument("--device", choices=[*NAMED, "cpu"], help="to plan for (JAX's default device)")
    parser.add_argument("--measure", action="store_true", help="run it, and XLA's product, on this machine")
    parser.add_argument("--plot", metavar="FILE", help="write a picture, of one schedule or of all of them: SVG or PNG")
    parser.add_argument("--html", action="store_true", help="as a table of HTML")


def run(arguments):
    with jax.enable_x64(True):  # float64 is float64
        return _run(arguments)


def _run(arguments):
    shape = shapes.Shape(arguments.m, arguments.n, arguments.k, arguments.trans_a, arguments.trans_b, arguments.batch)
    if arguments.groups and arguments.batch > 1:
        arguments.error("--groups and --batch: no kernel multiplies batches of groups")
    product = _ragged(shape, arguments.groups) if arguments.groups else _dense(shape)
    lhs, rhs = (jax.ShapeDtypeStruct(stored, arguments.dtype) for stored in product.pop("stored"))
    wanted = arguments.schedule or [schedules.Auto()]
    try:
        options = dict(
            **product,
            device=device_named(arguments.device),
            precision=arguments.precision,
            preferred_element_type=arguments.out_dtype or shapes.result_dtype(arguments.dtype),
        )
        plans = [jax_streamk.plan(lhs, rhs, schedule=each, **options) for each in wanted]
        if arguments.kernel is not None:
            plans = [on_kernel(plan, arguments.kernel) for plan in plans]
        explanations = [plan.explain(measure=arguments.measure) for plan in plans]
        if arguments.plot:
            for plan in plans:
                work_units(plan)  # before anything is printed, or written
    except (TypeError, ValueError) as error:
        arguments.error(str(error))
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"explain: {error}") from None
    print("\n\n".join(x._repr_html_() if arguments.html else str(x) for x in explanations))
    if arguments.plot:
        try:
            if len(plans) == 1:
                plans[0].plot(arguments.plot)
            else:
                plot_schedules(lhs, rhs, wanted, kernel=arguments.kernel, path=arguments.plot, **options)
        except (ImportError, OSError, ValueError) as error:
            raise SystemExit(f"explain: {error}") from None
    return 0


def _dense(shape):
    return dict(stored=shape.stored(), dimension_numbers=shape.dimension_numbers())


def _ragged(shape, groups):
    a, b = shape.stored()
    if shape.trans_a:
        numbers = ragged.numbers_of(0, int(shape.trans_b), 0)
    else:
        b, numbers = (groups, *b), ragged.numbers_of(1, 1 + shape.trans_b, 0, (0,))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return dict(stored=(a, b), dimension_numbers=numbers, group_sizes=sizes)


def schedule(words):
    """A schedule as the command line has it, such as ``split-k:4:separate``."""
    name, *given = words.split(":")
    try:
        if name == "auto" and not given:
            return schedules.Auto()
        if name == "batch-invariant" and not given:
            return schedules.Auto(batch_invariant=True)
        if name == "data-parallel" and not given:
            return schedules.DataParallel()
        if name == "split-k" and 1 <= len(given) <= 2:
            return schedules.SplitK(int(given[0]), *given[1:])
        if name == "stream-k" and len(given) <= 1:
            return schedules.StreamK(*given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{words!r}: {error}") from None
    raise argparse.ArgumentTypeError(f"{words!r}: must be {_SCHEDULES}")
