"""The inversion study: settings, units, tables, and what is read off them, by hand and at smoke scale."""

import dataclasses
import json
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import torch
import yaml
from click.testing import CliRunner

from lib import collection, paths, results
from lib.__main__ import main
from lib.config import ConfigError
from lib.inversion import analysis, settings, study
from lib.inversion.channels import named
from lib.inversion.reader import InversionError
from lib.results import MissingResult, ResultError

SMOKE = settings.load("smoke")


# Settings


def test_the_papers_configurations_are_run_with_the_papers_steps_and_candidates():
    for scale in ("laptop", "paper"):
        runs = {one.name: one for run in settings.load(scale).runs for one in run.variants()}
        found = {name: (runs[name].steps, runs[name].candidates) for name in ("fast", "baseline", "high accuracy")}
        assert found == {"fast": (600, 100), "baseline": (1000, 2000), "high accuracy": (2000, 10000)}
        assert all(runs[name].start == "zeros" and runs[name].prompts >= 12 for name in found)
        search = runs["baseline"].search(20)
        assert (search.learning_rate, search.weight_decay, search.clip, search.tolerance) == (0.05, 1e-5, 1.0, 1e-4)
        assert runs["zeros 1000"].prompts >= 24 and runs["zeros 1000"].tokens == 10


def test_prompts_are_nested_and_take_genres_in_turn():
    few, many = settings.prompts("written", 7), settings.prompts("written", 50)
    assert many[:7] == few and len({prompt.id for prompt in many}) == 50
    assert len({prompt.source for prompt in few[:5]}) == 5
    counts = pd.Series([prompt.source for prompt in many]).value_counts()
    assert (counts == 10).all()


def test_own_prompts_are_read_and_bad_ones_refused(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "one"}\n{"text": "two", "id": "b"}\n')
    assert [(prompt.id, prompt.text) for prompt in settings.prompts(str(own), 2)] == [("1", "one"), ("b", "two")]
    with pytest.raises(ConfigError, match="has 2, expected at least 3"):
        settings.prompts(str(own), 3)
    own.write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="line 1: expected a `text`"):
        settings.prompts(str(own), 1)
    with pytest.raises(ConfigError, match="pip install datasets"):
        settings.prompts("allenai/c4", 1)


