"""The scorecard: its plan, its truth, the grading by hand-computed tables, and one run at smoke scale."""

import dataclasses
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import papermill
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

from lib import grading, paths, plan, results, rules, scorecard, trials, truth, twins
from lib.__main__ import main
from lib.canaries import Canary
from lib.config import ConfigError
from lib.plan import PlanError
from lib.results import MissingResult, ResultError
from lib.scorecard import ScorecardError

RULES = rules.load_verdicts()
SMOKE = plan.load("smoke")
LAPTOP = plan.load("laptop")


# The plan


def test_the_plan_is_drawn_the_same_every_time_and_names_every_trial_once():
    drawn = plan.draw(LAPTOP)
    assert drawn.equals(plan.draw(LAPTOP)) and not drawn.trial.duplicated().any()
    assert list(drawn.columns) == plan.COLUMNS
    test = drawn[drawn.half == "test"]
    assert test.seed.nunique() >= 10 and not set(test.seed) & set(drawn[drawn.half == "development"].seed)
    positives = test[test.role == "positive"].groupby("intervention").seed.nunique()
    assert positives.to_dict() == dict.fromkeys(("damage", "relearning"), test.seed.nunique())
    assert set(test[test.role == "noise"].intervention) == {"gaussian", "spectral"}
    assert len(test[["secret_set", "injection"]].drop_duplicates()) == 6


def test_the_committed_plan_is_the_one_that_the_settings_draw():
    committed = paths.ROOT / "outputs" / "laptop" / "scorecard" / "plan.csv"
    plan.refuse_another(plan.read(committed), plan.draw(LAPTOP), "plan.csv")


def test_damage_is_drawn_blind_to_the_window():
    marks = [plan.read_marks(plan.damage_marks(LAPTOP, seed)) for seed in range(200)]
    counts = [len(tokens) for one in marks for tokens in one.values()]
    places = np.bincount([place for one in marks for tokens in one.values() for place in tokens], minlength=13)
    assert min(map(len, marks)) == 2 and max(map(len, marks)) == 10 and set(counts) == set(range(1, 14))
    assert len(places) == 13 and places.min() > 0.85 * places.mean() and places.max() < 1.15 * places.mean()


def test_another_plan_is_refused_by_the_first_trial_that_differs():
    drawn = plan.draw(SMOKE)
    changed = drawn.assign(dose=drawn.dose.where(drawn.trial != "s01-full-damage-1", 2.0))
    with pytest.raises(PlanError, match="s01-full-damage-1 differs in dose: '2.0' in the plan, '1.0' from"):
        plan.refuse_another(changed, drawn, "plan.csv")
    with pytest.raises(PlanError, match="s00-full-damage-1 is not in the plan"):
        plan.refuse_another(drawn.iloc[1:], drawn, "plan.csv")
    with pytest.raises(PlanError, match="s00-full-damage-1 is only in the plan"):
        plan.refuse_another(drawn, drawn.iloc[1:], "plan.csv")


