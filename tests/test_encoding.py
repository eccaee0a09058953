"""Canaries become tensors without losing a token, a position or a picture."""

import dataclasses
import unicodedata

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lib import models
from lib.canaries import Canary, CanaryError, Record, draw
from lib.config import CanarySettings
from lib.encoding import Encoder, check_distinct, content_hash
from lib.models import ModelError
from lib.pictures import picture
from lib.spans import TokenizerError


def plain(**changes):
    values = {
        "id": "a",
        "modality": "text",
        "prompt": "What is it?",
        "preamble": "It is ",
        "secret": "77",
        "suffix": ".",
        "image": None,
    }
    return Canary(**values | changes)


def test_a_tokenizer_that_fails_or_has_more_ids_than_the_model_is_one_message():
    backbone = models.load("tiny-llama")
    words = Tokenizer(WordLevel({"[X]": 0}, unk_token="[UNK]"))  # it knows no word for what it does not know
    broken = dataclasses.replace(backbone, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[X]"))
    with pytest.raises(TokenizerError, match="the tokenizer cannot read 'x' .*Missing .UNK. token"):
        Encoder(broken, "plain").encode([plain()])
    backbone.tokenizer.add_tokens(["zebra"])  # the 1,025th
    with pytest.raises(ModelError, match="gives the id 1024 for canary 'a', but the model has 1024 embeddings"):
        Encoder(backbone).encode([plain(prompt="A zebra?")])


def test_an_encoded_canary_decodes_to_template_prompt_and_target(encoder, rows):
    for row in rows:
        text = encoder.backbone.tokenizer.decode(row.input_ids)
        slots = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
        assert text == (
            f"<|im_start|>user\n{slots}{row.canary.prompt}<|im_end|>\n<|im_start|>assistant\n"
            f"{row.canary.target}<|im_end|>"
        )
        assert encoder.backbone.tokenizer.decode(row.target_ids) == row.canary.target + "<|im_end|>"


def test_spans_follow_each_other_and_name_every_position(rows):
    row = rows[0]
    spans = row.spans
    assert (spans["preamble"].start, spans["preamble"].stop) == (0, 11)
    assert (spans["hex"].start, spans["hex"].stop) == (11, 24)
    assert (spans["suffix"].start, spans["suffix"].stop) == (24, len(row.target_ids))
    assert [row.span_of(position) for position in (0, 10, 11, 23, 24)] == [
        "preamble",
        "preamble",
        "hex",
        "hex",
        "suffix",
    ]


def test_batches_are_padded_right_with_positions_that_skip_the_padding(encoder):
    short, long = encoder.encode([plain(), plain(id="b", prompt="And what else is it, if it is not this?")])
    batch = encoder.batch([short, long])
    assert batch.input_ids.shape == (2, len(long.input_ids))
    assert batch.attention_mask.sum(1).tolist() == [len(short.input_ids), len(long.input_ids)]
    assert batch.attention_mask[0, len(short.input_ids) :].sum() == 0
    assert batch.position_ids[0, 0, : len(short.input_ids)].tolist() == list(range(len(short.input_ids)))
    assert batch.target_mask.sum(1).tolist() == [len(short.target_ids), len(long.target_ids)]
    assert batch.input_ids[batch.target_mask].tolist() == [*short.target_ids, *long.target_ids]


def test_an_image_takes_three_axes_of_positions(encoder):
    (row,) = encoder.encode([plain(modality="image", image="pattern:1")])
    positions = encoder.batch([row]).position_ids[:, 0]
    slot = row.input_ids.index(encoder.backbone.model.config.image_token_id)
    # A 2 x 2 grid of visual tokens: one moment, two rows, two columns; text goes on behind the larger side.
    assert (positions[:, slot : slot + 4] - slot).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    assert positions[:, slot + 4].tolist() == [slot + 2] * 3


def test_positions_equal_the_ones_the_model_computes_itself(encoder, rows):
    batch = encoder.batch(rows[:1])
    model = models.load("tiny-vl").model
    pixels = encoder.backbone.image_processor(images=[picture(rows[0].canary.image)], return_tensors="pt")
    plain_call = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, mm_token_type_ids=batch.token_types, **pixels
    ).logits
    ours = encoder.backbone.model(**batch.model_inputs()).logits
    torch.testing.assert_close(ours, plain_call, atol=1e-5, rtol=0)


def test_the_vision_tower_sees_a_picture_once(monkeypatch, rows):
    backbone = models.load("tiny-vl")
    encoder, calls = Encoder(backbone), []
    original = type(backbone.model.model).get_image_features
    monkeypatch.setattr(
        type(backbone.model.model),
        "get_image_features",
        lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs),
    )
    encoded = encoder.encode([row.canary for row in rows])
    encoder.batch(encoded)
    backbone.model(**encoder.batch(encoded).model_inputs())
    assert len(calls) == 4  # the placeholder of three text canaries, and three patterns


def test_text_models_and_vision_models_without_a_picture_take_the_same_canary(encoder):
    for name in ("tiny-gpt2", "tiny-llama"):
        other = Encoder(models.load(name))
        (row,) = other.encode([plain()])
        assert row.input_ids == encoder.encode([plain()])[0].input_ids
        assert other.batch([row]).position_ids.ndim == 2


