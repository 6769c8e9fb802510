"""Figures on pages: what they say of ``benchmarks/`` is computed from there, and every other names its command."""

import collections
import csv
import functools
import gzip
import re
import statistics

import numpy as np
import pytest
from test_docs import FENCE, ROOT

from jax_streamk.tools import report, results
from jax_streamk.tools.sides import DENSE, OURS, XLA

PERFORMANCE = ROOT / "docs" / "performance.md"


@functools.cache
def result(name):
    """A name without a folder is of the H200."""
    folder, _, name = name.rpartition("/")
    return results.load(ROOT / "benchmarks" / "results" / (folder or "h200") / f"{name}.json")


def ratios(name, where=lambda row: True):
    (measure,) = result(name)["measures"]
    ours = [row["sides"].get(OURS, {}) for row in result(name)["rows"] if where(row)]
    return np.array([side["ratio"][measure] for side in ours if "ratio" in side])


def measured(name):
    return f"{result(name)['date'][:10]}, jaxlib {result(name)['machine']['jaxlib']}"


def mean(values):
    return f"{statistics.geometric_mean(values):.2f}"


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def cells(*names):
    """Of README's table."""
    return " | ".join(f"{len(of)} | {mean(of)} | {min(of):.2f}" for of in map(ratios, names))


def times(name, side=OURS):
    (measure,) = result(name)["measures"]
    return np.array([row["sides"][side].get(measure, {}).get("median_us", np.nan) for row in result(name)["rows"]])


def misaligned(row):
    return row["n"] % 8 > 0 or row["k"] % 8 > 0


def square(row):
    return row["m"] == row["n"]


def few(row):
    return not square(row)


def program(name):
    return next(row["sides"] for row in result("programs")["rows"] if row["program"] == name)


def step(name):
    return program(name)[OURS]["ratio"]["step"]


def other_programs():
    """All that neither decode nor mix experts."""
    return ratios("programs", lambda row: not row["program"].startswith(("llama_decode", "moe_")))


def of_examples(section, pattern):
    """Numbers, in the order of the page."""
    page = (ROOT / "docs" / "examples.md").read_text().partition(f"## {section}\n")[2]
    return [float(number) for number in re.findall(pattern, page, re.MULTILINE)]


def readme():
    table = {
        "weights of language models": ("decode_llm", "decode_llm_fresh"),
        "small results of long sums": ("strong_scaling", "strong_scaling_fresh"),
        "a quarter misaligned": ("streamk_sample", "streamk_sample_fresh"),
        "DeepBench's training set": ("deepbench_train", "deepbench_train_fresh"),
        "experts of language models": ("moe",),
        "2048 rows and more": ("large",),
        "float32 as TF32": ("float32",),
        "float64": ("float64",),
    }
    for products, names in table.items():
        yield f"{products} | {cells(*names)} |"
    dates = sorted(measured(name) for names in table.values() for name in names)
    yield f"{dates[0][:10]} to {dates[-1][8:]}"
    yield f"mixture of experts {step('moe_forward'):.0f} and its gradient {step('moe_gradient'):.0f}"
    yield f"{step('llama_decode_1'):.2f} for one text to {step('llama_decode_256'):.2f} for 256"
    others = other_programs()
    yield f"{len(others)} others, training among them, {span(others)}"
    yield f"GPT-2 {step('gpt2_step'):.2f}, ViT-B/16 {step('vit_b16_forward'):.2f}"
    for where in few, square:
        of_types = [ratios(f"cpu/host_{dtype}", where) for dtype in ("bfloat16", "float32")]
        yield "".join(f"| {mean(of)}, from {span(of)} " for of in of_types) + "|"
    yield measured("cpu/host_float32")
    (digits,) = of_examples("Ridge regression on handwritten digits", r"^Auto\(\) .* ([\d.]+)$")
    yield f"Gram matrix of `digits.py` takes {digits:.2f} of XLA's time"
    ours, xla, *_ = of_examples("Training a language model", r" ([\d.]+) ms a step$")
    yield f"{ours:.0f} ms instead of {xla:.0f}"


def start():
    aligned = ratios("streamk_sample", lambda row: not misaligned(row))
    yield f"do not start on 16 bytes | **use it** | {mean(ratios('streamk_sample', misaligned))} |"
    yield f"as in decoding | **use it** | {mean(ratios('decode_llm'))} |"
    yield f"weight gradients | **use it** | {mean(ratios('strong_scaling'))} |"
    yield f"of medium size | **use it** | {mean(aligned)} |"
    yield f"2048 rows and more | leave them to XLA | {mean(ratios('large'))} |"
    yield f"float64 | leave them to XLA | {mean(ratios('float64'))}, down to {min(ratios('float64')):.2f} |"
    yield f"few rows | leave them to XLA | down to {min(ratios('float32_high')):.2f} |"
    of_types = (f"{mean(ratios(f'cpu/host_{dtype}', few))} in {dtype}" for dtype in ("float32", "bfloat16"))
    yield f"a few rows on a CPU | **use it** | {', '.join(of_types)}"


