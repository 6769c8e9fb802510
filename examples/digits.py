"""Ridge regression on handwritten digits, with split-K and Stream-K products.

    python examples/digits.py

The 1797 digits of UCI's optical recognition set (8x8 pixels, shipped with scikit-learn) are classified by
``W = (X^T X + penalty I)^-1 X^T Y``: X holds centred pixels, Y one column per digit. Both products have a small result
and a long contraction (K = 1797), the shape for which K is worth cutting. Digits held out for the test are rows of
zeros in X and Y: they stay in the shape and contribute nothing.

Beside the accuracy of each schedule it prints what X^T X took under it and by XLA's product, calls taking turns. Exits
with 1 when a product strays from float64.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_streamk as sk

ROUNDS = 300  # of calls that are timed
SCHEDULES = (sk.StreamK(), sk.SplitK(8), sk.Auto())
# On a GPU float32 products are TF32 by default, good for three digits. At HIGH ours are three TF32 products, good for
# float32's own seven (XLA's stay one); on a CPU it changes nothing. So one tolerance is honest on both.
PRECISION = jax.lax.Precision.HIGH
TOLERANCE = 1e-5
PENALTY = 0.5


def load():
    """Centred pixels (1797, 64) and one-hot targets (1797, 10) with zeros for held-out rows, and what scoring needs."""
    pixels, digits = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(digits)), test_size=0.25, stratify=digits, random_state=0)
    pixels, targets = pixels / pixels.max(), np.eye(10)[digits]
    # A model of centred pixels and targets needs no bias in the regression.
    pixels, targets = pixels - pixels[train].mean(axis=0), targets - targets[train].mean(axis=0)
    held_out, answers = pixels[test], digits[test]
    prior = np.eye(10)[digits[train]].mean(axis=0)
    pixels[test] = targets[test] = 0
    return np.float32(pixels), np.float32(targets), held_out, answers, prior


def transposed_product(x, y, schedule):
    """X^T Y; by XLA's product for None."""
    if schedule is None:
        return jnp.matmul(x.T, y, precision=PRECISION)
    return sk.matmul(x.T, y, schedule=schedule, precision=PRECISION)


def fit(x, y, schedule):
    """Gram matrix, X^T Y and the ridge weights."""
    gram, moment = transposed_product(x, x, schedule), transposed_product(x, y, schedule)
    weights = jax.scipy.linalg.solve(gram + PENALTY * jnp.eye(len(gram)), moment, assume_a="pos")
    return gram, moment, weights


def medians(x, schedules):
    """Microseconds of a call that makes the Gram matrix under each schedule, which take turns."""
    x = jnp.asarray(x)
    programs = [jax.jit(lambda x, schedule=schedule: transposed_product(x, x, schedule)) for schedule in schedules]
    times = [[] for _ in programs]
    for _ in range(ROUNDS + 1):  # the first compiles
        for program, taken in zip(programs, times):
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            taken.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(taken[1:]) for taken in times]


def relative_error(found, exact):
    return np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()


def show_plan(title, x, y, schedule):
    # The kernel reads X as it lies: what is contracted is the first dimension of both.
    plan = sk.plan(x, y, (((0,), (0,)), ((), ())), schedule=schedule, precision=PRECISION)
    print(f"  {title}", *("    " + line for line in str(plan).splitlines()), sep="\n")


def main():
    x, y, held_out, answers, prior = load()
    print(
        f"{len(x) - len(answers)} digits to learn from, {len(answers)} to test on; "
        f"jax {jax.__version__} on {jax.devices()[0]}"
    )
    wide = x.astype(np.float64)
    exact_gram, exact_moment = wide.T @ wide, wide.T @ y.astype(np.float64)

    rows = []
    for schedule in (*SCHEDULES, None):
        if schedule is not None:
            print(f"\n{schedule}")
            show_plan("X^T X", x, x, schedule)
            show_plan("X^T Y", x, y, schedule)
        gram, moment, weights = jax.jit(fit, static_argnames="schedule")(x, y, schedule=schedule)
        errors = relative_error(gram, exact_gram), relative_error(moment, exact_moment)
        accuracy = np.mean(np.argmax(held_out @ np.asarray(weights) + prior, axis=1) == answers)
        rows.append(("XLA" if schedule is None else str(schedule), *errors, accuracy))
    times = medians(x, (*SCHEDULES, None))

    width = max(len(name) for name, *_ in rows)
    print(
        "\nAgreement with float64 (largest error over largest entry), the share of test digits read right, "
        "and the time of X^T X,"
    )
    print(f"the median of {ROUNDS} calls:\n")
    print(f"{'schedule':{width}}  {'X^T X':>8}  {'X^T Y':>8}  {'accuracy':>8}  {'time':>10}  {'of XLA':>6}")
    for (name, gram_error, moment_error, accuracy), us in zip(rows, times):
        print(
            f"{name:{width}}  {gram_error:8.1e}  {moment_error:8.1e}  {accuracy:8.1%}  "
            f"{us:7.1f} us  {us / times[-1]:6.2f}"
        )
    worst = max(max(errors) for name, *errors, _ in rows if name != "XLA")
    if not worst < TOLERANCE:
        sys.exit(f"\nA product is off by {worst:.1e}; the tolerance is {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