def test_documents_of_a_data_set_are_streamed_in_order_and_short_ones_passed_over(monkeypatch):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split, streaming):
            asked.append((name, config, split, streaming))
            return iter([{"text": "a" * n} for n in (5, 1, 7, 9)])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Datasets)
    found = settings.prompts("allenai/c4", 2, lambda text: len(text) >= 5)
    assert [prompt.text for prompt in found] == ["a" * 5, "a" * 7] and asked == [("allenai/c4", "en", "train", True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "verifid"}, "mode is 'verifid', expected one of verified, blind, reference"),
        ({"steps": None}, "steps is None; mode verified needs one"),
        ({"steps": 0}, "steps: got 0"),
        ({"mode": "blind"}, "candidates is 100; mode blind needs none"),
        ({"start": "zero"}, "start is 'zero', expected one of zeros"),
        ({"first": "scan"}, "first is 'scan'"),
        ({"configurations": {"a": {"layer": 3}}}, "configuration 'a' is {'layer': 3}, expected some of steps"),
        ({"configurations": {"a": {"start": "here"}}}, "start is 'here'"),
        ({"stepz": 3}, "unknown parameter 'stepz'"),
        ({"mode": "lm-order", "steps": None, "candidates": None, "channels": ["bf16"]}, "expected clean alone"),
        (
            {"mode": "lm-order", "steps": None, "candidates": None, "configurations": {"a": {}}},
            "mode lm-order takes no configurations",
        ),
        ({"configurations": {"blind": {}}}, "'blind' names two runs or configurations"),
        ({"mode": "reference", "abandon": True}, "abandon is true; mode reference has no fallback"),
        ({"channels": ["3-bits"]}, "channel: got '3-bits'"),
        ({"channels": ["gaussian x"]}, "channel: got 'gaussian x'"),
    ],
)
def test_a_run_that_cannot_be_run_is_refused(tmp_path, change, message):
    values = yaml.safe_load((paths.PARAMS / "inversion.yaml").read_text())
    run = {"mode": "verified", "steps": 30, "candidates": 100, "prompts": 2} | change
    values["scales"]["smoke"]["runs"]["one"] = run
    (tmp_path / "inversion.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises((ConfigError, InversionError), match=message):
        settings.load("smoke", path=tmp_path / "inversion.yaml")


def test_channels_are_found_by_name():
    states = torch.tensor([[1.0, -0.5, 0.26]])
    generator = torch.Generator().manual_seed(0)
    assert named("clean").release(states, generator).equal(states)
    assert named("2-bit").release(states, generator).tolist() == [[1.0, -0.0, 0.0]]  # steps of 1: -1, 0, 1
    noised = named("gaussian 0.5").release(torch.ones(1, 10000), generator)
    assert noised.std() == pytest.approx(0.5, rel=0.05) and not named("gaussian 0.5").deterministic


# What is read off the tables


def tokens(rows):
    """A table of tokens from (prompt, position, true, found, accepted, rank)."""
    table = pd.DataFrame(rows, columns=["prompt", "position", "true_id", "found_id", "accepted_id", "rank_final"])
    fixed = {"configuration": "r", "layer": "last", "channel": "clean", "mode": "reference", "steps": 5}
    table = table.assign(**fixed, category="content word", start="zeros")
    table["fallback"] = table.accepted_id < 0
    return table.assign(candidates=200)


REFERENCE = tokens(
    [
        ("a", 0, 5, 5, 5, 0),
        ("a", 1, 6, 6, 6, 40),
        ("a", 2, 7, 7, 7, 0),
        ("b", 0, 5, 5, 5, 3),
        ("b", 1, 8, 8, 9, 2),  # a nearer candidate was within the tolerance
        ("b", 2, 4, 4, -1, 900),
    ]
)


def test_one_run_with_the_true_prefix_gives_every_window():
    assert analysis.recovered(REFERENCE, 1).tolist() == [True, False, True, False, False, False]
    assert analysis.recovered(REFERENCE, 100).tolist() == [True, True, True, True, False, False]
    found = analysis.grid(REFERENCE, [1, 100]).set_index("candidates")
    assert found.recovered.tolist() == [2, 4] and found.of.tolist() == [6, 6]
    assert analysis.wilson(2, 6) == pytest.approx((0.0968, 0.7000), abs=1e-3)
    assert found.low[1] == 0.0 and found.high[1] == pytest.approx(
        0.7, abs=1e-3
    )  # both prompts, or b or a alone: 2, 0, 4 of 6
    exact = analysis.exact_by_length(REFERENCE, 100)
    assert exact.exact.tolist() == [2, 1, 1] and exact.of.tolist() == [2, 2, 2]
    assert analysis.exact_by_length(REFERENCE, 1).exact.tolist() == [1, 0, 0]
    assert analysis.recovered(REFERENCE, 901).tolist() == [True, True, True, True, False, True]  # the last by its rank


def test_published_mode_agrees_with_what_the_true_prefix_run_says_of_it():
    """Up to a prompt's first failure both stand behind the same prefix, so the windows' exact match is the same."""
    own = dataclasses.replace(SMOKE.runs[0], name="x", steps=8, candidates=60, prompts=4)
    inversion = study.Inversion(SMOKE)
    reference = own_tokens(inversion, own)
    for window in (1, 5, 60):
        published = own_tokens(inversion, dataclasses.replace(own, mode="verified", candidates=window))
        expected = analysis.exact_by_length(reference, window)
        assert analysis.exact_by_length(published).exact.tolist() == expected.exact.tolist()
    assert 0 < analysis.exact_by_length(reference, 1).exact.iloc[-1] < 4  # both kinds, else nothing was compared


def own_tokens(inversion, run):
    from lib.inversion import continuous

    reader, ids = inversion.reader(run.convention), inversion.ids(run)
    run = run.variants()[0]
    found = continuous.invert(reader, reader.states(ids), run.search(1000), ids)
    return found.tokens.assign(configuration=run.name, layer="last", channel="clean", mode=run.mode)


def test_at_risk_tokens_end_with_the_first_wrong_one():
    table = tokens([("a", 0, 1, 1, 1, 0), ("a", 1, 2, 3, 3, 1), ("a", 2, 4, 4, 4, 0), ("b", 0, 1, 9, 9, 1)])
    assert analysis.at_risk(table).tolist() == [True, True, False, True]


def test_signals_are_scored_by_token_and_summed_by_prompt():
    table = tokens([("a", 0, 1, 1, 1, 0), ("a", 1, 2, 3, 3, 1), ("a", 2, 4, 9, 9, 3), ("b", 0, 1, 1, 1, 0)])
    table = table.assign(discrete_loss=[1e-9, 0.5, 3.0, 2e-9], loss_final=[0.2, 0.1, 0.1, 0.1])
    areas = analysis.signal_areas(table).set_index(["per", "signal"]).area
    assert areas["token", "discrete loss"] == 1.0  # 0.5 above 1e-9 and 2e-9; the token behind the error is left out
    assert areas["token", "plateau loss"] == 0.25  # below one, tied with the other
    assert areas["prompt", "sum of discrete loss"] == 1.0


def test_error_rates_are_of_kinds_behind_a_true_prefix():
    table = REFERENCE.assign(category=["continuation", "function word", "number"] * 2)
    found = analysis.error_rates(table, 100).set_index("category")
    assert found.loc["first token", ["errors", "of"]].tolist() == [0, 2]
    assert found.loc["function word", ["errors", "of", "rate"]].tolist() == [1, 2, 0.5]
    assert (found.low <= found.rate).all() and (found.rate <= found.high).all()
    first = analysis.first_errors(table, 100)
    assert first.values.tolist() == [["function word", 1, 1.0]]


def test_the_error_model_finds_what_errors_were_drawn_from():
    rng = np.random.default_rng(0)
    rows = 3000
    table = pd.DataFrame({"prompt": rng.integers(300, size=rows).astype(str), "position": rng.integers(1, 10, rows)})
    table["category"] = rng.choice(["content word", "function word"], rows)
    table["merge_rank"], table["neighbour_distance"] = rng.integers(1, 40000, rows), rng.normal(size=rows)
    chance = 1 / (1 + np.exp(-(np.log(3) * (table.category == "function word") - 1 + 0.5 * table.neighbour_distance)))
    failed = rng.random(rows) < chance
    table = table.assign(true_id=1, accepted_id=np.where(failed, -1, 1), rank_final=np.where(failed, 99, 0))
    table = table.assign(fallback=failed, candidates=99)
    found = analysis.error_model(table, 10).set_index("term")
    assert found.low["function word"] < 3 < found.high["function word"] and found.p["function word"] < 1e-6
    assert found.low["distance to neighbours"] < np.exp(0.5) < found.high["distance to neighbours"]
    assert found.low["position"] < 1 < found.high["position"] and "continuation" not in found.index


def test_a_kind_that_never_fails_does_not_spoil_the_model():
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"prompt": rng.integers(60, size=600).astype(str), "position": rng.integers(1, 10, 600)})
    table["category"] = rng.choice(["content word", "function word", "number"], 600)
    table["merge_rank"], table["neighbour_distance"] = rng.integers(1, 40000, 600), rng.normal(size=600)
    failed = (rng.random(600) < 0.3) & (table.category != "number")
    table = table.assign(true_id=1, accepted_id=np.where(failed, -1, 1), rank_final=np.where(failed, 99, 0))
    found = analysis.error_model(table.assign(fallback=failed, candidates=99), 10)
    assert "number" not in set(found.term) and found.notna().all(axis=None)