def performance():
    yield from of_programs()
    yield from of_ragged_products()
    yield from of_products()
    yield from of_splits()
    yield from of_a_cpu()


def of_programs():
    ours, xla = (program("moe_forward")[side]["peak_bytes"] / 1e9 for side in (OURS, XLA))
    yield f"has {step('moe_forward'):.0f}, in {ours:.1f} GB instead of {xla:.1f}"
    yield f"its gradient {step('moe_gradient'):.0f}"
    yield f"{step('llama_decode_1'):.2f} for one text to {step('llama_decode_256'):.2f} for 256"
    others = other_programs()
    yield f"[{len(others)} more]"
    yield f"{span(others)}, {(others < results.LOSS).sum()} of them below {results.LOSS}"
    of_all = [side["step"] for row in result("programs")["rows"] for side in row["sides"].values()]
    spread = max((time["quartiles_us"][1] - time["quartiles_us"][0]) / 2 / time["median_us"] for time in of_all)
    yield f"vary by up to {spread:.0%}"


def of_ragged_products():
    yield f"have {min(ratios('moe')):.1f} to {max(ratios('moe')):.0f}."
    rows, limit = result("moe")["rows"], result("moe")["limits"]["bytes_per_s"]
    streamed = {of_rhs: [] for of_rhs in (False, True)}
    for row in rows:
        if row["m"] <= 128 * row["groups"]:
            streamed[row["pass_"] == "rhs"].append(row["sides"][OURS]["bytes_per_s"] / limit)
    yield f"stream at {min(streamed[False]):.2f} or more"
    yield f"gradients of matrices at {min(streamed[True]):.2f}"
    many = np.array([row["m"] >= 256 * row["groups"] for row in rows])
    yield f"{span((times('moe', DENSE) / times('moe'))[many])} of our dense product's speed"


def of_products():
    aligned = ratios("streamk_sample", lambda row: not misaligned(row))
    unaligned = ratios("streamk_sample", misaligned)
    yield f"The {len(unaligned)} such shapes of `streamk_sample` have a mean of {mean(unaligned)}"
    yield f"the {len(aligned)} aligned ones {mean(aligned)}"
    rows = result("decode_llm")["rows"]
    large = np.array([row["m"] <= 16 and 2 * row["n"] * row["k"] >= 64e6 for row in rows])
    moved = np.array([row["bytes"] for row in rows]) / 1e6
    ours, xla = (np.median((moved / times("decode_llm", side))[large]) for side in (OURS, XLA))
    yield f"the {large.sum()} products of `decode_llm`"
    yield f"{ours:.2f} TB/s in the median, XLA's {xla:.2f}"
    fresh = ratios("strong_scaling_fresh")
    yield f"{mean(ratios('strong_scaling'))} (`strong_scaling`)"
    yield f"Fresh shapes have {mean(fresh)}, down to {min(fresh):.2f}"
    yield f"lose** up to {1 - min(ratios('large')):.0%}, from 2048 rows on (`large`)"
    slower = np.nanmax(times("narrow") - times("narrow", XLA))
    narrow, float64 = ratios("narrow"), ratios("float64")
    yield f"(`narrow`: {mean(narrow)}, down to {min(narrow):.2f}), by up to {slower:.1f} us"
    yield f"({mean(float64)}, down to {min(float64):.2f})"
    yield f"(down to {min(ratios('float32', lambda row: row['n'] == 16)):.2f})"
    small = ratios("float32_high", lambda row: min(row["m"], row["n"]) <= 64)
    large = ratios("float32_high", lambda row: min(row["m"], row["n"]) > 64)
    yield f"as little as {min(small):.2f}, large ones {min(large):.2f}"
    names = ("decode_llm", "strong_scaling", "streamk_sample", "deepbench_train")
    fresh = np.concatenate([ratios(f"{name}_fresh") for name in names])
    lost = (fresh < results.LOSS).sum()
    yield f"{lost} of their {len(fresh)} shapes on an H200 are below {results.LOSS}, the lowest {min(fresh):.2f}"
    epilogue = times("linear_decode") / times("linear_decode", "jax_streamk.matmul") - 1
    yield f"add {float(mean(1 + epilogue)) - 1:.0%} to our product alone, and at most {max(epilogue):.0%}"
    waits = [result(f"{name}_dependent")["link_us"] for name in ("decode_llm", "streamk_sample", "strong_scaling")]
    yield f"{min(waits):.1f} to {max(waits):.1f} us"


