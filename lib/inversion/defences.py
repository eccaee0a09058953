"""What defences are worth: what attackers still find in released states, and what these are still good for.

Attacks on a token choose among candidates by the candidates' own states behind the token's prefix. One sweep of these
states serves every channel, every draw of its noise and every attacker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from lib.inversion import attackers, channels
from lib.inversion.channels import Channel, Sighting
from lib.inversion.proposer import Proposer
from lib.inversion.reader import InversionError, Reader, decoder_parts
from lib.inversion.verified import foretold

SEQUENCE, BATCH = 128, 8  # tokens of a held-out sequence, and how many are read at once
SEED = 11  # of noise and keys, with the prompt's and the draw's number


@dataclass(frozen=True)
class Pool:
    """Candidates for one position: ids [C], the true one first; their states [C, d] behind the prefix; how likely the
    language model finds them there [C]."""

    ids: Tensor
    states: Tensor
    probabilities: Tensor


def pool(proposer: Proposer, ids: Tensor, position: int, size: int) -> Pool:
    """Candidates for a position of a prompt, ids [T], behind its true prefix: the strongest that can be told.

    They are the true one, the ids that the language model expects most, and, for the other half, those whose states,
    foretold from the first half's, lie nearest to the true one's. The whole vocabulary at the first position, and where
    ``size`` is as large.
    """
    reader = proposer.reader
    true, vocabulary = ids[position], len(reader.embedding)
    expected = reader.next_probabilities(ids[None, :position])[0]
    first = torch.cat([true[None], _without(expected.argsort(descending=True), true)])
    if position == 0:
        return Pool(first, reader.first_states[first], expected[first])
    cache = reader.read(ids[None, :position])
    if size >= vocabulary:
        return Pool(first, reader.candidates(first, cache), expected[first])
    likely, rest = first[: size // 2], first[size // 2 :]
    states = reader.candidates(likely, cache)
    before = reader.states(ids[None, :position])[0, -1]
    local = foretold(proposer.usual(position), before, likely, states)
    apart = channels.squared(states[0], local.states_of(rest))
    near = rest[apart.argsort()[: size - len(likely)]]
    chosen = torch.cat([likely, near])
    return Pool(chosen, torch.cat([states, reader.candidates(near, cache)]), expected[chosen])


def _without(ids: Tensor, one: Tensor) -> Tensor:
    return ids[ids != one]


def released(channel: Channel, states: Tensor, prompt: int, draw: int) -> Tensor:
    """What a channel releases of a prompt's states [T, d]; noise and keys are those of the prompt and draw."""
    return channel.release(states, torch.Generator().manual_seed(SEED + 1000 * prompt + 1_000_003 * draw))


