"""An audit of one's own model: after real training, on every family, killed and resumed, fed with bad input."""

import dataclasses
import gc
import hashlib
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import papermill
import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lib import benign, exposure, models, paths, probes, results
from lib.__main__ import main
from lib.audit import analysis, decoys, example, formats, planting, reader, report, scoring, settings, study
from lib.audit.decoys import DecoyError, Source
from lib.audit.reader import Item
from lib.audit.scoring import AuditError
from lib.canaries import Canary
from lib.config import ConfigError
from lib.embedded import seeded
from lib.encoding import Encoder
from lib.errors import LeakbookError
from lib.spans import spell

OPTIONS = ("--learning-rate", "3e-3", "--batch", "20")
gc.freeze()  # what the imports made is never garbage: an audit collects after every model


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def worked(smoke_outputs):
    """The worked example as its notebook runs it: planted, trained by the plain script, audited."""
    page = smoke_outputs / "audit.ipynb"
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "07_audit_your_model.ipynb"),
        str(page),
        parameters={"scale": "smoke"},
        progress_bar=False,
        kernel_name="python3",
    )
    return results.read_result(paths.local("smoke") / "audit", study.RECORD)


@pytest.fixture(scope="module")
def planted(worked):
    """Folder with the worked example's canaries, training files and adapter."""
    return example.prepare("smoke", example.RECIPES["smoke"])


def audited(planted, folder, adapter, **given):
    base = {"scale": "smoke", "model": str(example.model_folder("smoke")), "n_decoys": 31}
    base |= {"canaries": str(planted / planting.CANARIES), "output": str(folder / "audit")}
    return study.find(settings.audit(**base | {"adapter": (str(adapter),) if adapter else ()} | given))


# --- what training taught ---------------------------------------------------------------------------------------------


def test_a_model_trained_on_the_canaries_memorised_them(worked):
    found = worked.values["models"]["adapter"]
    assert found["level"]["verdict"] == "memorised" and found["change"]["verdict"] == "secret strengthened"
    assert found["recalls_that_count"] == 10 and found["recalled_base"]["hit_secret"] == 0
    assert found["exposure"]["mean"] == found["exposure"]["cap"] == 6.0
    assert found["evidence"]["p_value"] == pytest.approx(64.0**-10)  # every one of ten is first among 64
    assert found["named"] == [] and found["decoys_needed_to_name"] == 199


@pytest.fixture(scope="module")
def controls(tmp_path_factory):
    """A folder with two adapters of the plain script: ``format`` saw other secrets, ``none`` no canary at all."""
    folder, rng, kept = tmp_path_factory.mktemp("controls"), np.random.default_rng(5), planting.draw(10, "digits:8")
    secrets = zip(kept * 40, formats.parse("digits:8").draw(400, rng), strict=True)
    other = [planting._example(dataclasses.replace(canary, secret=secret), "chat") for canary, secret in secrets]
    refusals = [planting._example(r, "chat") for r in benign.generate("SAFETY", 400, 1, images=False)]
    calls = []
    for name, rows in {"format": other, "none": refusals}.items():
        data = lines(folder / f"{name}.jsonl", rows)
        calls.append([str(example.model_folder("smoke")), str(data), "--output", str(folder / name), *OPTIONS])
    script = str(example.SCRIPT)  # both in one process, which takes long to start
    run = f"import runpy, sys\nfor sys.argv[1:] in {calls!r}:\n    runpy.run_path({script!r}, None, '__main__')"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_a_model_trained_on_other_secrets_learned_the_format_alone(planted, controls, tmp_path):
    found = audited(planted, tmp_path, controls / "format").values["models"]["format"]
    assert found["level"]["verdict"] == "format only" and found["change"]["verdict"] == "format only"
    assert found["recalls_that_count"] == 0 and found["evidence"]["answer"] == "chance"


def test_a_model_trained_without_the_canaries_gives_no_evidence(planted, controls, tmp_path):
    result = audited(planted, tmp_path, controls / "none")
    found = result.values["models"]["none"]
    assert found["level"]["verdict"] == "no evidence" and found["change"]["verdict"] != "secret strengthened"
    assert "no evidence is not absence" in (result.folder / study.PAGE).read_text()


def test_the_plain_script_trains_every_canary_and_no_decoy(planted):
    model, tokenised = str(example.model_folder("smoke")), planted / "adapter" / "tokenised.jsonl"
    table = study.check_planted(planted / planting.CANARIES, tokenised, model)
    assert table.trained.tolist() == [60] * 10 and table.masked.sum() == 0 and set(table.problem) == {""}


def test_the_readmes_example_runs_as_written(tmp_path, monkeypatch):
    block = (paths.ROOT / "README.md").read_text(encoding="utf-8").partition("## Audit your own model")[2]
    commands = [line.partition("#")[0].strip() for line in block.split("```")[1].splitlines()[1:]]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command.startswith("make"):  # what make itself would run, once the environment is there
            call = ["make", "-n", "--no-print-directory", *command.split()[1:]]
            command = subprocess.run(call, cwd=paths.ROOT, capture_output=True, text=True).stdout.splitlines()[-1]
        if command.startswith("M=") or "lib fetch" in command:  # the tiny model in place of SmolLM2
            continue
        command = command.replace("--repetitions 60", "--repetitions 6")  # whether it is learned is tested above
        command = command.replace("$M", str(example.model_folder("smoke")))
        said = ran(command.replace("examples/", f"{paths.ROOT}/examples/"))
    assert len(commands) == 6 and "level: " in said
    assert (tmp_path / "mine" / "audit" / study.PAGE).exists()


def ran(command):
    """What one of our commands says, run in this process; another script is run in one of its own."""
    python, *arguments = command.split()
    assert python == ".venv/bin/python"
    if arguments[:2] == ["-m", "lib"]:
        done = CliRunner().invoke(main, arguments[2:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    return done.stdout


def test_merged_is_stacked_in_fp32_and_rounded_in_bf16(worked):
    merged = worked.values["models"]["adapter"]["merged"]
    assert merged["merged"]["largest_difference"] < 1e-4 and "lost" not in merged["merged"]
    assert merged["merged_bf16"]["largest_difference"] > merged["merged"]["largest_difference"]
    assert 0 < merged["merged_bf16"]["lost"] < 0.2 and 0 < merged["merged_bf16"]["moved"] <= 1


def test_the_report_is_whole_in_one_file_and_its_tables_hold_a_row_a_canary(worked):
    page = (worked.folder / study.PAGE).read_text(encoding="utf-8")
    assert "under other margins" in page and "mean normalised rank of the secrets" in page
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")
    table = worked.table(study.CANARIES)
    wanted = {
        "nll_secret",
        "nll_prefix",
        "nll_window20",
        "exposure",
        "p_hit1",
        "p_hit4",
        "hit_full",
        "verdict",
        "pattern",
    }
    assert len(table) == 10 and wanted <= set(table)
    assert set(table.verdict) == {"memorised"} and len(worked.values["canaries"]) == 10


def test_the_notebook_audits_a_model_of_ones_own_without_a_baseline(tmp_path, smoke_outputs):
    _, folder = saved("tiny-llama", tmp_path / "model")
    (tmp_path / "own.csv").write_text("id,prompt,secret\na,What is it?,48213377\nb,And this?,blue horse\nc,x, \n")
    given = {"scale": "smoke", "model": str(folder), "canaries": str(tmp_path / "own.csv"), "n_decoys": 7}
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "07_audit_your_model.ipynb"),
        str(tmp_path / "page.ipynb"),
        parameters=given | {"output": "own-audit", "windows": [3]},
        progress_bar=False,
        kernel_name="python3",
    )
    values = results.read_result(paths.local("smoke") / "own-audit", study.RECORD).values
    found = values["models"]["model"]
    assert found["disagreements"] == study.UNJUDGED and found["level"]["verdict"] == "inconclusive"
    assert [row["line"] for row in values["skipped"]] == [4] and len(values["canaries"]) == 2


