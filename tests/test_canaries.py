"""Canaries are seeded, fitted, told apart, and survive a file; what cannot be tested is refused by name."""

import dataclasses
import json
import math

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lib import canaries, embedded, pictures
from lib.canaries import Canary, CanaryError
from lib.config import CanarySettings
from lib.spans import tokenize

EOT = "<|im_end|>"
FITTED = CanarySettings(n_text=20, n_image=20, seed=1, hex_tokens=13, preamble_tokens=11)


def canary(**changes):
    values = {
        "id": "a",
        "modality": "text",
        "prompt": "What is it?",
        "preamble": "It is ",
        "secret": "s3cr3t",
        "suffix": ".",
        "image": None,
    }
    return Canary(**values | changes)


def test_fitted_canaries_have_13_secret_tokens_behind_11_under_every_tokenizer(tokenizer):
    drawn = canaries.draw(FITTED, tokenizer, EOT)
    assert len(drawn) == 40
    assert [c.modality for c in drawn].count("image") == 20
    for one in drawn:
        span = canaries.secret_span(one, tokenizer, EOT)
        assert (span.start, span.stop, span.straddles) == (11, 24, False)
        assert len(one.secret) == 16 and set(one.secret) <= set(canaries.HEX_DIGITS)
        assert ("TEXTCAN-" if one.modality == "text" else "IMGCAN-") + one.secret + "-END" in one.target


def test_the_same_seed_gives_the_same_canaries_and_another_seed_none_of_them(tokenizer):
    secrets = {c.secret for c in canaries.draw(FITTED, tokenizer, EOT)}
    again = {c.secret for c in canaries.draw(FITTED, tokenizer, EOT)}
    others = {c.secret for c in canaries.draw(dataclasses.replace(FITTED, seed=2), tokenizer, EOT)}
    assert secrets == again and len(secrets) == 40
    assert not secrets & others


def test_more_canaries_keep_the_first_ones(tokenizer):
    few, many = (canaries.draw(dataclasses.replace(FITTED, n_text=n, n_image=0), tokenizer, EOT) for n in (5, 30))
    assert many[:5] == few


def test_without_fitting_secrets_keep_their_natural_length(tokenizer):
    natural = dataclasses.replace(FITTED, n_text=60, n_image=0, hex_tokens=None, preamble_tokens=None)
    lengths = {len(canaries.secret_span(c, tokenizer, EOT)) for c in canaries.draw(natural, tokenizer, EOT)}
    assert len(lengths) > 1


def test_an_impossible_layout_is_refused_with_what_is_possible(tokenizer):
    with pytest.raises(CanaryError, match=r"preamble_tokens: no text preamble has 40 tokens .* lengths are \["):
        canaries.draw(dataclasses.replace(FITTED, preamble_tokens=40), tokenizer, EOT)
    with pytest.raises(CanaryError, match="hex_tokens: only 0 of 2 secrets of the wanted token layout"):
        canaries.draw(dataclasses.replace(FITTED, n_text=2, hex_tokens=40), tokenizer, EOT)


def test_decoys_share_the_token_layout_and_nothing_else(tokenizer):
    first, second = canaries.draw(FITTED, tokenizer, EOT)[:2]
    decoys = canaries.decoys(first, 50, tokenizer, EOT, seed=3, taken=[second.secret])
    secrets = {decoy.secret for decoy in decoys}
    assert len(secrets) == 50 and first.secret not in secrets and second.secret not in secrets
    for decoy in decoys:
        assert (decoy.prompt, decoy.preamble, decoy.suffix) == (first.prompt, first.preamble, first.suffix)
        assert canaries.secret_span(decoy, tokenizer, EOT) == canaries.secret_span(first, tokenizer, EOT)
    assert decoys == canaries.decoys(first, 50, tokenizer, EOT, seed=3, taken=[second.secret])


def test_decoys_of_a_natural_secret_share_its_straddling():
    try:
        qwen = transformers.AutoTokenizer.from_pretrained(embedded.qwen_tokenizer_folder())
    except embedded.FetchError as error:
        pytest.skip(str(error))
    glued = canary(preamble="The code is TEXTCAN-", secret="ab34567890123456", suffix="-END")
    assert canaries.secret_span(glued, qwen, EOT).straddles_start
    for decoy in canaries.decoys(glued, 20, qwen, EOT, seed=0):
        assert canaries.secret_span(decoy, qwen, EOT).straddles_start
        assert len(tokenize(qwen, [decoy.target])[0][0]) == len(tokenize(qwen, [glued.target])[0][0])