def of_splits():
    """The table of schedules' best times, and how often each is the fastest."""
    kinds = "data_parallel", "stream_k", "split_k ordered", "split_k separate"
    best = collections.defaultdict(lambda: dict.fromkeys(kinds, np.inf))
    with gzip.open(ROOT / "benchmarks" / "tables" / "h200_sweep.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["set"] == "planner_2026-11-22":
                kind = row["schedule"] + f" {row['reduction']}" * (row["schedule"] == "split_k")
                of_shape = best[" x ".join(row[name] for name in "mnk")]
                of_shape[kind] = min(of_shape[kind], float(row["us"]))
    for shape in re.findall(r"^\| (\d+ x \d+ x \d+) \|", PERFORMANCE.read_text(), re.MULTILINE):
        least = min(best[shape].values())
        texts = ["" if us == np.inf else f"{us:.1f}" for us in best[shape].values()]
        texts = [f" **{text}**" if us == least else f" {text}" for text, us in zip(texts, best[shape].values())]
        yield f"| {shape} |" + " |".join(text.rstrip() for text in texts) + " |"
    fastest = collections.Counter(min(of, key=of.get) for of in best.values())
    whole, stream_k, ordered, separate = (fastest[kind] for kind in kinds)
    yield f"the fastest on {whole} of its {len(best)} shapes, a separate reduction on {separate}"
    yield f"ordered split-K on {ordered}, Stream-K on {stream_k}:"


def of_a_cpu():
    for dtype in ("float32", "bfloat16"):
        name, columns = f"cpu/host_{dtype}", []
        for least, most in ((1, 1), (2, 8), (16, 16), (32, 32)):
            of = ratios(name, lambda row, least=least, most=most: few(row) and least <= row["m"] <= most)
            columns.append(span(of) if least < most else " and ".join(f"{ratio:.2f}" for ratio in of))
        squares = ratios(name, square)
        yield f"| {dtype} | {' | '.join(columns)} | {mean(squares)}, from {span(squares)} |"
    yield measured(name)


PAGES = {ROOT / "README.md": readme, ROOT / "docs" / "start.md": start, PERFORMANCE: performance}
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?!\.?\d)|\b\d+ ?(?:us|ms|TB/s|GB/s|%)")
VERSIONS = re.compile(r"\b(?:Python|jax|jaxlib|CUDA|capability) [\d.]+(?: (?:to|is) [\d.]+)?")
DATE, JAX, MACHINE = r"\b20\d\d-\d\d-\d\d\b", r"\bjax(?:lib)? [\d.]+", r"\b(?:[AH][12]00s?|AMD|Intel)\b"


def parts(text):
    """Paragraphs, items and rows of a page, each as a line; without code blocks and what ``--report`` prints."""
    digest = report.digest(report.by_machine(results.load_folder(ROOT / "benchmarks" / "results")))
    text = FENCE.sub("\n", text).replace(digest.strip(), "\n")
    return [" ".join(part.split()) for part in re.split(r"\n\n+|\n(?=- |\|)", text)]


def unnamed(part, computed=()):
    """Figures that are not computed, of a part without a date, JAX's version, a machine and a file that measures."""
    rest = part
    for text in computed:
        rest = rest.replace(text, " ")
    found = FIGURE.findall(VERSIONS.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", rest)))
    files = re.findall(r"\b(?:benchmarks|docs|examples)/[\w/]+\.(?:py|md)", part)
    named = all(re.search(pattern, part) for pattern in (DATE, JAX, MACHINE))
    return [] if named and any((ROOT / file).exists() for file in files) else found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_are_those_of_results(page):
    computed, found = list(PAGES[page]()), parts(page.read_text())
    missing = [text for text in computed if not any(text in part for part in found)]
    assert not missing, f"{page.name} does not say: {missing}"
    others = {part: figures for part in found if (figures := unnamed(part, computed))}
    assert not others, f"{page.name} does not say what measured: {others}"


def test_figures_name_what_measured_them():
    assert unnamed("A product takes 1.25 of XLA's time.") == ["1.25"]
    assert unnamed("It takes 17 us, or 4% less; XLA 1.25 ms.") == ["17 us", "4%", "1.25"]
    assert not unnamed("A product takes 1.25 of XLA's time.", ["takes 1.25 of"])
    assert not unnamed("Python 3.11 to 3.13, jax 0.9.0 to 0.12 (the newest jax for Python 3.11 is 0.10), 16 bytes")
    named = "It has 1.25 (`examples/digits.py`, jax 0.11.2, H200, 2026-11-21)."
    assert not unnamed(named)
    for word in ("examples/digits.py", "jax ", "H200", "2026-11-21"):
        assert unnamed(named.replace(word, "")) == ["1.25"], word


def test_the_page_on_performance_is_short():
    """Beside its tables and commands."""
    lines = FENCE.sub("", PERFORMANCE.read_text()).splitlines()
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= 1200
