"""What is proposed: a linear model of states with one covariance, and Bayes' rule on top of it."""

import math
import types

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from lib import models
from lib.inversion import corpus, fitting, proposer
from lib.inversion.reader import InversionError, Reader


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def usual(width=3, count=5):
    root = normal(width, width, seed=1)
    return proposer.Usual(normal(count, 2), normal(2 + width + 1, width, seed=2), root @ root.T + torch.eye(width))


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_misfit_of_a_token_is_twice_its_negative_log_density_up_to_a_constant(noise):
    own, state, before = usual(), normal(3, seed=3), normal(3, seed=4)
    wide = own.covariance + noise * torch.eye(3)
    means = own.table + before @ own.context + own.constant
    log = [stats.multivariate_normal.logpdf(state, mean, wide) for mean in means.numpy()]
    constant = 3 * math.log(2 * math.pi) + float(torch.linalg.slogdet(wide).logabsdet)
    wanted = [-2 * one - constant for one in log]
    assert own.misfit(state[None], before[None], noise)[0].tolist() == pytest.approx(wanted)


class Linear:
    """A model whose states are linear, and noise: two embedding rows of one-token prompts, and what stands before."""

    def __init__(self, spread):
        self.embedding, self.first_states = normal(40, 2), normal(40, 2, seed=1)
        self.width, self.device, self.spread = 2, torch.device("cpu"), spread
        unit = self.embedding / self.embedding.norm(dim=-1, keepdim=True)
        self.weights = normal(7, 2, seed=2)
        self.known = torch.cat([unit, self.first_states], -1)

    def states(self, ids):
        rows = [self.first_states[ids[:, 0]]]
        for place in range(1, ids.shape[1]):
            inputs = torch.cat([self.known[ids[:, place]], rows[-1], torch.ones(len(ids), 1).double()], -1)
            rows.append(inputs @ self.weights + self.spread * normal(len(ids), 2, seed=10 + place))
        return torch.stack(rows, 1)


def test_fitting_finds_the_weights_of_a_linear_model():
    model = Linear(spread=0.0)
    ids = torch.randint(40, (300, 4), generator=torch.Generator().manual_seed(0))
    weights, covariance = fitting.fit(model, ids)
    torch.testing.assert_close(weights, model.weights, atol=0.02, rtol=0)
    assert covariance.abs().max() < 1e-3


def test_the_covariance_is_of_states_that_are_left_out_one_by_one():
    model = Linear(spread=0.5)
    ids = torch.randint(40, (12, 2), generator=torch.Generator().manual_seed(0))
    states = model.states(ids)
    inputs = torch.cat([model.known[ids[:, 1]], states[:, 0], torch.ones(12, 1).double()], -1)
    scale = inputs.square().sum(0)
    ridge = fitting.RIDGE * torch.diag(scale + 1e-6 * scale.mean())
    apart = []
    for one in range(12):
        rest = [i for i in range(12) if i != one]
        x, y = inputs[rest], states[rest, 1]
        apart.append(states[one, 1] - inputs[one] @ torch.linalg.solve(x.T @ x + ridge, x.T @ y))
    wanted = torch.stack(apart).T @ torch.stack(apart) / 12
    even = wanted.diagonal().mean() * torch.eye(2)
    wanted = (1 - fitting.SHRINKAGE) * wanted + fitting.SHRINKAGE * even
    torch.testing.assert_close(fitting.fit(model, ids)[1], wanted, rtol=1e-6, atol=0)


def test_tokens_are_scored_by_bayes_rule():
    """Two tokens: misfits 2 and 4, expected with 0.9 and 0.1, of which a half is spread evenly: 0.7 and 0.3."""
    own = proposer.Proposer.__new__(proposer.Proposer)
    own._usual = [types.SimpleNamespace(misfit=lambda *_: torch.tensor([[2.0, 4.0]]))] * 2
    found = own.scores(2, None, None, torch.tensor([[0.9, 0.1]]))
    assert found[0].tolist() == pytest.approx([-0.1 + math.log(0.7), -0.2 + math.log(0.3)])
    assert own.scores(2, None, None, None)[0].tolist() == pytest.approx([-0.1, -0.2])


