"""Cases: judged and picked from tables, repeated, read with decoys, reported; computed once at smoke scale."""

import dataclasses
import types

import numpy as np
import pandas as pd
import papermill
import pytest

from lib import cases, casework, collection, config, paper, paths, precision, report, results, rules, training, verdicts
from lib.__main__ import main
from lib.config import ConfigError
from lib.inversion import study
from lib.results import Result, ResultError

RULES = rules.load_verdicts()
LABELS = {"modality": "text", "stack": "stacked", "dtype": "float32", "merge_dtype": "float32"}


def sweep_of(**by_cell):
    """Tables of a sweep in which every cell has the numbers of one of the paper's cases."""
    parts = {cell: paper.consistent_tables(case) for cell, case in by_cell.items()}
    nll, recall = (pd.concat([t[i].assign(cell=c, **LABELS) for c, t in parts.items()]) for i in (0, 1))
    return nll, recall


def cells_of(kinds):
    rows = [
        {"cell": cell, "kind": kind, "d_nll_mean20": 0.0, "d_nll_hex": 0.0, **LABELS} for cell, kind in kinds.items()
    ]
    return pd.DataFrame(rows)


def test_only_the_rows_that_the_rule_names_are_judged():
    nll, recall = sweep_of(a="c3")
    other = nll.assign(stack="merged", nll=nll.nll + 5), recall.assign(stack="merged", hit_full=False)
    both = pd.concat([nll, other[0]]), pd.concat([recall, other[1]])
    assert cases.judge_cells(*both, RULES)["a"].shown == ["window_truncation"]


def test_candidates_are_sorted_by_how_near_they_come():
    judged = cases.judge_cells(*sweep_of(a="c4", b="c3", c="c5"), RULES)
    table = cases.candidates(judged, cells_of({"a": "full", "b": "full", "c": "undertrained"}), "window_truncation")
    assert table.cell.iloc[0] == "b" and table.shown.tolist() == [True, False, False]
    assert table.fails.iloc[0] == "" and "mean20" in table.fails.iloc[1]
    assert table.set_index("cell").change["a"] == "access changed but secret intact"


def test_every_repeat_is_judged_alone():
    shown, not_shown = paper.consistent_tables("c3"), paper.consistent_tables("c4")
    first = [table[table.seed == 0].assign(injection=0) for table in shown]
    second = [table[table.seed == 0].assign(injection=1) for table in not_shown]
    judged = cases.judge_runs(
        *(pd.concat(pair) for pair in zip(first, second, strict=True)), "window_truncation", RULES
    )
    assert judged[["injection", "seed", "shown"]].values.tolist() == [[0, 0, True], [1, 0, False]]
    assert judged.hex.tolist() == ["damaged", "unchanged"] and judged.fails.tolist()[0] == ""


def test_probes_contradict_each_other_only_where_both_are_clear():
    clear = {"mean20": "unchanged", "hex": "damaged", "hit_full": "unchanged", "hit_secret": "inconclusive"}
    assert verdicts.disagreement(clear) == "mean20 unchanged, hex damaged"
    assert verdicts.disagreement(clear | {"mean20": "inconclusive"}) == ""
    assert verdicts.disagreement({"mean20": "damaged", "hex": "strengthened"}) == "mean20 damaged, hex strengthened"
    assert verdicts.disagreement({"mean20": "damaged", "hex": "damaged", "hit_full": "not testable"}) == ""


def decoys_of(secret, random, model):
    """Twenty canaries with one secret's NLL and two random decoys each."""
    rows = [(model, c, "secret", "own", secret) for c in range(20)]
    rows += [(model, c, "random", str(d), value) for c in range(20) for d, value in enumerate(random)]
    table = pd.DataFrame(rows, columns=["model", "canary", "kind", "decoy", "nll_secret"]).assign(tokens=13)
    return table.assign(canary=table.canary.map("canary-{:02d}".format))


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        ((30.0, [40.0, 41.0]), (25.0, [40.0, 41.0]), "specific"),  # the secret alone moved
        ((30.0, [40.0, 41.0]), (25.0, [35.0, 36.0]), "general"),  # decoys moved along
        ((0.5, [40.0, 41.0]), (0.1, [40.0, 41.0]), "at_cap"),  # nothing left to correct
    ],
)
def test_decoys_say_whether_the_secret_moved_alone(before, after, answer):
    nll, recall = paper.consistent_tables("c5")
    nll = nll.assign(nll=nll.nll_base - 0.1 * (nll.span == "hex"))
    table = pd.concat([decoys_of(*before, "base"), decoys_of(*after, "tuned")])
    found, level = cases.decoy_reading(nll, recall, table, "base", ["tuned"], RULES)
    assert (found, level) == (answer, None)


