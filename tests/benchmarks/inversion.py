"""Seconds a token to invert hidden states, in a process of its own, by one method on the bench set.

Every token is searched behind its true prefix, so that an error costs no later token; the first token of a prompt, that
no gradient finds in a Llama-type model, is left out for all methods alike. Only exact inversion reads whole prompts,
behind what it found itself, the first token included. What a method sets up once (the model, the language model's cache
of a prefix, the tables of exact inversion) is outside its seconds; of the latter it is printed as ``setup``.
"""

import json
import time

import click
import numpy as np
import torch

from lib import config, models
from lib.inversion import continuous, proposer, settings, sipit, verified
from lib.inversion.reader import Convention, Reader, view
from lib.training import accelerator

METHODS = (
    "exact, together",
    "exact",
    "lm order",
    "batched",
    "sequential",
    "sipit published",
    "sipit cached",
    "full scan",
    "random ids: exact, together",
    "random ids: lm order",
)
SETS = {"batched": "batch", "lm order": "quick", "exact": "quick", "exact, together": "together"}


@click.command()
@click.option("--method", type=click.Choice(METHODS), required=True)
@click.option("--scale", default="laptop")
def main(method: str, scale: str) -> None:
    chosen = settings.load(scale)
    torch.set_num_threads(config.load_scale(scale).threads)
    bench = chosen.bench
    drawn = method.startswith("random ids: ")
    prompts, tokens = bench.random if drawn else getattr(bench, SETS.get(method, "slow"))
    backbone = models.load(chosen.model, chosen.revision, device=accelerator().device)
    reader = Reader(backbone, Convention(norm="pre" if method.startswith("sipit") else "post"), len(backbone.tokenizer))
    texts = settings.prompts(chosen.source, prompts)
    ids = torch.tensor(
        [backbone.tokenizer(text.text, add_special_tokens=False)["input_ids"][: tokens + 1] for text in texts]
    )
    if drawn:
        ids = torch.randint(len(reader.embedding), ids.shape, generator=torch.Generator().manual_seed(0))
    ids = ids.to(reader.device)
    states = reader.states(ids)
    started = time.perf_counter()
    for _ in range(3):
        reader.states(ids)
    forward = (time.perf_counter() - started) / 3 / ids.numel()  # a token of the same prompts, in one batch
    setup, plain = 0.0, method.removeprefix("random ids: ")
    if plain.startswith("exact"):
        own = proposer.fitted(reader)
        setup = own.seconds
        rows = exact(reader, own, ids, states, len(ids) if "together" in plain else 1)
    elif method == "batched":
        rows = batched(reader, ids, states, bench)
    else:
        rows = one_by_one(plain, reader, ids, states, bench)
    print(json.dumps({"method": method, "forward": forward, "setup": setup, "rows": rows}))


def exact(reader: Reader, own: proposer.Proposer, ids: torch.Tensor, states: torch.Tensor, size: int) -> list[dict]:
    """Ours: so many prompts together; a token's seconds are its share."""
    rows = []
    verified.numerical_floor(reader)
    for true, part in zip(ids.split(size), states.split(size), strict=True):
        started = time.perf_counter()
        found = verified.invert(reader, part, own)
        share = (time.perf_counter() - started) / true.numel()
        right = (found.ids == true)[found.tokens.prompt.tolist(), found.tokens.position.tolist()].tolist()
        proven = found.tokens.status != verified.BEST
        counts = found.tokens.candidates
        rows += [row(share, a and b, int(n), False) for a, b, n in zip(right, proven, counts, strict=True)]
    return rows


def batched(reader: Reader, ids: torch.Tensor, states: torch.Tensor, bench: settings.BenchSettings) -> list[dict]:
    """Ours: all prompts of a position together; a token's seconds are its share."""
    rows = []
    search = continuous.Settings(steps=bench.steps, candidates=bench.candidates)
    for position in range(1, ids.shape[1]):
        started = time.perf_counter()
        found, table, _ = continuous.search(
            reader, ids[:, :position], states[:, position], [search] * len(ids), list(range(len(ids)))
        )
        share = (time.perf_counter() - started) / len(ids)
        right = (found == ids[:, position]).tolist()
        rows += [row(share, one, int(n), False) for one, n in zip(right, table.candidates, strict=True)]
    return rows