def test_separation_is_given_for_every_length_at_which_there_are_both_kinds():
    table = tokens([("a", 0, 1, 1, 1, 0), ("a", 1, 2, 2, 2, 0), ("b", 0, 1, 1, 1, 0), ("b", 1, 2, 9, -1, 1)])
    table = table.assign(cumulative_loss=[1e-11, 2e-11, 1e-11, 1e-1], mode="verified")
    found = analysis.separation_by_length(table)
    assert found.exact.tolist() == [2, 1] and np.isnan(found.separation[0])
    assert found.separation[1] == pytest.approx(np.log10(1e-1 / 2e-11))
    assert analysis._flagged(table) == {"failed": 1, "flagged": 1, "false": 0}


def test_an_abandoned_prompt_stays_failed_and_keeps_its_sum():
    table = tokens([("a", 0, 1, 1, 1, 0), ("a", 1, 2, 2, 2, 0), ("b", 0, 1, 9, -1, 1)])
    table = table.assign(cumulative_loss=[1e-11, 2e-11, 1e-1], mode="verified")
    assert analysis.exact_by_length(table).exact.tolist() == [1, 1]
    assert analysis.exact_by_length(table, longest=4).exact.tolist() == [1, 1, 0, 0]
    found = analysis.separation_by_length(table)
    assert found.failed.tolist() == [1, 1] and found.separation[1] == pytest.approx(np.log10(1e-1 / 2e-11))


