"""Defended states: how each channel is compared with candidates, what every attacker makes of it, and what it costs."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from lib import models
from lib.inversion import attackers, channels, defences, fitting, proposer, verified
from lib.inversion.channels import Sighting, named
from lib.inversion.defences import Pool
from lib.inversion.reader import Convention, InversionError, Reader

GENERATOR = torch.Generator()


@pytest.fixture(scope="module")
def reader():
    return Reader(models.load("tiny-llama", dtype=torch.float64))


@pytest.fixture(scope="module")
def own(reader):
    ids = torch.randint(1024, (20, 64), generator=torch.Generator().manual_seed(1))
    return proposer.Proposer(reader, fitting.fit(reader, ids[:, :40].reshape(-1, 2)), fitting.fit(reader, ids))


def drawn(prompts, tokens, seed=0):
    return torch.randint(1024, (prompts, tokens), generator=torch.Generator().manual_seed(seed))


def seen(row, before=(), known=()):
    rows = torch.tensor([*before, row], dtype=torch.float64)
    return Sighting(rows, torch.tensor(known, dtype=torch.float64).reshape(-1, rows.shape[1]))


def misfit(name, sighting, *states):
    return named(name).misfit(sighting, torch.tensor(states, dtype=torch.float64)).tolist()


# Channels as attackers see them


def test_public_channels_are_applied_to_candidates():
    assert misfit("clean", seen([1.0, 2.0]), [1.0, 2.0], [0.0, 4.0]) == [0.0, 5.0]
    assert misfit("clipped 1", seen([1.0, 1.0]), [1.0, 1.0]) == [0.0]
    # 2 bits are the three steps -m, 0, m: what differs by less than half a step is one and the same
    assert misfit("2-bit", seen([4.0, 0.0]), [4.0, 1.9], [4.0, 2.1]) == [0.0, 16.0]
    assert misfit("top 0.5", seen([4.0, 0.0]), [4.0, 3.0], [4.5, 3.0]) == [0.0, 0.25]


def test_noise_is_judged_by_its_likelihood():
    # Gaussian: |y - h|^2 / 2 s^2 + d log s with s = sigma rms(h); rms of (3, 4) is sqrt(12.5)
    width = 0.5 * 12.5**0.5
    assert misfit("gaussian 0.5", seen([3.0, 5.0]), [3.0, 4.0])[0] == pytest.approx(
        1 / (2 * width**2) + 2 * np.log(width)
    )
    assert misfit("laplace 0.5", seen([2.0, 5.0]), [3.0, 4.0])[0] == pytest.approx(2 / width + 2 * np.log(width))
    # cut to norm 1, (3, 4) is (0.6, 0.8)
    assert misfit("private 1 2", seen([0.6, 1.8]), [3.0, 4.0])[0] == pytest.approx(1 / 8)
    for name in ("gaussian 0.5", "laplace 0.5", "private 1 2"):
        y, h = torch.tensor([2.0, 5.0]), torch.tensor([[3.0, 4.0], [1.0, 7.0]])
        found = named(name).misfit(Sighting(y[None], y[:0, None]), h)
        spread = {"gaussian": stats.norm, "laplace": stats.laplace, "private": stats.norm}[name.split()[0]]
        held = h / h.norm(dim=-1, keepdim=True) if name.startswith("private") else h
        widths = [2.0, 2.0] if name.startswith("private") else [0.5 * float(row.square().mean().sqrt()) for row in h]
        true = [-spread.logpdf(y, row, width).sum() for row, width in zip(held, widths, strict=True)]
        assert float(found[1] - found[0]) == pytest.approx(true[1] - true[0], abs=1e-5)
        assert named(name).likelihood


def test_dropout_leaves_the_rest_exact():
    assert misfit("dropout 0.5", seen([6.0, 0.0]), [3.0, 9.0], [3.5, 0.0]) == [0.0, 0.25]


def test_keys_leave_invariants():
    assert misfit("permuted", seen([1.0, 3.0, 2.0]), [3.0, 2.0, 1.0], [3.0, 2.0, 2.0]) == [0.0, 1.0]
    # a quarter turn: norms and inner products with tokens already read are as before
    turned = seen([-4.0, 3.0], before=[[0.0, 2.0]], known=[[2.0, 0.0]])
    good, wrong = misfit("rotated", turned, [3.0, 4.0], [4.0, 3.0])  # both of norm 5
    assert good == 0.0 and wrong == pytest.approx(2 * (8 - 6) ** 2 / 25)


# Attackers


def test_attackers_by_hand():
    pool = Pool(torch.tensor([7, 8]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.1, 0.9]))
    sighting = Sighting(torch.tensor([[0.6, 0.5]]), torch.zeros(0, 2))
    found = {row["attacker"]: row for row in defences.attacked(named("gaussian 1"), sighting, pool)}
    assert found["nearest"]["found_id"] == 7 and found["nearest"]["recovered"] == 1.0
    assert found["tolerance"]["recovered"] == 0.0  # the nearest is not within 1e-4
    assert found["nearest"]["loss"] == pytest.approx((0.4**2 + 0.5**2) / 2)
    assert found["prior alone"]["found_id"] == 8 and found["prior alone"]["rank"] == 1
    # equal rms: the likelihood ratio is exp(((0.36 + 0.25) - (0.16 + 0.25)) / 2 s^2) = exp(0.2), the prior's 9
    assert found["aware"]["found_id"] == 7 and found["aware, prior"]["found_id"] == 8


def test_a_tie_is_half_a_recovery():
    pool = Pool(torch.tensor([7, 8]), torch.tensor([[4.0, 1.0], [4.0, -1.0]]), torch.tensor([0.5, 0.5]))
    found = defences.attacked(named("2-bit"), Sighting(torch.tensor([[4.0, 0.0]]), torch.zeros(0, 2)), pool)
    assert {row["attacker"]: row["recovered"] for row in found}["aware"] == 0.5


def test_the_prior_needs_a_likelihood():
    assert not attackers.named("aware, prior").suits(named("4-bit"))
    with pytest.raises(InversionError, match="got 'nobody', expected one of tolerance, nearest"):
        attackers.named("nobody")


# The sweep


def test_candidates_hold_the_true_one_first_and_what_lies_nearest(reader, own):
    ids = drawn(1, 5)[0]
    whole, some = defences.pool(own, ids, 3, 1024), defences.pool(own, ids, 3, 200)
    assert int(some.ids[0]) == int(whole.ids[0]) == int(ids[3]) and len(set(some.ids.tolist())) == len(some.ids) == 200
    assert sorted(whole.ids.tolist()) == list(range(1024))
    assert len(defences.pool(own, ids, 0, 200).ids) == 1024  # the first position: the whole vocabulary
    for pool in (whole, some):
        torch.testing.assert_close(pool.states[0], reader.states(ids[None])[0, 3], atol=1e-9, rtol=0)
    apart = channels.squared(whole.states[0], whole.states)
    nearest = whole.ids[apart.argsort()[1:11]]
    assert len(set(nearest.tolist()) & set(some.ids.tolist())) >= 5  # a fifth of the ids holds half of the nearest


def test_a_sweep_finds_what_it_must(reader, own):
    names = ["clean", "8-bit", "gaussian 0.001", "gaussian 30", "permuted", "rotated", "dropout 0.5"]
    ids = drawn(1, 4, seed=3)[0]
    rows, margins = defences.sweep(own, ids, names, 2, 1024, 5, range(4))
    share = rows.groupby(["channel", "attacker"]).recovered.mean()
    assert (share[[(name, "aware") for name in names if name != "gaussian 30"]] == 1.0).all()
    assert (
        share["gaussian 30", "nearest"] < 0.5
        and share["permuted", "nearest"] < 0.5
        and share["rotated", "nearest"] < 0.5
    )
    assert share["clean", "tolerance"] == 1.0 and share["8-bit", "nearest"] == 1.0
    assert set(rows.prompt) == {5} and (rows[rows.channel == "clean"].draw == 0).all()
    assert set(rows[rows.channel == "gaussian 30"].draw) == {0, 1}
    small = margins[(margins.channel == "gaussian 0.001")].set_index("position")
    large = margins[(margins.channel == "gaussian 30")].set_index("position")
    assert (small.bound < 1e-6).all() and (large.bound > 1).all() and (small.candidates == 1024).all()
    states = defences.pool(own, ids, 2, 1024).states
    assert small.delta[2] == pytest.approx(float((states[1:] - states[0]).norm(dim=-1).min()))


def test_the_bound_holds_for_two_candidates():
    pool = Pool(torch.arange(2), torch.tensor([[1.0, 1.0], [1.0, 2.0]]), torch.ones(2))
    (row,) = defences._margins(pool, torch.tensor([1.0, 1.0]), [named("gaussian 0.5")])
    assert (
        row["delta"] == 1.0 and row["rms"] == 1.0 and row["bound"] == pytest.approx(stats.norm.sf(1.0))
    )  # exact for two


@pytest.mark.parametrize(
    "name", ["8-bit", "2-bit", "clipped 0.5", "top 0.2", "permuted", "rotated", "dropout 0.5", "bf16"]
)
def test_whole_prompts_come_back_through_channels_without_noise(reader, own, name):
    ids, channel = drawn(3, 6, seed=4), named(name)
    given = torch.stack([defences.released(channel, row, i, 0) for i, row in enumerate(reader.states(ids))])
    found = verified.invert(reader, given, own, verified.Settings(ahead=2), channel)
    assert found.exact(ids).all() and not (found.tokens.status == verified.BEST).any()


def test_a_flipped_digit_is_forgiven_only_where_nothing_else_comes_near(reader, own):
    """A coordinate of a rounded row is moved by a step; at 8 bits the right token is still alone, at 2 bits others fit
    as well, so that all are tried and the nearest is taken."""
    ids = drawn(1, 5, seed=8)
    for bits, few in ((8, True), (2, False)):
        channel = named(f"{bits}-bit")
        given = reader.states(ids)
        given = torch.stack([channel.release(row, torch.Generator()) for row in given])
        step = given[0, 2].abs().amax() / (2 ** (bits - 1) - 1)
        given[0, 2, given[0, 2].abs().argmin()] += step
        found = verified.invert(reader, given, own, verified.Settings(ahead=2), channel)
        row = found.tokens[found.tokens.position == 2].iloc[0]
        assert found.exact(ids).all() and row.status != verified.BEST
        assert (row.candidates < 1024) == few


def test_whole_prompts_behind_noise_are_a_best_effort_of_a_bounded_cost(reader, own):
    ids, channel = drawn(2, 5, seed=6), named("gaussian 0.05")
    given = torch.stack([defences.released(channel, row, i, 0) for i, row in enumerate(reader.states(ids))])
    bounded = verified.Settings(ahead=1, stages=(8, 300), scan=False)
    for attacker in ("nearest", "aware", "aware, prior"):
        found = verified.invert(reader, given, own, bounded, channel, attacker)
        assert (found.tokens.status == verified.BEST).all() and (found.tokens.candidates <= 301).all()
        assert (found.ids == ids).double().mean() > 0.5
    with pytest.raises(InversionError, match="'4-bit' has not"):
        verified.invert(reader, given, own, bounded, named("4-bit"), "aware, prior")


def test_a_cascade_that_makes_no_error_is_the_sweep(reader, own):
    """Up to its first error, a cascade stands behind the true prefix: exact match is what the sweep says."""
    ids, channel = drawn(2, 5, seed=8), named("3-bit")
    given = torch.stack([defences.released(channel, row, i, 0) for i, row in enumerate(reader.states(ids))])
    found = verified.invert(reader, given, own, verified.Settings(), channel)
    rows = pd.concat([defences.sweep(own, row, ["3-bit"], 1, 1024, i, range(5))[0] for i, row in enumerate(ids)])
    aware = rows[rows.attacker == "aware"].groupby("prompt").recovered.min() == 1.0
    assert found.exact(ids).tolist() == aware.tolist()


# Utility


def test_clean_states_lose_nothing_and_noise_costs(reader):
    ids = drawn(4, 20, seed=9)
    table = defences.utility(reader, ids, ["clean", "gaussian 0.1", "gaussian 3", "permuted"]).set_index("channel")
    logits = reader.backbone.model(input_ids=ids).logits.log_softmax(-1)
    nll = -logits[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    assert table.kl["clean"] == pytest.approx(0, abs=1e-9) and table.agreement["clean"] == 1.0
    assert table.nll["clean"] == pytest.approx(float(nll)) and (table.nll_clean == table.nll["clean"]).all()
    assert 0 < table.kl["gaussian 0.1"] < table.kl["gaussian 3"] and table.agreement["permuted"] < 0.5


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_the_model_goes_on_from_an_inner_layer(name):
    inner = Reader(models.load(name, dtype=torch.float64), Convention(layer=2, norm="pre"))
    table = defences.utility(inner, drawn(2, 10), ["clean", "gaussian 1"]).set_index("channel")
    assert table.kl["clean"] == pytest.approx(0, abs=1e-9) and table.agreement["clean"] == 1.0
    assert table.kl["gaussian 1"] > 1e-3
    with pytest.raises(InversionError, match="nothing goes on from layer 2, post-norm"):
        defences.utility(Reader(inner.backbone, Convention(layer=2)), drawn(1, 10), ["clean"])
