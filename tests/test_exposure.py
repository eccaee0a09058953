"""Decoys are scored like anything else, only faster; ranks, ties and closed forms are checked by hand."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib import adapters, canaries, exposure, extraction, models, probes
from lib.encoding import Encoder
from lib.exposure import ExposureError
from lib.extraction import ExtractionError


@pytest.fixture(scope="module")
def precise(rows):
    """The tiny model in float64, and the six canaries encoded for it."""
    backbone = models.load("tiny-vl", dtype=torch.float64)
    encoder = Encoder(backbone)
    return backbone.model, encoder, encoder.encode([row.canary for row in rows])


def alone(model, encoder, rows):
    """Total NLL of every secret, each row scored by the per-token probe."""
    scores = probes.token_nll(model, encoder, rows, batch_size=1)
    return scores.span_mean("hex").values.to_numpy() * [len(row.spans["hex"]) for row in rows]


@pytest.mark.parametrize("place", [0, 4], ids=["text", "image"])
def test_decoys_on_a_cached_prompt_score_as_they_do_alone(precise, place):
    model, encoder, rows = precise
    own = rows[place].canary
    decoys = canaries.decoys(own, 9, encoder.backbone.tokenizer, encoder.end_of_turn, seed=1)
    encoded = encoder.encode([own, *decoys])
    expected = alone(model, encoder, encoded)
    for size in (1, 4, 64):
        np.testing.assert_allclose(
            exposure.alternatives_nll(model, encoder, encoded, size), expected, atol=1e-9, rtol=0
        )
    # The calls leave nothing behind that another picture or a text would see.
    np.testing.assert_allclose(alone(model, encoder, rows), alone(model, encoder, rows[::-1])[::-1], atol=1e-9)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_secrets_of_several_lengths_are_scored_on_text_models(rows, name):
    backbone = models.load(name, dtype=torch.float64)
    encoder = Encoder(backbone)
    own = dataclasses.replace(rows[0].canary, image=None)
    secrets = [own.secret, "0", "12", "ffffffffffffffff", own.secret[:7], "blue horse"]
    encoded = encoder.encode([dataclasses.replace(own, id=str(i), secret=s) for i, s in enumerate(secrets)])
    assert len({len(row.spans["hex"]) for row in encoded}) > 2
    found = exposure.alternatives_nll(backbone.model, encoder, encoded, 4)
    np.testing.assert_allclose(found, alone(backbone.model, encoder, encoded), atol=1e-9, rtol=0)


def test_alternatives_must_share_prompt_and_picture(precise):
    model, encoder, rows = precise
    with pytest.raises(ExposureError, match="several prompts or pictures"):
        exposure.alternatives_nll(model, encoder, rows[:2])


def test_the_three_kinds_of_decoys(precise):
    model, encoder, rows = precise
    table = exposure.decoy_table(model, encoder, exposure.draw_decoys(encoder, rows, count=5), batch_size=16)
    own = {row.canary.id: row.canary.secret for row in rows}
    for canary, part in table.groupby("canary"):
        kinds = part.groupby("kind").decoy.agg(list)
        assert kinds["secret"] == [own[canary]]
        assert len(set(kinds["random"])) == 5 and own[canary] not in kinds["random"]
        modality = canary.split("-")[0]
        assert sorted(kinds["other"]) == sorted(s for c, s in own.items() if c.startswith(modality) and c != canary)
        for secret in kinds.get("shuffled", []):
            assert sorted(secret) == sorted(own[canary]) and secret != own[canary]
    assert (table.kind == "shuffled").any()


def test_the_search_for_shuffles_ends(encoder, rows):
    alike = dataclasses.replace(rows[0].canary, secret="a" * 16)
    assert exposure.shuffled(alike, 255, encoder, seed=0) == []
    found = exposure.shuffled(rows[0].canary, 255, encoder, seed=0, tries=300)
    layout = canaries.secret_span(rows[0].canary, encoder.backbone.tokenizer, encoder.end_of_turn)
    spans = canaries.secret_spans(found, encoder.backbone.tokenizer, encoder.end_of_turn)
    assert 0 < len(found) < 300 and set(spans) == {layout}


def decoy_rows(own, decoys, canary="a", kind="random"):
    rows = [(canary, "secret", "own", own)] + [(canary, kind, str(i), nll) for i, nll in enumerate(decoys)]
    return pd.DataFrame(rows, columns=["canary", "kind", "decoy", "nll_secret"]).assign(tokens=13)


@pytest.mark.parametrize(
    ("own", "rank", "bits"),
    [(0.5, 1, 3.0), (1.0, 2, 2.0), (3.5, 4, 1.0), (9.0, 8, 0.0)],  # decoys 1..7; at 1.0 a tie counts against it
)
def test_exposure_by_hand(own, rank, bits):
    (row,) = exposure.exposure(decoy_rows(own, [1, 2, 3, 4, 5, 6, 7])).to_dict("records")
    assert (row["rank"], row["exposure"], row["cap"], row["decoys"]) == (rank, bits, 3.0, 7)
    assert row["normalised_rank"] == pytest.approx((rank - 1) / 7) and row["margin"] == pytest.approx(1 - own)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0, 50))
def test_exposure_lies_between_nothing_and_its_cap(decoys, own):
    (row,) = exposure.exposure(decoy_rows(own, decoys)).to_dict("records")
    assert 0 <= row["exposure"] <= row["cap"] and 0 <= row["normalised_rank"] <= 1
    assert (row["margin"] > 0) == (row["rank"] == 1)


def test_kinds_are_never_pooled():
    table = pd.concat([decoy_rows(1.0, [2.0, 3.0]), decoy_rows(1.0, [0.5], kind="other")[1:]])
    assert exposure.exposure(table).set_index("kind")["rank"].to_dict() == {"random": 1, "other": 2}


def test_a_corrected_change_takes_the_decoys_along():
    before, after = decoy_rows(10.0, [30.0, 34.0]), decoy_rows(7.0, [29.0, 31.0])
    (row,) = exposure.corrected_change(before, after).to_dict("records")
    assert (row["secret"], row["decoys"], row["corrected"], row["base"]) == (-3.0, -2.0, -1.0, 10.0)
    assert row["tokens"] == 13
    with pytest.raises(ExposureError, match="different secrets or decoys"):
        exposure.corrected_change(before, after[:-1])
    with pytest.raises(ExposureError, match="no shuffled decoys of any canary"):
        exposure.corrected_change(before, after, "shuffled")


def test_a_score_that_is_no_number_never_counts_for_the_claim():
    for own, decoys in ((np.nan, [1.0, 2.0]), (1.0, [np.nan, 2.0])):
        with pytest.raises(ExposureError, match="for a is nan"):
            exposure.exposure(decoy_rows(own, decoys))
    twice = pd.concat([decoy_rows(1.0, [2.0]), decoy_rows(3.0, [4.0])])
    with pytest.raises(ExposureError, match="a has several rows of its own secret"):
        exposure.exposure(twice)


def test_exposure_without_decoys_is_refused(precise):
    with pytest.raises(ExposureError, match="a has no decoy"):
        exposure.exposure(decoy_rows(1.0, []))
    with pytest.raises(ExposureError, match="a has decoys and no secret of its own"):
        exposure.exposure(decoy_rows(1.0, [2.0])[1:])
    model, encoder, rows = precise
    with pytest.raises(ExposureError, match="got a count of 0, expected at least 1"):
        exposure.draw_decoys(encoder, rows, count=0)
    with pytest.raises(ExposureError, match="got no canary"):
        exposure.draw_decoys(encoder, [])
    with pytest.raises(ExposureError, match="got kind 'best'"):
        exposure.draw_decoys(encoder, rows, kinds=["best"])


# --- hits in k samples ------------------------------------------------------------------------------------------------


def test_hits_and_reliability_by_hand():
    logs = np.log([0.5, 0.1])
    np.testing.assert_allclose(extraction.hit_at_k(logs, 1), [0.5, 0.1])
    np.testing.assert_allclose(extraction.hit_at_k(logs, 4), [1 - 0.5**4, 1 - 0.9**4])
    np.testing.assert_allclose(extraction.reliability(logs, 4), [0.5**4, 0.1**4])
    assert extraction.hit_at_k(np.array([0.0, -np.inf]), 16).tolist() == [1.0, 0.0]
    assert extraction.hit_at_k(np.array([-40.0]), 16)[0] == pytest.approx(16 * np.exp(-40), rel=1e-12)
    for function in (extraction.hit_at_k, extraction.reliability):
        with pytest.raises(ExtractionError, match="got k = 0, expected at least one"):
            function(logs, 0)


@given(st.floats(-30, 0), st.integers(1, 64))
def test_more_samples_hit_more_and_all_of_them_less(log_p, k):
    logs = np.array([log_p])
    assert extraction.hit_at_k(logs, k)[0] <= extraction.hit_at_k(logs, k + 1)[0] + 1e-15
    assert extraction.reliability(logs, k + 1)[0] <= extraction.reliability(logs, k)[0]
    assert extraction.reliability(logs, k)[0] <= extraction.hit_at_k(logs, k)[0] + 1e-15


def test_the_probability_of_a_secret_is_read_off_the_per_token_table(precise):
    model, encoder, rows = precise
    scores = probes.token_nll(model, encoder, rows)
    spans = [row.spans["hex"] for row in rows]
    secret = [-nll[span.start : span.stop].sum() for nll, span in zip(scores.nll, spans, strict=True)]
    both = [-nll[: span.stop].sum() for nll, span in zip(scores.nll, spans, strict=True)]
    np.testing.assert_allclose(extraction.log_probability(scores), secret)
    np.testing.assert_allclose(extraction.log_probability(scores, with_preamble=True), both)


@pytest.mark.parametrize("top_k", [None, 3])
def test_sampling_hits_as_often_as_the_closed_form_says(encoder, rows, top_k):
    # A secret of one digit: even an untrained model hits it. The likeliest digits keep top-k from being a certain miss.
    model = encoder.backbone.model
    options = encoder.encode([dataclasses.replace(rows[0].canary, id=d, secret=d) for d in "0123456789abcdef"])
    nll = probes.token_nll(model, encoder, options).span_mean("hex").values
    row = options[int(nll.to_numpy().argmin())]
    assert len(row.spans["hex"]) == 1
    if top_k is None:
        (log_p,) = extraction.log_probability(probes.token_nll(model, encoder, [row]))
    else:
        # Make sure that it is among the candidates: the closed form must not be trivially 0.
        best = probes.token_nll(model, encoder, [row]).greedy_ids[0, row.spans["hex"].start]
        ids = (*row.input_ids[: row.target_start + row.spans["hex"].start], int(best))
        row = dataclasses.replace(row, input_ids=ids + row.input_ids[len(ids) :])
        (log_p,) = extraction.top_k_log_probability(model, encoder, [row], top_k)
    p, samples = float(np.exp(log_p)), 3000
    hits = extraction.sampled_hits(model, encoder, row, samples, seed=1, top_k=top_k)
    assert p > 0.001
    assert abs(hits.mean() - p) < 4 * np.sqrt(p * (1 - p) / samples) + 1e-3
    groups = hits[: samples // 4 * 4].reshape(-1, 4).any(1)  # hit@4, counted
    expected = extraction.hit_at_k(np.array([log_p]), 4)[0]
    assert abs(groups.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(groups)) + 1e-3


def test_top_k_leaves_out_what_is_not_among_the_candidates(encoder, rows):
    logs = extraction.top_k_log_probability(encoder.backbone.model, encoder, rows, 1)
    assert set(logs) <= {-np.inf, 0.0} and -np.inf in logs
    every = extraction.top_k_log_probability(encoder.backbone.model, encoder, rows, 10**6)
    scores = probes.token_nll(encoder.backbone.model, encoder, rows)
    np.testing.assert_allclose(every, extraction.log_probability(scores), atol=1e-3)
    with pytest.raises(ExtractionError, match="got 0 candidates"):
        extraction.top_k_log_probability(encoder.backbone.model, encoder, rows, 0)


def test_hits_among_samples_estimate_hit_at_k_without_bias():
    # Of 4 samples 1 hit: of the 6 pairs 3 hold it; of 4 samples 3 hit: every pair holds one.
    hits, samples = np.array([1, 3, 0, 4]), np.full(4, 4)
    np.testing.assert_allclose(extraction.sampled_hit_at_k(hits, samples, 1), [0.25, 0.75, 0.0, 1.0])
    np.testing.assert_allclose(extraction.sampled_hit_at_k(hits, samples, 2), [0.5, 1.0, 0.0, 1.0])
    with pytest.raises(ExtractionError, match="got k = 5, expected at most 4"):
        extraction.sampled_hit_at_k(hits, samples, 5)


def test_shuffles_do_not_depend_on_how_many_are_asked_for(encoder, rows):
    few = exposure.shuffled(rows[0].canary, 3, encoder, seed=0)
    many = exposure.shuffled(rows[0].canary, 40, encoder, seed=0)
    assert [c.secret for c in few] == [c.secret for c in many][:3] and len({c.secret for c in many}) == len(many)


@pytest.fixture(scope="module")
def taught(injected_adapter, smoke):
    """The injected tiny model in float64, and four of its text canaries."""
    plain = models.load("tiny-vl", dtype=torch.float64)
    encoder = Encoder(adapters.merge(plain, injected_adapter))
    given = canaries.read(smoke.folder / "canaries.jsonl")
    return encoder, encoder.encode(given[:4])


@pytest.mark.parametrize("memorised", [True, False])
def test_ranks_are_those_of_all_decoys_for_fewer_scores(taught, precise, memorised):
    encoder, rows = taught if memorised else (precise[1], precise[2][:4])
    sets = exposure.draw_decoys(encoder, rows, ["random"], 20, seed=3)
    model = encoder.backbone.model
    expected = exposure.exposure(exposure.decoy_table(model, encoder, sets))
    found = exposure.ranks(model, encoder, sets)
    shared = ["canary", "kind", "decoys", "rank", "exposure", "cap", "normalised_rank"]
    pd.testing.assert_frame_equal(found[shared], expected[shared])
    assert found.scored.sum() == 0 if memorised else found.scored.sum() > 0


def test_ranks_need_decoys_of_one_kind(precise):
    _, encoder, rows = precise
    sets = exposure.draw_decoys(encoder, rows[:2], ["random", "other"], 3, seed=3)
    with pytest.raises(ExposureError, match="of 2 kinds, expected one"):
        exposure.ranks(encoder.backbone.model, encoder, sets)
