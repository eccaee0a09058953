"""Inversion: held against a slow reference by hand, against exact scans, and against given matrices."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from lib import models, paths
from lib.inversion import continuous, conventions, diagnostics, sipit
from lib.inversion.continuous import Settings
from lib.inversion.reader import Convention, InversionError, Reader, empty, view

NAMES = ("tiny-gpt2", "tiny-llama")
CONVENTIONS = (Convention(), Convention(norm="pre"), Convention(layer=2, norm="pre"))
TIGHT = 1e-9  # of the tiny models, in float64: far above rounding, far below any other token


LAST = Convention()


def made(name, convention=LAST, prompts=2, tokens=5, seed=0):
    """A reader in float64, random ids [n, T] and their states."""
    reader = Reader(models.load(name, dtype=torch.float64), convention)
    ids = torch.randint(len(reader.embedding), (prompts, tokens), generator=torch.Generator().manual_seed(seed))
    return reader, ids, reader.states(ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
def test_cached_steps_and_candidates_give_the_states_of_the_whole_prompt(name, convention):
    reader, ids, states = made(name, convention)
    whole = reader.backbone.model(input_ids=ids, output_hidden_states=True).hidden_states
    if convention.norm == "post":
        torch.testing.assert_close(states, whole[-1], atol=0, rtol=0)
    if convention.layer is not None:
        torch.testing.assert_close(states, whole[convention.layer], atol=0, rtol=0)
    cache = empty()
    for position in range(ids.shape[1]):
        stepped = reader.proxies(reader.embedding[ids[:, position]], cache)
        torch.testing.assert_close(stepped, states[:, position], atol=1e-10, rtol=0)
        tried = reader.candidates(torch.tensor([7, ids[1, position], 9]), view(cache, [1]))
        torch.testing.assert_close(tried[1], states[1, position], atol=1e-10, rtol=0)
        before = None if position == 0 else cache.layers[0].keys.clone()
        cache, old = reader.extend(cache, ids[:, position]), cache
        assert before is None or torch.equal(old.layers[0].keys, before)


@pytest.mark.parametrize("name", NAMES)
def test_exact_searches_recover_every_prompt(name):
    reader, ids, states = made(name, tokens=3)
    for found in (sipit.full_scan(reader, states, TIGHT), sipit.lm_order(reader, states, TIGHT)):
        assert found.exact(ids).all() and not found.tokens.fallback.any()
        assert found.tokens.discrete_loss.max() < 1e-8
    pre, ids, states = made(name, Convention(norm="pre"), prompts=1, tokens=2)
    assert sipit.sipit(pre, states).exact(ids).all()


def slow_invert(reader, states, settings, starts):
    """The method by hand: one prompt, no cache, one candidate at a time."""
    table, model = reader.embedding, reader.model
    committed, fallbacks, tried_at = [], [], []
    for position, target in enumerate(states):
        before = table[torch.tensor(committed, dtype=torch.long)]

        def state(embedding, before=before):
            return model(inputs_embeds=torch.cat([before, embedding[None]])[None]).last_hidden_state[0, -1]

        proxy = starts[position].clone().requires_grad_(True)
        mean, square = torch.zeros_like(starts[position]), torch.zeros_like(starts[position])
        for step in range(settings.steps):
            loss = (state(proxy) - target).square().mean()
            if loss < settings.tolerance:
                break
            (gradient,) = torch.autograd.grad(loss, proxy)
            gradient = gradient * min(1.0, settings.clip / (float(gradient.norm()) + 1e-6))
            gradient = gradient + settings.weight_decay * proxy.detach()
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            rate = settings.learning_rate * 0.5 * (1 + np.cos(np.pi * step / settings.steps))
            hat = (mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.999 ** (step + 1)))
            proxy = (proxy.detach() - rate * hat[0] / (hat[1].sqrt() + 1e-8)).requires_grad_(True)
        order = (table - proxy.detach()).abs().sum(-1).argsort(stable=True)[: settings.candidates]
        fits = None
        for tried, candidate in enumerate(order, 1):  # noqa: B007
            with torch.no_grad():
                if (state(table[candidate]) - target).square().mean() < settings.tolerance:
                    fits = int(candidate)
                    break
        committed.append(int(order[0]) if fits is None else fits)
        fallbacks.append(fits is None)
        tried_at.append(tried)
    return committed, fallbacks, tried_at


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", ["zeros", "random", "prior"])
def test_the_batched_method_is_the_slow_one(name, start):
    reader, ids, states = made(name, tokens=3)
    settings = Settings(steps=40, candidates=20, tolerance=1e-6, start=start)
    found = continuous.invert(reader, states, settings)
    assert not found.tokens[found.tokens.position == 0].fallback.all()  # else nothing is compared
    for prompt in range(len(ids)):
        starts = [begin(reader, settings, [prompt], ids[prompt : prompt + 1], t)[0] for t in range(ids.shape[1])]
        committed, fallbacks, tried = slow_invert(reader, states[prompt], settings, starts)
        part = found.tokens[found.tokens.prompt == prompt]
        until = (
            fallbacks.index(True) + 1 if True in fallbacks else len(committed)
        )  # behind a fallback rounding may decide
        assert part.found_id.tolist()[:until] == committed[:until]
        assert part.fallback.tolist()[:until] == fallbacks[:until]
        assert part.candidates.tolist()[:until] == tried[:until]


def begin(reader, settings, keys, ids, position):
    """Where rows start at a position behind their true prefixes."""
    return continuous.starts(reader, [settings] * len(keys), keys, ids, torch.full((len(keys),), position))


def test_a_prompt_is_inverted_alike_alone_and_in_a_batch():
    reader, ids, states = made("tiny-llama", prompts=3, tokens=3)
    settings = Settings(steps=40, candidates=20, tolerance=1e-6, start="random")
    together = continuous.invert(reader, states, settings, keys=[5, 6, 7])
    alone = continuous.invert(reader, states[1:2], settings, keys=[6])
    own = together.tokens[together.tokens.prompt == 1].reset_index(drop=True)
    first = own.fallback.argmax() + 1 if own.fallback.any() else len(own)
    pd.testing.assert_frame_equal(
        own[:first].drop(columns=["prompt", "seconds"]),
        alone.tokens[:first].drop(columns=["prompt", "seconds"]),
        rtol=1e-5,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_prior_start_is_the_mean_row_under_the_models_own_probabilities(name):
    reader, ids, _ = made(name, tokens=3)
    first = begin(reader, Settings(start="prior"), [0, 1], ids, 0)
    torch.testing.assert_close(first, reader.embedding.mean(0).expand(2, -1))
    later = begin(reader, Settings(start="prior"), [0, 1], ids, 3)
    probabilities = reader.backbone.model(input_ids=ids).logits[:, -1].softmax(-1)
    torch.testing.assert_close(later, probabilities @ reader.embedding)


def test_rows_retire_when_they_have_converged():
    reader, ids, states = made("tiny-gpt2", prompts=2, tokens=1)
    settings = Settings(steps=30, tolerance=1e-4, candidates=5)
    at_goal = torch.stack([reader.embedding[ids[0, 0]], torch.zeros(reader.width, dtype=torch.float64)])
    found = continuous.drive(reader, empty(), states[:, 0], at_goal, [settings] * 2)
    assert found.steps.tolist()[0] == 0 and found.steps.tolist()[1] > 0
    torch.testing.assert_close(found.proxies[0], at_goal[0], atol=0, rtol=0)


def test_the_descent_is_torchs_adam_with_a_cosine_rate():
    reader, ids, states = made("tiny-llama", prompts=2, tokens=3)
    settings = Settings(steps=12, candidates=5)
    start = begin(reader, Settings(start="random"), [0, 1], ids, 2)
    found = continuous.drive(reader, reader.read(ids[:, :2]), states[:, 2], start, [settings] * 2)
    proxies = start.clone().requires_grad_(True)
    adam = torch.optim.Adam([proxies], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=settings.steps)
    for _ in range(settings.steps):
        loss = (reader.proxies(proxies, reader.read(ids[:, :2])) - states[:, 2]).square().mean(-1)
        (gradient,) = torch.autograd.grad(loss.sum(), proxies)
        proxies.grad = gradient * (settings.clip / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
        adam.step()
        schedule.step()
    torch.testing.assert_close(found.proxies, proxies.detach(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_positions_and_settings_side_by_side_are_searched_as_they_are_alone(name):
    reader, ids, states = made(name, prompts=2, tokens=4)
    rows = [(0, 1, 6, "zeros"), (1, 3, 9, "prior"), (0, 2, 6, "random"), (1, 0, 4, "mean")]
    settings = [Settings(steps=k, candidates=7, start=start, mode="reference") for _, _, k, start in rows]
    lengths = torch.tensor([position for _, position, _, _ in rows])
    prompts = [prompt for prompt, *_ in rows]
    targets, true = states[prompts, lengths], ids[prompts, lengths]
    _, together, _ = continuous.search(reader, ids[prompts, :3], targets, settings, prompts, true, lengths)
    for i, (prompt, position, steps, _) in enumerate(rows):
        prefix = ids[[prompt], :position]
        _, alone, _ = continuous.search(reader, prefix, targets[i : i + 1], [settings[i]], [prompt], true[i : i + 1])
        assert together.steps[i] == steps and together.position[i] == position
        own = together[i : i + 1].reset_index(drop=True).drop(columns=["prompt", "seconds"])
        pd.testing.assert_frame_equal(own, alone.drop(columns=["prompt", "seconds"]), rtol=1e-6, atol=1e-12)


def test_settings_side_by_side_may_differ_in_steps_candidates_and_start_alone():
    reader, _, states = made("tiny-gpt2")
    with pytest.raises(InversionError, match="got 2 of 2 kinds for 2 rows"):
        continuous.invert(reader, states, [Settings(candidates=5), Settings(candidates=5, metric="l2")])
    with pytest.raises(InversionError, match="got 1 of 1 kinds for 2 rows"):
        continuous.invert(reader, states, [Settings(candidates=5)])


def test_the_first_token_is_looked_up_where_no_gradient_reaches_it():
    reader, ids, states = made("tiny-llama", Convention(), prompts=3, tokens=2)
    found = continuous.invert(reader, states, Settings(steps=5, candidates=5, first="table"), ids)
    first = found.tokens[found.tokens.position == 0]
    assert (first.found_id == first.true_id).all() and (first.steps == 0).all() and not first.fallback.any()
    assert (found.tokens[found.tokens.position == 1].steps > 0).all()


def test_a_gradient_beyond_the_precision_is_refused():
    """Zero proxies behind many RMSNorm layers: each multiplies the slope by a thousand."""
    shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-8}
    deep = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, initializer_range=0.2)).requires_grad_(False)
    reader = Reader(models.load("tiny-llama").with_model(deep.eval()))
    states = reader.states(torch.tensor([[5, 6]]))
    with pytest.raises(InversionError, match="start elsewhere .prior, random. or look the first token up"):
        continuous.invert(reader, states, Settings(steps=3, candidates=5))
    continuous.invert(reader, states, Settings(steps=3, candidates=5, first="table"))


def test_a_proxy_that_is_no_number_ranks_nothing():
    reader, ids, _ = made("tiny-llama")
    with pytest.raises(InversionError, match="got NaN or infinity"):
        continuous.ranks(reader, torch.full((1, reader.width), torch.nan), ids[0, :1], "l1")


def test_the_reference_mode_keeps_a_true_prefix_and_says_what_it_would_have_found():
    reader, ids, states = made("tiny-gpt2", prompts=2, tokens=4)
    blind = continuous.invert(reader, states, Settings(steps=5, candidates=3, mode="blind"), ids)
    true = continuous.invert(reader, states, Settings(steps=5, candidates=3, mode="reference"), ids)
    assert true.exact(ids).all() and true.tokens.discrete_loss.max() < 1e-8
    assert (true.tokens.fallback == (true.tokens.rank_final >= 3)).all()
    assert (blind.tokens.candidates == 0).all()
    assert (
        (blind.tokens.found_id != blind.tokens.true_id)
        .eq(blind.tokens.rank_final > 0)[blind.tokens.position == 0]
        .all()
    )
    assert {"prompt", "position", "step", "loss", "rank"} == set(true.trace.columns)


def test_a_matrix_from_another_process_is_inverted_alike(tmp_path):
    program = f"""
