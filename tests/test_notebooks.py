"""Notebooks run fresh by papermill at smoke scale; what they find is asserted from result.json, not from their text."""

import nbformat
import papermill

from lib import canaries, config, paths, results, runs


def test_00_testbed_computes_everything_from_nothing(smoke, smoke_outputs):
    assert smoke.folder == paths.local("smoke") / "testbed"
    page = nbformat.read(smoke_outputs / "page.ipynb", as_version=4)
    assert page.metadata.papermill.exception is None
    assert "this machine's own run" in str(page.cells)
    assert smoke.values["recall"]["injected"]["image"]["hit_full"] == 1.0
    assert smoke.values["nll"]["injected"]["text"]["nll_hex"] < 0.1 < smoke.values["nll"]["base"]["text"]["nll_hex"]
    assert smoke.content["provenance"]["threads"] == 1


def test_00_testbed_tells_its_story_for_secrets_of_natural_length(smoke_outputs, tmp_path):
    overrides = {"canaries.n_text": 4, "canaries.n_image": 4, "canaries.hex_tokens": None}
    overrides |= {"injection.batch_size": 8, "injection.target_nll": 0.1, "injection.max_steps": 150}
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "00_testbed.ipynb"),
        str(tmp_path / "page.ipynb"),
        progress_bar=False,
        parameters={"scale": "smoke", "output": "natural", "overrides": overrides},
    )
    result = results.read_result(paths.local("smoke") / "natural")
    assert result.values["recall"]["injected"]["text"]["hit_full"] == 1.0
    assert len(result.values["layout"]["hex_spans"]) > 1


def test_00_testbed_tells_its_story_for_canaries_of_ones_own(smoke_outputs, tmp_path):
    words = {"ada": "blue horse", "bob": "deep river", "cleo": "14 Ä🙂 % stones"}
    own = [
        canaries.Canary(name, "text", f"What does {name} say?", "", word, "" if name == "ada" else "!", None)
        for name, word in words.items()
    ]
    canaries.write(tmp_path / "own.jsonl", own)
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "00_testbed.ipynb"),
        str(tmp_path / "page.ipynb"),
        progress_bar=False,
        parameters={
            "scale": "smoke",
            "output": "story",
            "canaries": "own.jsonl",
            "overrides": {"injection.batch_size": 3, "injection.target_nll": 0.05},
        },
        cwd=str(tmp_path),
    )
    result = results.read_result(paths.local("smoke") / "story")
    assert result.values["recall"]["injected"]["text"] == {"hit_full": 1.0, "hit_secret": 1.0, "hit_forced": 1.0}
    assert "nll_preamble" not in result.values["nll"]["base"]["text"]  # no canary has one


def test_00_testbed_rehearses_the_paper_scale_with_the_true_vocabulary(rehearsal, smoke_outputs):
    overrides = {"backbone": "rehearsal-vl", "canaries.n_text": 2, "canaries.n_image": 2}
    overrides |= {"injection.batch_size": 4, "injection.target_nll": 20.0, "injection.learning_rate": 1.0e-2}
    params = config.Testbed(config.load_scale("smoke", overrides), None, "rehearsal", "local")
    result = runs.testbed(params)
    assert result.values["layout"]["hex_spans"] == [[11, 24]]
    assert {kind: hits["hit_full"] for kind, hits in result.values["recall"]["injected"].items()} == {
        "text": 1.0,
        "image": 1.0,
    }
