"""Seconds a token to invert hidden states, in a process of its own, by one method on the bench set.

Every token is searched behind its true prefix, so that an error costs no later token; the first token of a prompt, that
no gradient finds in a Llama-type model, is left out for all methods alike. What a method sets up once (the model, the
language model's cache of a prefix) is outside its seconds, or named beside them.
"""

import json
import time

import click
import numpy as np
import torch

from lib import config, models
from lib.inversion import continuous, settings, sipit
from lib.inversion.reader import Convention, Reader, view
from lib.training import accelerator

METHODS = ("batched", "sequential", "sipit published", "sipit cached", "lm order", "full scan")
SETS = {"batched": "batch", "lm order": "quick"}


@click.command()
@click.option("--method", type=click.Choice(METHODS), required=True)
@click.option("--scale", default="laptop")
def main(method: str, scale: str) -> None:
    chosen = settings.load(scale)
    torch.set_num_threads(config.load_scale(scale).threads)
    bench = chosen.bench
    prompts, tokens = getattr(bench, SETS.get(method, "slow"))
    backbone = models.load(chosen.model, chosen.revision, device=accelerator().device)
    reader = Reader(backbone, Convention(norm="pre" if method.startswith("sipit") else "post"), len(backbone.tokenizer))
    texts = settings.prompts(chosen.source, prompts)
    ids = torch.tensor(
        [backbone.tokenizer(text.text, add_special_tokens=False)["input_ids"][: tokens + 1] for text in texts]
    )
    ids = ids.to(reader.device)
    states = reader.states(ids)
    started = time.perf_counter()
    for _ in range(3):
        reader.states(ids)
    forward = (time.perf_counter() - started) / 3 / ids.numel()  # a token of the same prompts, in one batch
    rows = (
        batched(reader, ids, states, bench) if method == "batched" else one_by_one(method, reader, ids, states, bench)
    )
    print(json.dumps({"method": method, "forward": forward, "rows": rows}))


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
    """A token at a time, until the method's budget is used up; positions first, so that every prompt is met."""
    rows, begun = [], time.perf_counter()
    for position in range(1, ids.shape[1]):
        for prompt in range(len(ids)):
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
