"""Host time of ``jax_streamk.matmul`` beside ``jnp.matmul``: tracing and lowering, and calls of the compiled function.

Both alternate in one process. Every trace is of a shape that neither has seen, so nothing comes from a cache, planning
included. The compiled call is timed from call to return, with a queue that is emptied between batches. Its operands are
8 x 8: XLA's CPU client runs a custom call in the caller's thread, where more arithmetic would be counted as overhead.

    python benchmarks/bench_dispatch.py out.json

writes out.json, and out.md with the same as a table. With ``--lower-for cuda`` programs are lowered for a GPU, which
need not be here.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import jax_streamk

PRODUCTS = {"jax_streamk": jax_streamk.matmul, "jnp": jnp.matmul}


def tracing_and_lowering(count, platform):
    """Median milliseconds per product of each."""
    times = {name: [] for name in PRODUCTS}
    for i in range(count + 3):
        for name, product in PRODUCTS.items():
            a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64 + 8 * i, 512), (512, 1024)))
            function = jax.jit(lambda a, b, product=product: product(a, b))
            start = time.perf_counter()
            function.trace(a, b).lower(lowering_platforms=(platform,) if platform else None)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def calls(batches, calls_per_batch=100):
    """Median microseconds per call of each."""
    a, b = jnp.ones((8, 8)), jnp.ones((8, 8))
    functions = {name: jax.jit(product) for name, product in PRODUCTS.items()}
    times = {name: [] for name in PRODUCTS}
    for function in functions.values():
        jax.block_until_ready(function(a, b))
    for _ in range(batches):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls_per_batch):
                out = function(a, b)
            times[name].append((time.perf_counter() - start) / calls_per_batch * 1e6)
            jax.block_until_ready(out)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--lower-for", choices=["cpu", "cuda"], help="platform; the default is where calls run")
    parser.add_argument("--lowerings", type=int, default=60)
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    lowered = f"trace and lower for {arguments.lower_for or jax.default_backend()}, ms"
    rows = {
        lowered: tracing_and_lowering(arguments.lowerings, arguments.lower_for),
        "compiled call, us": calls(arguments.batches),
    }
    result = dict(
        device=device.device_kind,
        cores=os.cpu_count(),
        python=platform.python_version(),
        jax=jax.__version__,
        kernels=len(jax_streamk.kernels()),
        date=time.strftime("%Y-%m-%d"),
        command=" ".join(["python benchmarks/bench_dispatch.py", *sys.argv[1:]]),
        rows=rows,
        ratios={what: times["jax_streamk"] / times["jnp"] for what, times in rows.items()},
    )
    lines = [
        f"# The host's part of a call, {result['device']}, {result['date']}",
        "",
        f"{result['cores']} cores, Python {result['python']}, jax {result['jax']}, "
        f"{result['kernels']} kernels compiled; `{result['command']}`.",
        "",
        "| | jax_streamk | jnp | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for what, times in rows.items():
        lines.append(f"| {what} | {times['jax_streamk']:.2f} | {times['jnp']:.2f} | {result['ratios'][what]:.2f} |")
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
