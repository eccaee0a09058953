"""Notebooks run fresh by papermill at smoke scale; what they find is asserted from result.json, not from their text."""

import nbformat
import papermill
import pytest

from lib import paths, runs


def test_00_testbed_computes_everything_from_nothing(smoke, smoke_outputs):
    assert smoke.folder == paths.local("smoke") / "testbed"
    page = nbformat.read(smoke_outputs / "page.ipynb", as_version=4)
    assert page.metadata.papermill.exception is None
    assert "this machine's own run" in str(page.cells)
    assert smoke.values["recall"]["injected"]["image"]["hit_full"] == 1.0
    assert smoke.values["nll"]["injected"]["text"]["nll_hex"] < 0.1 < smoke.values["nll"]["base"]["text"]["nll_hex"]
    assert smoke.content["provenance"]["threads"] == 2


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("texts", {"canaries.n_text": 6, "canaries.n_image": 0}),
        ("natural", {"canaries.n_text": 4, "canaries.n_image": 4, "canaries.hex_tokens": None}),
    ],
)
def test_00_testbed_tells_its_story_for_other_settings_too(smoke_outputs, tmp_path, name, overrides):
    short = {"injection.batch_size": 8, "injection.target_nll": 0.1, "injection.max_steps": 150}
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "00_testbed.ipynb"),
        str(tmp_path / "page.ipynb"),
        progress_bar=False,
        parameters={"scale": "smoke", "output": name, "overrides": short | overrides},
    )
    result = runs.read_result(paths.local("smoke") / name)
    assert result.values["recall"]["injected"]["text"]["hit_full"] == 1.0
    if name == "texts":
        assert result.values["canaries"] == {"text": 6, "image": 0}
    else:
        assert len(result.values["layout"]["hex_spans"]) > 1