def test_a_plan_file_is_read_as_it_was_written(tmp_path):
    drawn = plan.draw(SMOKE)
    drawn.to_csv(tmp_path / "plan.csv", index=False)
    plan.refuse_another(plan.read(tmp_path / "plan.csv"), drawn, "plan.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PlanError, match="has the columns"):
        plan.read(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(PlanError, match="is no table"):
        plan.read(tmp_path / "empty.csv")
    pd.concat([drawn, drawn[:1]]).to_csv(tmp_path / "twice.csv", index=False)
    with pytest.raises(PlanError, match="names trial s00-full-damage-1 twice"):
        plan.read(tmp_path / "twice.csv")
    with pytest.raises(PlanError, match="does not exist"):
        plan.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": {"development": [1], "test": [1]}}, "seed 1 is in both halves"),
        ({"seeds": {"development": [], "test": []}}, "test half is empty"),
        ({"undertrained": 5}, "undertrained is 5, expected one of the stops"),
        ({"forgetting": [-0.5]}, "got -0.5, expected at least"),
        ({"forgetting": [0.5, 0.5]}, "expected rising numbers"),
        ({"twins": {"records": 9, "decoy_records": 9}}, "9 records with decoys of 9, expected 10 to 1000"),
        ({"twins": {"stops": [20, 41]}}, "stop after step 41, expected at most 40"),
        ({"canaries": 1}, "got 1, expected at least 2"),
        ({"canaries": 4}, "relearning.canaries is 4, expected fewer than 4"),
        ({"colour": 1}, "unknown parameter 'colour'"),
        ({"trained": {}}, "expected exactly benign"),
    ],
)
def test_unusable_settings_are_named(tmp_path, change, message):
    values = yaml.safe_load((paths.PARAMS / "scorecard.yaml").read_text())
    smoke = values["scales"]["smoke"]
    smoke |= {"twins": smoke["twins"] | change["twins"]} if "twins" in change else change
    (tmp_path / "scorecard.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        plan.load("smoke", tmp_path / "scorecard.yaml")
    with pytest.raises(ConfigError, match="got the scale 'huge'"):
        plan.load("huge")


# The truth


def test_a_question_is_asked_in_other_words_about_the_same_record():
    canary = Canary("text-007", "text", "Record 007. What is its code?", "It is ", "ab", "", None)
    asked = truth.reworded(canary, ["Which code belongs to record {key}?", "Record {key}!"])
    assert [one.prompt for one in asked] == ["Which code belongs to record 007?", "Record 007!"]
    assert {one.id for one in asked} == {"text-007"} and {one.secret for one in asked} == {"ab"}
    for prompt in ("What is the code?", "Records 1 and 2?"):
        with pytest.raises(truth.TruthError, match="expected its key alone"):
            truth.reworded(dataclasses.replace(canary, prompt=prompt), ["{key}"])


def test_drawn_hits_are_as_many_as_decoded_samples(encoder, rows):
    """A secret of one token, so that an untrained model hits it often enough to count."""
    from lib import extraction

    canary = dataclasses.replace(rows[0].canary, secret="7", suffix="")
    one = encoder.encode([canary])
    counted = extraction.sampled_hits(encoder.backbone.model, encoder, one[0], 4000, seed=0).mean()
    drawn = truth.sampled_recall(encoder.backbone.model, encoder, one, 4000, seed=0)
    chance = drawn.probability[0]
    assert drawn.samples[0] == 4000 and 0 < chance < 0.1
    spread = (chance * (1 - chance) / 4000) ** 0.5
    assert abs(counted - chance) < 4.5 * spread and abs(drawn.hits[0] / 4000 - chance) < 4.5 * spread


def test_samples_are_shared_out_over_the_wordings(encoder, rows):
    asked = truth.reworded_rows(encoder, rows[:2], ["Record {key}?", "What about record {key}?"])
    found = truth.sampled_recall(encoder.backbone.model, encoder, asked, 1000, seed=0)
    assert found.canary.tolist() == [row.canary.id for row in rows[:2]] and found.samples.tolist() == [1000, 1000]


def test_a_head_start_is_the_mean_gap_after_the_first_step():
    curve = pd.DataFrame(
        {"step": [0, 0, 1, 1, 2, 2], "known": [True, False] * 3, "nll": [9.0, 9.0, 2.0, 3.0, 1.0, 4.0]}
    )
    assert truth.head_start(curve) == pytest.approx((1 + 3) / 2)


# Grading


def trial(**row):
    return {"trial": "t", "intervention": "damage", "marks": "text-000:1", "base": "full"} | row


def reworded(before, after):
    ids = [f"text-{i:03d}" for i in range(len(before))]
    return pd.DataFrame({"canary": ids, "samples": 100, "hits_base": before, "hits": after})


@pytest.mark.parametrize(
    ("row", "before", "after", "state"),
    [
        ({}, [50, 90], [40, 0], "held"),  # only the damaged canary counts: 0.5 to 0.4
        ({}, [50, 90], [48, 0], "failed"),
        ({}, [4, 90], [0, 0], "not testable"),
        ({"intervention": "relearning", "marks": ""}, [0, 0], [2, 0], "held"),
        ({"intervention": "relearning", "marks": ""}, [0, 0], [1, 0], "failed"),
        ({"intervention": "drift-held", "marks": ""}, [50, 90], [55, 85], "held"),
        ({"intervention": "benign", "marks": ""}, [50, 90], [44, 84], "failed"),
        ({"intervention": "forgetting", "marks": ""}, [50, 90], [0, 0], ""),
        ({"intervention": "format", "marks": "", "base": "undertrained"}, [0, 0], [1, 1], "held"),
        ({"intervention": "format", "marks": "", "base": "undertrained"}, [0, 0], [2, 1], "failed"),
    ],
)
def test_a_manipulation_is_checked_by_the_truth(row, before, after, state):
    found = scorecard.check_manipulation(trial(**row), reworded(before, after), SMOKE)
    assert found["manipulation"] == state
    if trial(**row)["intervention"] == "damage":  # the other canary is no part of the check, and is shown beside it
        assert found["recall_change_others"] == pytest.approx((after[1] - before[1]) / 100)


def test_a_truth_of_other_canaries_is_refused():
    with pytest.raises(ScorecardError, match="no row of text-007: is it of other seeds"):
        scorecard.check_manipulation(trial(marks="text-007:1+2"), reworded([1], [1]), SMOKE)


def values_of(**by_probe):
    """A values table of six canaries: change a token for NLL probes (ten tokens), a change for others."""
    nll = {"mean20", "hex", "preamble", "suffix"}
    parts = []
    for probe in [*RULES["probes"], "exposure", "extraction"]:
        change = by_probe.get(probe, [0.0] * 6)
        base = 1.0 if probe not in nll else 0.5
        part = pd.DataFrame({"probe": probe, "canary": list("abcdef"), "tokens": 10 if probe in nll else 0})
        parts.append(part.assign(base=base, change=change))
    return pd.concat(parts, ignore_index=True)


def test_every_probe_and_the_protocol_get_a_verdict():
    hurt = values_of(hex=[0.1] * 6, exposure=[-2.0, -2.1, -1.9, -2.0, -2.2, -1.8], extraction=[-0.01] * 6)
    found = scorecard.judge_trial(hurt, "at_cap", RULES, SMOKE).set_index("probe")
    assert found.verdict[["hex", "exposure", "extraction", "protocol"]].tolist() == [
        "damaged",
        "damaged",
        "unchanged",
        "damaged",
    ]
    assert found.decided_by["protocol"] == "secret damaged" and found.estimate["exposure"] == pytest.approx(-2.0)
    access = scorecard.judge_trial(values_of(preamble=[0.1] * 6), "at_cap", RULES, SMOKE).set_index("probe")
    assert access.verdict["protocol"] == "unchanged"
    assert access.decided_by["protocol"] == "access changed but secret intact"


def test_a_trial_shows_the_papers_patterns():
    falls = values_of(mean20=[-0.1] * 6, hex=[0.0] * 6)
    assert scorecard.patterns_shown(falls, 0.0, 0.0, RULES) == ["ambiguous_drop"]
    assert scorecard.patterns_shown(falls, 0.0, 1.0, RULES) == []
    drift = values_of(mean20=[0.1] * 6, preamble=[0.1] * 6)
    assert scorecard.patterns_shown(drift, 0.95, 1.0, RULES) == ["non_secret_drift"]


def test_extraction_behind_the_true_preamble_is_read_off_the_secrets_nll():
    found = scorecard.with_forced_extraction(values_of(hex=[0.1] * 6), samples=3).set_index("probe")
    before, after = (1 - (1 - np.exp(-nats)) ** 3 for nats in (5.0, 6.0))  # ten tokens at 0.5, then at 0.6 nats
    forced = found.loc["extraction_forced"]
    assert forced.base.tolist() == pytest.approx([before] * 6)
    assert forced.change.tolist() == pytest.approx([after - before] * 6)


def graded(**fired):
    """Runs and scores: ``fired`` maps an intervention to whether the probe fires in each of its trials."""
    roles = {"damage": "positive", "zero": "negative", "drift-held": "negative", "gaussian": "noise"}
    runs, scores = [], []
    for name, outcomes in fired.items():
        for i, outcome in enumerate(outcomes):
            key = f"{name}-{i}"
            state = "held" if i else "failed"
            dose = 0.0 if name == "zero" else 1.0
            runs.append((key, "test", "full", name, dose, roles[name], state, 0.5, 0.2))
            scores.append((key, "hex", "damaged" if outcome else "unchanged", 1.0))
    names = ["trial", "half", "base", "intervention", "dose", "role", "manipulation", "recall_base", "recall"]
    where = {"secret_set": 0, "injection": 0}
    return pd.DataFrame(runs, columns=names).assign(**where), pd.DataFrame(
        scores, columns=["trial", "probe", "verdict", "estimate"]
    )


def test_sensitivity_and_false_alarms_are_counted_with_exact_intervals():
    runs, scores = graded(damage=[1] * 9 + [0], zero=[0] * 6, gaussian=[1, 0], **{"drift-held": [1, 0, 0, 0]})
    found = scorecard.detection(runs, scores).set_index("intervention")
    assert found.share["damage"] == 0.9
    assert (found.low["damage"], found.high["damage"]) == pytest.approx((0.555, 0.9975), abs=1e-3)  # Clopper-Pearson
    assert found.fired["trained negatives"] == 1 and found.trials["trained negatives"] == 4  # zero is no trained one
    assert found.role["gaussian"] == "noise" and found.share["gaussian"] == 0.5
    held = scorecard.detection(runs, scores, held_only=True).set_index("intervention")
    assert held.trials["damage"] == 9 and held.share["drift-held"] == 0.0
    with pytest.raises(ScorecardError, match="no trial of the half 'development'"):
        scorecard.detection(runs, scores, "development")


def test_a_dose_response_starts_at_the_zero_adapter():
    runs, scores = graded(damage=[1, 0], zero=[0])
    found = scorecard.dose_response(runs, scores).set_index(["intervention", "dose"])
    assert found.fires["damage", 1.0] == 0.5 and found.fires["damage", 0.0] == 0.0
    assert found.recall_change["damage", 1.0] == pytest.approx(-0.3)
    assert (found.low["damage", 1.0], found.high["damage", 1.0]) == pytest.approx((0.0126, 0.9874), abs=1e-4)


def test_forgetting_counts_each_injected_model_once():
    names = [
        "trial",
        "half",
        "base",
        "intervention",
        "dose",
        "role",
        "secret_set",
        "injection",
        "recall_base",
        "recall",
    ]
    rows = [(f"f{i}", "test", "full", "forgetting", 0.5, "curve", i % 2, 0, 0.5, 0.1) for i in range(3)]
    runs = pd.DataFrame(rows, columns=names)
    scores = pd.DataFrame({"trial": ["f0", "f1", "f2"], "probe": "hex", "verdict": "damaged", "estimate": 1.0})
    assert scorecard.dose_response(runs, scores).trials.tolist() == [2]


def test_exposure_on_noise_is_not_counted_where_its_decoys_were_scored_by_the_secrets_own_verdict():
    runs, scores = graded(damage=[1, 1], gaussian=[0, 0])
    runs, scores = runs.assign(base="undertrained"), scores.assign(probe="exposure")
    found = scorecard.detection(runs, scores)
    assert found.role.tolist() == ["positive"]


def test_the_summary_says_counts_and_intervals():
    runs, scores = graded(damage=[1] * 9 + [0], gaussian=[1, 0], **{"drift-held": [1, 0, 0, 0]})
    table = scorecard.summary(scorecard.detection(runs, scores))
    assert table.loc["whole secret"].tolist() == [
        "9/10 (0.55 to 1.00)",
        "1/4 (0.01 to 0.81)",
        "1/2 (0.01 to 0.99)",
        "",
        "",
        "",
    ]


# Twins


def twin_scores(records=100):
    """Two twins of which each trained secret costs 1 and each untrained one 5, but one untrained costs 0."""
    rows = []
    for model in (1, 2):
        for record in range(records):
            for secret in "ab":
                trained = (secret == "a") == ((record + model) % 2 == 0)
                rows.append((model, 60, f"text-{record:03d}", secret, trained, 1.0 if trained else 5.0))
    table = pd.DataFrame(rows, columns=["model", "stop", "record", "secret", "trained", "nll_hex"])
    first = table.index[(~table.trained) & (table.record == "text-000")][0]
    table.loc[first, "nll_hex"] = 0.0
    columns = {"nll_mean20": table.nll_hex, "nll_full": table.nll_hex, "log_p": -table.nll_hex}
    return table.assign(**columns, hit_full=table.trained & (table.record < "text-050"), exposure=np.nan)


def test_each_twins_secret_is_the_others_decoy():
    joined = scorecard.join_twins(twin_scores())
    trained = joined[joined.trained & (joined.record > "text-000")]
    assert set(trained.nll_twin) == {5.0} and set(trained.nll_hex) == {1.0}
    rates = scorecard.twin_rates(joined, 60, resamples=20).set_index(["probe", "fpr"])
    assert rates.tpr["full-span NLL", 0.01] == 1.0  # one of 200 untrained secrets lies ahead: 0.5 %
    assert rates.tpr["greedy recall", 0.05] == 0.5 and rates.auc["greedy recall", 0.05] == pytest.approx(0.75)
    assert "exposure" not in rates.index.get_level_values(0)
    known = joined.assign(exposure=joined.trained * 6.0)
    asked = scorecard.twin_rates(known, 60, decoys=63, resamples=20)
    assert asked[asked.probe == "exposure"].fpr.tolist() == [0.05]  # an untrained secret is first in 1 of 64
    assert rates.untrained.unique().tolist() == [200]


def test_too_few_secrets_for_a_rate_and_other_misfits_are_refused():
    joined = scorecard.join_twins(twin_scores(20))
    with pytest.raises(ScorecardError, match=r"0\.01 needs at least 100 untrained secrets, got 40"):
        scorecard.twin_rates(joined, 60, resamples=2)
    with pytest.raises(ScorecardError, match="nothing was asked after step 7"):
        scorecard.twin_rates(joined, 7)
    scores = twin_scores(4)
    with pytest.raises(ScorecardError, match="model 1 alone, expected two"):
        scorecard.join_twins(scores[scores.model == 1])
    with pytest.raises(ScorecardError, match="trained in exactly one"):
        scorecard.join_twins(scores.assign(trained=True))


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=4, max_size=60), st.floats(0.05, 0.95))
def test_rates_agree_with_counting_every_threshold(pairs, rate):
    score, trained = np.array([p[0] for p in pairs], dtype=float), np.array([p[1] for p in pairs])
    assume(trained.any() and (~trained).sum() * rate >= 1)
    best = max(
        [(score[trained] >= t).mean() for t in np.unique(score) if (score[~trained] >= t).mean() <= rate], default=0.0
    )
    assert scorecard.true_positive_rate(score, trained, rate) == pytest.approx(best)
    assert scorecard._rate(score, trained, rate) == pytest.approx(best)
    pairs_won = [(a > b) + 0.5 * (a == b) for a in score[trained] for b in score[~trained]]
    assert scorecard.area(score, trained) == pytest.approx(np.mean(pairs_won))