def test_configurations_are_paired_by_prompt():
    rows = [("a", "x", True), ("a", "y", True), ("b", "x", False), ("b", "y", True), ("c", "x", False)]
    table = pd.DataFrame(rows, columns=["prompt", "configuration", "exact_match"]).assign(channel="clean")
    table["exact_match"] = table.exact_match.astype("boolean")
    assert analysis.paired(table, "x", "y") == {"prompts": 2, "only x": 0, "only y": 1, "p": 1.0}


# The whole study at smoke scale


@pytest.fixture(scope="module")
def smoke_study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inversion")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAKBOOK_OUTPUTS", str(folder))
        study.run_study(SMOKE)
        yield study.collect(SMOKE)


def test_the_tables_keep_their_columns(smoke_study):
    prompts, found = smoke_study.table("prompts.parquet"), smoke_study.table("tokens.parquet")
    contract = (
        "prompt source model layer norm n_tokens batch method configuration channel attacker exact_match similarity"
    )
    assert set(f"{contract} first_error seconds candidates status margin".split()) <= set(prompts.columns)
    contract = (
        "prompt method configuration position true_id found_id rank_final loss_final discrete_loss cumulative_loss"
    )
    assert set(f"{contract} candidates category".split()) <= set(found.columns)
    expected = {"prompt", "method", "configuration", "position", "step", "loss", "rank"}
    assert expected <= set(smoke_study.table("trace.parquet").columns)
    variants = [one for run in SMOKE.runs for one in run.variants()]
    sizes = {one.name: one.prompts * one.tokens * len(one.channels) for one in variants}
    assert found.groupby("configuration").size().to_dict() == sizes
    assert not found.duplicated(["configuration", "channel", "prompt", "position"]).any()


def test_exact_searches_are_exact_and_right_tokens_have_no_loss(smoke_study):
    prompts, found = smoke_study.table("prompts.parquet"), smoke_study.table("tokens.parquet")
    exact = prompts.set_index("configuration").exact_match
    assert exact[["full-scan", "lm-order", "sipit"]].all()
    accepted = found[(found["mode"] == "verified") & ~found.fallback]
    assert len(accepted) and (accepted.found_id == accepted.true_id).all()  # no collision
    right = found[(found["mode"] != "blind") & (found.found_id == found.true_id)]
    assert right.discrete_loss.max() < 1e-8


def test_what_is_finished_is_used_again_and_what_is_missing_computed(smoke_study):
    inversion = study.Inversion(SMOKE)
    run = next(run for run in SMOKE.runs if run.name == "published")
    last = inversion.unit_folder(run, run.units - 1)
    before = {path: path.stat().st_mtime_ns for path in inversion.folder.glob("runs/*/*/result.json")}
    old = smoke_study.table("tokens.parquet")
    (last / "result.json").unlink()
    with pytest.raises(ResultError, match=r"units of the inversion study are missing: published \(1\)"):
        study.collect(SMOKE)
    partly = study.collect(SMOKE, partly=True)
    assert partly.values["pending"] == ["published"] and "verified" not in set(
        partly.table("tokens.parquet").configuration
    )
    study.run_study(SMOKE)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert [path for path in before if after[path] != before[path]] == [last / "result.json"]
    new = study.collect(SMOKE).table("tokens.parquet")
    pd.testing.assert_frame_equal(old.drop(columns="seconds"), new.drop(columns="seconds"))


