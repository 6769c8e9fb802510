"""Custom calls that no plan would make: attributes, operands and workspaces of valid ones are changed at random.

python tests/fuzz.py --count 1000
python tests/fuzz.py --seed 123456    # one call again

A handler must run a call or refuse it by an error. It must not end the process, hang, or write outside of its buffers:
run it with a build under AddressSanitizer, too. Prints the call before it runs, to end with the one that did harm.
"""

import argparse
import faulthandler
import functools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_streamk as sk
from jax_streamk import DataParallel, SplitK, StreamK, _ffi
from jax_streamk.device import device_of
from jax_streamk.lower import chain as lowering_of_chain
from jax_streamk.plan import custom_call
from jax_streamk.tuning import measure

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
CHAIN_TARGET = custom_call.CHAIN_TARGETS[PLATFORM]
SECONDS = 60  # of one call
DTYPES = ["float32", "bfloat16", "int8", "int4", "int32", "bool"]


def shaped(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*shape):
    return jax.eval_shape(
        lambda: sk.QuantizedArray(
            jnp.zeros(shape, "int4"), jnp.zeros((*shape[:-2], shape[-2] // 32, shape[-1]), "bfloat16")
        )
    )


def linear(x, w, bias, residual):
    return sk.linear(x, w, bias, residual=residual, activation="silu", schedule=SplitK(3, "separate"))


# Functions of one product, and their operands.
PRODUCTS = [
    (lambda x, w: sk.matmul(x, w, schedule=StreamK()), [shaped("float32", 70, 300), shaped("float32", 300, 90)]),
    (linear, [shaped("bfloat16", *s) for s in ((40, 512), (512, 64), (64,), (40, 64))]),
    (lambda x, w: sk.matmul(x, w, schedule=DataParallel()), [shaped("float32", *s) for s in ((3, 9, 40), (3, 40, 24))]),
    (lambda x, w: sk.matmul(x, w, schedule=DataParallel()), [shaped("bfloat16", 5, 256), numbers(256, 128)]),
    (
        lambda x, w, sizes: sk.ragged_dot(x, w, sizes, schedule=DataParallel()),
        [shaped("float32", 50, 64), shaped("float32", 4, 64, 40), shaped("int32", 4)],
    ),
    (
        lambda x, w, sizes, rows: sk.ragged_dot(x, w, sizes, lhs_indices=rows, schedule=DataParallel()),
        [shaped("bfloat16", 30, 64), shaped("bfloat16", 4, 64, 40), shaped("int32", 4), shaped("int32", 60)],
    ),
]


@functools.cache
def plan(i):
    product, operands = PRODUCTS[i]
    return sk.plan(product, *operands)


class Call:
    """A valid call of a random product, with what is changed of it."""

    def __init__(self, seed):
        self.random, rng = random.Random(seed), np.random.default_rng(seed)
        made = plan(self.random.randrange(len(PRODUCTS)))
        self.attributes = dict(custom_call.attributes(made))
        self.changes = [str(made.problem)]
        spans = measure.spans(made.problem)
        type_d, size_d = spans.pop("d")
        self.result, self.workspace = [size_d, type_d.dtype], made.workspace_bytes
        self.operands = []
        for role, (type_, size) in spans.items():
            if role in ("group_sizes", "indices"):
                most = made.problem.m if self.random.random() < 0.5 else 2**31 - 1
                self.operands.append(rng.integers(-1, most // size + 2, size, np.int32))
            else:
                self.operands.append(jnp.asarray(rng.integers(-3, 4, size)).astype(type_.dtype))

    def change(self):
        self.random.choice([self.change_attribute] * 6 + [self.change_operand] * 3 + [self.change_result])()

    def change_attribute(self):
        name = self.random.choice(sorted(self.attributes))
        value, kind = self.attributes[name], self.random.random()
        if kind < 0.03:
            del self.attributes[name]
        elif kind < 0.06:
            self.attributes[name + "_"] = value
        elif kind < 0.12:
            self.attributes[name] = self.random.choice([np.float32(1), np.int8(1), np.int32(1), np.int64(1), "1"])
        elif isinstance(value, np.generic):
            self.attributes[name] = self.other(value)
        else:
            self.attributes[name] = self.random.choice([kernel.name for kernel in _ffi.kernels()])
        self.changes.append(f"{name}: {self.attributes.get(name)!r}")

    def other(self, value):
        """Another value of its dtype: near it, at an end of its dtype, or anywhere."""
        if value.dtype.kind == "b":
            return np.bool_(not value)
        if value.dtype.kind == "f":
            return value.dtype.type(self.random.choice([0.0, -1.0, np.inf, np.nan]))
        info, old = np.iinfo(value.dtype), int(value)
        near = [0, 1, -1, old - 1, old + 1, 2 * old, 3 * old // 2, -old, old + 8]
        ends = [info.min, info.max, info.max // 2, 2**31 - 1, -(2**31), 2**40, self.random.randrange(info.max)]
        return value.dtype.type(min(max(self.random.choice(near + ends), info.min), info.max))

    def change_operand(self):
        i, kind = self.random.randrange(len(self.operands)), self.random.randrange(7)
        x = self.operands[i]
        if kind == 0:
            del self.operands[i]
        elif kind == 1:
            self.operands.insert(i, x)
        elif kind == 2:
            self.operands[i] = x.astype(self.random.choice(DTYPES))
        elif kind == 3:
            self.operands[i] = x[: self.random.choice([0, 1, len(x) // 2, len(x) - 1])]
        elif kind == 4:
            self.operands[i] = x.reshape(1, -1, 1)
        else:
            self.random.shuffle(self.operands)
        self.changes.append(f"operands: {[f'{x.dtype}{[*x.shape]}' for x in self.operands]}")

    def change_result(self):
        if self.random.random() < 0.5:
            self.workspace = self.random.choice([0, 1, self.workspace // 2, max(0, self.workspace - 1)])
        elif self.random.random() < 0.5:
            self.result[0] = self.random.choice([0, 1, max(0, self.result[0] - 1)])
        else:
            self.result[1] = self.random.choice(DTYPES)
        self.changes.append(f"result: {self.result}, {self.workspace} bytes")

    def run(self):
        """Whether it was refused."""
        size, dtype = self.result
        return is_refused(
            TARGET, self.attributes, self.operands, [shaped(dtype, size), shaped("uint8", self.workspace)]
        )


def is_refused(target, attributes, operands, results):
    call = Primitive("fuzzed")
    call.multiple_results = True
    call.def_abstract_eval(lambda *operands: [jax.core.ShapedArray(x.shape, x.dtype) for x in results])

    def lower(ctx, *operands):
        config = {name: mlir.ir_attribute(value) for name, value in attributes.items()}
        return jax.ffi.ffi_lowering(target, backend_config=config)(ctx, *operands)

    mlir.register_lowering(call, lower)
    try:
        jax.block_until_ready(jax.jit(call.bind)(*operands))
    except (jax.errors.JaxRuntimeError, TypeError, ValueError):  # the latter: JAX takes no such call
        return True
    return False


def chained(x, w, gamma, v):
    y = sk.matmul(x, w)
    y = jnp.tanh(y) / (1 + jnp.abs(y).sum(-1, keepdims=True)) * gamma
    return y, sk.matmul(y, v)


class ChainCall:
    """A valid call of a chain, with what is changed of it."""

    def __init__(self, seed):
        self.random, rng = random.Random(seed), np.random.default_rng(seed)
        self.changes = ["chain"]
        operands = [
            jnp.asarray(rng.integers(-3, 4, shape), "bfloat16") for shape in [(7, 40), (40, 24), (24,), (24, 16)]
        ]
        (eqn,) = jax.make_jaxpr(sk.chain(chained))(*operands).eqns
        jaxpr = eqn.params["jaxpr"]
        chain = lowering_of_chain.chain_of(jaxpr, eqn.params["schedule"], device_of(None))
        call = lowering_of_chain._Call(None, chain, dict(zip(jaxpr.jaxpr.invars, operands)), PLATFORM)
        self.attributes = call.attributes()
        self.operands = [value for value, _ in call.arguments.values()]
        self.results = [shaped(x.aval.dtype, *x.aval.shape) for x in chain.stored()]
        self.workspace = chain.workspace_bytes

    def change(self):
        kind = self.random.random()
        if kind < 0.1:
            self.workspace = self.random.choice([0, 1, self.workspace // 2, max(0, self.workspace - 1)])
            self.changes.append(f"{self.workspace} bytes")
        elif kind < 0.2:
            at = self.random.randrange(len(self.operands))
            change = self.random.choice([lambda x: x[:0], lambda x: x.astype("float32"), lambda x: x[: len(x) // 2]])
            self.operands[at] = change(self.operands[at])
            self.changes.append(f"operands: {[f'{x.dtype}{[*x.shape]}' for x in self.operands]}")
        else:
            self.changes.append(str(self.change_in(self.attributes)))

    def change_in(self, fields):
        """Changes one of these attributes, or of those in one of them. Returns the path to it and its value."""
        name = self.random.choice(sorted(fields))
        if isinstance(fields[name], dict) and self.random.random() < 0.95:
            return name, *self.change_in(fields[name])
        if self.random.random() < 0.05:
            return name, "gone", fields.pop(name)
        fields[name] = self.other(fields[name])
        return name, fields[name]

    def other(self, value):
        if isinstance(value, np.ndarray) and value.size:
            if self.random.random() < 0.1:
                return value[: self.random.randrange(value.size)]
            changed = value.copy()
            at = self.random.randrange(value.size)
            near = [changed[at] + 1, changed[at] - 1, -changed[at]]
            changed[at] = self.random.choice([0, 1, -1, -2, 63, 64, 127, 128, 2**31 - 1, *near])
            return changed
        if isinstance(value, np.generic) and value.dtype.kind in "iu":
            return value.dtype.type(self.random.choice([0, 1, -1, int(value) + 1, int(value) - 1, 2**31 - 1]))
        return self.random.choice(["1", np.int8(1), np.float64(1), np.zeros(3, np.int64)])

    def run(self):
        """Whether it was refused."""
        results = [*self.results, shaped("uint8", self.workspace)]
        return is_refused(CHAIN_TARGET, self.attributes, self.operands, results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, help="of one call; without it they are new each time")
    arguments = parser.parse_args()
    seeds = [random.randrange(2**32) for _ in range(arguments.count)] if arguments.seed is None else [arguments.seed]
    assert not any(Call(seed).run() for seed in range(20)), "a call is refused as it is"
    assert not ChainCall(0).run(), "a chain is refused as it is"
    refused = 0
    for seed in seeds:
        call = random.Random(seed).choice([Call, Call, ChainCall])(seed)
        for _ in range(call.random.randint(1, 3)):
            call.change()
        print(f"--seed {seed}: {'; '.join(call.changes)}", flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        refused += call.run()
        faulthandler.cancel_dump_traceback_later()
    print(f"{len(seeds)} calls, {refused} of them refused")


if __name__ == "__main__":
    sys.exit(main())