def test_draw_statistics_count_what_fits(tokenizer):
    one = canaries.draw(FITTED, tokenizer, EOT)[0]
    found = canaries.draw_statistics(one, FITTED, tokenizer, EOT, draws=2000)
    assert 0.05 < found.acceptance < 0.25
    assert found.log2_candidates == pytest.approx(64 + math.log2(found.accepted / 2000))
    assert found.digit_share_all == pytest.approx(10 / 16, abs=0.02)
    everything = dataclasses.replace(FITTED, hex_tokens=None)
    assert canaries.draw_statistics(one, everything, tokenizer, EOT, draws=500).log2_candidates == 64


def test_a_model_without_images_gets_text_canaries_without_a_placeholder(tokenizer):
    texts = dataclasses.replace(FITTED, n_image=0)
    drawn = canaries.draw(texts, tokenizer, EOT, images=False)
    assert {one.image for one in drawn} == {None}
    assert [one.secret for one in drawn] == [one.secret for one in canaries.draw(texts, tokenizer, EOT)]
    with pytest.raises(CanaryError, match="canaries.n_image: got 20 for a model that takes no images, expected 0"):
        canaries.draw(FITTED, tokenizer, EOT, images=False)


def test_pictures_are_seeded_and_the_placeholder_is_uniform():
    assert pictures.picture("pattern:7").tobytes() == pictures.picture("pattern:7").tobytes()
    assert pictures.picture("pattern:7").tobytes() != pictures.picture("pattern:8").tobytes()
    assert pictures.picture("pattern:7").size == (56, 56)
    assert pictures.picture("placeholder").getcolors() == [(56 * 56, (128, 128, 128))]


TEXT = st.text(min_size=1, max_size=20).filter(lambda text: "\x00" not in text)


@settings(max_examples=60, deadline=None)
@given(prompt=TEXT, preamble=TEXT, secret=TEXT.filter(str.strip), suffix=TEXT)
def test_a_file_gives_back_exactly_what_was_written(tmp_path_factory, prompt, preamble, secret, suffix):
    one = canary(prompt=prompt, preamble=preamble, secret=secret, suffix=suffix)
    path = tmp_path_factory.mktemp("jsonl") / "canaries.jsonl"
    canaries.write(path, [one])
    if any(secret in part for part in (prompt, preamble, suffix)):
        with pytest.raises(CanaryError, match="occurs in its own"):
            canaries.read(path)
    else:
        assert canaries.read(path) == [one]


def test_image_paths_are_taken_from_the_files_own_folder(tmp_path):
    Image.new("RGB", (60, 60), "red").save(tmp_path / "red.png")
    canaries.write(tmp_path / "c.jsonl", [canary(modality="image", image="red.png")])
    (read,) = canaries.read(tmp_path / "c.jsonl")
    assert read.image == str(tmp_path / "red.png")
    assert pictures.picture(read.image).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([canary(), canary(prompt="Other?")], "canary 'a': this id occurs twice"),
        ([canary(secret="")], "canary 'a': the secret is '', expected at least one visible character"),
        ([canary(secret=" ")], "the secret is ' ', expected at least one visible character"),
        ([canary(prompt="Is it s3cr3t?")], "canary 'a': the secret 's3cr3t' occurs in its own prompt"),
        ([canary(preamble="It is s3cr3t: ")], "occurs in its own preamble"),
        ([canary(), canary(id="b", secret="other")], "canary 'b': has the prompt and image of canary 'a'"),
        ([canary(modality="image")], "canary 'a': an image canary needs an image"),
        ([canary(image="missing.png")], "canary 'a': image file '.*missing.png' does not exist"),
        ([canary(image="pattern:x")], "got image 'pattern:x', expected pattern:<seed>"),
        ([canary(modality="sound")], "line 1: modality is 'sound', expected 'text' or 'image'"),
        ([], "no canaries: expected at least one"),
    ],
)
def test_canaries_that_cannot_be_tested_are_refused_by_name(tmp_path, records, message):
    canaries.write(tmp_path / "c.jsonl", records)
    with pytest.raises(CanaryError, match=message):
        canaries.read(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", "c.jsonl, line 1: not a JSON object"),
        (b"\n[1, 2]", "c.jsonl, line 2: got .1, 2., expected a JSON object"),
        (b'{"id": "a"}', "line 1: got the keys .'id'., expected exactly id, modality, prompt"),
        (b'{"id": "\xff"}', "byte 8 is not UTF-8"),
        (json.dumps(dataclasses.asdict(canary()) | {"secret": 12}).encode(), "line 1: secret is 12, expected a string"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path, content, message):
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(CanaryError, match=message):
        canaries.read(tmp_path / "c.jsonl")


def test_a_broken_image_is_refused_by_name(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n truncated")
    canaries.write(tmp_path / "c.jsonl", [canary(modality="image", image="broken.png")])
    with pytest.raises(CanaryError, match="canary 'a': .*broken.png' is not a readable image"):
        canaries.read(tmp_path / "c.jsonl")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CanaryError, match="nowhere.jsonl does not exist"):
        canaries.read(tmp_path / "nowhere.jsonl")