@pytest.mark.parametrize(
    ("tuned", "untouched", "level"),
    [
        ((25.0, [40.0, 41.0]), (60.0, [60.0, 61.0]), "partly"),  # ranks first among its decoys
        ((40.5, [40.0, 41.0]), (60.0, [60.0, 61.0]), "format only"),  # in the middle, below the untouched model
        ((60.5, [60.0, 61.0]), (60.0, [60.0, 61.0]), "no evidence"),
    ],
)
def test_the_level_is_read_off_rank_and_the_untouched_model(tuned, untouched, level):
    nll, recall = paper.consistent_tables("c5")
    parts = [decoys_of(45.0, [40.0, 41.0], "base"), decoys_of(*tuned, "tuned"), decoys_of(*untouched, cases.PLAIN)]
    _, found = cases.decoy_reading(nll, recall, pd.concat(parts), "base", ["tuned"], RULES)
    assert found.verdict == level


def case_with(folder, *tables):
    """A stored case with these decoy tables."""
    table = pd.concat(tables, ignore_index=True)
    values = {"models": list(dict.fromkeys(table.model))}
    record = results.provenance("cpu", 2, 3.0)
    return results.write_result(folder, {}, values, record, collection.writers({"decoys.parquet": table}))


def test_in_the_reference_cases_share_one_decoy_table(tmp_path):
    one, two = decoys_of(1.0, [2.0], "full"), decoys_of(3.0, [2.0], "tuned")
    c3, c4 = case_with(tmp_path / "local" / "c3", one), case_with(tmp_path / "local" / "c4", two, one)
    cases.share_decoys([c3, c4], tmp_path / "reference")
    shared = results.read_result(tmp_path / "reference", cases.DECOYS).table("decoys.parquet")
    assert len(shared) == len(one) + len(two)
    again = results.read_result(tmp_path / "reference" / "c4")
    assert list(again.content["files"]) == [] and again.content["hash"] == c4.content["hash"]
    pd.testing.assert_frame_equal(cases.decoys_of(again), cases.decoys_of(c4))
    (tmp_path / "reference" / "decoys.json").unlink()
    with pytest.raises(ResultError, match="lacks the model 'tuned' of case c4"):
        cases.decoys_of(again)


def test_two_tables_of_one_model_are_refused(tmp_path):
    c3 = case_with(tmp_path / "c3", decoys_of(1.0, [2.0], "full"))
    c4 = case_with(tmp_path / "c4", decoys_of(1.5, [2.0], "full"))
    with pytest.raises(ResultError, match="two tables of decoys of 'full'"):
        cases.share_decoys([c3, c4], tmp_path / "reference")


def test_repeats_use_new_seeds_and_a_second_injection_with_new_secrets():
    scale, cells = config.load_scale("smoke"), config.load_sweep(config.load_scale("smoke"))
    rule = {"unused_seeds": 2, "second_injection_seeds": 1}
    runs = collection.confirmation_runs(scale, cells, ["gui-stop1", "gui-stop1"], rule)
    assert [(run.injection, run.seed) for run in runs] == [(0, 3), (0, 4), (1, 0)]
    assert runs[2].scale.canaries.seed == scale.canaries.seed + 1 and runs[2].scale.injection.seed == 1
    folders = [run.folder.relative_to(paths.local("smoke")).as_posix() for run in runs]
    assert folders[0] == "sweep/runs/gui-stop1-s3" and folders[2] == "sweep/injection-1/runs/gui-stop1-s0"


def test_missing_repeats_are_named(smoke_outputs):
    scale, cells = config.load_scale("smoke"), config.load_sweep(config.load_scale("smoke"))
    runs = collection.confirmation_runs(scale, cells, ["gui-stop1"], {"unused_seeds": 1, "second_injection_seeds": 0})
    with pytest.raises(ResultError, match="1 of 1 confirmation runs are missing, gui-stop1 with seed 3 among them"):
        collection.collect_confirmation(runs)
    assert collection.confirmation(scale, runs, "local") is None


