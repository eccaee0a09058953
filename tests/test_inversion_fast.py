"""The study of exact inversion and defences: settings, units and tables at smoke scale."""

import dataclasses
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import yaml
from click.testing import CliRunner

from lib import paths
from lib.__main__ import main
from lib.config import ConfigError
from lib.inversion import fast, fast_settings, settings, verified
from lib.inversion.reader import InversionError
from lib.results import MissingResult, ResultError

SMOKE = fast_settings.load("smoke")


# Settings


def test_the_laptop_sets_are_those_that_were_asked_for():
    laptop = {one.name: one for one in fast_settings.load("laptop").sets}
    english = [one for one in laptop.values() if one.source == "written" and one.layer is None]
    assert {one.tokens for one in english} == {10, 50, 200} and {one.batch == 1 for one in english} == {True, False}
    assert sum(one.prompts for one in english if one.batch > 1 and one.tokens <= 50) >= 60
    assert sum(one.source == fast_settings.RANDOM for one in laptop.values()) >= 1
    assert {"8-bit", "4-bit", "2-bit"} <= set(fast_settings.load("laptop").defences.channels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sets": {"a": {"source": "written", "prompts": 0, "tokens": 3, "batch": 1}}}, "set 'a'.prompts: got 0"),
        (
            {"sets": {"a": {"source": "written", "prompts": 1, "tokens": 3, "batch": 1, "norm": "none"}}},
            "norm is 'none'",
        ),
        ({"sets": {"a": 3}}, "set 'a' is 3, expected a mapping"),
        ({"proposals": ["english 7"]}, "proposals has 'english 7', expected names of sets"),
        ({"defences": {"channels": ["9-bits"]}}, "channel: got '9-bits'"),
        ({"defences": {"swept": [4]}}, "swept has 4, expected less than 4"),
        ({"defences": {"cascade": {"prompts": 3, "candidates": 8, "channels": []}}}, "is more than 2, the sweep's"),
    ],
)
def test_bad_settings_are_named(tmp_path, change, message):
    values = yaml.safe_load((paths.PARAMS / "fast.yaml").read_text())
    smoke = values["scales"]["smoke"]
    smoke |= {name: change.get(name, smoke[name]) for name in ("sets", "proposals")}
    smoke["defences"] |= change.get("defences", {})
    (tmp_path / "fast.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises((ConfigError, InversionError), match=message):
        fast_settings.load("smoke", path=tmp_path / "fast.yaml")


def test_sets_take_the_prompts_that_are_long_enough_and_ordinary_ids():
    study = fast.Study(SMOKE)
    english, random = SMOKE.sets
    written = settings.written()
    chosen = study.prompts(english)
    assert [name for name, *_ in chosen] == [prompt.id for prompt in written[:4]]
    assert all(len(ids) == 6 for *_, ids in chosen)
    long = dataclasses.replace(english, tokens=200, prompts=1)
    (name, _, ids), *_ = study.prompts(long)
    assert len(ids) == 200 and name == next(one for one, _, all_ids in study.encoded if len(all_ids) >= 200)
    with pytest.raises(InversionError, match="prompts have 90000 tokens, expected 4"):
        study.prompts(dataclasses.replace(english, tokens=90000))
    drawn = study.prompts(random)
    assert drawn == study.prompts(random) and len({tuple(ids) for *_, ids in drawn}) == 2
    assert not set(study.backbone.tokenizer.all_special_ids) & set(study.ordinary_ids)


# The study at smoke scale


@pytest.fixture(scope="module")
def made(smoke_outputs):
    found = CliRunner().invoke(main, ["fast", "--scale", "smoke", "--only", "sets"])
    assert found.exit_code == 0, found.output
    with pytest.raises(ResultError, match="units are missing, peers/english-6 among them: run `make fast SCALE=smoke`"):
        fast.collect(SMOKE)
    fast.run_study(SMOKE)
    return fast.collect(SMOKE)


def test_every_prompt_comes_back_and_tables_say_what_it_cost(made):
    prompts, tokens = made.table("prompts.parquet"), made.table("tokens.parquet")
    assert prompts.exact_match.all() and (tokens.found_id == tokens.true_id).all() and prompts.first_error.isna().all()
    assert set(prompts.configuration) == {one.name for one in SMOKE.sets} and (prompts.similarity == 1.0).all()
    assert prompts[["seconds", "forward", "read"]].gt(0).all(axis=None) and (prompts.status != verified.BEST).all()
    assert prompts.candidates.sum() == tokens.candidates.sum()
    assert len(prompts) == 6 and set(prompts.batch) == {1, 4}
    contract = (
        "prompt source model layer norm n_tokens batch method configuration channel attacker exact_match similarity"
    )
    assert set(f"{contract} first_error seconds candidates status margin".split()) <= set(prompts.columns)


def test_proposals_say_where_true_tokens_stand_at_first_sight(made):
    ranks = made.table("proposals.parquet")
    assert ranks.groupby("order").size().to_dict() == {"both": 20, "language model": 20, "states": 20}  # 4 prompts of 6
    mean = ranks.groupby("order")["rank"].mean()
    assert ranks["rank"].between(0, 1023).all() and mean["both"] < mean["language model"] / 4


def test_the_sweep_has_every_channel_and_attacker(made):
    rows, plan = made.table("sweep.parquet"), SMOKE.defences
    assert set(rows.channel) == set(plan.channels) and len(rows.groupby(["prompt", "position"])) == 8
    share = rows.groupby(["channel", "attacker"]).recovered.mean()
    assert share["clean", "tolerance"] == 1.0 and share["permuted", "aware"] == 1.0
    assert share["rotated", "aware"] > 0.9  # at the first position nothing but the norm is known
    assert share["permuted", "nearest"] < 0.5 and rows.recovered.between(0, 1).all()
    swept = made.table("swept.parquet")
    assert len(swept) and set(made.table("swept_margins.parquet").candidates) == {1024}
    margins = made.table("margins.parquet")
    assert set(margins.channel) == {"gaussian 0.1", "gaussian 1"} and (margins.delta > 0).all()


def test_cascades_and_utility(made):
    cascade, utility = made.table("cascade.parquet"), made.table("utility.csv")
    exact = (cascade.found_id == cascade.true_id).groupby([cascade.channel, cascade.attacker]).mean()
    assert exact["4-bit", "aware"] == 1.0 and exact["permuted", "aware"] == 1.0 and exact["rotated", "aware"] == 1.0
    assert ("gaussian 0.1", "aware, prior") in exact.index and ("4-bit", "aware, prior") not in exact.index
    clean = utility[utility.channel == "clean"]
    assert np.allclose(clean.kl, 0, atol=1e-6) and set(utility.source) == {"docstrings", "written"}
    assert isinstance(utility, pd.DataFrame) and (utility.kl > -1e-6).all()


def test_units_are_kept_and_the_study_found_again(made):
    before = {path: path.stat().st_mtime for path in (made.folder / "units").rglob("result.json")}
    fast.run_study(SMOKE)
    assert before == {path: path.stat().st_mtime for path in (made.folder / "units").rglob("result.json")}
    assert fast.find(fast_settings.FastRun(SMOKE, "auto")).content == made.content
    with pytest.raises(MissingResult, match="run `make fast SCALE=smoke`"):
        fast.load(SMOKE, "reference")
    with pytest.raises(
        ConfigError, match="got 'nothing', expected the beginning of one of cascade/2-bit|cascade/4-bit"
    ):
        fast.run_study(SMOKE, "nothing")


def test_the_notebook_tells_its_story_at_smoke_scale(made, tmp_path):
    page = tmp_path / "06.ipynb"
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "06_inversion_fast_and_defended.ipynb"), str(page), {"scale": "smoke"}, progress_bar=False
    )
    told = "".join(str(cell.get("outputs")) for cell in nbformat.read(page, as_version=4).cells)
    assert "tiny-llama: 1,024 tokens" in told and "this machine's own run" in told
    assert "not run at this scale: `make bench`" in told


def test_the_bench_is_taken_from_where_the_results_are(smoke_outputs, monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    for folder, seconds in (("local/smoke", 1.0), ("smoke", 2.0)):
        place = tmp_path / folder / "bench" / fast.BENCH
        place.parent.mkdir(parents=True)
        pd.DataFrame({"method": ["exact"], "mean": [seconds]}).to_csv(place, index=False)
    found = {
        source: fast.bench(fast_settings.FastRun(SMOKE, source))["mean"].item() for source in ("auto", "reference")
    }
    assert found == {"auto": 1.0, "reference": 2.0}


def test_snakemake_knows_every_part_of_the_study(tmp_path):
    command = [sys.executable, "-m", "snakemake", "--snakefile", paths.ROOT / "Snakefile", "--directory", tmp_path]
    command += ["--profile", paths.PARAMS / "profiles" / "local", "--config", "scale=smoke", "--dry-run", "--forceall"]
    done = subprocess.run([*command, "--", "fast"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("fast_sets", "fast_cascade", "fast"):
        assert f"rule {name}:" in done.stdout + done.stderr
