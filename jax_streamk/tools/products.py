"""Which products a CSV file asks for."""

import csv
import dataclasses

import jax
import jax.numpy as jnp

from jax_streamk import compat


@dataclasses.dataclass(frozen=True)
class Product:
    """``D[b, m, n] = A[b, m, k] @ B[b, k, n]``, row-major; of a transposed operand the last two dimensions lie swapped.

    ``out_dtype`` None is what JAX makes of the operands.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = False
    dtype: str = "bfloat16"
    out_dtype: str | None = None

    def dot_general(self):
        """Operands, as shapes, and the parameters of ``lax.dot_general``."""
        lead = (self.batch,) if self.batch > 1 else ()
        a, b = (self.k, self.m) if self.trans_a else (self.m, self.k), (self.n, self.k) if self.trans_b else (self.k, self.n)
        batch, first = tuple(range(len(lead))), len(lead)
        contract = (first if self.trans_a else first + 1,), (first + 1 if self.trans_b else first,)
        operands = [jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(self.dtype)) for shape in (a, b)]
        out = None if self.out_dtype is None else jnp.dtype(self.out_dtype)
        params = dict(dimension_numbers=(contract, (batch, batch)), precision=compat.canonicalize_precision(None))
        return operands, params | dict(preferred_element_type=out)

    def __str__(self):
        batch = f"{self.batch} x " if self.batch > 1 else ""
        a, b = "A^T" if self.trans_a else "A", "B^T" if self.trans_b else "B"
        out = f" -> {self.out_dtype}" if self.out_dtype else ""
        return f"{batch}{self.m} x {self.n} x {self.k} ({a} @ {b}, {self.dtype}{out})"


def read(path, dtypes):
    """The ``Product`` of every row of a CSV file, each once, in order; for each of ``dtypes`` where the row names none.

    Columns are m, n, k, and optionally batch, trans_a, trans_b (0 or 1), dtype and out_dtype. Others are ignored.

    Raises:
      OSError: the file cannot be read.
      ValueError: a column is missing or a value is not what it may be, with the path and the line.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in ("m", "n", "k") if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path}, line 1: there is no column {', '.join(missing)}; m, n and k are needed")
            products = []
            for row in reader:
                at = f"{path}, line {reader.line_num}"
                row = {name: (value or "").strip() for name, value in row.items() if name is not None}
                fixed = {name: _extent(at, name, row[name]) for name in ("m", "n", "k")}
                fixed["batch"] = _extent(at, "batch", row.get("batch") or "1")
                fixed |= {name: _flag(at, name, row.get(name) or "0") for name in ("trans_a", "trans_b")}
                fixed["out_dtype"] = _dtype(at, "out_dtype", row["out_dtype"]) if row.get("out_dtype") else None
                for dtype in [row["dtype"]] if row.get("dtype") else dtypes:
                    products.append(Product(**fixed, dtype=_dtype(at, "dtype", dtype)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: {error}; it must be a CSV file") from None
    return list(dict.fromkeys(products))


def _extent(at, name, text):
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{at}: {name}={text!r}; it must be an integer from 1 to 2^31 - 1")
    return int(text)


def _flag(at, name, text):
    if text not in ("0", "1"):
        raise ValueError(f"{at}: {name}={text!r}; it must be 0 or 1")
    return text == "1"


def _dtype(at, name, text):
    try:
        return jnp.dtype(text).name
    except TypeError:
        raise ValueError(f"{at}: {name}={text!r}; it must be the name of a dtype, such as bfloat16") from None