def test_a_position_searched_behind_others_than_lie_before_it_is_refused(smoke_study):
    inversion = study.Inversion(SMOKE)
    run = next(run for run in SMOKE.runs if run.name == "published")
    first = inversion.unit_folder(run, 0)
    kept = {path: path.read_bytes() for path in first.iterdir()}
    tokens = pd.read_parquet(first / "tokens.parquet")
    values = {"tokens": len(tokens), "timed": True}
    try:
        changed = collection.writers({"tokens.parquet": tokens.assign(found_id=1), "trace.parquet": tokens[:0]})
        results.write_result(first, inversion.inputs(run, 0), values, {"seconds": 0.0, "threads": 1}, changed)
        with pytest.raises(ResultError, match="was searched behind other tokens"):
            study.run_study(SMOKE)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_abandoned_prompts_are_found_like_the_others_as_far_as_they_go(smoke_study, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    published = dataclasses.replace(next(run for run in SMOKE.runs if run.name == "published"), prompts=4)
    runs = {abandon: dataclasses.replace(published, abandon=abandon) for abandon in (False, True)}
    found = {}
    for abandon, run in runs.items():
        inversion = study.Inversion(dataclasses.replace(SMOKE, runs=(run,)))
        monkeypatch.setattr(inversion, "folder", tmp_path / str(abandon))
        inversion.compute(run)
        found[abandon] = study.described(inversion, inversion.table(run, "tokens.parquet"))
        texts = study.prompt_table(inversion, found[abandon])
        assert texts.exact_match.sum() == (texts.status == "consistent").sum() < len(texts)
    key = ["configuration", "prompt", "position"]
    fell = (
        found[False]
        .sort_values(key)
        .groupby(key[:2])
        .fallback.transform(lambda part: part.shift(fill_value=False).cummax())
    )
    wanted = found[False].sort_values(key)[~fell.astype(bool)]
    assert 0 < len(wanted) < len(found[False])
    columns = [*key, "found_id", "fallback"]
    assert found[True].sort_values(key)[columns].values.tolist() == wanted[columns].values.tolist()
    assert texts.similarity.isna().all()  # it would be that of half texts


def test_an_edited_prompt_is_another_study(smoke_study, monkeypatch):
    texts = settings.prompts("written", 4)
    texts[3] = dataclasses.replace(texts[3], text="Another text, " * 5)
    monkeypatch.setattr(study, "prompts", lambda *_: texts)
    with pytest.raises(ResultError, match="texts is"):
        study.load(SMOKE, "local")


def test_runs_that_the_model_does_not_allow_are_refused_before_any_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    run = SMOKE.runs[-1]
    for change, message in (
        ({"layer": 9}, "layer: got 9, expected 1 to 3"),
        ({"mode": "random-proxy", "candidates": 2000, "norm": "post"}, "got C = 2000, expected at most 1024"),
        ({"tokens": 300}, "300 tokens, expected at most 256"),
    ):
        runs = (*SMOKE.runs[:1], dataclasses.replace(run, name="late", **change))
        with pytest.raises(InversionError, match=message):
            study.run_study(dataclasses.replace(SMOKE, runs=runs))
    assert not list(tmp_path.rglob("result.json"))


def test_a_unit_of_other_settings_is_refused_before_anything_runs(smoke_study):
    changed = tuple(dataclasses.replace(run, steps=31) if run.name == "blind" else run for run in SMOKE.runs)
    with pytest.raises(ResultError, match="run.steps is 5 there and 31 here"):
        study.run_study(dataclasses.replace(SMOKE, runs=changed))
    with pytest.raises(ConfigError, match="got 'blnd', expected one of reference"):
        study.run_study(SMOKE, "blnd")


def test_the_study_is_found_where_it_is_and_not_elsewhere(smoke_study):
    assert study.load(SMOKE, "local").folder == smoke_study.folder
    with pytest.raises(MissingResult, match="make inversion SCALE=smoke"):
        study.load(SMOKE, "reference")
    other = dataclasses.replace(SMOKE, log_every=11)
    with pytest.raises(ResultError, match="log_every is 10 there and 11 here"):
        study.load(other, "local")


def test_the_path_is_kept_step_by_step_and_ends_near_its_token(smoke_study):
    path = smoke_study.table("path.parquet")
    walked = path[path.kind == "proxy"]
    assert walked.groupby(["position", "start"]).size().to_dict() == dict.fromkeys(
        [(p, s) for p in SMOKE.path.positions for s in ("prior", "zeros")], SMOKE.path.steps // 10 + 1
    )
    ends = walked.sort_values("step").groupby(["position", "start"]).tail(1)
    assert (ends["rank"] <= 5).all() and (ends.loss < 0.05).all() and walked[walked.step == 0].loss.min() > 0.2
    assert (path.kind == "true").sum() == 2 and (path.kind == "crowd").sum() == 1024


def test_the_notebook_tells_its_story_at_smoke_scale(smoke_study, tmp_path):
    page = tmp_path / "05.ipynb"
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "05_inversion.ipynb"),
        str(page),
        parameters={"scale": "smoke"},
        progress_bar=False,
        kernel_name="python3",
    )
    told = "".join(str(cell.get("outputs")) for cell in nbformat.read(page, as_version=4).cells)
    assert "tiny-llama: 1,024 tokens" in told and "this machine's own run" in told