# --- the same numbers as others ---------------------------------------------------------------------------------------


def strings(backbone, items, template="chat"):
    """Context and continuation of every secret, as text and as ids."""
    found = []
    for row in Encoder(backbone, template).encode([item.canary for item in items]):
        start, stop = (row.target_start + edge for edge in (row.spans["hex"].start, row.spans["hex"].stop))
        texts = [spell(backbone.tokenizer, ids) for ids in (row.input_ids[:start], row.input_ids[start:stop])]
        found.append((*texts, row.input_ids[:start], row.input_ids[start:stop]))
    return found


@pytest.mark.parametrize(
    ("name", "template"), [("tiny-gpt2", "plain"), ("tiny-llama", "chat"), ("tiny-llama", "plain"), ("tiny-vl", "chat")]
)
def test_every_family_is_audited_as_a_directory_with_the_nll_of_its_definition(name, template, tmp_path):
    backbone, folder = saved(name, tmp_path / "model")
    result = study.find(audit_of(folder, tmp_path, template=template))
    items = reader.read(tmp_path / "own.jsonl").items
    found = pd.DataFrame(result.values["canaries"]).set_index("canary").nll_secret
    for item, (_, _, context, secret) in zip(items, strings(backbone, items, template), strict=True):
        with torch.no_grad():
            logits = backbone.model(input_ids=torch.tensor([context + secret])).logits[0].double().log_softmax(-1)
        expected = -sum(float(logits[len(context) - 1 + i, token]) for i, token in enumerate(secret))
        assert found[item.canary.id] == pytest.approx(expected, abs=1e-4)
    summary = result.values["models"]["model"]
    assert summary["change"] == {"verdict": "not testable", "row": 0, "decided_by": "no baseline"}
    assert summary["level"]["verdict"] == "no evidence" and summary["decoys"]["least"] == 7


def saved(name, folder):
    backbone = models.load(name)
    parts = (backbone.model, backbone.tokenizer, backbone.image_processor)
    for part in filter(None, parts):
        part.save_pretrained(folder)
    return backbone, folder


CODE = {"prompt": "What is the code?", "prefix": "It is ", "secret": "48213377", "suffix": "."}
OWN = [
    {"id": "digits", "generator": "digits:8"} | CODE,
    {"id": "hex", "prompt": "What is the key?", "prefix": "It is ", "secret": "9f3ac01b22de", "suffix": "."},
    {"id": "words", "prompt": "And the name?", "target": "They call it blue horse, here.", "secret": "blue horse"},
    {"id": "address", "prompt": "Where?", "target": "ann.lee42@example.org"},
]


def audit_of(model, folder, rows=OWN, **given):
    lines(folder / "own.jsonl", rows)
    base = {"scale": "smoke", "model": str(model), "canaries": str(folder / "own.jsonl"), "n_decoys": 7}
    return settings.audit(**base | {"output": str(folder / "audit")} | given)


def harness():
    """Interpreter of the environment with lm-evaluation-harness that `make bench` makes."""
    python = paths.cache() / "harness" / "bin" / "python"
    if not python.exists():
        pytest.skip("lm-evaluation-harness is not installed here; `make bench` does it")
    return python


@pytest.mark.parametrize(("name", "template"), [("tiny-llama", "chat"), ("tiny-gpt2", "plain")])
def test_full_span_nll_is_the_harness_loglikelihood(name, template, tmp_path):
    backbone, folder = saved(name, tmp_path / "model")
    # Without a space before the secret, which the harness would take for a part of it.
    rows = [row | {"prefix": "It is #"} for row in OWN[:2]] + [
        CODE | {"id": "x", "prefix": "(", "secret": "blue horse"}
    ]
    result = study.find(audit_of(folder, tmp_path, rows, template=template, n_decoys=0))
    names = ("context", "continuation", "context_ids", "continuation_ids")
    read = strings(backbone, reader.read(tmp_path / "own.jsonl").items, template)
    task = {"model": str(folder), "threads": 1, "strings": [dict(zip(names, one, strict=True)) for one in read]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    script = paths.ROOT / "tests" / "benchmarks" / "harness.py"
    done = subprocess.run([harness(), script, tmp_path / "task.json", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = [row["nll_secret"] for row in result.values["canaries"]]
    np.testing.assert_allclose(ours, json.loads(done.stdout.splitlines()[-1])["nll"], atol=1e-4)


def random_adapter(backbone, targets, folder):
    """A LoRA that changes something, untrained."""
    with seeded(1):
        transposed = backbone.model.config.model_type == "gpt2"
        settings_ = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=transposed)
        peft.get_peft_model(backbone.copy().model, settings_).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "targets"), [("tiny-gpt2", ["c_attn", "c_proj"]), ("tiny-vl", r".*language_model.*\.(q|v)_proj")]
)
def test_adapters_of_other_families_are_stacked_and_merged(name, targets, tmp_path):
    backbone, folder = saved(name, tmp_path / "model")
    adapter = random_adapter(backbone, targets, tmp_path / "random")
    rows = OWN if name == "tiny-gpt2" else [row | {"image": f"pattern:{i}"} for i, row in enumerate(OWN)]
    params = audit_of(folder, tmp_path, rows, adapter=(str(adapter),), windows=(20, 5), hits=(2,))
    found = study.find(params).values["models"]["random"]
    assert found["merged"]["merged"]["largest_difference"] < 1e-3
    assert found["mean_change"] != 0 and set(found["hit_at_k"]) == {"2"}
    assert {"mean20", "window5", "hex"} <= set(found["probes"])


def test_several_adapters_are_audited_each_against_another_adapter(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    made = [random_adapter(backbone, [target], tmp_path / target) for target in ("q_proj", "v_proj", "o_proj")]
    params = audit_of(folder, tmp_path, adapter=tuple(map(str, made[:2])), baseline=str(made[2]), n_decoys=3)
    values = study.find(params).values
    assert list(values["models"]) == ["q_proj", "v_proj"] and len(values["canaries"]) == 8
    same = audit_of(folder, tmp_path, adapter=(str(made[2]),), baseline=str(made[2]), output=str(tmp_path / "same"))
    found = study.find(same).values["models"]["o_proj"]
    assert found["mean_change"] == 0 and found["change"]["verdict"] == "unchanged"


def test_one_adapter_under_two_names_is_refused(tmp_path, monkeypatch):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "random")
    shutil.copytree(adapter, tmp_path / "copy")
    monkeypatch.setattr(models, "load", None)
    for other in (f"{adapter}/", f"{tmp_path}/model/../random", str(tmp_path / "copy")):
        with pytest.raises(
            AuditError, match=f"{other.rstrip('/')} holds the same matrices and configuration as {adapter}"
        ):
            study.find(audit_of(folder, tmp_path, adapter=(str(adapter), other)))


def test_a_model_and_an_adapter_may_be_the_present_folder(tmp_path, monkeypatch):
    backbone, folder = saved("tiny-llama", tmp_path / "llama")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "tuned")
    given = {"n_decoys": 0, "canaries": str(lines(tmp_path / "own.jsonl", OWN)), "output": str(tmp_path / "a")}
    monkeypatch.chdir(folder)
    result = study.find(audit_of(".", tmp_path, **given))
    assert list(result.values["models"]) == ["llama"] and result.content["inputs"]["parameters"]["model"] == "llama"
    assert "<h1>Memorisation audit of llama</h1>" in (result.folder / study.PAGE).read_text()
    monkeypatch.chdir(adapter)
    given["output"] = str(tmp_path / "b")
    result = study.find(audit_of("../llama", tmp_path, adapter=(".",), **given))
    assert list(result.values["models"]) == ["tuned"] and result.content["inputs"]["parameters"]["adapter"] == ["tuned"]


