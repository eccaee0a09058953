"""Channels by hand, and what they promise."""

import numpy as np
import pytest
import torch
from scipy import stats

from lib.inversion import channels
from lib.inversion.reader import InversionError

ROW = torch.tensor([[3.0, -4.0, 0.0, 5.0]], dtype=torch.float64)  # root mean square 12.5 ** 0.5


def released(name, states=ROW, seed=0):
    return channels.named(name).release(states, torch.Generator().manual_seed(seed))


def test_deterministic_channels_by_hand():
    assert released("clean").equal(ROW)
    assert released("3-bit").tolist() == [[pytest.approx(10 / 3), pytest.approx(-10 / 3), 0.0, 5.0]]  # steps of 5/3
    assert released("top 0.5").tolist() == [[0.0, -4.0, 0.0, 5.0]]
    edge = 12.5**0.5
    assert released("clipped 1").tolist() == [[3.0, pytest.approx(-edge), 0.0, pytest.approx(edge)]]
    assert released("bf16", torch.tensor([[1.0 + 2**-9]])).tolist() == [[1.0]]


@pytest.mark.parametrize(("name", "spread"), [("gaussian 0.5", 0.5), ("laplace 0.5", 0.5 * 2**0.5)])
def test_noise_has_its_size_relative_to_the_row(name, spread):
    noise = released(name, 7 * torch.ones(1, 40000, dtype=torch.float64)) - 7
    assert noise.std() == pytest.approx(7 * spread, rel=0.03) and abs(noise.mean()) < 0.1


def test_laplace_noise_is_laplace():
    noise = released("laplace 1", torch.ones(1, 20000, dtype=torch.float64))[0] - 1
    assert stats.kstest(noise.numpy(), "laplace").pvalue > 0.01


def test_dropout_keeps_the_mean():
    states = torch.ones(1, 40000, dtype=torch.float64)
    found = released("dropout 0.25", states)
    assert set(found.unique().tolist()) == {0.0, 4 / 3} and found.mean() == pytest.approx(1, rel=0.03)


def test_secret_keys_move_coordinates_and_keep_what_they_must():
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turned, moved = released("rotated", states), released("permuted", states)
    torch.testing.assert_close(turned @ turned.T, states @ states.T)  # the Gram matrix is no secret
    assert not torch.allclose(turned.sort(-1).values, states.sort(-1).values)
    torch.testing.assert_close(moved.sort(-1).values, states.sort(-1).values, atol=0, rtol=0)
    assert not moved.equal(states)
    order = [int((states[0] == value).nonzero()) for value in moved[0]]
    assert states[:, order].equal(moved)  # one order for all rows


@pytest.mark.parametrize("name", ["clean", "bf16", "4-bit", "clipped 2", "top 0.5", "permuted", "rotated"])
def test_deterministic_channels_are_the_same_every_time(name):
    assert channels.named(name).deterministic and released(name).equal(released(name))


def test_who_knows_what():
    secret = {
        name: channels.named(name).secret for name in ("4-bit", "gaussian 1", "permuted", "rotated", "dropout 0.1")
    }
    assert secret["4-bit"] == channels.NOTHING and channels.named("4-bit").repeatable
    assert "noise" in secret["gaussian 1"] and not channels.named("gaussian 1").repeatable
    assert "order" in secret["permuted"] and "basis" in secret["rotated"] and not channels.named("rotated").repeatable
    assert "dropped" in secret["dropout 0.1"]


def test_the_private_release_cuts_the_norm_and_adds_noise():
    states = torch.full((2000, 4), 50.0, dtype=torch.float64)  # norm 100
    found = released("private 10 2", states)
    assert found.mean() == pytest.approx(5.0, abs=0.1) and found.std() == pytest.approx(2.0, rel=0.05)
    small = torch.full((1, 4), 1e-9, dtype=torch.float64)
    assert released("private 10 1e-12", small).sum() == pytest.approx(4e-9, rel=0.01)  # shorter rows are left alone


@pytest.mark.parametrize(("clip", "sigma", "delta"), [(0.5, 1.0, 1e-5), (0.5, 4.0, 1e-3), (1.0, 0.3, 1e-6)])
def test_epsilon_solves_the_gaussian_mechanism(clip, sigma, delta):
    found, apart = channels.epsilon(clip, sigma, delta), 2 * clip / sigma
    back = stats.norm.cdf(apart / 2 - found / apart) - np.exp(found) * stats.norm.cdf(-apart / 2 - found / apart)
    assert back == pytest.approx(delta, rel=1e-6)
    if found < 1:  # where the classical bound holds it asks for more noise
        assert found <= apart * np.sqrt(2 * np.log(1.25 / delta))


def test_a_mechanism_that_hardly_moves_needs_no_epsilon():
    assert channels.epsilon(1e-9, 1.0, 0.1) == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "1-bit",
        "x-bit",
        "gaussian",
        "gaussian -1",
        "gaussian a",
        "laplace -1",
        "clipped 0",
        "top 0",
        "top 2",
        "dropout 1",
        "private 1",
        "private 0 1",
        "foggy",
        "clean 3",
        "",
        "gaussian nan",
    ],
)
def test_channels_that_make_no_sense_are_refused(name):
    with pytest.raises(InversionError, match="got"):
        channels.named(name)


def test_an_epsilon_of_nonsense_is_refused():
    with pytest.raises(InversionError, match="delta 1.0"):
        channels.epsilon(1.0, 1.0, 1.0)
