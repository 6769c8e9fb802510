"""``jax_streamk.matmul`` against ``jnp.matmul``, side by side on this GPU.

For every shape both run in one process on the same operands: R independent products of their own A and B in one jitted call (XLA
would merge dots that share an operand), R chosen so that more than 200 MB rotate through L2. Reported per product: the sum of all
kernel times by CUPTI (median over iterations; memsets are not kernels and are not in it), and the median wall time of the whole call.

    python benchmarks/bench_matmul.py benchmarks/shapes/prototype.csv out.json

writes out.json, and out.md with the same as a table.
"""

import argparse
import csv
import json
import math
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_streamk

ROTATE_BYTES = 220e6


def measure(function, operands, iterations=15):
    """(kernel us, wall us, kernel names) per product; operands are a tuple for each."""
    from jax.experimental.mosaic.gpu import profiler

    jitted = jax.jit(lambda products: [function(*xs) for xs in products])
    jax.block_until_ready(jitted(operands))
    _, runs = profiler.Cupti(finalize=False).measure(jitted, aggregate=False, iterations=iterations)(operands)
    runs = runs if isinstance(runs[0], list) else [runs]
    totals = sorted(sum(ms for _, ms in run) * 1e3 / len(operands) for run in runs)
    walls = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(5):
            out = jitted(operands)
        jax.block_until_ready(out)
        walls.append((time.perf_counter() - start) / 5 * 1e6 / len(operands))
    return totals[len(totals) // 2], sorted(walls)[len(walls) // 2], sorted({name for name, _ in runs[0]})


def gpu():
    """Name and driver of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[0]


def save(result, table, out):
    """Writes out, which ends in .json, and the table beside it."""
    with open(out, "w") as file:
        json.dump(result, file, indent=1)
    with open(out.removesuffix(".json") + ".md", "w") as file:
        file.write(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes")
    parser.add_argument("out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=float, default=500, help="seconds after which no new shape is begun")
    arguments = parser.parse_args()
    with open(arguments.shapes) as file:
        shapes = list(dict.fromkeys((int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)))
    dtype = jnp.dtype(arguments.dtype)
    rows, started = [], time.time()
    for m, n, k in shapes:
        if time.time() - started > arguments.limit:
            print("stopped at the time limit before", (m, n, k))
            break
        count = max(2, min(32, math.ceil(ROTATE_BYTES / (dtype.itemsize * (m * k + k * n + m * n)))))
        keys = jax.random.split(jax.random.key(m * n + k), 2 * count)
        make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.float32).astype(dtype), static_argnums=1)
        operands = [(make(keys[2 * i], (m, k)), make(keys[2 * i + 1], (k, n))) for i in range(count)]
        plan = jax_streamk.plan(*operands[0])
        ours = jax.jit(jax_streamk.matmul)(*operands[0]).astype(jnp.float32)
        theirs = jax.jit(jnp.matmul)(*operands[0]).astype(jnp.float32)
        difference = float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))
        our_kernels, our_wall, _ = measure(jax_streamk.matmul, operands)
        xla_kernels, xla_wall, names = measure(jnp.matmul, operands)
        row = dict(
            m=m, n=n, k=k, xla_us=xla_kernels, ours_us=our_kernels, ratio=xla_kernels / our_kernels, xla_wall_us=xla_wall,
            ours_wall_us=our_wall, wall_ratio=xla_wall / our_wall, plan=f"{plan.kernel} {plan.schedule}",
            estimate_us=plan.microseconds, xla_kernels=names, max_difference=difference,
        )  # fmt: skip
        rows.append(row)
        print(
            f"{m:6}{n:6}{k:6}  XLA {xla_kernels:8.2f}  ours {our_kernels:8.2f}  ratio {row['ratio']:.2f}  wall {row['wall_ratio']:.2f}"
            f"  {row['plan']}",
            flush=True,
        )
    geomean = {key: float(np.exp(np.mean([np.log(row[key]) for row in rows]))) for key in ("ratio", "wall_ratio")}
    result = dict(
        gpu=gpu(), jax=jax.__version__, dtype=dtype.name, date=time.strftime("%Y-%m-%d"),
        command=f"python benchmarks/bench_matmul.py {arguments.shapes}", geomean=geomean, rows=rows,
    )  # fmt: skip
    save(result, markdown(result), arguments.out)
    print("geometric mean of XLA / ours: kernels {ratio:.3f}, wall {wall_ratio:.3f}".format(**geomean))


def markdown(result):
    lines = [
        f"# matmul beside XLA, {result['dtype']}, {result['gpu']}, {result['date']}",
        "",
        f"jax {result['jax']}; `{result['command']}`. Row-major operands, microseconds a product; ratios are XLA's time over ours.",
        "Kernel time is the sum of all kernels by CUPTI (a memset is none); wall is the time of the whole jitted call of independent products.",
        "",
        "Geometric mean of the ratios: kernels **{ratio:.3f}**, wall **{wall_ratio:.3f}**.".format(**result["geomean"]),
        "",
        "| m | n | k | XLA us | ours us | ratio | wall ratio | our plan |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        shape = f"{row['m']} | {row['n']} | {row['k']}"
        lines.append(f"| {shape} | {row['xla_us']:.2f} | {row['ours_us']:.2f} | {row['ratio']:.2f} | {row['wall_ratio']:.2f} | {row['plan']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