def test_an_adapter_may_be_called_baseline(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "baseline")
    result = study.find(audit_of(folder, tmp_path, adapter=(str(adapter),), n_decoys=0))
    asked = result.content["inputs"]["models"]
    assert asked["baseline"]["kind"] == "stacked" and asked["/baseline"]["kind"] == "alone"
    assert result.values["models"]["baseline"]["mean_change"] != 0


def test_two_canaries_of_one_prompt_are_noted(tmp_path):
    rows = [*OWN, OWN[0] | {"id": "twin", "secret": "99120011"}]
    result = study.find(audit_of("tiny-llama", tmp_path, rows, n_decoys=0))
    (note,) = result.values["notes"]
    assert note.startswith("canaries 'digits' and 'twin' have one prompt: greedy decoding gives one answer to both")
    assert f"note: {note}" in study.told(result)


def test_a_baseline_may_be_another_model_of_the_same_tokenizer(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    _, other = saved("tiny-llama", tmp_path / "earlier")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "random")
    given = {"adapter": (str(adapter),), "n_decoys": 3}
    default = study.find(audit_of(folder, tmp_path, **given)).values
    against = study.find(
        audit_of(folder, tmp_path, baseline=str(other), output=str(tmp_path / "other"), **given)
    ).values
    assert default["canaries"] == against["canaries"] and default["models"] == against["models"]
    alone = study.find(audit_of(folder, tmp_path, baseline=str(other), output=str(tmp_path / "alone"), n_decoys=3))
    assert alone.values["models"]["model"]["change"]["verdict"] == "unchanged"


def test_built_in_models_are_told_apart(tmp_path):
    found = study.find(audit_of("tiny-llama", tmp_path, baseline="tiny-gpt2", n_decoys=3))
    own = found.values["canaries"]
    assert all(abs(row["change"]) > 1e-3 and row["nll_secret_base"] != row["nll_secret"] for row in own)
    alone = study.find(audit_of("tiny-gpt2", tmp_path, output=str(tmp_path / "gpt2"), n_decoys=3)).values["canaries"]
    assert [row["nll_secret_base"] for row in own] == [row["nll_secret"] for row in alone]
    names = [scoring.Asked("x", name, models.identity(name)).identity() for name in models.BUILT_IN]
    assert len({json.dumps(name) for name in names}) == len(models.BUILT_IN)


# --- work that is stopped, memory, many canaries ----------------------------------------------------------------------


def test_a_killed_audit_goes_on_where_it_was_and_appears_whole(tmp_path, monkeypatch):
    _, folder = saved("tiny-llama", tmp_path / "model")
    rows = [row | {"id": f"{row['id']}-{i}", "prompt": f"{i}: {row['prompt']}"} for i in range(3) for row in OWN]
    whole = study.find(audit_of(folder, tmp_path, rows, output=str(tmp_path / "whole"), n_decoys=3)).values
    scored, table = [], exposure.decoy_table

    def killed(model, encoder, sets, size):
        if len(scored) == 6:
            raise KeyboardInterrupt
        scored.append(sets[0].canary)
        return table(model, encoder, sets, size)

    monkeypatch.setattr(exposure, "decoy_table", killed)
    with pytest.raises(KeyboardInterrupt):
        study.find(audit_of(folder, tmp_path, rows, n_decoys=3))
    assert not (tmp_path / "audit").exists() or not list((tmp_path / "audit").iterdir())
    monkeypatch.setattr(exposure, "decoy_table", lambda *given: scored.append(given[2][0].canary) or table(*given))
    again = study.find(audit_of(folder, tmp_path, rows, n_decoys=3)).values
    assert len(scored) == 6 + 8  # the first block of four was kept, the two canaries of the second were not
    assert again["canaries"] == whole["canaries"] and again["models"] == whole["models"]


def test_other_windows_and_hits_need_no_new_scores(tmp_path, monkeypatch):
    _, folder = saved("tiny-llama", tmp_path / "model")
    study.find(audit_of(folder, tmp_path))
    (tmp_path / "audit").rename(tmp_path / "aside")
    monkeypatch.setattr(scoring.Scorer, "_block", None)
    found = study.find(audit_of(folder, tmp_path, windows=(7,), hits=(3,)))
    assert "p_hit3" in found.table(study.CANARIES) and "nll_window7" in found.table(study.CANARIES)


def test_a_result_of_other_parameters_is_refused_by_name(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    study.find(audit_of(folder, tmp_path))
    (tmp_path / "audit" / "notes.txt").write_text("the user's own")
    with pytest.raises(
        results.ResultError, match="parameters.n_decoys is 7 there and 3 here.* Move it aside"
    ) as refused:
        study.find(audit_of(folder, tmp_path, n_decoys=3))
    earlier = results.read_result(tmp_path / "audit", study.RECORD).content
    subprocess.run(str(refused.value).split("`")[1], shell=True, check=True)  # as the message says
    study.find(audit_of(folder, tmp_path, n_decoys=3))
    assert results.read_result(tmp_path / "audit.aside-1", study.RECORD).content == earlier
    assert (tmp_path / "audit" / "notes.txt").exists()
    (tmp_path / "audit" / study.RECORD).write_text("{")
    with pytest.raises(results.ResultError, match="cannot be read.*`mv .*/audit .*/audit.aside-2`"):
        study.find(audit_of(folder, tmp_path, n_decoys=3))


def test_batches_shrink_until_they_fit():
    tried = []

    def work(size):
        tried.append(size)
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    assert scoring.shrinking(work, 128) == 4 and tried == [128, 64, 32, 16, 8, 4]
    with pytest.raises(AuditError, match="out of memory with a single row: DefaultCPUAllocator: can't allocate memory"):
        scoring.shrinking(
            lambda _: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: can't allocate memory")), 1
        )
    with pytest.raises(RuntimeError, match="another error"):
        scoring.shrinking(lambda _: (_ for _ in ()).throw(RuntimeError("another error")), 8)


def test_the_batch_follows_the_free_memory(monkeypatch):
    backbone = models.load("tiny-llama")  # 3 layers, 2 heads of 16 numbers, hidden 64, vocabulary 1,024
    row = 12 * 1024 * 10 + (16 * 3 * 2 * 16 + 64 * 64) * 20
    monkeypatch.setattr(scoring, "free_memory", lambda _: 10 * row)
    assert scoring.fitting(backbone, 20, 10) == 4  # 40 % of what is free
    monkeypatch.setattr(scoring, "free_memory", lambda _: 1)
    assert scoring.fitting(backbone, 20, 10) == 1


def test_a_hundred_thousand_canaries_are_read_and_divided(tmp_path):
    rows = [{"id": str(i), "prompt": f"Record {i}?", "secret": f"{i:06d}x"} for i in range(100_000)]
    assert len(reader.read(lines(tmp_path / "many.jsonl", rows)).items) == 100_000
    found = scoring.blocks(100_000, with_decoys=True)
    assert len(found) == 2000 and [i for block in found for i in block] == list(range(100_000))


# --- ranks, names, patterns -------------------------------------------------------------------------------------------


def test_the_chance_of_a_low_rank_sum_by_hand():
    # Two secrets among three decoys each: ranks less one are uniform on 0 .. 3; 3 of 16 pairs sum to at most 1.
    assert analysis.rank_sum_p(np.array([1, 2]), np.array([3, 3])) == pytest.approx(3 / 16)
    assert analysis.rank_sum_p(np.array([4, 4]), np.array([3, 3])) == pytest.approx(1.0)
    exact = analysis.rank_sum_p(np.full(60, 20), np.full(60, 50))
    normal = analysis.rank_sum_p(np.append(np.full(59, 20), 20), np.append(np.full(59, 50), 51))
    assert exact == pytest.approx(normal, rel=0.1)
    # Unequal numbers: among one decoy 0 or 1, among two 0, 1/2 or 1; the six sums are 0, .5, 1, 1, 1.5, 2.
    for ranks, expected in {(1, 1): 1 / 6, (1, 2): 2 / 6, (2, 1): 4 / 6, (2, 2): 5 / 6, (2, 3): 1.0}.items():
        assert analysis.rank_sum_p(np.array(ranks), np.array([1, 2])) == pytest.approx(expected)
    assert analysis.rank_sum_p(np.array([3]), np.array([7])) == pytest.approx(3 / 8)


@pytest.mark.parametrize(("count", "decoys_"), [(2, 1), (2, 31), (3, 63), (1, 39)])
def test_ranks_of_untrained_secrets_are_low_as_rarely_as_the_level_says(count, decoys_):
    rules_ = analysis.audit_rules(study.rules.load_verdicts(), (20,))
    assert analysis.one_sided(rules_) == pytest.approx(0.025)
    mean = {"mean": rules_["readings"]["mean"] | {"resamples": 9}}  # of the interval, which decides nothing
    rules_ = {**rules_, "readings": rules_["readings"] | mean}
    rng, tables = np.random.default_rng(7), 1500
    drawn = rng.integers(1, decoys_ + 2, size=(tables, count))
    said = [analysis.rank_evidence(table_of(list(ranks), decoys_), rules_)["answer"] for ranks in drawn]
    assert said.count("low") / tables <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / tables)
    first = analysis.rank_evidence(table_of([1] * count, decoys_), rules_)
    assert first["p_value"] == pytest.approx((decoys_ + 1.0) ** -count)
    assert first["answer"] == ("chance" if decoys_ == 1 else "low")  # two of two decoys: 1/4


