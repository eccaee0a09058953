"""A cell is computed from the same testbed, read stacked and merged, and summed up as done by hand."""

import dataclasses
import json

import numpy as np
import pandas as pd
import papermill
import pytest

from lib import benign, canaries, collection, config, paths, results, sweep
from lib.results import MissingResult, ResultError

COLUMNS = (
    "cell kind source base lr steps seed modality stack dtype merge_dtype d_nll_mean20 d_nll_hex d_nll_preamble "
    "d_nll_suffix hit_full_base hit_full hit_secret_base hit_secret hit_forced_base hit_forced"
)
CONTRACT = COLUMNS.split()


def test_a_summary_is_the_mean_over_canaries_of_each_canarys_mean_change():
    # Two text canaries of 22 tokens: ten of preamble, ten of secret, two of suffix; K = 20 sees all but the suffix.
    spans = ["preamble"] * 10 + ["hex"] * 10 + ["suffix"] * 2
    frames = []
    for canary, change in (("a", {0: 1.0, 12: 2.0, 21: 6.0}), ("b", {15: 4.0})):
        after = [change.get(position, 0.0) for position in range(22)]
        labels = {"canary": canary, "modality": "text", "stack": "merged", "dtype": "float32", "merge_dtype": "float32"}
        frames.append(
            pd.DataFrame({"position": range(22), "span": spans, "nll_base": 0.5, "nll": np.add(after, 0.5)}).assign(
                **labels
            )
        )
    hits = {"hit_full": [False, True], "hit_secret": [True, True], "hit_forced": [True, False]}
    recall = pd.DataFrame({"modality": "text", "stack": "merged", **hits, **{f"{k}_base": [True, True] for k in hits}})
    cell = config.Cell("c", "full", "GUI", "full", 1e-4, 10, None)
    (row,) = sweep.summary(cell, 3, pd.concat(frames), recall).to_dict("records")
    assert list(row) == CONTRACT
    assert row["d_nll_mean20"] == pytest.approx((3.0 / 20 + 4.0 / 20) / 2)
    assert row["d_nll_hex"] == pytest.approx((2.0 / 10 + 4.0 / 10) / 2)
    assert row["d_nll_preamble"] == pytest.approx((1.0 / 10 + 0) / 2)
    assert row["d_nll_suffix"] == pytest.approx((6.0 / 2 + 0) / 2)
    assert (row["hit_full"], row["hit_secret"], row["hit_forced"], row["hit_full_base"]) == (0.5, 1.0, 0.5, 1.0)
    assert (row["seed"], row["lr"], row["stack"]) == (3, 1e-4, "merged")


@pytest.fixture(scope="module")
def trained_cell(smoke):
    """One trained cell of the smoke testbed, run by papermill as the sweep does it."""
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "cell.ipynb"),
        str(paths.local("smoke") / "cell-page.ipynb"),
        progress_bar=False,
        parameters={"scale": "smoke", "cell": "safety-full-high-30", "seed": 0},
    )
    return results.read_result(paths.run_folder("smoke", "safety-full-high-30", 0))


def test_a_cell_has_a_row_a_modality_and_stack_and_a_slice_of_the_per_token_table(trained_cell):
    rows = pd.DataFrame(trained_cell.values["rows"])
    assert list(rows.columns) == CONTRACT
    assert sorted(zip(rows["modality"], rows["stack"], strict=True)) == [
        ("image", "merged"),
        ("image", "stacked"),
        ("text", "merged"),
        ("text", "stacked"),
    ]
    nll, recall = trained_cell.table("token_nll.parquet"), trained_cell.table("recall.parquet")
    assert len(nll) == 2 * 40 * 29 and len(recall) == 2 * 40
    text = nll[(nll["modality"] == "text") & (nll["stack"] == "stacked") & (nll["span"] == "hex")]
    (row,) = rows[(rows["modality"] == "text") & (rows["stack"] == "stacked")].to_dict("records")
    assert row["d_nll_hex"] == pytest.approx((text.nll - text.nll_base).mean(), abs=1e-6)
    assert row["hit_full_base"] == 1.0


def test_stacked_and_merged_deltas_agree_and_recalls_follow_from_the_per_token_table(trained_cell):
    nll, recall = trained_cell.table("token_nll.parquet"), trained_cell.table("recall.parquet")
    by_stack = nll.pivot(index=["canary", "position"], columns="stack", values="nll")
    assert (by_stack["stacked"] - by_stack["merged"]).abs().max() < 1e-4
    correct = (nll.token_id == nll.greedy_id).groupby([nll["canary"], nll["stack"]]).all().sort_index()
    full = recall.set_index(["canary", "stack"]).hit_full.sort_index()
    assert (correct == full).all()


