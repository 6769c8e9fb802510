"""``jax_streamk.linear`` with bias and silu against our own product alone and against XLA's ``silu(x @ w + b)``, on this GPU.

Measured as in bench_matmul.py, all three in one process on the same operands.

    python benchmarks/bench_linear.py out.json

writes out.json, and out.md with the same as a table.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
from bench_matmul import ROTATE_BYTES, gpu, measure, save

import jax_streamk

SHAPES = [(m, 14336, 4096) for m in (1, 16, 128, 2048)]
VARIANTS = {
    "linear": lambda x, w, bias, residual: jax_streamk.linear(x, w, bias, activation="silu"),
    "residual": lambda x, w, bias, residual: jax_streamk.linear(x, w, bias, activation="silu", residual=residual),
    "gelu": lambda x, w, bias, residual: jax_streamk.linear(x, w, bias, activation="gelu"),
    "matmul": lambda x, w, bias, residual: jax_streamk.matmul(x, w),
    "XLA": lambda x, w, bias, residual: jax.nn.silu(x @ w + bias),
    "XLA residual": lambda x, w, bias, residual: jax.nn.silu(x @ w + residual + bias),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    arguments = parser.parse_args()
    dtype, rows = jnp.bfloat16, []
    for m, n, k in SHAPES:
        count = max(2, min(32, math.ceil(ROTATE_BYTES / (2 * (m * k + k * n + m * n)))))
        make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.float32).astype(dtype), static_argnums=1)
        keys = iter(jax.random.split(jax.random.key(m), 4 * count))
        operands = [tuple(make(next(keys), shape) for shape in ((m, k), (k, n), (n,), (m, n))) for _ in range(count)]
        row = dict(m=m, n=n, k=k, plan=str(jax_streamk.plan(*operands[0][:2]).kernel))
        # Twice, in opposite orders: the machine's clock drifts.
        for name in (*VARIANTS, *reversed(VARIANTS)):
            kernels, wall, names = measure(VARIANTS[name], operands)
            row.setdefault(name, []).append(dict(kernels_us=kernels, wall_us=wall, kernels=names))
        for name in VARIANTS:
            runs = row[name]
            row[name] = runs[0] | {key: sum(run[key] for run in runs) / len(runs) for key in ("kernels_us", "wall_us")}
        rows.append(row)
        print(m, {name: round(row[name]["kernels_us"], 2) for name in VARIANTS}, flush=True)
    result = dict(
        gpu=gpu(), jax=jax.__version__, dtype="bfloat16", date=time.strftime("%Y-%m-%d"),
        command=f"python benchmarks/bench_linear.py {arguments.out}", rows=rows,
    )  # fmt: skip
    save(result, markdown(result), arguments.out)


def markdown(result):
    lines = [
        f"# linear beside matmul and XLA, {result['dtype']}, {result['gpu']}, {result['date']}",
        "",
        f"jax {result['jax']}; `{result['command']}`. n = 14336, k = 4096; microseconds a product, sums of kernel times by CUPTI, and wall",
        "time of the whole jitted call of independent products in parentheses.",
        "",
        "| m | linear: bias, silu | with residual | bias, gelu | matmul | XLA: bias, silu | XLA with residual | linear / matmul | XLA / linear | plan |",
        "|" + " --- |" * 10,
    ]
    for row in result["rows"]:
        cells = [f"{row[name]['kernels_us']:.2f} ({row[name]['wall_us']:.1f})" for name in VARIANTS]
        time_of = lambda name: row[name]["kernels_us"]
        ratios = [f"{time_of('linear') / time_of('matmul'):.3f}", f"{time_of('XLA') / time_of('linear'):.2f}"]
        lines.append("| " + " | ".join([str(row["m"]), *cells, *ratios, row["plan"]]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