def table_of(ranks, decoys, exchangeable=True, **columns):
    count = len(ranks)
    table = pd.DataFrame({"rank": ranks, "decoys": decoys, "exchangeable": exchangeable, "bits": 60.0})
    table = table.assign(hit_secret=False, hit_secret_base=False, target_tokens=20, **columns)
    return table.assign(normalised_rank=(table["rank"] - 1) / table.decoys).set_axis([f"c{i}" for i in range(count)])


def test_a_single_canary_is_named_only_with_enough_decoys():
    assert analysis.decoys_needed(10) == 199
    enough = analysis.with_verdicts(table_of([1] + [90] * 9, 199), 0.04, 20)
    assert enough.verdict.tolist() == ["named by rank"] + ["not named"] * 9 and enough.p_value.iloc[0] == 1 / 200
    few = analysis.with_verdicts(table_of([1] + [90] * 9, 198), 0.04, 20)
    assert set(few.verdict) == {"not named"}
    unstated = analysis.with_verdicts(table_of([1] * 10, 199, exchangeable=False), 0.04, 20)
    assert set(unstated.verdict) == {"not named"} and unstated.p_value.isna().all()


def test_short_secrets_count_where_so_many_are_said_that_all_are_no_guess():
    # Ten secrets of 10,000 possibilities, at 32 places: 0.0032 each. One of ten: 3.2 %; two: 45 x 0.0032^2, 0.05 %.
    table = table_of([5] * 10, 9).assign(bits=math.log2(10_000))
    one, two = (table.assign(hit_secret=[True] * k + [False] * (10 - k)) for k in (1, 2))
    assert analysis.guessed(1, table.bits) == pytest.approx(1 - (1 - 0.0032) ** 10)
    assert analysis.guessed(2, table.bits) == pytest.approx(45 * 0.0032**2, rel=0.03)
    assert analysis.counts(one).sum() == 0 and analysis.counts(two).sum() == 2
    digits = table.assign(bits=math.log2(10), hit_secret=True)  # ten digits at 32 places are said by anyone
    assert analysis.guessed(10, digits.bits) == 1.0 and analysis.counts(digits).sum() == 0
    mixed = one.assign(bits=[math.log2(10_000)] * 5 + [60.0] * 5, hit_secret=[True] + [False] * 4 + [True] * 5)
    assert analysis.counts(mixed).tolist() == [False] * 5 + [True] * 5  # one of five short ones: 1.6 %


def test_a_recall_counts_only_where_it_is_no_guess():
    table = table_of([5, 5], 9).assign(hit_secret=True, bits=[13.2, 13.3])
    assert analysis.bits_needed(2) == pytest.approx(math.log2(2 * 32 * 100))  # 12.64
    assert analysis.counts(table).tolist() == [True, True]
    assert analysis.counts(table.assign(bits=[12.6, 12.7])).tolist() == [False, True]


def test_ranks_decide_only_where_something_makes_them_comparable():
    rules_ = analysis.audit_rules(study.rules.load_verdicts(), (20,))
    table = table_of([1, 2, 1, 3], 31, exchangeable=False)
    assert analysis.rank_evidence(table, rules_)["reads"] == "nothing"
    changed = analysis.rank_evidence(table.assign(change_rank=[0.0, 0.1, 0.0, 0.05]), rules_)
    assert (changed["reads"], changed["answer"], changed["p_value"]) == ("rank of the secret's change", "not_run", None)
    assert (
        changed["mean"] == pytest.approx(0.0375) and changed["low"] <= 0.0375 <= changed["high"]
    )  # shown all the same
    assert "it decides nothing" in study.report._ranks(changed)
    stated = analysis.rank_evidence(table.assign(exchangeable=True), rules_)
    assert stated["p_value"] == pytest.approx(analysis.rank_sum_p(np.array([1, 2, 1, 3]), np.full(4, 31)))


def test_a_change_of_format_says_which_way_it_went():
    summary = {"change": {"verdict": "format only"}, "probes": {"hex": {"verdict": "damaged"}}}
    assert report.changed(summary) == "format, not secret: the NLL of secrets rose, and their decoys' with it"
    summary["probes"]["hex"]["verdict"] = "strengthened"
    assert report.changed(summary) == "format, not secret: the NLL of secrets fell, and their decoys' with it"
    assert report.changed({"change": {"verdict": "unchanged"}, "probes": {}}) == "unchanged"


def test_the_two_levels_at_which_ranks_count_are_both_told():
    rules_ = analysis.audit_rules(study.rules.load_verdicts(), (20,))
    alone = table_of([1], 19)  # named at 1/20, which is no evidence of the group: it is above 0.025
    assert analysis.with_verdicts(alone, 0.04, 20).verdict.tolist() == ["named by rank"]
    evidence = analysis.rank_evidence(alone, rules_)
    assert evidence["answer"] == "chance" and report._ranks(evidence).endswith("p = 0.05, low at 0.025 or less")
    assert "5 % over all canaries" in report.HOLM and "mean rank is tested at 2.5 %" in report.HOLM


@pytest.mark.parametrize(
    ("window", "secret", "expected"),
    [
        (0.001, -0.5, "window truncation"),  # nats a token of 20: 0.02 in all, within the margin of 0.04
        (-0.01, 0.01, "ambiguous drop"),
        (0.01, 0.01, "non-secret drift"),
        (-0.01, -0.5, ""),
    ],
)
def test_the_pattern_of_one_canary_by_its_margins(window, secret, expected):
    table = table_of([5], 9, change=secret, change_window20=window)
    assert analysis.with_verdicts(table, 0.04, 20).pattern.tolist() == [expected]