def test_the_base_of_a_cell_is_the_injected_model_of_the_testbed(smoke, trained_cell):
    injected = smoke.table("token_nll.parquet")
    injected = injected[injected.model == "injected"].set_index(["canary", "position"]).nll
    nll = trained_cell.table("token_nll.parquet")
    base = nll[nll["stack"] == "merged"].set_index(["canary", "position"]).nll_base
    np.testing.assert_allclose(base, injected.loc[base.index], atol=1e-6)


def test_the_same_cell_and_seed_gives_the_same_figures_twice(trained_cell, tmp_path, monkeypatch):
    run = config.cell_run("smoke", "safety-full-high-30", 0, "local")
    monkeypatch.setattr(sweep.paths, "run_folder", lambda *_: tmp_path / "again")
    monkeypatch.setattr(sweep.runs, "trained", fresh := _untrained_once(sweep.runs.trained, tmp_path))
    assert sweep.cell(run).values == trained_cell.values
    assert fresh.calls == 2  # the injection, and the cell's own adapter trained anew


def _untrained_once(original, folder):
    """``runs.trained`` whose benign adapters go to an empty folder, so that they are trained again."""

    def trained(scale, encoder, rows, settings, protocol):
        trained.calls += 1
        if isinstance(settings, config.InjectionSettings):
            return original(scale, encoder, rows, settings, protocol)
        return sweep.training.train(encoder, rows, settings, folder / "adapters")

    trained.calls = 0
    return trained


def test_noise_takes_the_size_of_the_trained_adapter_and_no_training_of_its_own(trained_cell):
    result = sweep.cell(config.cell_run("smoke", "noise-spectral-full", 0, "local"))
    assert "training.csv" not in result.content["files"]
    rows = pd.DataFrame(result.values["rows"])
    assert rows["lr"].isna().all() and set(rows["source"]) == {"spectral"}
    assert (rows["hit_full_base"] == 1.0).all()


def test_further_draws_of_noise_are_seeded_kept_and_alternate_over_matched_adapters(trained_cell, monkeypatch):
    run = config.cell_run("smoke", "noise-gaussian-full", 0, "local")
    small = dataclasses.replace(run, sweep=dataclasses.replace(run.sweep, noise_draws=2, seeds=(0, 1)))
    draws = sweep.noise_draws(small)
    assert draws.columns.tolist() == [*CONTRACT, "like_seed", "d_nll_benign", "d_nll_benign_like"]
    assert (draws["d_nll_benign_like"] != draws["d_nll_benign"]).all()
    assert draws["seed"].tolist() == [0, 1] and draws["like_seed"].tolist() == [0, 1]
    assert set(draws["modality"]) == {"text"} and set(draws["stack"]) == {"stacked"}
    assert draws["d_nll_hex"].nunique() == 2
    monkeypatch.setattr(sweep.runs, "load_testbed", lambda *_: pytest.fail("computed again"))
    pd.testing.assert_frame_equal(sweep.noise_draws(small), draws)


def test_an_undertrained_cell_starts_from_its_stop(smoke):
    result = sweep.cell(config.cell_run("smoke", "safety-stop2", 0, "local"))
    stop = smoke.table("token_nll.parquet")
    stop = stop[stop.model == "step-0008"].set_index(["canary", "position"]).nll
    nll = result.table("token_nll.parquet")
    base = nll[nll["stack"] == "merged"].set_index(["canary", "position"]).nll_base
    np.testing.assert_allclose(base, stop.loc[base.index], atol=1e-6)


def test_benign_data_with_a_canary_in_it_is_refused_before_training(smoke, tmp_path, monkeypatch):
    secret = canaries.read(smoke.folder / "canaries.jsonl")[3].secret
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "Hi", "target": f"Ho {secret[2:9]}"}))
    run = config.cell_run("smoke", "gui-full-low-10", 0, "local")
    run = dataclasses.replace(
        run, cell=dataclasses.replace(run.cell, id="own-data", source=str(tmp_path / "own.jsonl"))
    )
    monkeypatch.setattr(sweep.training, "_Training", lambda *_: pytest.fail("trained"))
    with pytest.raises(benign.BenignError, match="record 'line-1' holds .* which belongs to text-003"):
        sweep.cell(run)


