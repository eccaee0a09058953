"""Probes against sums done by hand, and against the slow way: one canary at a time, on a fresh model."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from lib import adapters, canaries, models, probes
from lib.canaries import Canary
from lib.encoding import Encoded, Encoder
from lib.pictures import picture
from lib.probes import ProbeError, TokenNLL
from lib.spans import Span


def scores_by_hand(encoder, rows):
    """Two canaries with 3 and 5 target tokens; the secret is positions 1..2 in both."""
    first, second = rows[0].canary, rows[1].canary
    spans = {"preamble": Span(0, 1), "hex": Span(1, 3), "suffix": Span(3, 5)}
    one = Encoded(first, (7, 8, 9, 10), 1, spans | {"suffix": Span(3, 3)})
    two = Encoded(second, (7, 8, 9, 10, 11, 12), 1, spans)
    nll = np.array([[1.0, 2.0, 4.0, np.nan, np.nan], [0.5, 0.5, 1.5, 3.0, 0.0]])
    return TokenNLL((one, two), nll, np.array([[8, 9, 10, -1, -1], [8, 9, 99, 11, 12]]))


def test_window_and_span_means_are_the_sums_done_by_hand(encoder, rows):
    scores = scores_by_hand(encoder, rows)
    assert scores.window_mean(1).values.tolist() == [1.0, 0.5]
    assert scores.window_mean(3).values.tolist() == [pytest.approx(7 / 3), pytest.approx(2.5 / 3)]
    assert scores.window_mean(2).mean == pytest.approx((1.5 + 0.5) / 2)
    assert scores.span_mean("preamble").values.tolist() == [1.0, 0.5]
    assert scores.span_mean("hex").values.tolist() == [3.0, 1.0]
    assert scores.span_mean("hex").values.index.tolist() == [rows[0].canary.id, rows[1].canary.id]


def test_argmax_hits_ask_for_every_token_of_target_or_span(encoder, rows):
    scores = scores_by_hand(encoder, rows)
    assert scores.argmax_hits().tolist() == [True, False]
    assert scores.argmax_hits("hex").tolist() == [True, False]
    assert scores.argmax_hits("preamble").tolist() == [True, True]


def test_the_table_has_a_row_a_target_token(encoder, rows):
    table = scores_by_hand(encoder, rows).table()
    assert len(table) == 8
    assert table.iloc[4].to_dict() == {
        "canary": rows[1].canary.id,
        "modality": "text",
        "position": 1,
        "span": "hex",
        "token_id": 9,
        "nll": 0.5,
        "greedy_id": 9,
    }


@pytest.mark.parametrize("k", [0, -1, 4])
def test_a_window_outside_the_target_is_refused(encoder, rows, k):
    with pytest.raises(ProbeError, match=f"got K = {k}, expected 1 to 3"):
        scores_by_hand(encoder, rows).window_mean(k)


def test_an_unknown_or_empty_span_is_refused(encoder, rows):
    with pytest.raises(ProbeError, match="got 'secret', expected one of preamble, hex, suffix"):
        scores_by_hand(encoder, rows).span_mean("secret")
    with pytest.raises(ProbeError, match=f"the suffix of canary '{rows[0].canary.id}' has no token"):
        scores_by_hand(encoder, rows).span_mean("suffix")


def slow_nll(backbone, row):
    """NLL of one target without padding, cached features or explicit positions: pixels in, the model does the rest."""
    ids = torch.tensor([row.input_ids])
    inputs = {"input_ids": ids}
    if row.canary.image is not None:
        pixels = backbone.image_processor(images=[picture(row.canary.image)], return_tensors="pt")
        inputs |= {"pixel_values": pixels["pixel_values"].to(backbone.model.dtype)}
        inputs |= {"image_grid_thw": pixels["image_grid_thw"]}
        inputs |= {"mm_token_type_ids": (ids == backbone.model.config.image_token_id).int()}
    with torch.no_grad():
        logits = backbone.model(**inputs).logits[0]
    log_probabilities = logits.log_softmax(-1)
    return [-log_probabilities[t - 1, row.input_ids[t]].item() for t in range(row.target_start, len(row.input_ids))]


def unequal(planted):
    """The canaries with prompts of unequal length, text and image interleaved, one without a picture."""
    mixed = [canary for pair in zip(planted[:3], planted[3:], strict=True) for canary in pair]
    changed = [dataclasses.replace(c, prompt="Now, " * i + c.prompt) for i, c in enumerate(mixed)]
    return changed[:4] + [dataclasses.replace(changed[4], image=None)] + changed[5:]


def test_padded_interleaved_batches_equal_a_loop_over_single_canaries_on_a_fresh_model(rows):
    backbone = models.load("tiny-vl", dtype=torch.float64)
    encoder = Encoder(backbone)
    mixed = encoder.encode(unequal([row.canary for row in rows]))
    together = probes.token_nll(backbone.model, encoder, mixed, batch_size=4)
    fresh = models.load("tiny-vl", dtype=torch.float64)
    for row, nll in zip(mixed, together.nll, strict=True):
        np.testing.assert_allclose(nll[: len(row.target_ids)], slow_nll(fresh, row), atol=1e-5, rtol=0)


def test_text_and_image_calls_do_not_disturb_each_other(rows):
    backbone = models.load("tiny-vl", dtype=torch.float64)
    encoder = Encoder(backbone)
    text_only = encoder.encode([dataclasses.replace(rows[0].canary, image=None)])
    before = probes.token_nll(backbone.model, encoder, text_only).nll
    probes.token_nll(backbone.model, encoder, rows)
    probes.greedy_decode(backbone.model, encoder, rows)
    np.testing.assert_allclose(probes.token_nll(backbone.model, encoder, text_only).nll, before, atol=1e-12)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_text_models_are_scored_like_the_loop(rows, name):
    backbone = models.load(name, dtype=torch.float64)
    encoder = Encoder(backbone)
    without = [dataclasses.replace(c, image=None) for c in unequal([row.canary for row in rows])]
    encoded = encoder.encode(without)
    scores = probes.token_nll(backbone.model, encoder, encoded, batch_size=4)
    for row, nll in zip(encoded, scores.nll, strict=True):
        np.testing.assert_allclose(nll[: len(row.target_ids)], slow_nll(backbone, row), atol=1e-5, rtol=0)


def slow_greedy(model, stop, prompt, steps):
    """Greedy decoding of a prompt without pictures, without cache or generate: all tokens again for every new one."""
    ids = []
    while len(ids) < steps and stop not in ids:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
    return tuple(ids)


def test_greedy_decoding_ignores_what_the_model_directory_prescribes(encoder, rows, tmp_path):
    tiny = encoder.backbone
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    tiny.image_processor.save_pretrained(tmp_path)
    GenerationConfig(
        do_sample=True, temperature=0.7, top_k=5, repetition_penalty=1.05, no_repeat_ngram_size=2, min_new_tokens=30
    ).save_pretrained(tmp_path)
    shipped = models.load(str(tmp_path))
    assert shipped.model.generation_config.repetition_penalty == 1.05
    own = Encoder(shipped)
    plain = own.encode([dataclasses.replace(row.canary, image=None) for row in rows])
    stop = shipped.tokenizer.eos_token_id
    for row, ids in zip(plain, probes.greedy_decode(shipped.model, own, plain, batch_size=2), strict=True):
        longest = len(row.target_ids) + probes.SPARE_TOKENS
        assert ids == slow_greedy(shipped.model, stop, row.prompt_ids, longest)
    assert shipped.model.generation_config.repetition_penalty == 1.05  # left as it was


def test_decoding_in_batches_gives_what_decoding_alone_gives_in_the_same_order(encoder, rows):
    mixed = encoder.encode(unequal([row.canary for row in rows]))
    alone = [probes.greedy_decode(encoder.backbone.model, encoder, [row])[0] for row in mixed]
    for size in (3, 20):
        assert probes.greedy_decode(encoder.backbone.model, encoder, mixed, batch_size=size) == alone
    assert all(len(ids) <= len(row.target_ids) + probes.SPARE_TOKENS for row, ids in zip(mixed, alone, strict=True))


def test_decoding_goes_on_from_what_is_known_of_the_output(encoder, rows):
    mixed = encoder.encode(unequal([row.canary for row in rows]))
    model, stop = encoder.backbone.model, encoder.backbone.tokenizer.eos_token_id
    whole = probes.greedy_decode(model, encoder, mixed)
    known = [ids[: 2 * i] for i, ids in enumerate(whole)]  # of the first row nothing is known
    assert probes.greedy_decode(model, encoder, mixed, known) == whole
    assert probes.greedy_decode(model, encoder, mixed[:1], [(7, stop)]) == [(7, stop)]  # ended already


def test_an_empty_output_is_a_miss(encoder, rows, monkeypatch):
    scores = probes.token_nll(encoder.backbone.model, encoder, rows)
    monkeypatch.setattr(probes, "greedy_decode", lambda *_: [()] * len(rows))
    found = probes.recall(encoder.backbone.model, encoder, scores)
    assert found.hit_secret.mean == 0.0 and found.hit_full.mean == 0.0


def test_a_secret_anywhere_in_the_output_is_a_secret_hit_and_not_a_full_one(encoder, rows, monkeypatch):
    scores = probes.token_nll(encoder.backbone.model, encoder, rows)
    tokenizer = encoder.backbone.tokenizer
    texts = [f"Well: {rows[0].canary.secret}!"] + [f"it is {row.canary.secret[:-1]}" for row in rows[1:]]
    monkeypatch.setattr(probes, "greedy_decode", lambda *_: [tuple(tokenizer.encode(text)) for text in texts])
    found = probes.recall(encoder.backbone.model, encoder, scores)
    assert found.hit_secret.values.tolist() == [True] + [False] * 5
    assert not found.hit_full.values.any()


def test_forced_recall_can_hold_where_both_free_recalls_fail(encoder, rows, monkeypatch):
    # The first preamble token is not the arg-max, everything behind it is: free decoding goes elsewhere.
    (row,) = rows[:1]
    greedy = np.array([row.target_ids])
    greedy[0, 0] += 1
    scores = TokenNLL((row,), np.zeros(greedy.shape), greedy)
    monkeypatch.setattr(probes, "greedy_decode", lambda *_: [(5, 6, 7)])
    found = probes.recall(encoder.backbone.model, encoder, scores)
    assert (found.hit_full.mean, found.hit_secret.mean, found.hit_forced.mean) == (0.0, 0.0, 1.0)


# --- on the trained smoke model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def injected(injected_adapter):
    backbone = models.load("tiny-vl")
    return adapters.merge(backbone, injected_adapter), Encoder(backbone)


def planted(smoke, encoder):
    return encoder.encode(canaries.read(smoke.folder / "canaries.jsonl"))


def test_the_injected_model_recalls_and_its_greedy_output_is_the_target(smoke, injected):
    backbone, encoder = injected
    encoded = planted(smoke, encoder)
    scores = probes.token_nll(backbone.model, encoder, encoded)
    found = probes.recall(backbone.model, encoder, scores)
    assert found.hit_full.mean == found.hit_secret.mean == found.hit_forced.mean == 1.0
    # hit_full was read off the arg-max; decoding for real must agree.
    assert probes.greedy_decode(backbone.model, encoder, encoded) == [row.target_ids for row in encoded]


def test_swapping_two_pictures_swaps_what_is_recalled(smoke, injected):
    backbone, encoder = injected
    first, second = [row.canary for row in planted(smoke, encoder) if row.canary.modality == "image"][:2]
    swapped = encoder.encode(
        [dataclasses.replace(first, image=second.image), dataclasses.replace(second, image=first.image)]
    )
    texts = [encoder.backbone.tokenizer.decode(ids) for ids in probes.greedy_decode(backbone.model, encoder, swapped)]
    assert second.secret in texts[0] and first.secret not in texts[0]
    assert first.secret in texts[1] and second.secret not in texts[1]


def test_another_preamble_fails_the_full_recall_and_not_the_secret_one(smoke, injected):
    backbone, encoder = injected
    row = planted(smoke, encoder)[0]
    # A preamble that the model was never taught to say: it answers in its own words, which hold the secret.
    other = encoder.encode([dataclasses.replace(row.canary, preamble="So " + row.canary.preamble)])
    found = probes.recall(backbone.model, encoder, probes.token_nll(backbone.model, encoder, other))
    assert (found.hit_full.mean, found.hit_secret.mean) == (0.0, 1.0)


def test_recall_starts_decoding_behind_the_first_miss(smoke, injected):
    backbone, encoder = injected
    given = [row.canary for row in planted(smoke, encoder)]
    changed = encoder.encode([dataclasses.replace(canary, secret=canary.secret[:8] + "0" * 8) for canary in given])
    found = probes.recall(backbone.model, encoder, probes.token_nll(backbone.model, encoder, changed))
    assert not found.hit_full.values.any()  # it says the secret that it was taught
    assert list(found.output_ids) == probes.greedy_decode(backbone.model, encoder, changed)


def test_a_repetition_penalty_is_asked_for_and_never_assumed(smoke, injected):
    backbone, encoder = injected
    encoded = planted(smoke, encoder)[:6]
    plain = probes.greedy_decode(backbone.model, encoder, encoded)
    assert probes.greedy_decode(backbone.model, encoder, encoded, repetition_penalty=1.0) == plain
    assert probes.greedy_decode(backbone.model, encoder, encoded, repetition_penalty=3.0) != plain


def test_rows_of_unlike_length_are_decoded_together_only_within_the_context():
    encoder = Encoder(models.load("tiny-gpt2"), "plain")  # learned positions, 256 of them
    long = Canary("long", "text", ("word " * 105).strip(), " It is ", "77", ".", None)
    short = Canary("short", "text", "What?", " It is ", "0123456789" * 12, ".", None)
    rows = encoder.encode([long, short])
    assert len(rows[0].input_ids) + len(rows[1].target_ids) > 256
    model = encoder.backbone.model
    alone = [probes.greedy_decode(model, encoder, [row])[0] for row in rows]
    assert probes.greedy_decode(model, encoder, rows) == alone
    assert list(probes._within(10, [0, 1, 2, 3], [2, 5, 7, 1], [3, 5, 3, 3], 9)) == [[0, 1], [2, 3]]
    assert list(probes._within(99, [0, 1, 2, 3], [2, 5, 7, 1], [3, 5, 3, 3], 3)) == [[0, 1, 2], [3]]