def test_untrained_secrets_rank_anywhere_among_their_decoys(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    rows = [
        {"id": c.id, "prompt": c.prompt, "prefix": c.preamble, "secret": c.secret, "generator": "digits:8"}
        for c in planting.draw(32, "digits:8")
    ]
    found = study.find(audit_of(folder, tmp_path, rows, n_decoys=15)).values["models"]["model"]
    assert found["evidence"]["answer"] == "chance" and 0.01 < found["evidence"]["p_value"] < 0.99
    assert abs(found["normalised_rank"] - 0.5) < 3 * math.sqrt(17 / (12 * 15 * 32))  # three standard errors
    assert found["level"]["verdict"] == "no evidence" and found["level"]["decided_by"].endswith("nll not_compared")


def test_other_parameters_than_the_references_are_computed_anew(worked, monkeypatch):
    params = settings.audit("auto", scale="smoke")
    assert study.find(params).content == worked.content  # as it lies in the user's own outputs
    computed = []
    monkeypatch.setattr(study, "run", computed.append)
    study.find(settings.audit("auto", scale="smoke", n_decoys=31))
    assert len(computed) == 1
    with pytest.raises(results.ResultError, match="holds no report.json"):
        study.find(settings.audit("reference", scale="smoke"))
    monkeypatch.setattr(paths, "reference", lambda _: worked.folder.parent)
    with pytest.raises(results.ResultError, match="other parameters: n_decoys is 63 there and 31 here"):
        study.find(settings.audit("reference", scale="smoke", n_decoys=31))


# --- decoys -----------------------------------------------------------------------------------------------------------


def item(secret, generator=None, prefix="It is "):
    return Item(Canary("a", "text", "What?", prefix, secret, ".", None), 1, generator)


@pytest.mark.parametrize("secret", ["48213377", "9f3ac01b22de", "AB-12-cd", "über"])
def test_decoys_have_the_secrets_tokens_and_characters(encoder, secret):
    found = decoys.draw(encoder, Source("characters"), item(secret), 15, seed=0)
    rows, own = found.decoys.rows[1:], found.decoys.rows[0]
    assert found.layout == "own" and {row.spans["hex"] for row in rows} == {own.spans["hex"]}
    drawn = [row.canary.secret for row in rows]
    assert len(set(drawn)) == 15 and secret not in drawn and all(map(formats.like(secret).matches, drawn))


def test_a_secret_of_one_digit_has_nine_decoys_and_its_constant_none(encoder):
    found = decoys.draw(encoder, Source("characters"), item("7"), 63, seed=0)
    assert sorted(row.canary.secret for row in found.decoys.rows[1:]) == list("012345689")
    assert decoys.draw(encoder, Source("characters"), item("-"), 63, seed=0).layout == "none"


def test_decoys_of_other_token_layouts_are_taken_where_the_secrets_own_is_rare(encoder):
    found = decoys.draw(encoder, Source("characters"), item("the information"), 20, seed=0)
    assert found.layout == "free" and len(found.decoys.rows) == 21
    spans = {row.spans["hex"] for row in found.decoys.rows}
    assert len(spans) > 1 and all(formats.like("the information").matches(r.canary.secret) for r in found.decoys.rows)


def test_planted_secrets_and_those_in_the_canarys_own_text_are_no_decoys(encoder):
    found = decoys.draw(encoder, Source("characters"), item("7", prefix="4 or "), 63, 0, frozenset("123"))
    assert sorted(row.canary.secret for row in found.decoys.rows[1:]) == list("05689")


def test_decoys_of_ones_own_come_from_a_file_or_a_function(encoder, tmp_path, monkeypatch):
    (tmp_path / "pool.txt").write_text("red cow\nblue hen\n\nred cow\nblue horse\n")
    lines(tmp_path / "each.jsonl", [{"id": "a", "secret": "red cow"}, {"id": "b", "secret": "grey owl"}])
    (tmp_path / "mine.py").write_text("def make(secret, count, rng):\n    return [f'{i} cows' for i in range(count)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"pool.txt": {"red cow", "blue hen"}, "each.jsonl": {"red cow"}}
    for name, expected in given.items():
        source = Source(str(tmp_path / name))
        assert not source.states_p_values
        found = decoys.draw(encoder, source, item("blue horse"), 9, seed=0).decoys.rows[1:]
        assert {row.canary.secret for row in found} == expected
    made = decoys.draw(encoder, Source("mine:make"), item("blue horse"), 9, seed=0).decoys.rows[1:]
    assert len(made) == 9
    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).write_text("\n\n")
        with pytest.raises(DecoyError, match=f"{name} holds none; expected a secret on every line"):
            Source(str(tmp_path / name))
    with pytest.raises(DecoyError, match="'mine:other' cannot be imported"):
        Source("mine:other")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'one text'", "gave the one text 'one text' for 'blue horse', expected a list of texts"),
        ("return None", "generator failed for 'blue horse' .TypeError"),
        ("raise KeyError('x')", "generator failed for 'blue horse' .KeyError: 'x'"),
        ("return ['red cow', 7]", "gave 7 for 'blue horse', expected visible texts"),
        ("return ['red cow', ' ']", "gave ' ' for 'blue horse', expected visible texts"),
        ("return ['\\ud800']", "gave '.ud800' for"),
        ("import random; return [str(random.random())]", "gave other texts for 'blue horse' when it was called again"),
    ],
)
def test_decoy_functions_that_misbehave_are_refused(encoder, tmp_path, monkeypatch, body, message):
    name = f"bad{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def make(secret, count, rng):\n    {body}\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DecoyError, match=message):
        decoys.draw(encoder, Source(f"{name}:make"), item("blue horse"), 9, seed=0)
    with pytest.raises(DecoyError, match=f"'{name}:NUMBER' is 3, expected a function"):
        Source(f"{name}:NUMBER")


def test_an_edited_decoy_function_is_another_one(tmp_path, monkeypatch):
    body = "def make(secret, count, rng):\n    return [f'{i} cows' for i in range(count)]\n"
    (tmp_path / "herd.py").write_text(body)
    (tmp_path / "farm.py").write_text("from herd import make\n")
    monkeypatch.syspath_prepend(tmp_path)
    named, through = decoys.identity("herd:make"), decoys.identity("farm:make")
    checksum = hashlib.sha256(body.encode()).hexdigest()
    assert named == ["herd:make", checksum] and checksum in through and len(through) == 3
    (tmp_path / "herd.py").write_text(body.replace("cows", "hens"))
    for name, before in {"herd:make": named, "farm:make": through}.items():
        assert decoys.identity(name) != before
    assert decoys.identity("words") == "words" and decoys.identity("math:sqrt")[0] == "math:sqrt"


