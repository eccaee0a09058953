"""Results appear whole or not at all, are reused only for the same inputs, and are never overwritten."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lib import canaries, config, files, paths, results, runs
from lib.files import StorageError
from lib.results import ResultError


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    return tmp_path


def write(folder, inputs, value=1):
    return results.write_result(
        folder, inputs, {"value": value}, {"seconds": 1}, {"table.csv": lambda path: path.write_text("a\n1\n")}
    )


def test_a_result_is_reused_for_the_same_inputs_in_any_order_of_keys(outputs):
    folder = outputs / "local" / "smoke" / "study"
    assert results.reusable(folder, {"a": 1}) is None
    write(folder, {"a": 1, "b": {"c": 2, "d": 3}})
    found = results.reusable(folder, {"b": {"d": 3, "c": 2}, "a": 1})
    assert found.values == {"value": 1}
    assert found.table("table.csv").a.tolist() == [1]
    assert found.origin.startswith("results: this machine's own run")


def test_a_fresh_result_is_what_a_later_reader_gets(outputs):
    folder = outputs / "local" / "smoke" / "study"
    fresh = write(folder, {"a": 1}, value=[(1, 2)])
    assert fresh == results.read_result(folder) and fresh.values == {"value": [[1, 2]]}


def test_other_inputs_are_refused_naming_what_differs_and_how_to_move_it_aside(outputs):
    folder = outputs / "local" / "smoke" / "study"
    write(folder, {"scale": {"rank": 32, "seed": 0}, "model": "x"})
    with pytest.raises(ResultError) as refusal:
        results.reusable(folder, {"scale": {"rank": 16, "seed": 0}, "model": "x", "new": 1})
    text = str(refusal.value)
    assert "new is 'absent' there and 1 here; scale.rank is 32 there and 16 here" in text
    assert "seed" not in text
    command = text.split("`")[1]
    subprocess.run(command, shell=True, check=True, cwd=paths.ROOT)
    assert results.reusable(folder, {"scale": {"rank": 16}}) is None
    assert (folder.with_name("study.aside-1") / "result.json").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "result.json").write_text('{"hash": '), "result.json cannot be read"),
        (lambda f: (f / "result.json").write_text("[]"), "result.json cannot be read"),
        (lambda f: (f / "table.csv").write_text("a\n2\n"), "table.csv is missing or not the file that was written"),
        (lambda f: (f / "table.csv").unlink(), "table.csv is missing"),
        (
            lambda f: (f / "result.json").write_text((f / "result.json").read_text().replace('"a": 1', '"a": 2')),
            "the hash in result.json is not that of its inputs",
        ),
    ],
)
def test_a_damaged_result_is_refused(outputs, damage, message):
    folder = outputs / "local" / "smoke" / "study"
    write(folder, {"a": 1})
    damage(folder)
    with pytest.raises(ResultError, match=f"{message}.*Nothing was overwritten. Move it aside with `mv "):
        results.reusable(folder, {"a": 1})


def test_result_json_is_written_last(outputs):
    folder = outputs / "study"

    def fail(path):
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        results.write_result(folder, {}, {}, {}, {"first.csv": lambda path: path.write_text("x"), "second.csv": fail})
    assert sorted(path.name for path in folder.iterdir()) == ["first.csv"]
    assert results.read_result(folder) is None


def test_a_full_disk_leaves_no_half_written_file_and_says_what_to_do(outputs):
    def half(path):
        path.write_text("half of the tab")
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = outputs / "study"
    write(folder, {"a": 1})
    with pytest.raises(StorageError, match="no space left to write .*table.csv .* nothing half-written was kept"):
        results.write_result(folder, {"a": 2}, {}, {}, {"table.csv": half})
    assert results.reusable(folder, {"a": 1}).values == {"value": 1}  # what was there stands
    assert sorted(path.name for path in folder.iterdir()) == ["result.json", "table.csv"]


def test_a_really_full_device_is_recognised(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with pytest.raises(StorageError), files.building(tmp_path / "table") as unfinished:
        unfinished.symlink_to("/dev/full")
        unfinished.write_text("x" * 100_000)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_in_one_piece(tmp_path):
    target = tmp_path / "folder"
    for number in (1, 2):
        with files.building(target) as unfinished:
            unfinished.mkdir()
            (unfinished / f"{number}").touch()
    assert [path.name for path in target.iterdir()] == ["2"]


# --- the testbed -------------------------------------------------------------------------------


def params(**changes):
    return dataclasses.replace(config.from_notebook({"scale": "smoke"}), results="local", **changes)


def test_speed_settings_are_no_part_of_a_results_identity():
    one = params()
    slower = dataclasses.replace(one, scale=dataclasses.replace(one.scale, threads=2, evaluation_batch=3))
    assert results.inputs_hash(runs.testbed_inputs(one, None)) == results.inputs_hash(runs.testbed_inputs(slower, None))
    other = dataclasses.replace(one, scale=config.load_scale("smoke", {"injection.seed": 1}))
    assert results.inputs_hash(runs.testbed_inputs(one, None)) != results.inputs_hash(runs.testbed_inputs(other, None))


def test_the_smoke_testbed_recalls_all_forty_and_knew_none(smoke):
    recall = smoke.values["recall"]
    for kind in ("text", "image"):
        assert recall["base"][kind] == {"hit_full": 0.0, "hit_secret": 0.0, "hit_forced": 0.0}
        assert recall["injected"][kind] == {"hit_full": 1.0, "hit_secret": 1.0, "hit_forced": 1.0}
    assert smoke.values["undertrained"]
    assert smoke.values["canaries"] == {"text": 20, "image": 20}
    assert smoke.values["layout"]["hex_spans"] == [[11, 24]]
    assert smoke.values["training"]["adapted_modules"] == 4 * 7


def test_the_summary_agrees_with_the_tables(smoke):
    nll, recall = smoke.table("token_nll.parquet"), smoke.table("recall.parquet")
    assert len(nll) == 5 * 40 * 29 and len(recall) == 5 * 40
    window = nll[(nll.model == "injected") & (nll.modality == "text") & (nll.position < 20)].nll.mean()
    assert smoke.values["nll"]["injected"]["text"]["nll_mean20"] == pytest.approx(window, abs=1e-6)
    correct = (nll.token_id == nll.greedy_id).groupby([nll.model, nll.canary]).all()
    full = recall.set_index(["model", "canary"]).hit_full
    assert (correct.sort_index() == full.sort_index()).all()
    assert len(smoke.table("training.csv")) == smoke.values["training"]["steps"]


def test_a_second_run_takes_the_first_ones_result(smoke):
    before = (smoke.folder / "result.json").stat().st_mtime_ns
    assert runs.testbed(params()).content == smoke.content
    assert (smoke.folder / "result.json").stat().st_mtime_ns == before


def test_other_parameters_on_the_same_folder_are_refused_before_any_work(smoke, monkeypatch):
    monkeypatch.setattr(runs.models, "load", lambda *_: pytest.fail("a model was loaded"))
    other = dataclasses.replace(params(), scale=config.load_scale("smoke", {"injection.rank": 16}))
    with pytest.raises(ResultError, match="scale.injection.rank is 32 there and 16 here"):
        runs.testbed(other)


def test_bad_canaries_are_refused_before_any_model_is_loaded(smoke_outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.models, "load", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "c.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(canaries.CanaryError, match="c.jsonl, line 1"):
        runs.testbed(params(canaries=str(tmp_path / "c.jsonl"), output="own"))


def test_a_users_own_canaries_are_planted(smoke_outputs, tmp_path):
    own = [
        canaries.Canary(f"note-{i}", "text", f"Note {i}?", "It says: ", f"blue {word}", ".", None)
        for i, word in enumerate(["horse", "river", "stone", "cloud"])
    ]
    canaries.write(tmp_path / "own.jsonl", own)
    scale = config.load_scale("smoke", {"injection.batch_size": 4, "injection.target_nll": 0.05})
    result = runs.testbed(dataclasses.replace(params(canaries=str(tmp_path / "own.jsonl"), output="own"), scale=scale))
    assert result.values["recall"]["injected"]["text"]["hit_full"] == 1.0
    assert result.values["canaries"] == {"text": 4, "image": 0}
    assert result.values["draws"] == {} and result.values["images"] == {}


def test_auto_takes_local_results_then_the_reference(outputs, smoke_outputs, monkeypatch):
    reference = outputs / "smoke" / "testbed"
    inputs = runs.testbed_inputs(params(), None)
    write(reference, inputs, value="reference")
    monkeypatch.setattr(runs, "_compute_testbed", lambda *_: pytest.fail("computed"))
    auto = dataclasses.replace(params(), results="auto")
    assert runs.testbed(auto).values == {"value": "reference"}
    assert "the committed reference" in runs.testbed(auto).origin
    write(outputs / "local" / "smoke" / "testbed", inputs, value="local")
    assert runs.testbed(auto).values == {"value": "local"}
    assert runs.testbed(dataclasses.replace(params(), results="reference")).values == {"value": "reference"}


def test_the_reference_alone_does_not_stop_a_fresh_clone_from_computing(outputs, monkeypatch):
    write(outputs / "smoke" / "testbed", runs.testbed_inputs(params(), None))
    monkeypatch.setattr(runs, "_compute_testbed", lambda *_: "computed")
    assert runs.testbed(params()) == "computed"


def test_a_reference_of_other_parameters_is_not_shown(outputs):
    write(outputs / "smoke" / "testbed", runs.testbed_inputs(params(), None))
    other = dataclasses.replace(params(), scale=config.load_scale("smoke", {"canaries.seed": 7}), results="reference")
    with pytest.raises(ResultError, match="scale.*canaries.seed is 20260630 there and 7 here|canaries.seed"):
        runs.testbed(other)
    with pytest.raises(ResultError, match="holds no result"):
        runs.testbed(dataclasses.replace(params(output="elsewhere"), results="reference"))


def test_ids_and_secrets_that_look_like_numbers_stay_text(outputs):
    folder = outputs / "local" / "smoke" / "study"
    one = canaries.Canary("001", "text", "2020-01-01?", "It is ", "0042", ".", None)
    results.write_result(folder, {}, {}, {}, {"canaries.jsonl": lambda path: canaries.write(path, [one])})
    assert results.read_result(folder).table("canaries.jsonl").iloc[0].to_dict() == dataclasses.asdict(one)


def test_folders_from_the_environment_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", "here")
    monkeypatch.setenv("LEAKBOOK_CACHE", "there")
    assert (paths.outputs(), paths.cache()) == (tmp_path / "here", tmp_path / "there")


def test_leftovers_of_killed_work_are_cleared(tmp_path):
    leftover = tmp_path / ".study.leakbook-abcdefgh"
    leftover.mkdir()
    with files.building(tmp_path / "study") as unfinished:
        unfinished.write_text("x")
    assert leftover.exists()  # it may still be written
    os.utime(leftover, (0, 0))
    with files.building(tmp_path / "study") as unfinished:
        unfinished.write_text("x")
    assert not leftover.exists()


def test_only_folders_of_our_own_are_cleared_from_a_locked_folder(tmp_path):
    theirs = [".venv-training", ".venv.leakbook-TRAINING", ".audit.leakbook-training2", "report.leakbook-abcdefgh"]
    kept = [tmp_path / "proj" / name for name in theirs] + [tmp_path / ".proj-training"]
    ours = [tmp_path / "proj" / ".report.json.leakbook-ab_def12", tmp_path / ".proj.leakbook-abcdefgh"]
    for folder in [*kept, *ours]:
        folder.mkdir(parents=True)
    with files.locked(tmp_path / "proj"):
        assert all(folder.exists() for folder in kept) and not any(folder.exists() for folder in ours)
    with files.building(tmp_path / "proj" / "report.json") as unfinished:
        assert [unfinished.parent] == files._unfinished(tmp_path / "proj", ".report.json")
        unfinished.write_text("x")


def kernel_of(process):
    """The notebook kernel that a run has started, once it is training."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children(recursive=True):
            if "ipykernel" in " ".join(child.cmdline()):
                return child
        time.sleep(0.05)
    raise AssertionError("no kernel was started")