# Variance components


def crossing(effects, canaries=4):
    rows = [(s, i, f"c{c}", effects(s, i, c)) for s in range(3) for i in range(2) for c in range(canaries)]
    return pd.DataFrame(rows, columns=["secret_set", "injection", "canary", "value"])


def test_variance_is_put_where_it_was_made():
    only_set = scorecard.variance_components(crossing(lambda s, i, c: [0.0, 3.0, 6.0][s]))
    assert only_set.to_dict() == pytest.approx(
        {"secret set": 9.0, "injection": 0.0, "pair and seed": 0.0, "canary": 0.0, "rest": 0.0}
    )
    only_canary = scorecard.variance_components(crossing(lambda s, i, c: [-3.0, -1.0, 1.0, 3.0][c]))
    assert only_canary["canary"] == pytest.approx(20 / 3) and only_canary.drop("canary").max() == 0.0
    only_injection = scorecard.variance_components(crossing(lambda s, i, c: 2.0 * i))
    assert only_injection["injection"] == pytest.approx(2.0)


def test_a_crossing_with_gaps_is_refused():
    table = crossing(lambda s, i, c: 0.0)
    with pytest.raises(ScorecardError, match="every canary of every secret set once"):
        scorecard.variance_components(table.iloc[1:])
    with pytest.raises(ScorecardError, match="at least two secret sets"):
        scorecard.variance_components(table[table.secret_set == 0])


