"""A few cases of tests/campaign.py, new ones each time: a failure's seed makes it again."""

import dataclasses
import random

import campaign
import jax
import pytest

COUNT = {"products": 30, "programs": 10, "invariance": 2}
SLACK = 3  # a fault is larger than the largest error that chance makes of many cases


@pytest.mark.parametrize("kind", campaign.KINDS)
def test_random_cases(kind):
    seeds = [random.randrange(2**32) for _ in range(COUNT[kind])]
    failures = [why for seed in seeds if (why := campaign.failed(kind, seed, SLACK)) is not None]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("kind", ["products", "programs"])
@pytest.mark.parametrize(
    "change, why",
    [
        (lambda x: x * 1.05, "an error of"),
        (lambda x: x + float("nan"), "is finite in"),
        (lambda x: x[None], "instead of"),
    ],
)
def test_a_wrong_result_is_found(kind, change, why):
    case = next(case for case in map(campaign.KINDS[kind], range(100)) if case.dtype == "float32")
    assert campaign.failure(case) is None
    wrong = dataclasses.replace(case, ours=lambda *operands: jax.tree.map(change, case.ours(*operands)))
    assert why in campaign.failure(wrong)


def test_rows_that_depend_on_others_are_found():
    case = campaign.rows(0)
    assert campaign.changed(case) is None
    wrong = dataclasses.replace(case, of=lambda x: case.of(x) * (1 + x.shape[0] // 100))
    assert "other bits" in campaign.changed(wrong)


def test_a_case_is_made_of_its_seed():
    texts = [campaign.product(7).text for _ in range(2)]
    assert texts[0] == texts[1] != campaign.product(8).text
