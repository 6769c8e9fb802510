"""A tensor-parallel MLP, forward and backward, by this library's products and by XLA's.

    python examples/tensor_parallel.py [--out results.json]

``x + gelu(x @ up + b) @ down + c`` with the hidden dimension divided over all GPUs, or over simulated CPU devices where
there is no GPU: ``up`` by columns, ``down`` by rows. Each device multiplies what it has; one sum over devices follows
the second product, and one the gradient of ``x``. The first product's bias and activation are its kernel's epilogue;
the second's bias and residual come after the sum.

Prints the collectives of both programs, how far values and gradients are from float64 and from each other, and times.
Exits with 1 when ours has more collectives than XLA's, or twice its error.
"""

import argparse
import collections
import json
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk as sk

DIVISIONS = dict(x=P(), up=P(None, "model"), b=P("model"), down=P("model"), c=P())


def ours(x, up, b, down, c):
    return sk.linear(sk.linear(x, up, b, activation="gelu_tanh"), down, c, residual=x)


def xlas(x, up, b, down, c):
    return x + jax.nn.gelu(x @ up + b, approximate=True) @ down + c


def exact(**operands):
    return xlas(**{name: x.astype(np.float64) for name, x in operands.items()})


VARIANTS = {"ours": ours, "xla": xlas}


def step(mlp):
    """The result, and the gradients of the sum over tokens of its mean square for every operand."""

    def loss(operands):
        out = mlp(**operands)
        wide = out.astype(jnp.promote_types(out.dtype, np.float32))
        return jnp.square(wide).sum() / out.shape[1], out

    def result_and_gradients(operands):
        gradients, out = jax.grad(loss, has_aux=True)(operands)
        return {"result": out} | {f"d{name}": gradient for name, gradient in gradients.items()}

    return result_and_gradients


def operands_on(mesh, tokens, width, hidden, dtype):
    """Random operands at the scales of a network that trains, made where they live."""
    shapes = dict(x=(tokens, width), up=(width, hidden), b=(hidden,), down=(hidden, width), c=(width,))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in DIVISIONS.items()}

    def make():
        keys = jax.random.split(jax.random.key(0), len(shapes))
        scale = dict(up=width**-0.5, down=hidden**-0.5)
        return {n: (jax.random.normal(k, s) * scale.get(n, 1)).astype(dtype) for k, (n, s) in zip(keys, shapes.items())}

    return jax.jit(make, out_shardings=shardings)(), shardings


def collectives(program):
    """How many arrays each kind moves: XLA may move several by one call."""
    kinds = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\((.*?)\)", program.as_text())
    return collections.Counter(kind for kind, arrays in found for _ in range(arrays.count("%")))


def seconds(programs, operands, rounds):
    """The median time of each program, taking turns, after one round to warm up."""
    times = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(operands))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


@jax.jit
def difference(found, wanted):
    """Of two trees of arrays, the largest difference over the largest entry of each pair."""
    return jax.tree.map(lambda a, b: jnp.abs(a.astype(np.float64) - b).max() / jnp.abs(b).max(), found, wanted)


def measure(mesh, tokens, width, hidden, dtype, rounds):
    operands, shardings = operands_on(mesh, tokens, width, hidden, dtype)
    results = {"result": shardings["x"]} | {f"d{name}": sharding for name, sharding in shardings.items()}
    passes = {
        "forward": {
            name: jax.jit(lambda operands, mlp=mlp: mlp(**operands), out_shardings=shardings["x"])
            for name, mlp in VARIANTS.items()
        },
        "step": {name: jax.jit(step(mlp), out_shardings=results) for name, mlp in VARIANTS.items()},
    }
    report = {}
    for title, functions in passes.items():
        programs = {name: function.lower(operands).compile() for name, function in functions.items()}
        report[title] = {
            "collectives": {name: dict(collectives(program)) for name, program in programs.items()},
            "our_products": len(re.findall(r"custom_call_target=\"jax_streamk_", programs["ours"].as_text())),
            "seconds": seconds(programs, operands, rounds),
        }
    found = {name: program(operands) for name, program in programs.items()}
    with jax.enable_x64(True):
        wanted = jax.jit(step(exact), out_shardings=results)(operands)
        errors = {name: difference(out, wanted) for name, out in found.items()} | {
            "between": difference(found["ours"], found["xla"])
        }
    report["errors"] = {name: {key: float(x) for key, x in by_array.items()} for name, by_array in errors.items()}
    return report


def show(report):
    for title in ("forward", "step"):
        taken, moved = report[title]["seconds"], report[title]["collectives"]
        print(f"\n{title}: {report[title]['our_products']} products by our kernels")
        for name in VARIANTS:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(moved[name].items())) or "none"
            print(f"  {name:5}{1e3 * taken[name]:10.3f} ms    collectives: {counts}")
    print(f"\n{'largest error':14}{'ours':>10}{'xla':>10}{'between':>10}")
    errors = report["errors"]
    for key in errors["ours"]:
        print(f"{key:14}" + "".join(f"{errors[name][key]:10.1e}" for name in ("ours", "xla", "between")))


def failures(report, dtype):
    for title in ("forward", "step"):
        mine, theirs = (sum(report[title]["collectives"][name].values()) for name in VARIANTS)
        if mine > theirs:
            yield f"{title}: {mine} arrays moved between devices, by XLA's program {theirs}"
    rounding = float(jnp.finfo(dtype).eps)
    for key, error in report["errors"]["ours"].items():
        if not error <= 2 * report["errors"]["xla"][key] + rounding:
            yield f"{key} is off by {error:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, help="default: all GPUs, or 4 simulated CPU devices")
    parser.add_argument("--tokens", type=int, help="batch times sequence; default 4096 on GPUs, 256 on a CPU")
    parser.add_argument("--width", type=int, help="default 8192 on GPUs, 256 on a CPU")
    parser.add_argument("--hidden", type=int, help="default 28672 on GPUs, 1024 on a CPU")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16 on GPUs, float32 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=30, help="runs of each program that are timed; default 30")
    parser.add_argument("--out", help="a JSON file to write the report to")
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", options.devices or 4)
    gpu = jax.default_backend() == "gpu"
    defaults = (4096, 8192, 28672, "bfloat16") if gpu else (256, 256, 1024, "float32")
    tokens, width, hidden, dtype = (
        given or default
        for given, default in zip((options.tokens, options.width, options.hidden, options.dtype), defaults)
    )
    devices = jax.devices()[: options.devices]
    mesh = jax.make_mesh((len(devices),), ("model",), axis_types=(AxisType.Auto,), devices=devices)
    print(
        f"{tokens} tokens, width {width}, hidden {hidden}, {dtype}; "
        f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}"
    )
    report = measure(mesh, tokens, width, hidden, np.dtype(dtype), options.rounds)
    show(report)
    if options.out:
        machine = dict(device_kind=devices[0].device_kind, devices=len(devices), jax=jax.__version__)
        sizes = dict(tokens=tokens, width=width, hidden=hidden, dtype=dtype, rounds=options.rounds)
        with open(options.out, "w") as file:
            json.dump(machine | sizes | report, file, indent=1)
    if why := list(failures(report, dtype)):
        sys.exit("\n" + "\n".join(why))


if __name__ == "__main__":
    main()