import torch
from lib import models
from lib.inversion.reader import Reader
reader = Reader(models.load("tiny-llama", dtype=torch.float64))
torch.save(reader.states(torch.tensor([[5, 900, 31, 31]])), {str(tmp_path / "states.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=paths.ROOT)
    reader = Reader(models.load("tiny-llama", dtype=torch.float64))
    found = sipit.full_scan(reader, torch.load(tmp_path / "states.pt"), TIGHT)
    assert found.ids.tolist() == [[5, 900, 31, 31]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[..., :10], r"expected \[prompts, positions, 64\]"),
        (lambda h: h[0], r"expected \[prompts, positions, 64\]"),
        (lambda h: h.index_fill(1, torch.tensor([2]), torch.nan), "prompt 0, position 2 holds NaN"),
        (lambda h: h.index_fill(1, torch.tensor([1]), 0.0), "position 1 is all zeros"),
        (lambda h: h.repeat(1, 100, 1), "reads at most 256"),
    ],
)
def test_states_that_cannot_be_a_prompts_are_refused(change, message):
    reader, _, states = made("tiny-gpt2")
    with pytest.raises(InversionError, match=message):
        continuous.invert(reader, change(states))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("known", [True, False], ids=["ids known", "states alone"])
def test_the_convention_that_fits_is_named(name, known):
    reader, ids, states = made(name, Convention(layer=2, norm="pre"))
    given = ids if known else None
    conventions.check(reader, states, given)
    best = conventions.fitting(reader.backbone, states, given).iloc[0]
    assert (best.layer, best.norm) == (2, "pre") and best.residual < 1e-20
    other = Reader(reader.backbone, Convention(layer=1, norm="pre"))
    with pytest.raises(InversionError, match="stated as layer 1, pre-norm, but layer 2, pre-norm reproduces them"):
        conventions.check(other, states, given)
    last = Reader(reader.backbone, Convention(layer=3))
    conventions.check(last, last.states(ids), given)
    foreign = torch.randn(states.shape, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    with pytest.raises(InversionError, match="no layer of tiny-.* reproduces them"):
        conventions.check(reader, foreign, given)


@pytest.mark.parametrize("name", NAMES)
def test_states_of_the_other_side_of_the_final_norm_are_refused_before_the_search(name):
    post, ids, states = made(name)
    pre = Reader(post.backbone, Convention(norm="pre"))
    with pytest.raises(InversionError, match="state them as post"):
        continuous.invert(pre, states, Settings(candidates=10))
    with pytest.raises(InversionError, match="taken before the final norm"):
        continuous.invert(post, 10 * pre.states(ids), Settings(candidates=10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(steps=0), "K = 0"),
        (Settings(candidates=2000), "C = 2000, expected 1 to 1024"),
        (Settings(candidates=10, metric="l3"), "metric: got 'l3'"),
        (Settings(candidates=10, mode="reference"), "without the true ids"),
    ],
)
def test_settings_that_no_search_can_run_with_are_refused(settings, message):
    reader, _, states = made("tiny-gpt2")
    with pytest.raises(InversionError, match=message):
        continuous.invert(reader, states, settings)


def test_models_that_cannot_be_read_are_refused():
    backbone = models.load("tiny-llama")
    with pytest.raises(InversionError, match="got 9, expected 1 to 3"):
        Reader(backbone, Convention(layer=9))
    with pytest.raises(InversionError, match="norm: got 'mid'"):
        Reader(backbone, Convention(norm="mid"))
    with pytest.raises(InversionError, match="takes images"):
        Reader(models.load("tiny-vl"))
    backbone.model.resize_token_embeddings(1100)
    with pytest.raises(InversionError, match="embeds 1100 ids and its tokenizer spells 1024"):
        Reader(backbone)
    assert len(Reader(backbone, vocabulary=1024).embedding) == 1024


# Diagnostics


def test_the_alarm_is_measured_in_orders_of_magnitude_and_positions():
    assert diagnostics.separation([1e-11, 2e-11, 1e-1], [True, True, False]) == pytest.approx(np.log10(1e-1 / 2e-11))
    assert diagnostics.separation([1.0, 2.0], [False, False]) is None
    tokens = pd.DataFrame(
        {
            "prompt": [0] * 3 + [1] * 3,
            "position": [0, 1, 2] * 2,
            "found_id": [1, 2, 3, 1, 2, 3],
            "true_id": [1, 2, 3, 1, 9, 3],
            "cumulative_loss": [0, 0, 0, 0, 1e-5, 1e-2],
        }
    )
    found = diagnostics.alarm_delay(tokens, 1e-3)
    assert found.values.tolist() == [[1, 1, 2.0, 1.0]]
    assert np.isnan(diagnostics.alarm_delay(tokens, 1.0).delay[0])


def test_tokens_fall_into_kinds():
    words = frozenset({"the", "and"})
    kinds = {" the": "function word", "the": "continuation", " cat": "content word", "ing": "continuation"}
    kinds |= {
        " 12": "number",
        "3": "number",
        ",": "punctuation",
        " (": "punctuation",
        "\n": "other",
        " é": "content word",
    }
    assert {token: diagnostics.category(token, words) for token in kinds} == kinds


def test_near_misses_are_told_from_wrong_basins():
    assert diagnostics.near_miss([0, 99, 100, 324, 325, 900], 100, 1000) == [
        "recovered",
        "recovered",
        "near miss",
        "near miss",
        "wrong basin",
        "wrong basin",
    ]


def test_density_and_duplicates_by_hand():
    table = torch.tensor([[0.0, 1.0], [0.0, 3.0], [4.0, 0.0], [0.0, 1.0]])
    found = diagnostics.density(table, [1, 2], neighbours=2).set_index("id")
    assert found.distance[1] == pytest.approx(2.0) and found.cosine[1] == pytest.approx(1.0)
    assert found.distance[2] == pytest.approx(17**0.5) and found.cosine[2] == pytest.approx(0.0)
    assert diagnostics.duplicates(table) == {0: (0, 3), 3: (0, 3)}
    assert diagnostics.similarity("abcd", "abxd") == pytest.approx(0.75)
    assert diagnostics.first_error([1, 2, 3], [1, 5, 3]) == 1 and diagnostics.first_error([1], [1]) is None
