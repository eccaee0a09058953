"""Parameters have known names and right types, or are refused with the value seen and what would be right."""

import dataclasses
import types

import pytest
import yaml

from lib import adapters, benign, config, paths, plan, rules
from lib.config import ConfigError
from lib.inversion import fast_settings, settings


def test_threads_can_be_set_from_outside(monkeypatch):
    monkeypatch.setenv(config.THREADS, "3")
    assert config.load_scale("laptop").threads == 3
    monkeypatch.setenv(config.THREADS, "many")
    with pytest.raises(ConfigError, match="LEAKBOOK_THREADS: got 'many'"):
        config.load_scale("laptop")


@pytest.mark.parametrize("path", sorted(paths.PARAMS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_parameter_file_loads(path):
    content = yaml.safe_load(path.read_text())
    if path.name == "cells.yaml":
        assert len(config.load_sweep(config.load_scale("laptop")).cells) == 34
    elif path.name == "verdicts.yaml":
        assert list(rules.load_verdicts()["patterns"]) == ["window_truncation", "non_secret_drift", "ambiguous_drop"]
    elif path.name == "cases.yaml":
        for name in content["constructed"]:
            assert config.load_cases(name).constructed.steps > 0
    elif path.name == "scorecard.yaml":
        for name in content["scales"]:
            assert len(plan.draw(plan.load(name))) > 0
    elif path.name == "inversion.yaml":
        for name in content["scales"]:
            assert len(settings.load(name).runs) > 0
    elif path.name == "fast.yaml":
        for name in content["scales"]:
            assert len(fast_settings.load(name).sets) > 0
    elif path.name == "scales.yaml":
        for name in content:
            assert config.load_scale(name).name == name
    else:
        assert content == {"scale": path.stem}
        assert config.from_notebook(content).scale.name == path.stem


def test_values_of_the_scale_file_arrive_with_their_types():
    scale = config.load_scale("laptop")
    assert (scale.backbone, scale.canaries.n_text, scale.canaries.hex_tokens) == ("smol-vl", 20, 13)
    assert scale.injection.stop_steps == (10, 20, 30)
    assert type(scale.injection.learning_rate) is float


def test_overrides_replace_single_settings_by_dotted_name():
    scale = config.load_scale("smoke", {"canaries.hex_tokens": None, "injection.learning_rate": 1})
    assert scale.canaries.hex_tokens is None
    assert scale.injection.learning_rate == 1.0
    assert dataclasses.replace(scale.canaries, hex_tokens=13) == config.load_scale("smoke").canaries


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": "huge"}, "scale: got 'huge', expected one of laptop, paper, smoke"),
        ({"scale": 3}, "notebook.scale: got 3 .int., expected a string"),
        ({"scal": "smoke"}, "unknown parameter 'scal'; known are scale, model, canaries, output, overrides"),
        ({"overrides": {"injection.rank": "32"}}, r"injection.rank: got '32' \(str\), expected an integer"),
        ({"overrides": {"injection.learning_rate": "1e-05"}}, r"write 1.0e-5, without quotes"),
        ({"overrides": {"injection.rank": True}}, r"injection.rank: got True \(bool\), expected an integer"),
        ({"overrides": {"injection.rank": 0}}, "injection.rank: got 0, expected at least 1"),
        ({"overrides": {"injection.rang": 8}}, "unknown parameter 'injection.rang'; known here are alpha, batch_size"),
        ({"overrides": {"model.rank": 8}}, "'model' is not a group of settings"),
        ({"overrides": {"injection.precision": "fp8"}}, "got 'fp8' .str., expected one of 'auto', 'bf16', 'fp32'"),
        ({"overrides": {"injection.stop_steps": [3, 2]}}, r"got \[3, 2\], expected rising steps below max_steps = "),
        ({"overrides": {"injection.learning_rate": float("nan")}}, "got nan, expected at least 0.0"),
        ({"overrides": {"injection.learning_rate": 0}}, "expected a number above 0"),
        ({"overrides": {"injection.target_nll": 0.0}}, "injection.target_nll: got 0.0, expected a number above 0"),
        ({"overrides": {"injection.learning_rate": float("inf")}}, "got inf, expected at least 0.0, and finite"),
        ({"overrides": {"canaries.n_text": 0, "canaries.n_image": 0}}, "expected at least one"),
        ({"output": "../elsewhere"}, "expected a plain folder name"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        config.from_notebook({"scale": "smoke"} | given)


def test_modules_functions_and_ipython_names_are_no_parameters():
    namespace = {
        "scale": "smoke",
        "In": [""],
        "Out": {},
        "exit": 1,
        "_private": 2,
        "yaml": yaml,
        "f": lambda: 0,
        "types": types,
    }
    assert config.from_notebook(namespace).scale.name == "smoke"


def test_results_are_computed_where_papermill_injected_parameters(monkeypatch):
    monkeypatch.delenv(config.ENVIRONMENT, raising=False)
    injected = {"scale": "smoke", "In": ["", "scale = 'laptop'", '# Parameters\nscale = "smoke"\n']}
    assert config.from_notebook(injected).results == "local"
    assert config.from_notebook({"scale": "smoke", "In": ["", "scale = 'laptop'"]}).results == "auto"
    monkeypatch.setenv(config.ENVIRONMENT, "reference")
    assert config.from_notebook(injected).results == "reference"
    monkeypatch.setenv(config.ENVIRONMENT, "cloud")
    with pytest.raises(ConfigError, match="LEAKBOOK_RESULTS: got 'cloud', expected one of auto, local, reference"):
        config.from_notebook(injected)


def test_a_parameters_cell_can_be_edited_and_run_again_in_jupyter():
    first, second = "scale = 'smoke'\nmodell = 'x'", "scale = 'smoke'\nmodel = None"
    namespace = {"scale": "smoke", "modell": "x", "In": ["", first]}
    with pytest.raises(ConfigError, match="unknown parameter 'modell'"):
        config.from_notebook(namespace)
    namespace |= {"In": ["", first, "%matplotlib inline", second], "values": 3, "nll": [1], "model": None}
    assert config.from_notebook(namespace).scale.name == "smoke"


def test_a_name_that_papermill_injects_and_nobody_reads_is_refused():
    cells = ["", "scale = 'smoke'", '# Parameters\nscal = "paper"\n']
    with pytest.raises(ConfigError, match="unknown parameter 'scal'"):
        config.from_notebook({"scale": "smoke", "scal": "paper", "In": cells})


def test_only_the_scale_files_own_settings_are_standard():
    assert config.from_notebook({"scale": "smoke"}).is_standard
    assert not config.from_notebook({"scale": "smoke", "canaries": "c.jsonl"}).is_standard
    assert not config.from_notebook({"scale": "smoke", "overrides": {"canaries.seed": 1}}).is_standard


def test_the_sweep_has_the_papers_shape():
    sweep = config.load_sweep(config.load_scale("laptop"))
    kinds = [cell.kind for cell in sweep.cells]
    assert {kind: kinds.count(kind) for kind in kinds} == {"full": 16, "undertrained": 12, "noise": 4, "long": 2}
    assert len(sweep.seeds) == 3 and (sweep.training.rank, sweep.training.alpha) == (16, 32)
    assert sweep.cell("noise-spectral-stop2").like == "safety-stop2"
    with pytest.raises(ConfigError, match="cell: got 'gui-fulll', expected one of gui-full-low-10, "):
        sweep.cell("gui-fulll")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("id: gui-full-low-30", "id: gui-full-low-10", "cell 'gui-full-low-10': this id occurs twice"),
        ("id: gui-full-low-30", "id: ../elsewhere", "cell '../elsewhere': this id is no plain name"),
        ("learning_rate: 4.0e-4", "learning_rate: 4e-4", "got '4e-4' .str., expected a number or null.*write 1.0e-5"),
        ("learning_rate: 4.0e-4", "learning_rate: null", "learning_rate: got None, expected a number above 0"),
        ("base: stop-3", "base: stop-4", "base: got 'stop-4', expected one of full, stop-1, stop-2, stop-3"),
        ("like: safety-stop2", "like: safety-stop9", "like: got 'safety-stop9', expected a trained cell on the base"),
        ("like: safety-stop2", "like: safety-stop1", "expected a trained cell on the base 'stop-2'"),
        ("steps: null, like: safety-stop2", "steps: 5, like: safety-stop2", "steps: got 5, expected null, since noise"),
        ("kind: long", "kind: longer", "got 'longer' .str., expected one of 'full', 'undertrained', 'long', 'noise'"),
        (
            "source: SYNTH",
            "source: SYNTHH",
            "source: got 'SYNTHH', expected one of GUI, .* or a file that ends in .jsonl",
        ),
        ("source: spectral", "source: GUI", "source: got 'GUI', expected one of gaussian, spectral"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, 1]", r"got 34 cells and seeds \(0, 1, 1\), expected some, seeds once"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, 2", "grid: .*cells.yaml cannot be read .*expected a YAML file like"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, two]", "got 'two' .str., expected an integer"),
    ],
)
def test_a_cell_that_cannot_be_run_is_refused(tmp_path, old, new, message):
    text = (paths.PARAMS / "cells.yaml").read_text()
    assert old in text
    (tmp_path / "cells.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        config.load_sweep(config.load_scale("laptop"), tmp_path / "cells.yaml")


def test_a_grid_that_does_not_exist_is_refused_and_its_own_files_lie_beside_it(tmp_path):
    laptop = config.load_scale("laptop")
    with pytest.raises(ConfigError, match="grid: .*none.yaml cannot be read"):
        config.load_sweep(laptop, str(tmp_path / "none.yaml"))
    text = (paths.PARAMS / "cells.yaml").read_text().replace("source: SYNTH", "source: mine.jsonl", 1)
    (tmp_path / "own.yaml").write_text(text)
    assert config.load_sweep(laptop, tmp_path / "own.yaml").cells[4].source == str(tmp_path / "mine.jsonl")


def test_the_grids_sources_are_those_that_exist():
    assert tuple(benign.SOURCES) == config.BENIGN_SOURCES and tuple(adapters.NOISE) == config.NOISE_KINDS


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("total_nats: 0.04", "total_nats: 4e-2", "margin.total_nats: got '4e-2' .str., expected a number"),
        (
            "mean20: [strengthened]",
            "mean21: [strengthened]",
            "pattern ambiguous_drop: unknown rule 'mean21'; known are",
        ),
        (
            "mean20: [strengthened]",
            "mean20: [better]",
            "ambiguous_drop.mean20: got 'better', expected one of damaged, ",
        ),
        ("any: {hex: [damaged]", "any: {hexx: [damaged]", "window_truncation, any: unknown rule 'hexx'"),
        (
            "decoys: [general]",
            "decoys: [usual]",
            "change, row 3.decoys: got 'usual', expected one of specific, general",
        ),
        ("recall: [some]", "recall: some", "level, row 2.recall: got 'some' .str., expected a list of a string"),
        ("preamble_share_at_least: 0.9", "preamble_share_at_least: -1", "got -1.0, expected at least 0.0"),
        ("  - {verdict: inconclusive}\n\n# The protocol's verdict on level", "\n# The", "must match everything else"),
        ("equivalence_alpha: 0.025", "equivalence_alpha: 0.05", "equivalence_alpha: got 0.05, expected 0.025, half of"),
        ("interval: studentised_bootstrap", "interval: student_t", "readings.mean.interval: got 'student_t'"),
        ("opposite: mixed", "opposite: fires", "readings.count_nll.opposite: got 'fires'"),
        ("spread_floor:", "floor:", "readings.mean: unknown parameter 'floor'"),
        ("window: 20", "windw: 20", "probes.mean20: got .*expected kind nll with window or span"),
        ("largest: d_nll_hex", "largest: d_nll_hx", "picking.window_truncation: got .*d_nll_hx.*expected kinds and"),
        ("base_above: 0.1", "base_above: high", "decoys.base_above: got 'high'"),
        (
            "picking:",
            "choosing:",
            "expected the parts margin, readings, probes, patterns, change, level, decoys, picking",
        ),
    ],
)
def test_an_unknown_rule_is_refused(tmp_path, old, new, message):
    text = (paths.PARAMS / "verdicts.yaml").read_text()
    assert old in text
    (tmp_path / "verdicts.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        rules.load_verdicts(tmp_path / "verdicts.yaml")


def test_every_probe_that_a_rule_names_is_one_of_the_probes():
    loaded = rules.load_verdicts()
    asked = {key for row in loaded["change"] for key in row} - {"verdict", "decoys"}
    assert asked <= set(loaded["probes"])
    assert set(loaded["picking"]) - {"rows", "confirmation"} == set(loaded["patterns"])
