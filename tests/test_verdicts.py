"""Verdicts on tables written by hand: what the paper reports, what intervals cover, and what is refused."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import paper, rules, verdicts
from lib.verdicts import VerdictError

RULES = rules.load_verdicts()
SPANS = ["preamble"] * 11 + ["hex"] * 13 + ["suffix"] * 3


def tables(change, seeds=1, base=0.5, hits=None, base_hit=True):
    """Per-token and recall tables of canaries whose NLL moves by ``change`` [seeds, canaries, 27] or [canaries, 27]."""
    change = np.broadcast_to(np.asarray(change, dtype=float), (seeds, *np.shape(change)[-2:]))
    count = change.shape[1]
    grid = [(s, f"c{c:02d}", t) for s in range(seeds) for c in range(count) for t in range(27)]
    nll = pd.DataFrame(grid, columns=["seed", "canary", "position"])
    nll["span"], nll["nll_base"] = SPANS * (seeds * count), base
    nll["nll"] = nll.nll_base + change.ravel()
    recall = nll[["seed", "canary"]].drop_duplicates().reset_index(drop=True)
    for hit in ("hit_full", "hit_secret", "hit_forced"):
        recall[f"{hit}_base"] = base_hit
        recall[hit] = base_hit if hits is None else np.asarray(hits).ravel()
    return nll, recall


def test_a_probe_reads_the_mean_of_its_tokens():
    change = np.zeros((2, 27))
    change[0, 0], change[0, 23], change[1, 11] = 0.2, 1.3, 2.6
    values = verdicts.probe_values(*tables(change), RULES).set_index(["probe", "canary"])
    assert values.loc["mean20"].change.tolist() == pytest.approx([0.2 / 20, 2.6 / 20])
    assert values.loc["hex"].change.tolist() == pytest.approx([1.3 / 13, 2.6 / 13])
    assert values.loc["preamble"].change.tolist() == pytest.approx([0.2 / 11, 0.0])
    assert values.loc["hex"].tokens.tolist() == [13, 13] and values.loc["hex"].base.tolist() == [0.5, 0.5]


def test_a_clipped_window_reads_shorter_targets_whole():
    nll, recall = tables(np.full((2, 27), 0.1))
    nll = nll[(nll.canary == "c00") | (nll.position < 12)]  # the second target ends after its first secret token
    clipped = {"probes": {"mean20": {"kind": "nll", "window": 20, "clipped": True}}}
    values = verdicts.probe_values(nll, recall, clipped)
    assert values.tokens.tolist() == [20, 12] and values.change.tolist() == pytest.approx([0.1, 0.1])
    with pytest.raises(VerdictError, match="got K = 20, expected 1 to 12"):
        verdicts.probe_values(nll, recall, RULES)


# --- the paper's three cases, from per-token changes that give its numbers --------------------------------------------

PATTERNS = {"c3": "window_truncation", "c4": "non_secret_drift", "c5": "ambiguous_drop"}
WINDOWS = {"c3": 0.0001, "c4": 0.0150, "c5": -0.0070}
SECRETS = {"c3": 0.0133, "c4": 0.0004, "c5": 0.0076}


@pytest.mark.parametrize("reading", ["mean", "sum"])
@pytest.mark.parametrize("case", PATTERNS)
def test_the_papers_numbers_give_the_papers_patterns_and_no_other(case, reading):
    nll, recall = paper.consistent_tables(case, reading)
    change = nll.nll - nll.nll_base
    by_canary = [nll.seed, nll.canary]
    secret = change[nll.span == "hex"].groupby(by_canary)
    assert change[nll.position < 20].groupby(by_canary).mean().mean() == pytest.approx(WINDOWS[case], abs=2e-5)
    assert (secret.mean() if reading == "mean" else secret.sum()).mean() == pytest.approx(SECRETS[case], abs=2e-5)
    found = verdicts.judge_group(nll, recall, RULES)
    assert found.shown == [PATTERNS[case]]
    for table in (found.verdicts, found.verdicts_of_sums):
        shares, base = found.shares["preamble"], recall.hit_full_base.mean()
        held = [f.pattern for f in verdicts.patterns(table, shares, base, RULES).values() if f.holds]
        assert held == [PATTERNS[case]]


def test_c3_fails_as_reported():
    nll, recall = paper.consistent_tables("c3")
    assert (~recall.hit_full).sum() == 7 and len(recall) == 60
    assert recall[~recall.hit_full].canary.nunique() == 3
    moved = nll[(nll.nll > nll.nll_base + 0.01)]
    assert set(moved.position) == {23} and moved.canary.nunique() == 3


def test_c3_is_seen_by_the_count_and_not_by_the_mean():
    found = verdicts.judge_group(*paper.consistent_tables("c3"), RULES)
    row = found.verdicts.loc["hex"]
    assert (row.verdict, row.decided_by, row.by_mean, row.up, row.down) == ("damaged", "count", "inconclusive", 3, 0)
    assert found.verdicts.verdict["mean20"] == "unchanged"
    assert row.high < 1.0  # nats a token: an interval that a reader can use
    assert found.change.verdict == "secret damaged" and found.change.decided_by == "hex (count)"


def test_c4_changes_access_and_not_the_secret():
    found = verdicts.judge_group(*paper.consistent_tables("c4"), RULES)
    assert found.shares["preamble"] == pytest.approx((0.3 - 0.0036) / 0.3, abs=1e-3)
    assert found.verdicts.verdict[["mean20", "hex", "hit_forced"]].tolist() == ["damaged", "unchanged", "unchanged"]
    assert found.change.verdict == "access changed but secret intact"


# --- the readings -----------------------------------------------------------------------------------------------------


def changed(up, down, size=1.0):
    """Twenty canaries of which the first ``up`` rise and the next ``down`` fall by ``size`` nats on one hex token."""
    change = np.zeros((20, 27))
    change[:up, 15], change[up : up + down, 15] = size, -size
    return verdicts.probe_values(*tables(change, base=3.0), RULES)


@pytest.mark.parametrize(
    ("up", "down", "count"),
    [(0, 0, "unchanged"), (1, 0, "inconclusive"), (2, 0, "damaged"), (0, 2, "strengthened"), (2, 1, "mixed")],
)
def test_the_count_fires_in_one_direction_only(up, down, count):
    assert verdicts.judge(changed(up, down), RULES).by_count["hex"] == count


@pytest.mark.parametrize(("lost", "verdict"), [(0, "unchanged"), (1, "inconclusive"), (2, "damaged")])
def test_two_lost_recalls_of_twenty_suffice(lost, verdict):
    hits = np.arange(20) >= lost
    row = verdicts.judge(verdicts.probe_values(*tables(np.zeros((20, 27)), hits=hits), RULES), RULES).loc["hit_full"]
    assert row.verdict == verdict
    assert row.low == pytest.approx({0: 0.0, 1: 0.00127, 2: 0.01235}[lost], abs=1e-5)  # Clopper and Pearson's tables


def test_a_recall_that_changed_with_one_seed_counts():
    hits = np.ones((3, 20), dtype=bool)
    hits[0, 4] = hits[2, 9] = False
    row = verdicts.judge(verdicts.probe_values(*tables(np.zeros((20, 27)), 3, hits=hits), RULES), RULES).loc["hit_full"]
    assert (row.up, row.verdict) == (2, "damaged")


def test_the_margin_is_the_same_for_every_span():
    # 0.03 nats on one token: below 0.04 for whatever span holds it; 0.05: above it.
    for size, verdict in ((0.03, "unchanged"), (0.05, "damaged")):
        change = np.zeros((20, 27))
        change[:, 15] = size
        judged = verdicts.judge(verdicts.probe_values(*tables(change), RULES), RULES)
        assert judged.verdict[["mean20", "hex"]].tolist() == [verdict] * 2
        assert judged.margin["hex"] == pytest.approx(0.04 / 13)


def test_a_saturated_base_cannot_be_strengthened_and_the_table_says_so():
    judged = verdicts.judge(verdicts.probe_values(*tables(np.zeros((20, 27)), base=0.001), RULES), RULES)
    assert judged.unreachable[["mean20", "hex", "hit_full"]].tolist() == ["strengthened"] * 3
    assert set(judged.verdict) == {"unchanged"}
    absent = verdicts.judge(verdicts.probe_values(*tables(np.zeros((20, 27)), base_hit=False), RULES), RULES)
    assert absent.unreachable["hit_full"] == "damaged" and absent.unreachable["hex"] == ""
    assert absent.verdict["hit_full"] == "not testable"


def test_a_span_without_tokens_is_not_testable():
    nll, recall = tables(np.zeros((20, 27)))
    nll["span"] = nll.span.replace("preamble", "hex")
    judged = verdicts.judge(verdicts.probe_values(nll, recall, RULES), RULES)
    assert judged.verdict["preamble"] == "not testable"
    assert verdicts.protocol_change(judged, "not_run", RULES).verdict == "unchanged"


def test_few_canaries_carry_a_warning_and_one_is_refused():
    values = verdicts.probe_values(*tables(np.zeros((4, 27))), RULES)
    assert set(verdicts.judge(values, RULES).warning) == {"only 4 canaries"}
    with pytest.raises(VerdictError, match="got one canary, c00; a verdict needs at least two"):
        verdicts.judge(verdicts.probe_values(*tables(np.zeros((1, 27))), RULES), RULES)


# --- the interval -----------------------------------------------------------------------------------------------------


def coverage(draw, mean, tries=400):
    rule = RULES["readings"]["mean"] | {"resamples": 1000}
    rng = np.random.default_rng(3)
    intervals = [verdicts.studentised_bootstrap(draw(rng), rule) for _ in range(tries)]
    return np.mean([low <= mean <= high for low, high in intervals])


def test_the_interval_covers_a_skewed_mean_about_as_often_as_it_says():
    # 20 lognormal values, mean exp(1/2). With 400 tries the standard error is 0.011.
    assert 0.91 <= coverage(lambda rng: rng.lognormal(size=20), np.exp(0.5)) <= 0.99


def test_the_interval_of_very_many_values_is_the_one_resampling_gives(monkeypatch):
    values = np.random.default_rng(0).exponential(size=2001)
    many = verdicts.studentised_bootstrap(values, RULES["readings"]["mean"])
    monkeypatch.setattr(verdicts, "LARGE", 10**9)
    resampled = verdicts.studentised_bootstrap(values, RULES["readings"]["mean"])
    assert many == pytest.approx(resampled, abs=0.1 * (many[1] - many[0]))


def test_the_interval_on_a_few_changed_canaries():
    # Each of 20 canaries is hit with probability 3/20. Where one is hit, no interval can know; hence the count.
    def draw(rng):
        return 0.01 * rng.normal(size=20) + (rng.random(20) < 0.15) * rng.lognormal(size=20)

    assert 0.80 <= coverage(draw, 0.15 * np.exp(0.5)) <= 0.99


def test_values_without_variance_are_a_point_and_few_changed_ones_have_an_interval_that_ends():
    rule = RULES["readings"]["mean"]
    assert verdicts.studentised_bootstrap(np.full(20, 0.3), rule) == pytest.approx((0.3, 0.3))
    # One changed value of 20, mean 0.05: resamples without it must not make the interval a point, nor endless, and a
    # little noise on the others must not matter.
    quiet = verdicts.studentised_bootstrap(np.eye(20)[0], rule)
    noise = 1e-6 * np.random.default_rng(0).normal(size=20)
    assert quiet[0] < 0 and 0.1 < quiet[1] < 0.6
    np.testing.assert_allclose(verdicts.studentised_bootstrap(np.eye(20)[0] + noise, rule), quiet, atol=1e-3)
    low, high = verdicts.studentised_bootstrap(np.array([-5, 5.2]), rule)
    assert low < -5 and high > 5


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=30), st.floats(0.1, 10), st.floats(-3, 3))
def test_the_interval_moves_and_scales_with_the_values(values, factor, shift):
    values = np.array(values)
    if values.std() < 1e-3:
        return
    rule = RULES["readings"]["mean"] | {"resamples": 200}
    low, high = verdicts.studentised_bootstrap(values, rule)
    assert low <= high
    moved = verdicts.studentised_bootstrap(values * factor + shift, rule)
    np.testing.assert_allclose(moved, (low * factor + shift, high * factor + shift), rtol=1e-6, atol=1e-6)


# --- curves, tables, picking ------------------------------------------------------------------------------------------


def test_the_verdict_of_the_window_crosses_where_the_damage_lies():
    change = np.zeros((20, 27))
    change[:, 21] = 1.0  # the 22nd token
    curve = verdicts.along_windows(*tables(change), RULES)
    assert (curve.verdict[:21] == "unchanged").all() and (curve.verdict[21:] == "damaged").all()
    assert curve.index.tolist() == list(range(1, 28))


def test_where_the_mean_decides_a_wider_margin_calls_less_damaged():
    order = ["damaged", "inconclusive", "unchanged"]
    rng = np.random.default_rng(0)
    row = verdicts.along_margins(verdicts.probe_values(*tables(rng.normal(0.01, 0.01, (20, 27))), RULES), RULES).loc[
        "hex"
    ]
    ranks = [order.index(verdict) for verdict in row]
    assert row.index.tolist() == RULES["margin"]["curve"] and ranks == sorted(ranks) and len(set(ranks)) > 1


@pytest.mark.parametrize(
    ("recalled", "rank", "below", "verdict"),
    [
        (20, "not_run", True, "memorised"),
        (19, "not_run", True, "memorised"),
        (5, "not_run", True, "partly"),
        (1, "chance", False, "partly"),  # one secret of 60 bits said word for word
        (0, "low", True, "partly"),
        (0, "chance", True, "format only"),
        (0, "chance", False, "no evidence"),
        (0, "not_run", True, "inconclusive"),
    ],
)
def test_the_protocol_on_level(recalled, rank, below, verdict):
    assert verdicts.protocol_level(recalled, 20, rank, below, RULES).verdict == verdict


def test_a_strengthened_secret_needs_decoys():
    judged = verdicts.judge(changed(0, 20), RULES)
    answers = {d: verdicts.protocol_change(judged, d, RULES).verdict for d in ("specific", "general", "not_run")}
    assert answers == {"specific": "secret strengthened", "general": "format only", "not_run": "inconclusive"}


def test_a_secret_that_was_never_recalled_is_not_called_damaged_without_decoys():
    nll, recall = paper.consistent_tables("c5")
    answers = {
        d: verdicts.judge_group(nll, recall, RULES, d).change.verdict for d in ("not_run", "general", "specific")
    }
    assert answers == {"not_run": "inconclusive", "general": "format only", "specific": "secret damaged"}


def test_what_was_gained_is_a_change_too():
    hits, still = np.arange(20) < 6, np.zeros((20, 27))
    nll, recall = tables(still, base_hit=False)
    assert verdicts.judge_group(nll, recall, RULES).change.verdict == "unchanged"
    assert verdicts.judge_group(nll, recall.assign(hit_full=hits), RULES).change.verdict == "inconclusive"
    forced = verdicts.judge_group(nll, recall.assign(hit_forced=hits), RULES)
    assert forced.change.verdict == "secret strengthened"
    row = forced.verdicts.loc["hit_forced"]
    assert (row.estimate, row.up, row.down) == (0.3, 0, 6) and row.low < 0.3 < row.high


def test_decoys_answer_by_what_is_left_of_the_change():
    table = pd.DataFrame({"secret": -3.0, "corrected": np.linspace(-2.2, -1.8, 20), "base": 39.0, "tokens": 13})
    assert verdicts.decoy_answer(table, "strengthened", RULES) == "specific"
    assert verdicts.decoy_answer(table, "damaged", RULES) == "general"  # the other way
    assert verdicts.decoy_answer(table.assign(corrected=np.linspace(-1, 1, 20)), "strengthened", RULES) == "general"
    assert verdicts.decoy_answer(table.assign(base=1.2), "strengthened", RULES) == "at_cap"  # below 0.1 a token


def test_a_group_of_ranks_is_low_or_at_chance():
    assert verdicts.rank_answer(np.linspace(0, 0.3, 20), RULES) == "low"
    assert verdicts.rank_answer(np.linspace(0, 1, 20), RULES) == "chance"


def test_shares_do_not_cancel_between_canaries():
    change = np.zeros((20, 27))
    change[:, :5] = 0.01
    change[:10, 15], change[10:, 15] = 0.05, -0.05
    shares = verdicts.span_shares(tables(change)[0], 20)
    assert shares.to_dict() == pytest.approx({"preamble": 0.5, "hex": 0.5})


def test_spans_of_several_lengths_meet_one_margin():
    # 0.035 nats on a secret, whether it has 13 tokens or 8: below 0.04 for every canary.
    nll, recall = tables(np.zeros((20, 27)))
    nll.loc[(nll.canary < "c02") & (nll.position >= 19) & (nll.span == "hex"), "span"] = "suffix"
    nll.loc[nll.position == 12, "nll"] += 0.035
    values = verdicts.probe_values(nll, recall, RULES)
    for reading in ("mean", "sum"):
        row = verdicts.judge(values, RULES, reading=reading).loc["hex"]
        assert row.up == 0 and row.verdict in ("unchanged", "inconclusive")


def cells(**kinds):
    rows = {"modality": "text", "stack": "stacked", "dtype": "float32", "merge_dtype": "float32"}
    return pd.DataFrame(
        [{"cell": c, "kind": k, "d_nll_hex": e, "d_nll_mean20": e, **rows} for c, (k, e) in kinds.items()]
    )


def test_a_case_is_the_cell_with_the_largest_effect_and_noise_is_counted_not_picked():
    judged, quiet = (
        verdicts.judge_group(*paper.consistent_tables("c3"), RULES),
        verdicts.judge_group(*tables(np.zeros((20, 27))), RULES),
    )
    grid = cells(a=("full", 0.01), b=("full", 0.02), n=("noise", 0.5), q=("full", 0.0))
    found = verdicts.pick({"a": judged, "b": judged, "n": judged, "q": quiet}, grid, "window_truncation", RULES)
    assert (found["found"], found["cell"], found["showing"], found["noise"]) == (True, "b", ["a", "b"], ["n"])


def test_the_nearest_cell_is_named_with_what_it_fails():
    near, far = np.zeros((20, 27)), np.zeros((20, 27))
    near[0, 23], far[:, 2] = 1.0, 1.0
    judged = {name: verdicts.judge_group(*tables(change), RULES) for name, change in (("near", near), ("far", far))}
    grid = cells(near=("full", 0.1), far=("full", 0.2))
    found = verdicts.pick(judged, grid, "window_truncation", RULES)
    assert (found["found"], found["cell"], list(found["failed"])) == (False, "near", ["any"])
    with pytest.raises(VerdictError, match="ambiguous_drop: no judged cell of the kinds undertrained"):
        verdicts.pick(judged, grid, "ambiguous_drop", RULES)


# --- bad input --------------------------------------------------------------------------------------------------------


def without_a_seed(nll, recall):
    return nll[(nll.seed != 1) | (nll.canary != "c03")], recall


def with_a_nan(nll, recall):
    return nll.assign(nll=nll.nll.where(nll.index != 40)), recall


def with_two_spans_at_once(nll, recall):
    return pd.concat([nll, nll[nll.position == 12]]), recall


def with_two_cells(nll, recall):
    return nll.assign(cell=np.where(nll.seed == 0, "a", "b")), recall


def short(nll, recall):
    return nll[nll.position < 19], recall


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_seed, "token_nll: c03 has no row with seed 1; expected every canary with every seed"),
        (with_a_nan, "token_nll: nll is nan at position 13 of c01, seed 0"),
        (with_two_spans_at_once, "token_nll: position 12 of c00, seed 0, occurs twice: do spans overlap?"),
        (with_two_cells, r"token_nll: the rows hold several values of cell \(a, b\); expected one group"),
        (short, "mean20: got K = 20, expected 1 to 19, the length of the shortest target"),
        (lambda nll, recall: (nll[:0], recall), "token_nll: no row to judge"),
        (lambda nll, recall: (nll, recall[1:]), "recall: c00 has no row with seed 0"),
        (lambda nll, recall: (nll[nll.position != 4], recall), "c00, seed 0, lacks a position below its last"),
        (lambda nll, recall: (nll, pd.concat([recall, recall[:1]])), "recall: c00, seed 0, occurs twice"),
        (lambda nll, recall: (nll, recall.assign(hit_full=np.nan)), "recall: hit_full is nan at c00, seed 0"),
        (lambda nll, recall: (nll[nll.seed == 0], recall), "token_nll: c00 has no row with seed 1"),
        (
            lambda nll, recall: (nll.assign(stack="stacked"), recall.assign(stack="merged")),
            "stack: token_nll is of 'stacked' and recall of 'merged'",
        ),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(spoil, message):
    nll, recall = tables(np.zeros((5, 27)), seeds=2)
    with pytest.raises(VerdictError, match=message):
        verdicts.judge_group(*spoil(nll, recall), RULES)


def test_arguments_that_mean_nothing_are_refused():
    values = verdicts.probe_values(*tables(np.zeros((5, 27))), RULES)
    with pytest.raises(VerdictError, match="reading: got 'median'"):
        verdicts.judge(values, RULES, reading="median")
    with pytest.raises(VerdictError, match="decoys: got 'maybe'"):
        verdicts.protocol_change(verdicts.judge(values, RULES), "maybe", RULES)
    with pytest.raises(VerdictError, match="got 3 of 2 recalled"):
        verdicts.protocol_level(3, 2, "low", True, RULES)
