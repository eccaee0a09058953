"""Exact inversion: propose, verify, repair, on the tiny models in float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib import models
from lib.inversion import channels, corpus, fitting, proposer, verified
from lib.inversion.reader import Convention, InversionError, Prefixes, Reader

NAMES = ("tiny-gpt2", "tiny-llama")
CONVENTIONS = (Convention(), Convention(norm="pre"), Convention(layer=2, norm="pre"))
SETTINGS = verified.Settings(ahead=3, stages=(4, 16, 64), refit=16)


def proposed(reader, ids):
    pairs = ids[:, :40].reshape(-1, 2)
    return proposer.Proposer(reader, fitting.fit(reader, pairs), fitting.fit(reader, ids))


@pytest.fixture(scope="module")
def made():
    """A reader in float64 and its proposer, by model and convention."""
    kept = {}

    def make(name, convention=CONVENTIONS[0]):
        if (name, convention) not in kept:
            reader = Reader(models.load(name, dtype=torch.float64), convention)
            ids = torch.randint(1024, (20, 64), generator=torch.Generator().manual_seed(1))
            kept[name, convention] = (
                reader,
                proposed(reader, ids),
            )
        return kept[name, convention]

    return make


def drawn(prompts, tokens, seed=0):
    return torch.randint(1024, (prompts, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
def test_every_prompt_comes_back_exactly(made, name, convention):
    reader, own = made(name, convention)
    ids = drawn(4, 12)
    found = verified.invert(reader, reader.states(ids), own, SETTINGS)
    assert found.exact(ids).all() and (found.tokens.residual <= found.tolerance).all()
    assert found.tolerance < 1e-20 and not found.tokens.status.eq(verified.BEST).any()
    assert found.tokens[["prompt", "position"]].values.tolist() == [[p, t] for p in range(4) for t in range(12)]
    assert found.read >= found.tokens.candidates.sum()


def blind(reader):
    """A proposer that knows nothing."""
    generator, width = torch.Generator().manual_seed(5), reader.width
    weights = torch.randn(3 * width + 1, width, generator=generator, dtype=torch.float64)
    return proposer.Proposer(reader, *[(weights, torch.eye(width, dtype=torch.float64))] * 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
def test_a_proposer_that_knows_nothing_costs_candidates_and_no_exactness(made, name, convention):
    reader, own = made(name, convention)
    ids = drawn(3, 6, seed=2)
    found = verified.invert(reader, reader.states(ids), blind(reader), SETTINGS)
    helped = verified.invert(reader, reader.states(ids), own, SETTINGS)
    assert found.exact(ids).all() and found.tokens.candidates.sum() > helped.tokens.candidates.sum()
    assert found.tokens.candidates.max() <= 1024


@pytest.mark.parametrize("name", NAMES)
def test_branches_are_the_states_of_whole_prompts(made, name):
    reader, _ = made(name)
    ids, prefixes, rows = drawn(3, 8), Prefixes(reader, 3, 8), torch.arange(3)
    whole = reader.states(ids)
    for stop in ([2, 1, 3], [3, 4, 3], [8, 8, 8]):  # prompts that grow at their own pace
        lengths = prefixes.lengths.clone()
        most = max(b - int(a) for a, b in zip(lengths, stop, strict=True))
        places = (lengths[:, None] + torch.arange(most)).clamp(max=7)
        states, longer = reader.branches(ids[rows[:, None], places], prefixes.rows(rows), lengths, chain=True)
        wanted = (lengths[:, None] + torch.arange(most)) < torch.tensor(stop)[:, None]
        torch.testing.assert_close(states[wanted], whole[rows[:, None], places][wanted], atol=1e-10, rtol=0)
        columns = torch.where(wanted, longer.get_seq_length() - most + torch.arange(most), -1)
        prefixes.append(rows, longer, columns)
        assert prefixes.lengths.tolist() == stop


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 1023), min_size=1, max_size=20))
def test_any_sequence_within_the_context_comes_back(made, name, sequence):
    reader, own = made(name)
    ids = torch.tensor([sequence])
    assert verified.invert(reader, reader.states(ids), own, SETTINGS).ids.tolist() == [sequence]


def test_a_class_of_equal_rows_is_named():
    other = Reader(models.load("tiny-llama", dtype=torch.float64))
    with torch.no_grad():
        other.embedding[7] = other.embedding[900]
    ids = torch.tensor([[3, 900, 5]])
    found = verified.invert(other, other.states(ids), blind(other), SETTINGS)
    assert found.tokens.status.tolist()[1] == verified.AMBIGUOUS and int(found.ids[0, 1]) in (7, 900)
    assert found.ids[0, [0, 2]].tolist() == [3, 5]


def test_states_that_no_token_reproduces_are_best_effort_and_the_other_rows_finish(made):
    reader, own = made("tiny-llama")
    ids = drawn(2, 4)
    states = reader.states(ids)
    states[0, 2] += 0.01 * torch.randn(reader.width, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    found = verified.invert(reader, states, own, SETTINGS)
    status = found.tokens.pivot(index="prompt", columns="position", values="status")
    assert status.loc[0, 2] == verified.BEST and not (status.loc[1] == verified.BEST).any()
    assert found.ids.tolist() == ids.tolist()  # the nearest is still the right one
    assert found.tokens.candidates.max() == 1024
    swept = found.tokens[(found.tokens.prompt == 0) & (found.tokens.position == 2)].iloc[0]
    whole = reader.states(torch.cat([ids[:1, :2].expand(1024, -1), torch.arange(1024)[:, None]], 1))[:, -1]
    first, second = verified.residuals(whole, states[0, 2]).sort().values[:2].tolist()
    assert (
        swept.residual == pytest.approx(first) and swept.margin == pytest.approx(second / first) and swept.margin > 10
    )


def test_behind_a_lost_token_the_whole_vocabulary_is_not_read_again(made):
    reader, own = made("tiny-llama")
    ids = drawn(2, 6)
    states = reader.states(ids)
    states[0, 2] = states[1, 5]  # another text's state: no token comes near it
    found = verified.invert(reader, states, own, SETTINGS).tokens.set_index(["prompt", "position"])
    assert found.status[0, 2] == verified.BEST and found.candidates[0, 2] == 1024 and found.margin[0, 2] < 10
    behind = found.loc[[(0, place) for place in (3, 4, 5)]]
    assert (behind.status == verified.BEST).all() and (behind.candidates <= 64 + 1).all()
    assert (found.loc[1].status != verified.BEST).all()


def test_a_margin_tells_the_answer_from_the_runner_up(made):
    reader, _ = made("tiny-gpt2")
    ids = drawn(2, 10, seed=3)
    found = verified.invert(reader, reader.states(ids), blind(reader), SETTINGS)
    unique = found.tokens[found.tokens.status == verified.UNIQUE]
    assert len(unique) and unique.margin.min() > 1e6
    assert np.isnan(found.tokens.margin[found.tokens.candidates == 1]).all()


def test_a_token_whose_rounding_is_beyond_the_tolerance_is_computed_the_plain_way(made):
    """States to the bit as plain passes give them, and a tolerance of a hundredth of the cached path's error."""
    reader, own = made("tiny-llama")
    ids = drawn(1, 6)
    strict = verified.numerical_floor(reader) / 100
    settings = verified.Settings(ahead=3, stages=(4, 16, 64), refit=16, tolerance=strict)
    states = torch.cat([reader.states(ids[:, : t + 1])[:, -1:] for t in range(6)], 1)
    found = verified.invert(reader, states, own, settings)
    assert found.exact(ids).all() and (found.tokens.status != verified.BEST).all()
    assert (found.tokens.residual <= strict).all() and found.tokens.candidates.max() < 1024