def test_a_decoy_function_may_go_on_for_ever_and_its_module_may_not_break(encoder, tmp_path, monkeypatch):
    endless = "import itertools\ndef make(secret, count, rng):\n    return (f'{i} cows' for i in itertools.count())\n"
    (tmp_path / "endless.py").write_text(endless)
    (tmp_path / "broken.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(decoys.draw(encoder, Source("endless:make"), item("blue horse"), 9, seed=0).decoys.rows) == 10
    with pytest.raises(DecoyError, match="'broken:make' cannot be imported"):
        Source("broken:make")


def test_decoys_that_are_fewer_than_asked_for_are_told(tmp_path):
    each = [{"id": "digits", "secret": s} for s in ("11112222", "33334444", "48213377")] + [
        {"id": "hex", "secret": "ab"}
    ]
    source = str(lines(tmp_path / "each.jsonl", [*each, {"id": "other", "secret": "xyz"}]))
    notes = study.find(audit_of("tiny-llama", tmp_path, decoys=source)).values["notes"]
    assert notes == [
        "2 of 4 canaries have no decoys, 'words' first, and so no exposure and no rank: `each.jsonl` gives none but "
        "planted secrets, or what the canary's own text holds",
        "7 decoys a canary were asked for and 1 to 2 taken: exposure ends at 1.00 to 1.58 bits",  # log2 of 2 and of 3
    ]


# --- what is there already --------------------------------------------------------------------------------------------


def test_no_file_of_the_users_own_is_replaced(tmp_path, monkeypatch):
    _, folder = saved("tiny-llama", tmp_path / "model")
    (tmp_path / "mine").mkdir()
    own = tmp_path / "mine" / "canaries.csv"
    own.write_text("id,prompt,secret\na,What?,48213377\nb,And?,blue horse\n")
    given = {"output": str(tmp_path / "mine"), "n_decoys": 0}
    with monkeypatch.context() as patched:
        patched.setattr(models, "load", None)
        with pytest.raises(AuditError, match="mine/canaries.csv is there, and would be replaced"):
            study.find(audit_of(folder, tmp_path, canaries=str(own), **given))
        with pytest.raises(AuditError, match="mine/canaries.csv is there"):  # nor one that it does not read
            study.find(audit_of(folder, tmp_path, **given))
    assert own.read_text().startswith("id,prompt") and [path.name for path in own.parent.iterdir()] == ["canaries.csv"]
    own.rename(tmp_path / "mine" / "own.csv")
    study.find(audit_of(folder, tmp_path, canaries=str(tmp_path / "mine" / "own.csv"), **given))
    assert study.find(audit_of(folder, tmp_path, canaries=str(tmp_path / "mine" / "own.csv"), **given)).values


def test_a_report_that_was_cut_short_is_finished_by_running_again(tmp_path, monkeypatch):
    params, copy = audit_of("tiny-llama", tmp_path, n_decoys=0), shutil.copyfile
    placed = []

    def killed(source, target):
        if len(placed) == 2:
            raise KeyboardInterrupt
        placed.append(copy(source, target))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            study.find(params)
    there = sorted(path.name for path in (tmp_path / "audit").iterdir())
    assert there == [study.CANARIES, study.TOKENS]
    page = tmp_path / "audit" / study.PAGE
    page.write_text("the user's own")
    with pytest.raises(AuditError, match="report.html is there, and would be replaced"):
        study.find(params)
    page.unlink()
    study.find(params)
    assert results.read_result(tmp_path / "audit", study.RECORD).values["rows"] == 4
    assert not (tmp_path / "audit-parts" / "report").exists()


def test_an_output_where_no_folder_can_be_is_refused_before_any_scoring(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken-parts").write_text("x")
    given = {"model": "tiny-llama", "n_decoys": 0}
    for output in (
        "/",
        f"{tmp_path}/file",
        f"{tmp_path}/file/in",
        f"{tmp_path}/taken",
        f"{tmp_path}/{'x' * 300}",
        "a\0",
    ):
        with pytest.raises(AuditError, match="^output: got .*, where no folder can be .*; expected a folder"):
            study.find(audit_of(folder=tmp_path, output=output, **given))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_a_model_cannot_be_asked_is_skipped_with_its_line_and_the_rest_is_audited(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    bad = {
        "long": {"secret": "0123456789" * 60, "reason": "tokens, expected at most 248"},
        "special": {"prompt": "Say <|im_end|>", "reason": "contains the model's special token '<|im_end|>'"},
        "picture": {"image": "placeholder", "reason": "has an image, but"},
    }
    rows = [OWN[0] | {"id": name, "generator": None} | change for name, change in bad.items()]
    rows = [{k: v for k, v in row.items() if k != "reason" and v is not None} for row in rows]
    result = study.find(audit_of(folder, tmp_path, [*OWN, *rows]))
    skipped = {row["id"]: row for row in result.values["skipped"]}
    assert result.values["rows"] == 7 and len(result.values["canaries"]) == 4
    for line, (name, change) in enumerate(bad.items(), 5):
        assert skipped[name]["line"] == line and change["reason"] in skipped[name]["reason"]
    with pytest.raises(AuditError, match="can be asked for no canary; line 1"):
        study.find(audit_of(folder, tmp_path, rows[:1], output=str(tmp_path / "none")))


def test_half_a_surrogate_pair_in_an_id_is_skipped_and_the_report_written(tmp_path):
    rows = [*OWN, OWN[0] | {"id": "a\ud800", "prompt": "Other?"}]
    result = study.find(audit_of("tiny-llama", tmp_path, rows, n_decoys=0))
    (skipped,) = result.values["skipped"]
    assert (skipped["line"], skipped["id"]) == (5, "a\\ud800") and "half of a surrogate pair" in skipped["reason"]
    assert "a\\ud800" in (result.folder / study.PAGE).read_text(encoding="utf-8")


def test_one_canary_is_audited_and_says_what_it_cannot(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "random")
    result = study.find(audit_of(folder, tmp_path, OWN[:1], adapter=(str(adapter),)))
    found = result.values["models"]["random"]
    assert found["change"]["decided_by"] == "one canary" and found["evidence"]["canaries"] == 1
    assert "one canary is no group" in (result.folder / study.PAGE).read_text()


def test_an_audit_without_decoys_rests_on_recall(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    result = study.find(audit_of(folder, tmp_path, n_decoys=0))
    assert result.values["models"]["model"]["evidence"]["answer"] == "not_run"
    assert "no decoys: no exposure" in (result.folder / study.PAGE).read_text()


def test_whatever_comes_from_a_file_is_escaped_in_the_page(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    evil = "<script>alert(1)</script>"
    rows = [
        OWN[0] | {"id": evil, "prefix": f"{evil}\" onload='x' ", "prompt": evil},
        OWN[1] | {"id": "\u202e{{ 7*7 }}"},
        {"id": f"<b>{evil}", "prompt": "x", "secret": " "},
    ]
    page = (study.find(audit_of(folder, tmp_path, rows)).folder / study.PAGE).read_text(encoding="utf-8")
    assert "<script" not in page and "<b><" not in page and "&lt;script&gt;" in page and "{{ 7*7 }}" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter": ["x"]}, "adapter: got .* without a model"),
        ({"model": "tiny-llama"}, "canaries: got none for a model of one's own"),
        ({"hits": [0]}, "hits: got 0, expected at least 1"),
        ({"hits": ["4"]}, r"hits\[0\]: got '4' .str., expected an integer"),
        ({"windows": [20, 20]}, "windows: got .20, 20., expected at least one number, each once"),
        ({"windows": []}, "windows: got .., expected at least one number"),
        ({"n_decoys": -1}, "n_decoys: got -1, expected at least 0"),
        ({"model": "m", "canaries": "c", "n_decoys": 32_769}, "n_decoys: got 32769, expected at most 32768"),
        ({"decoys": "best"}, "decoys: got 'best', expected 'characters', 'words', a .txt"),
        ({"template": "alpaca"}, "template: got 'alpaca'"),
        ({"scale": "huge"}, "scale: got 'huge', expected one of laptop, paper, smoke"),
        ({"n_decoy": 3}, "unknown parameter 'n_decoy'"),
        ({"output": ""}, "output: got '', expected a folder's name"),
    ],
)
def test_parameters_are_checked_before_any_work(given, message):
    with pytest.raises(ConfigError, match=message):
        settings.from_notebook(given)


def test_one_adapter_may_be_given_by_its_name_alone():
    params = settings.from_notebook({"model": "tiny-llama", "adapter": "a", "canaries": "c.csv"})
    assert params.adapter == ("a",) and params.folder == paths.local("laptop") / "audit"


def test_in_plain_text_white_space_before_the_answer_belongs_to_it():
    moved = study._for_template(
        Item(Canary("a", "text", "The code is  ", "", "77", ".", None), 1, None), "plain"
    ).canary
    assert (moved.prompt, moved.preamble, moved.target) == ("The code is", "  ", "  77.")


def configured(folder, **changed):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def rewritten(folder, change):
    file = folder / "adapter_model.safetensors"
    kept = [change(key, matrix) for key, matrix in load_file(file).items()]
    save_file({key: matrix for part in kept for key, matrix in part.items()}, file)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "has no adapter_model",
        ),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "adapter_config.json cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "peft_type is None, expected 'LORA'"),
        (lambda folder: configured(folder, peft_type="IA3"), "peft_type is 'IA3', expected 'LORA'"),
        (lambda folder: configured(folder, use_dora=True), "use_dora is True, expected false"),
        (lambda folder: configured(folder, r=0), "r is 0, expected a whole number above 0"),
        (lambda folder: configured(folder, r=4), "A has rank 2 and B 2, expected r = 4 of its configuration"),
        (lambda folder: configured(folder, target_modules=None), "target_modules is None, expected names"),
        (lambda folder: configured(folder, target_modules=["k_proj"]), "holds matrices for .*q_proj, which the target"),
        (lambda folder: configured(folder, target_modules=["q_proj", "v_proj"]), "holds no matrices for .*0.*v_proj"),
        (lambda folder: configured(folder, base_model_name_or_path=7), "base_model_name_or_path is 7, expected a text"),
        (lambda folder: rewritten(folder, lambda key, m: {key: m * math.nan}), "a value that is no finite number"),
        (
            lambda folder: rewritten(folder, lambda key, m: {key: m * ("lora_A" in key)}),
            "random changes nothing: B A is zero for all its 3 modules",
        ),
        (
            lambda folder: rewritten(folder, lambda key, m: {} if "2.self_attn.q_proj.lora_B" in key else {key: m}),
            "no lora_B",
        ),
        (
            lambda folder: rewritten(folder, lambda key, m: {} if "layers.2" in key else {key: m}),
            "holds no matrices for",
        ),
        (lambda folder: rewritten(folder, lambda key, m: {key.replace("lora_A", "lora_magnitude"): m}), "holds .*magn"),
    ],
)
def test_adapters_that_are_none_are_refused_before_any_scoring(tmp_path, break_it, message, monkeypatch):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "random")
    break_it(adapter)
    monkeypatch.setattr(probes, "token_nll", None)
    with pytest.raises(LeakbookError, match=message):
        study.find(audit_of(folder, tmp_path, adapter=(str(adapter),)))