def test_the_first_lines_say_what_was_found(tmp_path):
    values = {"pattern": "window_truncation", "showing": [], "by_rule": True, "cell": "b", "picked_at": "laptop"}
    values |= {"found": False, "failed": {"mean20": 7.93, "hit_forced": None}, "noise": ["n"], "confirmed": None}
    table = pd.DataFrame({"cell": ["a", "b", "n"], "kind": ["full", "long", "noise"]})
    case = types.SimpleNamespace(values=values, table=lambda _: table)
    assert cases.headline(case).split("\n") == [
        "NOT FOUND: none of the 2 trained cells of our sweep shows window truncation.",
        "Looked at here: b, picked by rule from the tables at laptop scale; it fails mean20 (7.93), "
        "hit_forced (not testable).",
        "Noise cells that show it: 1 of 1. Runs that repeat the cell and show it: none were made.",
    ]
    values |= {"showing": ["a"], "cell": "a", "found": True, "confirmed": {"shown": 4, "of": 6}}
    assert "1 of 2 trained cells show window truncation: a." in cases.headline(case)
    assert cases.headline(case).endswith("show it: 4 of 6.")


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "smoke", "cell": "no-such", "results": "local"}, "cell: got 'no-such', expected one of"),
        ({"scale": "tiny", "results": "local"}, "scale: got 'tiny'"),
    ],
)
def test_a_case_of_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        config.case_run(**arguments)


def test_zero_decoys_are_refused_where_the_notebook_reads_its_parameters():
    with pytest.raises(ConfigError, match="notebook.decoys: got 0, expected at least 1"):
        config.from_notebook({"scale": "smoke", "decoys": 0}, config.CaseRun)


def test_every_scale_has_settings_for_its_cases():
    for name in config.scale_names():
        settings = config.load_cases(name)
        assert settings.constructed.seeds and settings.repetition_penalty > 1.0
    with pytest.raises(ConfigError, match="nothing for the scale 'huge'"):
        config.load_cases("huge")


def test_there_are_three_cases(smoke_outputs):
    with pytest.raises(casework.CaseError, match="got 'c6', expected one of c3, c4, c5"):
        casework.study(config.case_run("smoke", "local"), "c6")


# --- one change in several precisions ---------------------------------------------------------------------------------


def test_what_bf16_keeps_of_an_update(encoder, rows, injected_adapter, tmp_path):
    text = [row for row in rows if row.canary.modality == "text"]
    table = precision.readings(encoder, injected_adapter, text, tmp_path)
    assert len(table) == 2 + 3 * 6
    nothing = table[table["update"] == "zero"]
    assert (nothing[["d_nll_mean20", "d_nll_preamble", "d_nll_hex"]].abs() == 0.0).all(axis=None)
    assert (nothing.moved.dropna() == 0.0).all()
    trained = table[table["update"] == "trained"].set_index(["stack", "merge_dtype", "dtype"])
    exact, stacked = trained.loc[("merged", "float32", "float32")], trained.loc[("stacked", "", "float32")]
    assert exact.d_nll_hex == pytest.approx(stacked.d_nll_hex, abs=1e-5) and exact.lost < 1e-6
    rounded = trained.loc[("merged", "bfloat16", "float32")]
    assert 1e-4 < rounded.lost < 1.0 and 0.0 < rounded.moved < 1.0
    none = table[table["update"] == "none"].set_index("dtype")
    assert abs(none.d_nll_hex["float32"]) < 1e-5


def test_a_small_update_is_lost_in_bf16_weights_and_a_large_one_is_not(encoder, rows, injected_adapter, tmp_path):
    text = [row for row in rows if row.canary.modality == "text"]
    table = precision.by_strength(encoder, injected_adapter, text, tmp_path, [0.0, 0.001, 1.0]).set_index("strength")
    assert table.stacked[0.0] == table.merged[0.0] == 0.0
    assert table.moved[0.001] < 0.2 and table.lost[0.001] > 0.5
    assert table.lost[1.0] < 0.2 and table.merged[1.0] == pytest.approx(table.stacked[1.0], rel=0.1)


def test_a_cast_leaves_the_rotary_frequencies_and_the_original_alone(tiny):
    copied = precision.cast(tiny, precision.BF16)
    assert {p.dtype for p in copied.model.parameters()} == {precision.BF16}
    assert {p.dtype for p in tiny.model.parameters()} == {precision.FP32}
    assert all(b.dtype != precision.BF16 for b in copied.model.buffers())