@pytest.fixture(scope="module")
def reader():
    return Reader(models.load("tiny-llama"))


TEXTS = ["The quick brown fox jumps over the lazy dog. " * 40, "Two."]


def test_sequences_are_text_written_and_random_a_third_each(reader):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    ids = fitting.sequences(reader, TEXTS, 6 * 128, seed=0)
    assert ids.shape == (6, 128) and int(ids.max()) < 1024
    assert reader.backbone.tokenizer.decode(ids[0].tolist()) in TEXTS[0]
    firsts = {reader.backbone.tokenizer(text)["input_ids"][0] for text in TEXTS}
    assert {int(ids[2, 0]), int(ids[3, 0])} <= firsts  # what is written begins as texts do
    assert torch.equal(ids, fitting.sequences(reader, TEXTS, 6 * 128, seed=0))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_pairs_are_random_neighbours_and_beginnings_of_words(reader):
    tokenizer = reader.backbone.tokenizer
    ids = fitting.pairs(reader, TEXTS, [[5, 6, 7], [8], [9, 10], [2000, 1]], 6, seed=0)
    neighbours = [tokenizer(text)["input_ids"] for text in TEXTS]
    neighbours = {pair for one in neighbours for pair in zip(one, one[1:], strict=False)}
    assert ids.shape == (6, 2) and {tuple(pair) for pair in ids[2:4].tolist()} <= neighbours
    assert sorted(ids[4:].tolist()) == [[5, 6], [9, 10]]  # one id is no pair, and 2000 is none of the vocabulary's


def test_what_is_fitted_is_kept_and_read_again(reader, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus, "docstrings", lambda _: TEXTS)
    own = proposer.fitted(reader, 3 * 128, ("tqdm",))
    again = proposer.fitted(Reader(models.load("tiny-llama")), 3 * 128, ("tqdm",))
    state, expected = reader.states(torch.tensor([[5, 6, 7]]))[0], torch.full((1, 1024), 1 / 1024)
    for position in (1, 2):
        places = (position, state[position : position + 1], state[position - 1 : position], expected)
        torch.testing.assert_close(own.scores(*places), again.scores(*places))
    assert own.continuations == again.continuations and own.seconds == again.seconds > 0


def test_other_weights_of_the_same_name_have_a_proposer_of_their_own(reader, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus, "docstrings", lambda _: TEXTS)
    proposer.fitted(reader)
    trained = Reader(models.load("tiny-llama"))
    with torch.no_grad():
        next(iter(trained.model.layers[2].parameters())).mul_(1.01)
    assert proposer.is_kept(reader) and not proposer.is_kept(trained)


def test_texts_without_a_known_id_are_passed_over(reader):
    few = Reader(models.load("tiny-llama"), vocabulary=3)
    ids = fitting.sequences(few, ["Two."], 6 * 128, seed=0)
    assert int(ids.max()) < 3 and ids.shape[1] == 128 and len(ids) >= 2


def test_a_proposer_of_another_width_is_refused(reader, tmp_path):
    parts = {kind: torch.zeros(97, 32) for kind in proposer.KINDS}
    parts |= {f"{kind} covariance": torch.eye(32) for kind in proposer.KINDS}
    parts |= {"first": torch.zeros(1000, 32), "words": torch.zeros(0, 7, dtype=torch.long)}
    save_file(parts, tmp_path / "p.safetensors", metadata={"seconds": "1.0"})
    with pytest.raises(
        InversionError, match="is for 1000 ids of width 32, expected 1024 of width 64: of another model"
    ):
        proposer.read(reader, tmp_path / "p.safetensors")
    (tmp_path / "p.safetensors").write_bytes(b"not one")
    with pytest.raises(InversionError, match="delete it, and it is fitted again"):
        proposer.read(reader, tmp_path / "p.safetensors")