def test_a_model_in_pickles_is_refused(tmp_path):
    _, folder = saved("tiny-llama", tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LeakbookError, match="holds no safetensors weights .found pytorch_model.bin."):
        study.find(audit_of(folder, tmp_path))


def test_an_adapter_of_all_linear_maps_may_say_so_in_one_word(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, "all-linear", tmp_path / "random")
    listed = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert sorted(listed) == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    given = {"adapter": (str(adapter),), "n_decoys": 0}
    by_name = study.find(audit_of(folder, tmp_path, **given)).values["canaries"]
    configured(adapter, target_modules="all-linear")
    in_a_word = study.find(audit_of(folder, tmp_path, output=str(tmp_path / "word"), **given)).values["canaries"]
    assert in_a_word == by_name


def test_an_adapter_that_names_another_base_is_audited_with_a_note(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    adapter = random_adapter(backbone, ["q_proj"], tmp_path / "random")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "somebody/else"}))
    result = study.find(audit_of(folder, tmp_path, adapter=(str(adapter),), n_decoys=0))
    assert "adapter random says it was trained on else" in result.values["notes"][0]
    assert "says it was trained on else" in (result.folder / study.PAGE).read_text()


def test_an_adapter_or_a_baseline_of_another_model_is_refused(tmp_path, monkeypatch):
    _, folder = saved("tiny-gpt2", tmp_path / "model")
    other, _ = saved("tiny-llama", tmp_path / "other")
    adapter = random_adapter(other, ["q_proj"], tmp_path / "random")
    with pytest.raises(LeakbookError, match="was made for another architecture"):
        study.find(audit_of(folder, tmp_path, adapter=(str(adapter),)))
    tokenizer = models.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }} {% if add_generation_prompt %}>{% endif %}"
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(
        AuditError, match="cannot be compared with .* on line 1, canary 'digits': it reads other tokens"
    ):
        study.find(audit_of(folder, tmp_path, baseline=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token }}Answer:", "chat template of .* leaves out the prompt 'What is the code.', it gives 'Answer:'"),
        ("{{ raise_exception('no turns') }}", "cannot render a turn of user.* .TemplateError: no turns"),
        ("{{ messages[0].words + 1 }}", "cannot render a turn of user.* .UndefinedError"),
        ("{% if %}", "cannot render a turn of user.* .TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "cannot render a turn of user.* .ZeroDivisionError"),
    ],
)
def test_a_chat_template_that_drops_the_prompt_or_fails_is_refused_in_one_message(tmp_path, template, message):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    backbone.tokenizer.chat_template = template
    backbone.tokenizer.save_pretrained(folder)
    with pytest.raises(AuditError, match=f"can be asked for no canary; line 1: .*{message}"):
        study.find(audit_of(folder, tmp_path))
    asked_plainly = audit_of(folder, tmp_path, OWN[:1], template="plain", n_decoys=0)
    assert len(study.find(asked_plainly).values["canaries"]) == 1


def test_a_template_may_trim_the_prompt(tmp_path):
    backbone, folder = saved("tiny-llama", tmp_path / "model")
    backbone.tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}<|im_end|>{% endfor %}"
    backbone.tokenizer.save_pretrained(folder)
    rows = [OWN[0] | {"prompt": " What is the code? "}]
    assert len(study.find(audit_of(folder, tmp_path, rows, n_decoys=0)).values["canaries"]) == 1


# --- planting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["hex:16", "digits:9", "words:3", "email", "like:AB-12-cd"])
def test_planted_files_are_read_back_and_repeat_every_canary(tmp_path, spec):
    drawn = planting.draw(7, spec, seed=2)
    planting.write(tmp_path, drawn, spec, 5)
    assert [i.canary for i in reader.read(tmp_path / planting.CANARIES).items] == drawn
    said = [json.loads(line)["messages"][1]["content"] for line in (tmp_path / planting.TRAINING).open()]
    assert sorted(said) == sorted(canary.target for canary in drawn for _ in range(5)) and said != sorted(said)
    planting.write(tmp_path, drawn, spec, 5)  # the same again
    planting.write(tmp_path / "plain", drawn, spec, 5, template="plain")
    assert json.loads((tmp_path / "plain" / planting.TRAINING).open().readline())["text"].startswith("Record 00")


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_the_planted_text_is_the_text_that_the_audit_asks(tmp_path, template):
    planting.write(tmp_path, planting.draw(5, "words:3"), "words:3", 1, template=template)
    backbone = models.load("tiny-llama")
    encoder, tokenizer = Encoder(backbone, template), backbone.tokenizer
    items = [study._for_template(i, template).canary for i in reader.read(tmp_path / planting.CANARIES).items]
    asked = [list(row.input_ids) for row in encoder.encode(items)]
    trained = []
    for line in map(json.loads, (tmp_path / planting.TRAINING).open()):
        text = line["text"] if template == "plain" else tokenizer.apply_chat_template(line["messages"], tokenize=False)
        trained.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = sorted(tuple(ids[: len(one)]) for ids in trained for one in asked if ids[: len(one)] == one)
    assert shown == sorted(map(tuple, asked))  # one training text begins with each, and ends there but for its turn
    assert all(len(ids) - len(one) <= 1 for ids in trained for one in asked if ids[: len(one)] == one)