def test_snakemake_knows_every_run_of_the_study(tmp_path):
    command = [sys.executable, "-m", "snakemake", "--snakefile", paths.ROOT / "Snakefile", "--directory", tmp_path]
    command += ["--profile", paths.PARAMS / "profiles" / "local", "--config", "scale=smoke", "--dry-run", "--forceall"]
    done = subprocess.run([*command, "--", "inversion"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("inversion_published", "inversion_full_scan", "inversion"):
        assert f"rule {name}:" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--run", "blind"], ["--jobs", "2"]])
def test_the_command_runs_what_is_missing_and_writes_the_tables(smoke_study, arguments, monkeypatch):
    monkeypatch.setattr("lib.__main__.execute", lambda *_: None)  # the notebook has a test of its own
    record = smoke_study.folder / "result.json"
    before = record.stat().st_mtime_ns
    done = CliRunner().invoke(main, ["inversion", "--scale", "smoke", *arguments])
    assert done.exit_code == 0, done.output
    assert (record.stat().st_mtime_ns == before) == ("--run" in arguments)
    assert json.loads(record.read_text())["results"]["pending"] == []


def test_a_prompt_that_is_too_short_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(json.dumps({"text": "a"}) for _ in range(4)))
    inversion = study.Inversion(settings.load("smoke", {"source": str(own)}))
    assert inversion.folder.name == "own"
    with pytest.raises(InversionError, match="prompt 1 has 1 tokens, expected at least 3"):
        inversion.ids(SMOKE.runs[0])


def test_the_short_inversion_says_what_it_found(smoke_study):
    found = study.short(SMOKE)
    assert set(found.true) == set(found.found) == set(found.tokens.prompt) and len(found.tokens) == 4
    assert "tiny-llama (layer last, post-norm)" in found.what


def test_what_came_back_is_told_prompt_by_prompt():
    table = tokens([("a", 0, 1, 1, 1, 0), ("a", 1, 2, 3, -1, 1500), ("b", 0, 1, 1, 1, 0), ("b", 1, 4, 4, 4, 0)])
    table = table.assign(token=["It", " was", "It", " is"], found_token=["It", " had", "It", " is"])
    found = analysis.read_back(table)
    assert found.loc["a"].tolist() == ["It was", "It had", "1 of 2", "' was' (content word, rank 1,500)"]
    assert found.loc["b"].tolist() == ["It is", "It is", "2 of 2", ""]


def test_published_mode_is_held_against_the_reference_run_length_by_length():
    own = tokens([("a", 0, 5, 5, 5, 0), ("a", 1, 6, 1, -1, 0), ("c", 0, 5, 5, 5, 0), ("c", 1, 6, 6, 6, 0)])
    found = analysis.agreement(own, REFERENCE[REFERENCE.position < 2], 100)
    assert found == {"prompts": 1, "predicted": [1, 1], "found": [1, 0]}
    abandoned = own.iloc[[0]].assign(found_id=1)
    found = analysis.agreement(abandoned, REFERENCE[REFERENCE.position < 2], 100)
    assert found == {"prompts": 1, "predicted": [1, 1], "found": [0, 0]}  # nobody was left at the second token
