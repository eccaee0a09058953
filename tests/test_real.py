"""The embedded language model: exact weights, exact scores. A few tests, the rest of the suite stays tiny."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from test_probes import slow_nll

from lib import canaries, embedded, models, probes
from lib.config import CanarySettings
from lib.encoding import Encoder


@pytest.fixture(scope="module")
def smol():
    return models.load("smol-vl")


@pytest.fixture(scope="module")
def encoder(smol):
    return Encoder(smol)


def test_the_grafted_model_gives_bit_equal_text_logits(smol):
    plain = models.load("smollm2")
    texts = ["The capital of France is Paris, and", "def f(x):\n    return x + 1\n", "TEXTCAN-0f3a51 äöü 🙂 12345"]
    for text in texts:
        ids = plain.tokenizer(text, return_tensors="pt").input_ids
        assert torch.equal(ids, smol.tokenizer(text, return_tensors="pt").input_ids)
        with torch.no_grad():
            expected, grafted = plain.model(ids).logits, smol.model(ids).logits
        assert grafted.shape[-1] == 49152  # vision tokens stay out of the softmax
        assert torch.equal(expected, grafted)


def test_a_copy_keeps_the_vision_tokens_out_of_the_softmax_too(smol):
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(smol.copy().model(ids).logits, smol.model(ids).logits)


def test_it_is_a_language_model(smol):
    prompt = smol.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        best = smol.model(**prompt).logits[0, -1].argmax()
    assert smol.tokenizer.decode(best) == " Paris"


def test_padded_interleaved_batches_equal_a_loop_over_single_canaries_on_a_fresh_model(smol, encoder):
    settings = CanarySettings(n_text=3, n_image=3, seed=8, hex_tokens=13, preamble_tokens=11)
    drawn = canaries.draw(settings, smol.tokenizer, encoder.end_of_turn)
    mixed = [drawn[0], drawn[3], dataclasses.replace(drawn[1], prompt="Please: " + drawn[1].prompt), drawn[4]]
    rows = encoder.encode([*mixed, dataclasses.replace(drawn[2], image=None), drawn[5]])
    together = probes.token_nll(smol.model, encoder, rows, batch_size=6)
    fresh = models.load("smol-vl")
    for row, nll in zip(rows, together.nll, strict=True):
        np.testing.assert_allclose(nll[: len(row.target_ids)], slow_nll(fresh, row), atol=1e-4, rtol=0)


def test_the_model_directories_are_read_by_plain_transformers():
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.smollm2_folder())
    assert model.config.rope_parameters["rope_theta"] == 100000
    vision = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(embedded.smol_vl_folder())
    assert vision.config.text_config.rope_parameters["mrope_section"] == [8, 12, 12]
    assert vision.lm_head.weight.data_ptr() == vision.get_input_embeddings().weight.data_ptr()