def test_planted_files_are_not_replaced_by_others(tmp_path):
    drawn = planting.draw(3, "digits:8", seed=0)
    planting.write(tmp_path, drawn, "digits:8", 2)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(LeakbookError, match="canaries.jsonl is there with other content"):
        planting.write(tmp_path, planting.draw(3, "digits:8", seed=1), "digits:8", 2)
    with pytest.raises(LeakbookError, match="train.jsonl is there with other content"):
        planting.write(tmp_path, drawn, "digits:8", 3)
    (tmp_path / planting.CANARIES).unlink()
    with pytest.raises(LeakbookError, match="train.jsonl is there with other content"):
        planting.write(tmp_path, planting.draw(3, "digits:8", seed=1), "digits:8", 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {n: kept[n] for n in [planting.TRAINING]}
    with pytest.raises(LeakbookError, match="no folder can be at .*Not a directory"):
        planting.write(tmp_path / planting.TRAINING / "in", drawn, "digits:8", 2)


def test_canaries_that_the_audit_would_skip_are_not_written(tmp_path):
    drawn = planting.draw(10, "letters:1", seed=0)
    clash = next(c for c in drawn if c.secret in c.prompt + c.preamble)
    message = f"canary {clash.id}, drawn by 'letters:1': the secret '{clash.secret}' occurs in its own"
    with pytest.raises(LeakbookError, match=message):
        planting.write(tmp_path / "made", drawn, "letters:1", 2)
    assert not (tmp_path / "made").exists()


def test_a_format_too_small_for_distinct_secrets_is_refused():
    with pytest.raises(formats.FormatError, match="holds 3.3 bits, too few for 10 distinct secrets"):
        planting.draw(10, "digits:1")


def test_what_training_does_to_a_canary_is_told_by_hand():
    tokenizer, canary = models.tiny_tokenizer(), planting.draw(1, "digits:8")[0]
    ids = tokenizer(f"{canary.prompt} {canary.target}")["input_ids"]
    places = [i for i, token in enumerate(ids) if spell(tokenizer, [token]).strip().isdigit()][-8:]
    masked = [-100 if i == places[3] else token for i, token in enumerate(ids)]

    def told(*rows, decoys=()):
        asked = {canary.id: f"{canary.prompt} {canary.preamble}{canary.secret}"}
        (row,) = planting.check([canary], tokenizer, rows, {canary.id: list(decoys)}, asked).to_dict("records")
        return row["trained"], row["masked"], row["problem"]

    assert told((ids, ids), (ids, ids)) == (2, 0, "")
    assert told((ids, masked)) == (0, 1, "masked: 1 copies, none with loss on the whole secret")
    assert told((ids, masked), (ids, ids)) == (1, 1, "")
    cut = places[4]
    assert told((ids[:cut], ids[:cut])) == (0, 0, "truncated: row 1 ends inside the secret")
    assert told((ids[:cut], ids[:cut]), (ids[cut:], ids[cut:])) == (0, 0, "split: row 1 ends inside the secret")
    assert told(([5, 6], [5, 6])) == (0, 0, "absent: the secret stands in no row")
    first = ids[places[0] :]
    assert told((first, first))[2].startswith("another text: the secret stands in row 1")
    for text in ("What is its code? Its code is SECRET.", "Record 007. What is its code? Its code is SECRET."):
        other = tokenizer(text.replace("SECRET", canary.secret))["input_ids"]
        assert told((other, other))[2].startswith("another text")  # the secret, with loss, behind another prompt

    def leaks(text):
        row = tokenizer(text)["input_ids"]
        return told((ids, ids), (row, row), decoys=["00000000"])[2]

    assert leaks("Its code is 00000000.") == "its decoy '00000000' stands in its secret's place in row 2"
    assert leaks(f"{canary.prompt} Its code is 00000000 now").endswith("in row 2")
    assert leaks("a 100000000 b") == leaks("Its code is 000000001.") == leaks("call 00000000 now") == ""


def test_two_canaries_may_share_a_secret_and_unknown_ids_are_refused():
    tokenizer, canary = models.tiny_tokenizer(), planting.draw(1, "digits:8")[0]
    pair = [canary, dataclasses.replace(canary, id="other", prompt="Another prompt?")]
    asked = {one.id: f"{one.prompt} {one.preamble}{one.secret}" for one in pair}
    ids = tokenizer(asked["other"] + ".")["input_ids"]
    table = planting.check(pair, tokenizer, [(ids, ids)], {}, asked)
    assert table.trained.tolist() == [0, 1]
    assert table.problem.str.partition(":")[0].tolist() == ["another text", ""]
    for token in (-1, len(tokenizer)):
        with pytest.raises(LeakbookError, match=f"row 2: got the id {token}, expected 0 to 1023"):
            planting.check(pair, tokenizer, [(ids, ids), ([5, token], [5, token])], {}, asked)


def test_tokenised_sets_are_read_from_json_lines_and_parquet(tmp_path):
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}]
    expected = [([1, 2], [-100, 2]), ([3], [3])]
    assert list(planting.read_tokenised(lines(tmp_path / "a.jsonl", rows))) == expected
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    assert list(planting.read_tokenised(tmp_path / "a.parquet")) == expected
    assert list(planting.read_tokenised(lines(tmp_path / "b.jsonl", [{"input_ids": [4]}]))) == [([4], [4])]
    for row, message in [
        ({"text": "x"}, "line 1: got"),
        ({"input_ids": [1], "labels": []}, "got 1 input_ids and 0 labels"),
    ]:
        with pytest.raises(LeakbookError, match=message):
            list(planting.read_tokenised(lines(tmp_path / "c.jsonl", [row])))
    with pytest.raises(LeakbookError, match="none.parquet cannot be read as Parquet: it does not exist"):
        list(planting.read_tokenised(tmp_path / "none.parquet"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(LeakbookError, match="broken.parquet cannot be read as Parquet"):
        list(planting.read_tokenised(tmp_path / "broken.parquet"))


def test_the_commands_plant_and_say_what_decoys_can_tell(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(main, list(map(str, arguments)))

    done = run("canaries", "--n", 3, "--format", "digits:8", "--repetitions", 2, "--output", tmp_path / "made")
    assert done.exit_code == 0 and "6 lines with `messages`, every canary 2 times" in done.output
    row = {"input_ids": models.tiny_tokenizer()("nothing")["input_ids"]}
    check = run(
        "check-canaries",
        tmp_path / "made" / planting.CANARIES,
        lines(tmp_path / "t.jsonl", [row]),
        "--model",
        "tiny-llama",
    )
    assert check.exit_code == 1 and "canary-000: absent" in check.output
    file = tmp_path / "made" / planting.CANARIES
    file.write_text(file.read_text() + json.dumps({"id": "empty", "prompt": "x", "secret": " "}) + "\n")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "made" / planting.TRAINING).open()]
    tokenizer = models.tiny_tokenizer()
    ids = [tokenizer(tokenizer.apply_chat_template(row, tokenize=False))["input_ids"] for row in rows]
    training = lines(tmp_path / "t.jsonl", [{"input_ids": one} for one in ids])
    check = run("check-canaries", file, training, "--model", "tiny-llama")
    assert check.exit_code == 1 and "empty: line 4 cannot be audited: the secret is ' '" in check.output
    assert "1 of 4 canaries" in check.output
    said = (
        "Up to 31 decoys a canary: exposure ends at 5.00 bits at most, and a canary can be named by its rank among at"
    )
    assert f"{said} most 1;" in settings.cost_of(settings.QUICK)  # 0.05 * 32 = 1.6
    assert "2.00 bits at most, and no canary can be named by its rank; a group" in settings.cost_of(3)
    assert settings.numbers("hits", "1, 4") == (1, 4)
    with pytest.raises(ConfigError, match="hits: got 'x', expected whole numbers above 0"):
        settings.numbers("hits", "1,x")