def test_a_killed_run_goes_on_and_ends_with_the_same_figures(smoke, tmp_path):
    command = [sys.executable, "-m", "lib", "testbed", "--scale", "smoke"]
    environment = os.environ | {"LEAKBOOK_OUTPUTS": str(tmp_path), "LEAKBOOK_RESULTS": "auto"}  # run computes anyway

    def start():
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = start()  # killed itself, as soon as there is a state to go on from
    orphan = kernel_of(first)
    wait_for(lambda: list(tmp_path.rglob("checkpoint.safetensors")))
    first.kill()
    first.communicate(timeout=60)
    wait_for(lambda: not orphan.is_running())
    assert not list(tmp_path.rglob("result.json"))

    second = start()  # its kernel killed, a little later
    kernel = kernel_of(second)
    (checkpoint,) = tmp_path.rglob("checkpoint.safetensors")
    before = checkpoint.stat().st_mtime_ns
    wait_for(lambda: not checkpoint.exists() or checkpoint.stat().st_mtime_ns != before)
    kernel.kill()
    _, message = second.communicate(timeout=60)
    assert second.returncode != 0 and "Traceback" not in message
    assert "ended without a result" in message and "Run the same command again" in message
    assert not list(tmp_path.rglob("result.json"))

    third = start()
    _, message = third.communicate(timeout=120)
    assert third.returncode == 0, message
    result = json.loads((tmp_path / "local" / "smoke" / "testbed" / "result.json").read_text())
    assert result["results"] == smoke.values


def wait_for(condition, seconds=60):
    """Wait until ``condition`` holds, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