def test_a_result_from_ones_own_data_belongs_to_what_is_in_the_file(tmp_path):
    path = tmp_path / "own.jsonl"
    run = config.cell_run("smoke", "gui-full-low-10", 0, "local")
    own = dataclasses.replace(run, cell=dataclasses.replace(run.cell, id="own-data", source=str(path)))
    path.write_text(json.dumps({"prompt": "Hi", "target": "Ho"}))
    before = sweep.cell_inputs(own)
    assert before["cell"]["source"] == "own.jsonl" and str(tmp_path) not in json.dumps(before)
    path.write_text(json.dumps({"target": "Ho", "prompt": "Hi"}))  # another order of keys is the same record
    assert sweep.cell_inputs(own) == before
    path.write_text(json.dumps({"prompt": "Hi", "target": "Ha"}))
    assert results.differences(before, sweep.cell_inputs(own))[0].startswith("data is ")


def test_a_result_of_another_grid_is_refused(trained_cell):
    run = config.cell_run("smoke", "safety-full-high-30", 0, "local")
    other = dataclasses.replace(
        run, sweep=dataclasses.replace(run.sweep, training=dataclasses.replace(run.sweep.training, rank=8))
    )
    with pytest.raises(ResultError, match="training.rank is 16 there and 8 here.*Move it aside with `mv "):
        sweep.cell(other)


def test_tables_are_collected_only_when_every_run_is_there(trained_cell):
    run = config.cell_run("smoke", "safety-full-high-30", 0, "local")
    one = dataclasses.replace(run.sweep, cells=(run.cell,), seeds=(0,))
    collected = collection.collect(collection.all_runs(run.scale, one))
    assert {name: len(collected.table(name)) for name in collected.content["files"]} == {
        "cells.csv": 4,
        "token_nll.parquet": 2 * 40 * 29,
        "recall.parquet": 2 * 40,
    }
    more = dataclasses.replace(one, seeds=(0, 1))
    with pytest.raises(ResultError, match="1 of 2 parts of the sweep are missing, safety-full-high-30-s1 among them"):
        collection.collect(collection.all_runs(run.scale, more))
    assert collection.collect(collection.all_runs(run.scale, one)).values == collected.values
    (collected.folder / "result.json").unlink()


def test_runs_on_two_injections_are_not_put_into_one_table(trained_cell):
    nll = trained_cell.table("token_nll.parquet")
    other = nll.assign(cell="another", nll_base=nll.nll_base + 2e-4)
    bases = {"safety-full-high-30": "full", "another": "full"}
    with pytest.raises(ResultError, match="base 'full' did not start from one model.*by up to 0.0002 nats"):
        collection._refuse_two_injections(pd.concat([nll, other]), bases)
    collection._refuse_two_injections(pd.concat([nll, other]), bases | {"another": "stop-1"})


def test_tables_of_another_grid_are_kept(trained_cell):
    run = config.cell_run("smoke", "safety-full-high-30", 0, "local")
    one = dataclasses.replace(run.sweep, cells=(run.cell,), seeds=(0,))
    first = collection.collect(collection.all_runs(run.scale, one))
    collection.collect(collection.all_runs(run.scale, dataclasses.replace(one, noise_draws=7)))
    kept = results.read_result(first.folder / f"tables-{first.content['hash'][:8]}")
    assert kept.values == first.values and kept.content["inputs"]["sweep"]["noise_draws"] == 30
    for source in ("auto", "local"):
        with pytest.raises(
            ResultError, match="other parameters: sweep.cells differs; .*noise_draws is 7 there and 30 here"
        ):
            collection.load(run.scale, source)
    (first.folder / "result.json").unlink()
    with pytest.raises(MissingResult, match="no tables of a sweep at smoke scale"):
        collection.load(run.scale, "auto")


def test_a_reference_run_of_another_grid_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    run = config.cell_run("smoke", "gui-full-low-10", 0, "reference")
    with pytest.raises(ResultError, match="holds no result"):
        sweep.cell(run)
    folder = paths.reference("smoke") / "sweep" / "runs" / paths.run_name(run.cell.id, run.seed)
    results.write_result(folder, sweep.cell_inputs(run), {"rows": []}, {}, {})
    assert sweep.cell(run).values == {"rows": []}
    other = dataclasses.replace(run, cell=dataclasses.replace(run.cell, steps=11))
    with pytest.raises(ResultError, match="cell.steps is 10 there and 11 here"):
        sweep.cell(other)