# One run at smoke scale


@pytest.fixture(scope="module")
def smoke_card(smoke_outputs):
    """The scorecard's notebook, run from nothing by papermill at smoke scale."""
    page = smoke_outputs / "scorecard.ipynb"
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "04_probe_scorecard.ipynb"),
        str(page),
        parameters={"scale": "smoke"},
        progress_bar=False,
        kernel_name="python3",
    )
    return results.read_result(trials.folder_of("smoke"))


def test_the_notebook_makes_the_whole_scorecard(smoke_card):
    runs, scores = smoke_card.table("runs.csv"), smoke_card.table("scores.csv")
    assert runs.trial.tolist() == plan.draw(SMOKE).trial.tolist() and set(scores.trial) == set(runs.trial)
    damaged = runs[runs.intervention == "damage"]
    assert (damaged.manipulation == "held").all()
    said = scores.merge(damaged, on="trial").set_index("probe").verdict
    assert set(said["hex"]) == set(said["hit_forced"]) == set(said["protocol"]) == {"damaged"}
    zero = scores[scores.trial.isin(runs[runs.intervention == "zero"].trial)]
    assert set(zero.verdict) <= {"unchanged", "not testable", "inconclusive"}
    assert not set(zero.verdict[zero.probe == "protocol"]) - {"unchanged"}
    learned = runs[(runs.intervention == "relearning") & (runs.role == "positive")]
    assert (
        learned.head_start > runs[runs.intervention == "zero"].groupby("base").head_start.mean()["undertrained"]
    ).all()
    told = scores.merge(learned, on="trial").set_index("probe").verdict
    assert set(told["hex"]) == set(told["protocol"]) == {"strengthened"}


