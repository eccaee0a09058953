"""Shared fixtures: tokenizers, the tiny testbed, and one smoke run of the whole testbed a session."""

import os

os.environ.pop("LEAKBOOK_RESULTS", None)
os.environ |= {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}

import papermill
import pytest
import torch
import transformers
from hypothesis import settings

from lib import embedded, models, paths, results
from lib.canaries import draw
from lib.config import CanarySettings
from lib.encoding import Encoder

torch.set_num_threads(1)
settings.register_profile("leakbook", deadline=None)  # a busy machine is no failure
settings.load_profile("leakbook")


@pytest.fixture(scope="session")
def tiny():
    return models.load("tiny-vl")


@pytest.fixture(scope="session")
def encoder(tiny):
    return Encoder(tiny)


@pytest.fixture(scope="session")
def rows(encoder):
    """Three text and three image canaries, encoded for the tiny model."""
    settings = CanarySettings(n_text=3, n_image=3, seed=5, hex_tokens=13, preamble_tokens=11)
    return encoder.encode(draw(settings, encoder.backbone.tokenizer, encoder.end_of_turn))


def _tokenizer(name):
    if name == "tiny":
        return models.tiny_tokenizer()
    folder = embedded.smol_vl_folder if name == "smollm2" else embedded.qwen_tokenizer_folder
    try:
        return transformers.AutoTokenizer.from_pretrained(folder())
    except embedded.FetchError as error:
        pytest.skip(f"the {name} vocabulary cannot be had: {error}")


@pytest.fixture(scope="session", params=["tiny", "smollm2", "qwen"])
def tokenizer(request):
    return _tokenizer(request.param)


@pytest.fixture(scope="session")
def rehearsal():
    try:
        return models.load("rehearsal-vl")
    except embedded.FetchError as error:
        pytest.skip(f"the Qwen vocabulary cannot be had: {error}")


@pytest.fixture(scope="session")
def smoke_outputs(tmp_path_factory):
    """A folder for the results of this session, which lib.paths and all kernels then use."""
    folder = tmp_path_factory.mktemp("outputs")
    before = os.environ.get("LEAKBOOK_OUTPUTS")
    os.environ["LEAKBOOK_OUTPUTS"] = str(folder)
    yield folder
    os.environ.pop("LEAKBOOK_OUTPUTS")
    if before is not None:
        os.environ["LEAKBOOK_OUTPUTS"] = before


@pytest.fixture(scope="session")
def smoke(smoke_outputs):
    """The testbed notebook, run from nothing by papermill at smoke scale."""
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "00_testbed.ipynb"),
        str(smoke_outputs / "page.ipynb"),
        parameters={"scale": "smoke"},
        progress_bar=False,
        kernel_name="python3",
    )
    return results.read_result(paths.local("smoke") / "testbed")


@pytest.fixture(scope="session")
def injected_adapter(smoke):
    """The fully trained adapter of the smoke run."""
    return paths.local("smoke") / "adapters" / smoke.content["provenance"]["adapters"] / "final"
