"""Every specification of the window probe, held against the committed one and against a table done by hand."""

import numpy as np
import pandas as pd
import pytest

from lib import paper, rules, specification, verdicts

RULES = rules.load_verdicts()
COMMITTED = {"K": 20, "interval": "studentised bootstrap", "reading": "either", "margin": 0.04, "stack": "stacked"}


@pytest.fixture(scope="module", params=["c3", "c4", "c5"])
def case(request):
    nll, recall = paper.consistent_tables(request.param)
    return nll, recall, specification.specifications(nll.assign(stack="stacked"), RULES)


def test_the_committed_specification_is_the_verdict_of_the_battery(case):
    nll, recall, table = case
    curve = verdicts.along_windows(nll, recall, RULES)
    own = table[(table.reading == "either") & (table.interval == "studentised bootstrap") & (table.margin == 0.04)]
    assert own.set_index("K").verdict.to_dict() == curve.verdict.to_dict()
    means = table[(table.reading == "mean") & (table.interval == "studentised bootstrap") & (table.margin == 0.04)]
    assert means.set_index("K").verdict.to_dict() == curve.by_mean.to_dict()


def test_every_choice_is_crossed_with_every_other(case):
    nll, _, table = case
    margins, windows = len(RULES["margin"]["curve"]), 27
    assert len(table) == margins * windows * (1 + 2 * len(specification.INTERVALS))
    assert not table.duplicated(specification.CHOICES).any() and set(table.K) == set(range(1, 28))


def small(*rows):
    """Specifications that differ in K and margin only."""
    fixed = {"interval": "", "reading": "count", "stack": "stacked"}
    table = pd.DataFrame(rows, columns=["cell", "K", "margin", "verdict"])
    return table.assign(**fixed)


def test_flips_are_counted_against_the_committed_verdict():
    table = small(
        ("a", 20, 0.04, "unchanged"),
        ("a", 24, 0.04, "damaged"),
        ("a", 20, 0.08, "unchanged"),
        ("a", 24, 0.08, "inconclusive"),
    )
    found = specification.flips(table, {"K": 20, "margin": 0.04}).loc["a"]
    assert (found.committed, found.flipped, found.reversed) == ("unchanged", 0.5, 0.25)
    assert (found.damaged, found.unchanged, found.inconclusive) == (0.25, 0.5, 0.25)


def test_the_choice_that_flips_most_comes_first():
    # K decides everything, the margin nothing.
    rows = [("a", k, m, "unchanged" if k == 20 else "damaged") for k in (20, 24) for m in (0.04, 0.08)]
    found = specification.influence(small(*rows)).set_index("choice")
    assert found.index[0] == "K" and found.flips["K"] == 1.0 == found.reversals["K"]
    assert found.flips["margin"] == 0.0


def test_intervals_agree_on_values_without_skew():
    values = np.linspace(-1, 1, 20)[:, None]
    rule = RULES["readings"]["mean"]
    found = {name: method(values, rule) for name, method in specification.INTERVALS.items()}
    for low, high in found.values():
        assert low[0] == pytest.approx(-high[0], abs=0.05) and 0.2 < high[0] < 0.35
    own = verdicts.studentised_bootstrap(values[:, 0], rule)
    assert found["studentised bootstrap"][0][0] == pytest.approx(own[0])