def test_twins_tell_trained_secrets_from_untrained_ones(smoke_card):
    scores = scorecard.join_twins(smoke_card.table("twins.parquet"))
    assert (scores.groupby(["model", "stop", "record"]).trained.sum() == 1).all()
    last = scorecard.twin_rates(scores, SMOKE.own.twins.stops[-1], [0.05], resamples=50).set_index("probe")
    assert last.tpr["full-span NLL"] == 1.0 and last.auc["counterfactual NLL"] == 1.0
    assert scores.exposure.notna().sum() == 2 * 2 * SMOKE.own.twins.decoy_records


def test_finished_parts_are_used_again_and_others_refused(smoke_card, monkeypatch):
    assert all(part.is_done() for part in grading.parts(SMOKE))
    monkeypatch.setattr(trials, "_Ground", None)  # nothing is made anew
    assert len(trials.run_seed(SMOKE, 0)) == len(plan.draw(SMOKE)) / 2
    again = grading.collect(SMOKE)
    for name in grading.TABLES:
        assert again.content["files"][name] == smoke_card.content["files"][name]
    other = dataclasses.replace(SMOKE, truth=dataclasses.replace(SMOKE.truth, samples=10))
    with pytest.raises(ResultError, match="truth.samples is 1000 there and 10 here"):
        grading.collect(other)
    with pytest.raises(ResultError, match="truth.samples"):
        grading.load(other, "local")
    with pytest.raises(PlanError, match="got 77, expected one of the plan's: 0, 1"):
        trials.run_seed(SMOKE, 77)