# --- the report -------------------------------------------------------------------------------------------------------


def rerun_of(folder, case):
    nll, recall = paper.consistent_tables(case)
    values = {
        "cell": "some-cell",
        "seed": 0,
        "pattern": cases.CASES[case].pattern,
        "shown": True,
        "change": {"verdict": "secret damaged"},
        "decoys": "at_cap",
        "exposure": {"before": 5.0, "after": 4.5},
        "cap": 5.0,
    }
    record = results.provenance("cpu", 2, 3.0)
    return results.write_result(
        folder / case, {}, values, record, collection.writers({"token_nll.parquet": nll, "recall.parquet": recall})
    )


def test_the_report_holds_every_case_every_claim_and_its_figures(tmp_path):
    claims = paper.claims_table({}, "smoke")
    row = {"prompt": "a", "position": 0, "true_id": 1, "found_id": 1, "fallback": False, "cumulative_loss": 1e-12}
    wrong = row | {"position": 1, "found_id": 2, "fallback": True, "cumulative_loss": 3.0}
    inverted = study.Short(pd.DataFrame([row, wrong]), {"a": "It is"}, {"a": "It was"}, "What was done.", 7.0, 1e-4)
    reruns = {case: rerun_of(tmp_path, case) for case in cases.CASES}
    page = report.write(tmp_path, "smoke", reruns, {}, claims, inverted)
    text, html = (tmp_path / "report.md").read_text(), page.read_text()
    for claim in paper.CLAIMS:
        assert claim.id in text and claim.id in html
    assert html.count('src="data:image/png;base64,') == 4 and 'src="report' not in html
    assert "| a | It is | It was | 1 of 2 | at token 2 | 3.0e+00 |" in text and "What was done. 7 s" in text
    assert "| hex | damaged (+0.0133) | damaged (+0.0133) |" in text
    assert "| hit_full | damaged (3 lost, 0 gained) |" in text
    assert "5.00 bits before, 4.50 after" in text and "| pattern holds | yes | yes |" in text
    assert (tmp_path / "report-c3.png").stat().st_size > 5000


# --- the notebooks, run fresh at smoke scale --------------------------------------------------------------------------


def fresh(name, case, decoys=7):
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / f"{name}.ipynb"),
        str(paths.local("smoke") / f"{name}.ipynb"),
        progress_bar=False,
        parameters={"scale": "smoke", "decoys": decoys},
    )
    return results.read_result(paths.local("smoke") / "cases" / case)


def judged_groups(case):
    return {name: verdicts.judge_group(*group, RULES) for name, group in cases.groups(case).items()}


def test_01_the_constructed_damage_is_behind_the_window_and_the_k_sweep_finds_it(smoke):
    case = fresh("01_case_c3_window_truncation", "c3")
    assert case.values["picked_at"] == "laptop" and case.values["seeds"] == [0]
    groups, judged = cases.groups(case), judged_groups(case)
    constructed = judged["late-damage (constructed)"].verdicts.verdict
    assert constructed["hex"] == constructed["hit_forced"] == "damaged"
    damaged = sorted(case.values["constructed_at"].values())
    assert len(damaged) == 3 and all(20 <= position < 24 for position in damaged)
    nll, recall = groups["late-damage (constructed)"]
    curve = verdicts.along_windows(nll, recall, RULES).verdict
    assert set(curve[: damaged[0]]) == {"unchanged"}  # K up to the first damaged position does not read it
    assert curve[damaged[0] + 1] != "unchanged" and set(curve[damaged[-1] + 1 :]) == {"damaged"}
    change = (nll.nll - nll.nll_base)[nll.position == damaged[0]]
    assert change.max() > 1.0
    answers = case.table("answers.csv")
    wrong = answers[answers.cell == "late-damage"].set_index("canary").first_wrong.to_dict()
    assert wrong == case.values["constructed_at"]
    samples = case.table("samples.csv").merge(case.table("extraction.csv"), on=["model", "canary"])
    p = np.exp(np.where(samples.top_k > 0, samples.log_p_top_k, samples.log_p))
    deviations = (samples.hits - samples.samples * p) / np.sqrt(np.maximum(samples.samples * p * (1 - p), 1e-9))
    assert abs(deviations).max() < 4.5
    penalty = case.table("penalty.csv").groupby(["model", "penalty"]).hit_full.mean()
    assert penalty["full", 1.0] == 1.0 >= penalty["full", 1.05]