def test_an_attacker_who_does_not_know_the_channel_is_not_helped_by_the_plain_way(made):
    """Through coarse rounding no plain state is the released one: who compares plain states proves nothing."""
    reader, own = made("tiny-llama")
    ids, channel = drawn(2, 5, seed=4), channels.named("4-bit")
    released = channel.release(reader.states(ids), torch.Generator())
    found = verified.invert(reader, released, own, SETTINGS, channel, "nearest")
    assert (found.tokens.status == verified.BEST).all()
    assert (verified.invert(reader, released, own, SETTINGS, channel, "aware").tokens.status != verified.BEST).all()


def test_settings_that_no_search_can_run_with_are_named(made):
    reader, own = made("tiny-llama")
    with pytest.raises(InversionError, match="rates: got none, expected a learning rate, or no steps"):
        verified.invert(reader, reader.states(drawn(1, 2)), own, verified.Settings(rates=()))


@pytest.mark.parametrize("stages", [(), (1024,), (1, 2, 1023)])
def test_stages_may_end_anywhere(made, stages):
    reader, _ = made("tiny-llama")
    ids = drawn(5, 3, seed=6)
    found = verified.invert(reader, reader.states(ids), blind(reader), verified.Settings(stages=stages, again=(1023,)))
    assert found.exact(ids).all() and found.tokens.candidates.max() <= 1024
    assert (found.tokens.status != verified.BEST).all()


# What continues a word


class Pieces:
    """A tokenizer of a few ids that takes the longest first."""

    held = ("P", "l", " plans", "ans", "PL", "AN", "S", "plans", " 12")

    def __len__(self):
        return len(self.held)

    def decode(self, ids):
        return "".join(self.held[one] for one in ids)

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [self.split(text) for text in texts]}

    def split(self, text):
        ids = []
        while text:
            place = max(
                (one for one in range(len(self)) if text.startswith(self.held[one])),
                key=lambda one: len(self.held[one]),
            )
            ids, text = [*ids, place], text[len(self.held[place]) :]
        return ids


def test_words_of_the_vocabulary_tell_what_continues_the_beginning_of_a_text():
    """The one word, plans, is an id as it stands; Plans is P + l + ans, and PLANS is PL + AN + S."""
    assert corpus.continuations(corpus.split_words(Pieces())) == {(0,): [1], (0, 1): [3], (4,): [5], (4, 5): [6]}


def test_half_a_word_shares_its_expectation_with_what_may_continue_it(made):
    _, own = made("tiny-llama")
    own.continuations = {(7,): [3, 5, 9_999_999]}
    even = torch.full((8,), 1 / 8, dtype=torch.float64)
    mixed = own.word_prior(even, torch.tensor([7]))
    assert mixed.tolist() == pytest.approx([0.0875, 0.0875, 0.0875, 0.2375, 0.0875, 0.2375, 0.0875, 0.0875])
    assert own.word_prior(even, torch.tensor([6])) is even  # no word begins so
    own.continuations = {}