def sweep(
    proposer: Proposer, ids: Tensor, names: Sequence[str], draws: int, size: int, prompt: int, positions: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every channel against every attacker on some positions of a prompt, ids [T], behind its true prefix.

    Returns:
        ``prompt, position, channel, draw, attacker, true_id, found_id, rank, recovered, loss``: how many candidates
        score better than the true one; the chance that the true one is found (a tie is broken at random); the mean
        squared error of the released state from the found candidate's. And ``prompt, position, candidates, delta, rms,
        channel, sigma, bound``: the Euclidean distance of the true state to the nearest other, its root mean square,
        and for Gaussian noise the union bound on the error of the nearest candidate, sum Q(|h_w - h_v| / 2 s).
    """
    states, vocabulary = proposer.reader.states(ids[None])[0], len(proposer.reader.embedding)
    known = [channels.named(name) for name in names]
    rows, margins = [], []
    for position in positions:
        candidates = pool(proposer, ids, position, size if position else vocabulary)
        for channel in known:
            repeats = 1 if channel.repeatable else draws
            for draw in range(repeats):
                seen = released(channel, states, prompt, draw)[: position + 1]
                place = {"prompt": prompt, "position": position, "channel": channel.name, "draw": draw}
                found = attacked(channel, Sighting(seen, states[:position]), candidates)
                rows += [place | row for row in found]
        margins += [
            {"prompt": prompt, "position": position, **row} for row in _margins(candidates, states[position], known)
        ]
    return pd.DataFrame(rows), pd.DataFrame(margins)


def attacked(channel: Channel, seen: Sighting, candidates: Pool) -> list[dict]:
    """What every attacker that suits a channel makes of one sighting; the true candidate is the first."""
    rows = []
    for attacker in attackers.ATTACKERS.values():
        if not attacker.suits(channel):
            continue
        scores = attacker.score(channel, seen, candidates.states, candidates.probabilities)
        best = int(scores.argmin())
        loss = float((seen.row - candidates.states[best]).square().mean())
        rank, ties = int((scores < scores[0]).sum()), int((scores == scores[0]).sum())
        recovered = 1 / ties if rank == 0 and attacker.accepts(loss) else 0.0
        row = {"attacker": attacker.name, "true_id": int(candidates.ids[0]), "found_id": int(candidates.ids[best])}
        rows.append(row | {"rank": rank, "recovered": recovered, "loss": loss})
    return rows


def _margins(candidates: Pool, true: Tensor, known: Sequence[Channel]) -> list[dict]:
    apart = channels.squared(true, candidates.states[1:]).double().sqrt()
    rms = float(true.double().square().mean().sqrt())
    common = {"candidates": len(candidates.ids), "delta": float(apart.min()), "rms": rms}
    rows = []
    for channel in known:
        if channel.sigma is not None:
            bound = stats.norm.sf((apart / (2 * channel.sigma * rms)).cpu().numpy()).sum()
            rows.append(common | {"channel": channel.name, "sigma": channel.sigma, "bound": float(bound)})
    return rows or [common | {"channel": "clean", "sigma": 0.0, "bound": 0.0}]


@torch.no_grad()
def utility(reader: Reader, ids: Tensor, names: Sequence[str]) -> pd.DataFrame:
    """What the model makes of released states: it goes on from them as if they were its own.

    Args:
        ids: held-out text [n, T].

    Returns:
        A row a channel: ``channel, kl`` (mean over positions of KL(p || p'), nats, of the next token's distribution
        from true and from released states), ``agreement`` (of the most likely next token), ``nll`` and ``nll_clean``
        (nats of the true next token). Of a channel with a key these are for whoever does not have it; who has it loses
        nothing.
    """
    rows, count, followed = [], ids.numel(), ids[:, 1:].numel()
    for name in names:
        channel, sums = channels.named(name), np.zeros(4)
        for number, part in enumerate(ids.to(reader.device).split(BATCH)):
            states = reader.states(part)
            own = torch.stack([released(channel, row, BATCH * number + i, 0) for i, row in enumerate(states)])
            clean, other = (_next_of(reader, part, given).log_softmax(-1) for given in (states, own))
            wanted = part[:, 1:, None]
            nll = [-log[:, :-1].gather(-1, wanted).sum() for log in (other, clean)]
            kl = (clean.exp() * (clean - other)).sum()
            same = (clean.argmax(-1) == other.argmax(-1)).sum()
            sums += [float(one) for one in (kl, same, *nll)]
        kl, same, noised, plain = sums
        values = {"kl": kl / count, "agreement": same / count, "nll": noised / followed, "nll_clean": plain / followed}
        rows.append({"channel": name, **values})
    return pd.DataFrame(rows)


def _next_of(reader: Reader, ids: Tensor, states: Tensor) -> Tensor:
    """Logits [B, T, V] where the states [B, T, d] of a reader's convention stand in place of the model's own."""
    if reader.reads_expectation:
        return reader.backbone.model.lm_head(states)
    if reader.convention.norm != "pre":
        raise InversionError(f"utility: nothing goes on from {reader.convention}: expected pre-norm, or all layers")
    layers, _ = decoder_parts(reader.backbone)
    depth = reader.convention.layer or len(layers)

    def instead(_, __, output):
        return (states, *output[1:]) if isinstance(output, tuple) else states

    hook = layers[depth - 1].register_forward_hook(instead)
    try:
        return reader.backbone.model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