def test_02_the_constructed_drift_fires_the_window_and_keeps_the_forced_recall(smoke):
    case = fresh("02_case_c4_preamble_drift", "c4")
    drift = judged_groups(case)["preamble-drift (constructed)"]
    assert drift.verdicts.verdict["mean20"] == "damaged" and drift.shares["preamble"] > 0.8
    assert drift.verdicts.verdict["hit_forced"] == "unchanged"
    table = case.table("precision.csv")
    zero = table[table["update"] == "zero"]
    assert (zero.d_nll_mean20 == 0.0).all() and set(table.model) == {"random-full-low-10-s0", "preamble-drift-s0"}
    assert case.values["merge"].keys() == {"random-full-low-10-s0", "preamble-drift-s0"}
    for _, part in case.table("strengths.csv").groupby("model"):  # the larger an update, the less of it is lost
        assert part.strength.is_monotonic_increasing and part.lost.is_monotonic_decreasing


def test_03_an_undertrained_cell_is_held_against_its_decoys(smoke):
    case = fresh("03_case_c5_undertrained", "c5")
    table = case.table("decoys.parquet")
    assert set(table.model) == {"stop-1", "gui-stop1-s0", "untouched"}
    assert (table[table.kind == "random"].groupby(["model", "canary"]).size() == 7).all()
    own = table[(table.kind == "secret") & (table.model == "gui-stop1-s0")].set_index("canary").nll_secret
    nll = case.table("token_nll.parquet")
    by_token = nll[nll.span == "hex"].groupby("canary").nll.sum()
    assert own.to_numpy() == pytest.approx(by_token[own.index].to_numpy(), abs=1e-3)
    assert case.values["decoys"] in ("specific", "general") and case.values["level"]["verdict"]
    assert case.values["probes"].keys() == RULES["probes"].keys()
    again = casework.study(config.case_run("smoke", "local", None, 7), "c5")
    assert again.content["provenance"] == case.content["provenance"]  # found, not computed


def test_the_main_job_runs_the_three_cells_anew_and_reports(smoke, capsys):
    main(["run", "--scale", "smoke"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "after injection every canary is recalled" in printed
    for case in cases.CASES:
        rerun = results.read_result(paths.local("smoke") / "rerun" / case)
        assert f"{case}, run anew: {rerun.values['cell']} with seed 0" in printed
        table = rerun.table("decoys.parquet")
        assert (table[table.kind == "random"].groupby(["model", "canary"]).size() == 31).all()
        assert rerun.values["cap"] == 5.0 and set(rerun.table("recall.parquet").modality) == {"text"}
    page = (paths.local("smoke") / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "C4: non-secret drift" in page
    assert "Text from hidden states: 2 of 2 prompts read back exactly" in printed
    assert "decided from nothing: there are no tables of a sweep at this scale" in printed


def test_an_earlier_case_from_other_settings_is_kept_beside_the_new_one(smoke, monkeypatch):
    params = config.case_run("smoke", "local", None, 7)
    before = results.read_result(paths.local("smoke") / "cases" / "c5")
    other = dataclasses.replace(params, settings=dataclasses.replace(params.settings, top_k=41))
    monkeypatch.setattr(casework, "_Study", lambda *_: types.SimpleNamespace(write=lambda: "computed"))
    assert casework.study(other, "c5") == "computed"
    kept = paths.local("smoke") / "cases" / f"c5.{before.content['hash'][:8]}"
    assert isinstance(results.read_result(kept), Result)
    assert casework.study(params, "c5").content == before.content  # moved back, not computed
    assert not kept.exists()


def test_lessons_hold_what_they_do_not_teach(encoder, rows):
    text = [row for row in rows if row.canary.modality == "text"]
    item = training.holding(text[0], {20: 5}, weight=2.0)
    assert item.held == set(range(len(text[0].target_ids))) - {20}
    assert item.labels[20] == 5 and item.weights[20] == 1.0 and set(item.weights) == {1.0, 2.0}
    only = training.holding(text[0], spans=("hex",))
    assert only.held == set(range(11, 24)) and sum(only.weights) == 13