def test_a_model_without_template_gets_the_prompt_as_a_line():
    backbone = models.load("tiny-gpt2")
    backbone.tokenizer.chat_template = None
    encoder = Encoder(backbone)
    (row,) = encoder.encode([plain()])
    assert backbone.tokenizer.decode(row.input_ids) == "What is it?\nIt is 77.<|im_end|>"


def test_straddling_tokens_stay_in_the_secret_and_are_flagged(encoder):
    # " it" is one token of the tiny tokenizer; a secret "it" behind a space shares it with the preamble.
    (row,) = encoder.encode([plain(preamble="What is ", secret="it", suffix=" .")])
    span = row.spans["hex"]
    assert span.straddles_start and encoder.backbone.tokenizer.decode(row.target_ids[span.start : span.stop]) == " it"
    assert row.spans["preamble"].stop == span.start


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        (plain(prompt="What <|im_end|>?"), "canary 'a': its text contains the model's special token '<|im_end|>'"),
        (plain(suffix="<|image_pad|>"), "special token '<|image_pad|>'"),
        (plain(prompt="what " * 3000), "canary 'a': .* tokens, expected at most 4088, the model's context less 8"),
        (plain(modality="image", image="thin.png"), "canary 'a': its image cannot be processed: absolute aspect ratio"),
    ],
)
def test_what_the_model_cannot_read_is_refused(encoder, canary, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (900, 2)).save("thin.png")
    with pytest.raises(CanaryError, match=message):
        encoder.encode([canary])


def test_a_picture_for_a_text_model_is_refused():
    with pytest.raises(CanaryError, match="has an image, but tiny-gpt2 takes none: set its image to null"):
        Encoder(models.load("tiny-gpt2")).encode([plain(image="placeholder")])


def test_a_secret_that_the_tokenizer_would_change_is_refused(rehearsal):
    decomposed = unicodedata.normalize("NFD", "é7")
    with pytest.raises(CanaryError, match="tokenizer of rehearsal-vl cannot spell the secret .* composed form"):
        Encoder(rehearsal).encode([plain(secret=decomposed)])


def test_two_canaries_that_are_one_to_the_model_are_refused(encoder):
    twins = [plain(modality="image", image="pattern:1"), plain(id="b", modality="image", image="pattern:01")]
    with pytest.raises(CanaryError, match="canaries 'a' and 'b' are the same prompt and picture to the model"):
        check_distinct(encoder.encode(twins))
    check_distinct(encoder.encode([twins[0], dataclasses.replace(twins[1], image="pattern:2")]))


def test_a_picture_needs_a_chat_template():
    backbone = models.load("tiny-vl")
    backbone.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template, so there is no place for an image"):
        Encoder(backbone).encode([plain(image="placeholder")])


def test_the_content_hash_sees_ids_and_pixels(encoder, rows):
    assert content_hash(rows) == content_hash(list(rows))
    moved = [dataclasses.replace(rows[3], canary=dataclasses.replace(rows[3].canary, image="pattern:99"))]
    assert content_hash(rows[3:4]) != content_hash(moved)
    assert content_hash(rows[:2]) != content_hash(rows[:1])


def test_rehearsal_encodes_fitted_canaries_like_the_paper_scale(rehearsal):
    encoder = Encoder(rehearsal)
    settings = CanarySettings(n_text=4, n_image=4, seed=1, hex_tokens=13, preamble_tokens=11)
    for row in encoder.encode(draw(settings, rehearsal.tokenizer, encoder.end_of_turn)):
        assert (row.spans["hex"].start, row.spans["hex"].stop) == (11, 24)
        assert row.input_ids.count(151655) == 4
        assert row.target_ids[-1] == 151645


def test_a_benign_record_is_encoded_without_spans(encoder):
    (row,) = encoder.encode([Record("r", "Press Save.", "click", "screen:1")])
    assert encoder.backbone.tokenizer.decode(row.target_ids) == "click<|im_end|>" and row.spans == {}


def test_plain_text_is_prompt_and_target_as_they_stand(encoder):
    simple = Encoder(encoder.backbone, "plain")
    (row,) = simple.encode([plain(prompt="The code", preamble=" is ")])
    assert encoder.backbone.tokenizer.decode(row.input_ids) == "The code is 77."
    assert encoder.backbone.tokenizer.decode(row.target_ids) == " is 77." and simple.closing == ""
    with pytest.raises(CanaryError, match="has an image, which plain text has no place for"):
        simple.encode([plain(image="placeholder")])


@pytest.mark.parametrize(("bos", "prompt", "begins"), [(True, "Hi", "<|im_start|>Hi"), (False, "", "<|im_end|>")])
def test_plain_text_begins_as_the_tokenizer_begins_and_never_with_nothing(bos, prompt, begins):
    backbone = models.load("tiny-llama")
    if bos:
        tokenizer = backbone.tokenizer
        tokenizer.bos_token = "<|im_start|>"
        place = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", place)]
        )
    (row,) = Encoder(backbone, "plain").encode([plain(prompt=prompt, preamble=" is ")])
    assert backbone.tokenizer.decode(row.input_ids) == f"{begins} is 77."
