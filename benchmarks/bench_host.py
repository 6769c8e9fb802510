"""``jax_streamk.matmul`` against XLA's dot on CPU threads: f32 and bf16, m = n = k in {512, 1024, 2048}.

    python benchmarks/bench_host.py out.json [--seconds 6]

Both are jitted and take turns on the same operands, so that whatever else the machine does slows both. Reported: the best and the
median time of each, and XLA's over ours.
"""

import argparse
import itertools
import json
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_streamk


def take_turns(functions, operands, seconds):
    """Microseconds of every call of every function, called in turn."""
    for function in functions:
        jax.block_until_ready(function(*operands))
    times = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for function, taken in zip(functions, times):
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(function(*operands))
                taken.append((time.perf_counter() - start) * 1e6)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=6, help="for each problem")
    arguments = parser.parse_args()
    functions = jax.jit(jnp.matmul), jax.jit(jax_streamk.matmul)
    rows = []
    for dtype, size in itertools.product(("float32", "bfloat16"), (512, 1024, 2048)):
        keys = jax.random.split(jax.random.key(size))
        operands = [jax.random.normal(key, (size, size)).astype(dtype) for key in keys]
        xla, ours = take_turns(functions, operands, arguments.seconds)
        plan = jax_streamk.plan(*operands)
        row = dict(
            dtype=dtype, size=size, xla_best_us=min(xla), ours_best_us=min(ours), best_ratio=min(xla) / min(ours),
            xla_median_us=float(np.median(xla)), ours_median_us=float(np.median(ours)),
            median_ratio=float(np.median(xla) / np.median(ours)), calls=len(ours), plan=f"{plan.kernel} {plan.schedule}",
        )  # fmt: skip
        rows.append(row)
        print(
            f"{dtype:9}{size:6}  best: XLA {min(xla):8.0f} us, ours {min(ours):8.0f}, ratio {row['best_ratio']:.2f}"
            f"  median: ratio {row['median_ratio']:.2f}  {row['plan']}",
            flush=True,
        )
    with open("/proc/cpuinfo") as file:
        cpu = {line.split(":")[1].strip() for line in file if line.startswith("model name")}
    result = dict(
        cpu=sorted(cpu), cores=os.cpu_count(), load_average=os.getloadavg()[0], python=platform.python_version(), jax=jax.__version__,
        date=time.strftime("%Y-%m-%d"), command="python benchmarks/bench_host.py", rows=rows,
    )  # fmt: skip
    with open(arguments.out, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
