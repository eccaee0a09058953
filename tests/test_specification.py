"""Every specification of the window probe, held against the committed one and against tables done by hand."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import figures, paper, rules, specification, verdicts
from lib.verdicts import VerdictError

RULES = rules.load_verdicts()
COMMITTED = specification.committed(RULES)
LABELS = {"cell": "a", "stack": "stacked", "dtype": "float32", "merge_dtype": "float32"}
BOOTSTRAP = "studentised bootstrap"
NUMBERS = st.floats(-1.0, 1.0, width=32)


def labelled(case, **labels):
    return [table.assign(**(LABELS | labels)) for table in paper.consistent_tables(case)]


@pytest.fixture(scope="module", params=["c3", "c4", "c5"])
def case(request):
    nll, recall = labelled(request.param)
    return nll, recall, specification.specifications(nll, RULES)


def at(table, **levels):
    """The rows of the committed specification, but for K and ``levels``."""
    levels = {name: level for name, level in COMMITTED.items() if name != "K"} | levels
    rows = table[np.logical_and.reduce([table[name] == level for name, level in levels.items()])]
    return rows.set_index("K").verdict.to_dict()


def test_the_committed_specification_is_that_of_the_rules():
    assert COMMITTED == {
        "K": 20,
        "tokens": "sum",
        "reading": "either",
        "interval": BOOTSTRAP,
        "margin": 0.04,
        "stack": "stacked",
        "dtype": "float32",
    }


def test_the_committed_specification_is_the_verdict_of_the_battery(case):
    nll, recall, table = case
    curve = verdicts.along_windows(nll, recall, RULES)
    assert at(table) == curve.verdict.to_dict()
    assert at(table, reading="mean") == curve.by_mean.to_dict()
    alone = curve.by_count.replace(verdicts.MIXED, verdicts.INCONCLUSIVE)
    assert at(table, reading="count", interval="") == alone.to_dict()


def test_every_choice_is_crossed_with_every_other(case):
    _, _, table = case
    margins, windows = len(RULES["margin"]["curve"]), 27
    assert len(table) == 2 * margins * windows * (1 + 2 * len(specification.INTERVALS))
    assert not table.duplicated(specification.CHOICES).any() and set(table.K) == set(range(1, 28))


def test_a_mean_over_tokens_is_held_against_one_margin_a_token(case):
    # 0.04 nats in 20 tokens are 0.02 in 10: the mean at K = 10 and margin 0.04 is the sum's verdict at margin 0.02.
    _, _, table = case
    means, sums = at(table, tokens="mean"), at(table)
    assert means[20] == sums[20] and means[10] == at(table, margin=0.02)[10]


@pytest.mark.parametrize("name", ["c3", "c4", "c5"])
def test_with_a_margin_converted_to_the_window_mean_and_sum_are_one_verdict(name):
    # Windows of K tokens are equally long in all canaries, which is why the choice is about the margin alone.
    nll, recall = paper.consistent_tables(name)
    for k in (1, 12, 20, 27):
        only = {**RULES, "probes": {"window": {"kind": "nll", "window": k}}}
        values = verdicts.probe_values(nll, recall, only)
        mean, total = (verdicts.judge(values, only, reading=reading).verdict["window"] for reading in ("mean", "sum"))
        assert mean == total


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_arrays_are_judged_as_single_values_are(rows):
    low, high, up, down = map(np.array, zip(*rows, strict=True))
    rule = RULES["readings"]["count_nll"]
    means = specification._placed(low, high, 0.04)
    counts = specification._counted(up, down, rule["min_canaries"])
    either = specification._either(means, counts)
    for row, mean, count, both in zip(rows, means, counts, either, strict=True):
        by_mean, by_count = verdicts.place(*row[:2], 0.04), verdicts.count_reading(*row[2:], rule)
        assert mean == by_mean and both == verdicts.either_reading(by_mean, by_count)[0]
        assert count == (verdicts.INCONCLUSIVE if by_count == verdicts.MIXED else by_count)


def test_cells_stacks_and_dtypes_are_told_apart_and_only_those_that_are_there():
    nll, _ = labelled("c4")
    merged = nll.assign(stack="merged", merge_dtype="bfloat16", nll=nll.nll_base)
    both = specification.specifications(pd.concat([nll, merged, nll.assign(cell="b")]), RULES)
    alone = specification.specifications(nll, RULES)
    assert both.groupby("cell", observed=True).size().to_dict() == {"a": 2 * len(alone), "b": len(alone)}
    own = both[(both.cell == "a") & (both["stack"] == "stacked")].verdict.astype(str)
    assert own.tolist() == alone.verdict.astype(str).tolist()
    untouched = both[both["stack"] == "merged"]
    assert set(untouched.verdict) == {"unchanged"} and set(untouched.dtype) == {"float32, merged in bfloat16"}
    assert set(alone.dtype) == {"float32"}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda t: pd.concat([t, t.iloc[:1]]), "occurs twice"),
        (lambda t: t[(t.seed != 0) | (t.canary != t.canary[0])], "got 59 targets, expected 3 seeds x 20"),
        (lambda t: t.assign(nll=t.nll.where(t.position != 3)), "missing or not a number"),
        (lambda t: t[(t.position != 3) | (t.seed != 0)], "missing or not a number"),
        (lambda t: t.assign(modality=np.where(t.seed == 0, "text", "image")), "modalities text, image"),
    ],
)
def test_tables_that_cannot_be_judged_are_refused(spoil, message):
    with pytest.raises(VerdictError, match=message):
        specification.specifications(spoil(labelled("c3")[0]), RULES)


def test_a_window_alone_or_a_recall_alone_is_a_conclusion_of_its_own():
    # C3: three canaries lose their recall, the window is silent. C4: the window moves, no recall does.
    parts = [labelled(name, cell=name) for name in ("c3", "c4", "c5")]
    nll, recall = (pd.concat(tables) for tables in zip(*parts, strict=True))
    table = specification.specifications(nll, RULES)
    found = specification.conclusions(table, nll, recall, RULES)
    assert len(found) == 3 * len(table)
    told = specification.flips(found, COMMITTED | {"recall": "hit_forced"}, "conclusion").committed
    assert told.to_dict() == {"c3": "the recall alone", "c4": "the window alone", "c5": "not testable"}


def test_a_group_without_recalls_is_refused():
    nll, recall = labelled("c3")
    table = specification.specifications(nll, RULES)
    with pytest.raises(VerdictError, match="recall: no row to judge"):
        specification.conclusions(table, nll, recall.assign(stack="merged"), RULES)


def test_the_recall_changes_the_conclusion_and_never_the_windows_verdict():
    nll, recall = labelled("c4")
    recall["hit_full"] = ~recall.canary.isin(recall.canary.unique()[:3])
    table = specification.specifications(nll, RULES)
    found = specification.conclusions(table, nll, recall, RULES)
    levels = COMMITTED | {"recall": "hit_full"}
    one = specification.flips(found, levels, "conclusion").loc["a"]
    other = specification.flips(found, COMMITTED | {"recall": "hit_secret"}, "conclusion").loc["a"]
    assert (one.committed, other.committed) == ("both fire", "the window alone")
    on = {name: specification.influence(found, levels, name).set_index("choice") for name in ("verdict", "conclusion")}
    # Of three definitions one is at odds with the two others: two pairs of three, two of the two other levels.
    assert on["conclusion"].flips["recall"] == pytest.approx(2 / 3) and on["conclusion"].alone["recall"] == 1.0
    assert on["verdict"].flips["recall"] == 0.0


@pytest.mark.parametrize(
    "window, recall, conclusion",
    [
        ("damaged", "damaged", "both fire"),
        ("damaged", "strengthened", "in opposite directions"),
        ("damaged", "inconclusive", "the window alone"),
        ("inconclusive", "strengthened", "the recall alone"),
        ("unchanged", "inconclusive", "neither fires"),
        ("damaged", "not testable", "not testable"),
    ],
)
def test_conclusions_by_hand(window, recall, conclusion):
    assert specification._concluded(np.array([window]), np.array([recall])).tolist() == [conclusion]


def small(*rows):
    """Specifications that differ in K and margin only."""
    fixed = {"tokens": "sum", "interval": BOOTSTRAP, "reading": "either", "stack": "stacked", "dtype": "float32"}
    return pd.DataFrame(rows, columns=["cell", "K", "margin", "verdict"]).assign(**fixed)


def test_flips_are_counted_against_the_committed_verdict():
    table = small(
        ("a", 20, 0.04, "unchanged"),
        ("a", 24, 0.04, "damaged"),
        ("a", 20, 0.08, "unchanged"),
        ("a", 24, 0.08, "inconclusive"),
    )
    found = specification.flips(table, COMMITTED).loc["a"]
    assert (found.committed, found.specifications, found.flipped, found.reversed) == ("unchanged", 4, 0.5, 0.25)
    shares = (found.damaged, found.unchanged, found.inconclusive, found.strengthened)
    assert shares == (0.25, 0.5, 0.25, 0.0)


def test_a_committed_specification_that_is_not_there_or_not_one_is_refused():
    table = small(("a", 20, 0.04, "unchanged"), ("a", 20, 0.08, "damaged"), ("b", 20, 0.08, "damaged"))
    for ask in (specification.flips, specification.influence):
        with pytest.raises(VerdictError, match="names 1 rows, expected one in each cell"):
            ask(table, COMMITTED)
    with pytest.raises(VerdictError, match="names 3 rows"):
        specification.flips(table, {"K": 20})
    with pytest.raises(VerdictError, match="no level of tokens, reading, .*; expected one of every choice"):
        specification.influence(table, {"K": 20, "margin": 0.04})


def test_the_choice_that_flips_most_comes_first():
    # K decides everything, the margin nothing.
    rows = [("a", k, m, "unchanged" if k == 20 else "damaged") for k in (20, 24) for m in (0.04, 0.08)]
    found = specification.influence(small(*rows), COMMITTED).set_index("choice")
    assert found.index[0] == "K" and found.flips["K"] == found.reversals["K"] == found.alone["K"] == 1.0
    assert found.flips["margin"] == found.alone["margin"] == 0.0


def test_influence_is_a_share_of_pairs():
    # K at margin 0.04: unchanged, damaged, inconclusive: 3 of 3 pairs differ, 1 of them clear; at 0.08 none of 3.
    said = {0.04: ["unchanged", "damaged", "inconclusive"], 0.08: ["damaged"] * 3}
    rows = [("a", k, m, verdict) for m, told in said.items() for k, verdict in zip((20, 24, 27), told, strict=True)]
    found = specification.influence(small(*rows), COMMITTED).set_index("choice")
    assert (found.flips["K"], found.reversals["K"], found.alone["K"]) == (3 / 6, 1 / 6, 1.0)
    assert (found.flips["margin"], found.reversals["margin"], found.alone["margin"]) == (2 / 3, 1 / 3, 1.0)


def test_a_choice_of_one_level_has_no_influence_to_report():
    found = specification.influence(small(("a", 20, 0.04, "damaged"), ("a", 24, 0.04, "damaged")), COMMITTED)
    alone = found[found.choice != "K"]
    assert (alone.levels == 1).all() and alone[["flips", "reversals", "alone"]].isna().all(axis=None)
    assert found.choice[0] == "K" and found.flips[0] == 0.0


def test_a_count_is_compared_with_every_intervals_mean():
    # Count: damaged. Mean: unchanged by one interval, damaged by the other: of two pairs one differs.
    rows = [("count", "", "damaged"), ("mean", BOOTSTRAP, "unchanged"), ("mean", "Student's t", "damaged")]
    table = small(*(("a", 20, 0.04, verdict) for *_, verdict in rows))
    table["reading"], table["interval"] = [row[0] for row in rows], [row[1] for row in rows]
    found = specification.influence(table, COMMITTED | {"reading": "mean"}).set_index("choice")
    assert found.flips["reading"] == 0.5 and found.flips["interval"] == 1.0


@given(st.lists(st.sampled_from(specification.VERDICTS), min_size=6, max_size=6))
def test_influence_is_that_of_counting_pairs_one_by_one(told):
    places = list(itertools.product((20, 24, 27), (0.04, 0.08)))
    table = small(*(("a", *place, verdict) for place, verdict in zip(places, told, strict=True)))
    found = specification.influence(table, COMMITTED).set_index("choice").flips
    said = dict(zip(places, told, strict=True))
    pairs = list(itertools.combinations(places, 2))
    for choice, same in (("K", 1), ("margin", 0)):
        asked = [(one, other) for one, other in pairs if one[same] == other[same]]
        assert found[choice] == pytest.approx(np.mean([said[one] != said[other] for one, other in asked]))


def test_intervals_agree_on_values_without_skew():
    values = np.linspace(-1, 1, 20)[:, None]
    rule = RULES["readings"]["mean"]
    found = {name: method(values, rule) for name, method in specification.INTERVALS.items()}
    for low, high in found.values():
        assert low[0] == pytest.approx(-high[0], abs=0.05) and 0.2 < high[0] < 0.35
    own = verdicts.studentised_bootstrap(values[:, 0], rule)
    assert found[BOOTSTRAP][0][0] == pytest.approx(own[0])


def test_values_without_spread_are_a_point():
    low, high = specification.INTERVALS[BOOTSTRAP](np.full((20, 1), 0.1), RULES["readings"]["mean"])
    assert low[0] == high[0] == pytest.approx(0.1)


def judged(**by_cell):
    probes = ["mean20", "hex", "preamble", "hit_full"]
    return pd.DataFrame.from_dict(by_cell, orient="index", columns=probes)


def test_contradictions_are_counted_where_both_verdicts_are_clear():
    table = judged(
        a=["damaged", "damaged", "unchanged", "damaged"],
        b=["unchanged", "damaged", "damaged", "inconclusive"],
        c=["damaged", "damaged", "unchanged", "not testable"],
        d=["inconclusive", "damaged", "damaged", "damaged"],
        n=["damaged", "unchanged", "unchanged", "not testable"],
    )
    kinds = pd.Series({"a": "full", "b": "full", "c": "undertrained", "d": "long", "n": "noise"})
    found = specification.contradictions(table, kinds, "mean20")
    hexes = found.loc["trained", "hex"]
    assert (hexes.cells, hexes.comparable, hexes.contradict, hexes.which) == (4, 3, 1, "b")
    # Clopper and Pearson, 1 of 3: low = 1 - 0.975 ** (1 / 3).
    assert hexes.share == pytest.approx(1 / 3) and hexes.low == pytest.approx(1 - 0.975 ** (1 / 3))
    full = found.loc["trained", "hit_full"]  # 0 of 1: high = 1 - 0.025
    assert (full.comparable, full.contradict, full.low) == (1, 0, 0.0) and full.high == pytest.approx(0.975)
    assert found.loc[("noise", "any")].which == "n" and found.loc[("noise", "hex")].contradict == 1
    nobody = found.loc["noise", "hit_full"]
    assert nobody.comparable == 0 and nobody[["share", "low", "high"]].isna().all()
    assert "preamble" not in found.index.get_level_values("against")  # it does not read the secret


def test_the_curve_shows_every_cell_and_says_where_nothing_was_varied():
    rows = [
        (cell, k, m, verdict)
        for cell, told in {"a": "damaged", "n": "unchanged"}.items()
        for k, verdict in ((20, told), (24, "inconclusive"))
        for m in (0.04, 0.08)
    ]
    table = small(*rows)
    fates, ranking = specification.flips(table, COMMITTED), specification.influence(table, COMMITTED)
    figure = figures.specification_curve({"every K": fates}, {"every K": ranking}, ["n"], {"a": "C3"})
    texts = [text.get_text() for axes in figure.axes for text in [*axes.texts, *axes.get_yticklabels()]]
    assert {"C3 ▸ a", "n", "50 %", "100 %", "one level"} <= set(texts)
    assert "The window's verdict under 4 specifications" in [axes.get_title(loc="left") for axes in figure.axes]
    trained, noise = (axes for axes in figure.axes if axes.get_ylabel() in ("trained cells", "noise"))
    assert len(trained.get_yticks()) == len(noise.get_yticks()) == 1