def test_a_missing_twin_is_named(smoke_card, tmp_path):
    folder = twins.folder("smoke", 2)
    folder.rename(tmp_path / "aside")
    try:
        with pytest.raises(ResultError, match="1 of 36 parts of the scorecard are missing, twin 2 among them"):
            grading.collect(SMOKE)
        done = {part.name: part.is_done() for part in grading.parts(SMOKE)}
        assert not done["twin-2"] and done["twin-1"] and done["seed-00"]
    finally:
        (tmp_path / "aside").rename(folder)


def test_results_of_another_seed_are_refused(smoke_card, tmp_path):
    own, other = (trials.trial_folder("smoke", f"s0{seed}-full-zero-0") for seed in (0, 1))
    own.rename(tmp_path / "aside")
    try:
        shutil.copytree(other, own)
        with pytest.raises(ResultError, match="trial.seed is 1 there and 0 here"):
            grading.collect(SMOKE)
        shutil.rmtree(own)
        shutil.copytree(tmp_path / "aside", own)
        (own / "reworded.csv").write_bytes((other / "reworded.csv").read_bytes())
        with pytest.raises(ResultError, match="reworded.csv is missing or not the file that was written"):
            grading.collect(SMOKE)
    finally:
        shutil.rmtree(own)
        (tmp_path / "aside").rename(own)