def one_by_one(method: str, reader: Reader, ids: torch.Tensor, states: torch.Tensor, bench) -> list[dict]:
    """A token at a time, until the method's budget is used up; in an order drawn once, so that a part of the tokens is
    a sample of all."""
    rows, begun = [], time.perf_counter()
    places = [(prompt, position) for position in range(1, ids.shape[1]) for prompt in range(len(ids))]
    np.random.default_rng(0).shuffle(places)
    for prompt, position in places:
        left = min(bench.cap, bench.budget - (time.perf_counter() - begun))
        if left <= 0:
            return rows
        prefix, target = ids[prompt : prompt + 1, :position], states[prompt, position]
        cache = reader.read(prefix)
        order = None
        if method == "lm order":
            order = reader.next_probabilities(prefix)[0].argsort(descending=True)
        started = time.perf_counter()
        if method == "sequential":
            chosen, tried, done = sequential(reader, cache, target, bench, started + left)
        elif method.startswith("sipit"):
            start = int(np.random.default_rng([0, prompt, position]).integers(len(reader.embedding)))
            limit = sipit.Sipit(seconds=left)
            if method == "sipit cached":
                chosen, tried, done = sipit.descend(reader, cache, target, start, limit)
            else:
                chosen, tried, done = published(reader, prefix, target, start, limit)
        else:
            order = torch.arange(len(reader.embedding), device=reader.device) if order is None else order
            chosen, tried, done = continuous.verify(reader, cache, target, order, 1e-4)
        seconds = time.perf_counter() - started
        rows.append(row(seconds, int(chosen) == int(ids[prompt, position]), tried, not done and seconds >= left))
    return rows


def row(seconds: float, right: bool, candidates: int, capped: bool) -> dict:
    """What is printed of a token."""
    return {"seconds": seconds, "right": bool(right), "candidates": candidates, "capped": bool(capped)}


def sequential(reader: Reader, cache, target: torch.Tensor, bench, until: float) -> tuple[int, int, bool]:
    """The published search as its scripts do it: one prompt, a cached prefix, candidates verified one by one."""
    proxy = torch.zeros(1, reader.width, device=reader.device, requires_grad=True)
    adam = torch.optim.Adam([proxy], lr=0.05, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=bench.steps)
    for _ in range(bench.steps):
        adam.zero_grad()
        loss = (reader.proxies(proxy, cache)[0] - target).square().mean()
        if loss < 1e-4 or time.perf_counter() > until:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_([proxy], 1.0)
        adam.step()
        schedule.step()
    order = continuous.distances(reader, proxy.detach(), "l1")[0].topk(bench.candidates, largest=False).indices
    for tried, candidate in enumerate(order, 1):
        if (reader.candidates(candidate[None], view(cache))[0] - target).square().mean() < 1e-4:
            return int(candidate), tried, True
        if time.perf_counter() > until:
            break
    return int(order[0]), tried, tried == len(order)


def published(reader: Reader, prefix: torch.Tensor, target: torch.Tensor, start: int, limit) -> tuple[int, int, bool]:
    """SIPIT without a cache: every step and every try reads the whole prefix again."""
    table, model = reader.embedding, reader.model
    before, proxy = table[prefix[0]], table[start].clone()
    untried = torch.ones(len(table), dtype=torch.bool, device=reader.device)
    until, tried = time.perf_counter() + limit.seconds, 0

    def state(embedding):
        return model(inputs_embeds=torch.cat([before, embedding[None]])[None], use_cache=False).last_hidden_state[0, -1]

    while tried < len(table) and time.perf_counter() < until:
        proxy = proxy.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad((state(proxy) - target).square().mean(), proxy)
        scale = (limit.clip / (gradient.norm() + 1e-6)).clamp(max=1.0)
        proxy = proxy.detach() - limit.learning_rate * scale * gradient
        far = (table - proxy).norm(dim=-1).masked_fill(~untried, torch.inf)
        nearest, tried = far.argmin(), tried + 1
        with torch.no_grad():
            if torch.allclose(state(table[nearest]), target, rtol=0.0, atol=limit.tolerance):
                return int(nearest), tried, True
        untried[nearest] = False
        if tried % limit.snap == 0:
            proxy = table[far.masked_fill(~untried, torch.inf).argmin()].clone()
    return -1, tried, False


if __name__ == "__main__":
    main()