def test_a_plan_is_not_replaced_under_trials_that_were_made(smoke_card):
    other = dataclasses.replace(SMOKE, own=dataclasses.replace(SMOKE.own, forgetting=(0.3,)))
    with pytest.raises(PlanError, match="s00-full-forgetting-0 was made by another plan"):
        grading.commit_plan(other)
    assert not (paths.reference("smoke") / "scorecard" / "plan.csv").exists()


def test_another_plan_than_the_settings_draw_is_refused_before_anything_runs(smoke_card):
    committed = paths.reference("smoke") / "scorecard" / "plan.csv"
    committed.parent.mkdir(parents=True)
    try:
        drawn = plan.draw(SMOKE)
        drawn.assign(dose=0.25).to_csv(committed, index=False)
        with pytest.raises(PlanError, match="s00-full-damage-1 differs in dose"):
            grading.collect(SMOKE)
        found = CliRunner().invoke(main, ["trials", "--scale", "smoke", "--seed", "0"])
        assert isinstance(found.exception, PlanError)
        assert CliRunner().invoke(main, ["plan", "--scale", "smoke"]).exit_code == 0
        grading.draw_plan(SMOKE)
    finally:
        committed.unlink()
        committed.parent.rmdir()


def test_snakemake_knows_every_part_of_the_scorecard(smoke_outputs, tmp_path):
    command = [sys.executable, "-m", "snakemake", "--snakefile", paths.ROOT / "Snakefile", "--directory", tmp_path]
    command += ["--profile", paths.PARAMS / "profiles" / "local", "--config", "scale=smoke", "--dry-run", "--forceall"]
    done = subprocess.run([*command, "--", "scorecard"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for part in ("trials_0", "trials_1", "twin", "scorecard"):
        assert f"rule {part}:" in done.stdout + done.stderr or f"localrule {part}:" in done.stdout + done.stderr


def test_there_is_no_scorecard_where_none_was_made():
    with pytest.raises(MissingResult, match="make scorecard SCALE=paper"):
        grading.load(plan.load("paper"), "local")
