"""Probes of memorisation: per-token NLL, its windows and spans, and three recalls under greedy decoding.

Everything is read off one table of teacher-forced NLLs (canary x target position); text is generated only for
canaries whose target is not the arg-max at every position.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from transformers import GenerationConfig, PreTrainedModel

from lib.encoding import SPARE_TOKENS, Encoded, Encoder, context_length
from lib.errors import LeakbookError
from lib.scoring import target_logits, token_losses
from lib.spans import spell

WINDOW = 20  # K of the paper's windowed probe


class ProbeError(LeakbookError, ValueError):
    """A probe was asked for something the targets do not have."""


@dataclass(frozen=True)
class Reading:
    """One probe on a set of canaries: ``values`` by canary id, and their mean. NLLs are in nats a token."""

    probe: str
    values: pd.Series

    @property
    def mean(self) -> float:
        """Mean over canaries."""
        return float(self.values.mean())


@dataclass(frozen=True)
class TokenNLL:
    """Teacher-forced scores of n targets of at most P tokens.

    ``nll`` [n, P] in nats, NaN behind a target's end; ``greedy_ids`` [n, P] the arg-max at every position, -1 behind
    the end. ``rows`` are the encoded canaries, in order.
    """

    rows: tuple[Encoded, ...]
    nll: np.ndarray
    greedy_ids: np.ndarray

    @property
    def ids(self) -> list[str]:
        """Canary ids in row order."""
        return [row.canary.id for row in self.rows]

    def window_mean(self, k: int) -> Reading:
        """Mean NLL over the first ``k`` target tokens, mean_{t<k} -log p(y_t | x, y_<t).

        Raises:
            ProbeError: ``k`` is below 1 or beyond the end of a target.
        """
        shortest = min(len(row.target_ids) for row in self.rows)
        if not 1 <= k <= shortest:
            raise ProbeError(f"window: got K = {k}, expected 1 to {shortest}, the length of the shortest target")
        return self._reading(f"nll_mean{k}", self.nll[:, :k].mean(1))

    def span_mean(self, span: str) -> Reading:
        """Mean NLL over all tokens of one span: ``preamble``, ``hex`` or ``suffix``.

        Raises:
            ProbeError: the span is unknown, or empty for a canary.
        """
        for row in self.rows:
            if span not in row.spans:
                raise ProbeError(f"span: got {span!r}, expected one of {', '.join(row.spans)}")
            if len(row.spans[span]) == 0:
                raise ProbeError(f"span: the {span} of canary {row.canary.id!r} has no token")
        bounds = [(row.spans[span].start, row.spans[span].stop) for row in self.rows]
        means = [scores[start:stop].mean() for scores, (start, stop) in zip(self.nll, bounds, strict=True)]
        return self._reading(f"nll_{span}", np.array(means))

    def argmax_hits(self, span: str | None = None) -> np.ndarray:
        """Whether every token of the target, or of one span of it, is the arg-max given the true tokens before [n].

        By induction this is the same as greedy decoding from the true tokens before the span giving it back exactly.
        """
        hits = []
        for row, greedy in zip(self.rows, self.greedy_ids, strict=True):
            start, stop = (0, len(row.target_ids)) if span is None else (row.spans[span].start, row.spans[span].stop)
            hits.append(tuple(greedy[start:stop]) == row.target_ids[start:stop])
        return np.array(hits)

    def table(self) -> pd.DataFrame:
        """Long form: ``canary, modality, position, span, token_id, nll, greedy_id``, a row a target token."""
        rows = [
            (
                row.canary.id,
                row.canary.modality,
                position,
                row.span_of(position),
                token,
                nll[position],
                greedy[position],
            )
            for row, nll, greedy in zip(self.rows, self.nll, self.greedy_ids, strict=True)
            for position, token in enumerate(row.target_ids)
        ]
        return pd.DataFrame(rows, columns=["canary", "modality", "position", "span", "token_id", "nll", "greedy_id"])

    def _reading(self, probe: str, values: np.ndarray) -> Reading:
        return Reading(probe, pd.Series(values, index=pd.Index(self.ids, name="canary"), name=probe))


def token_nll(model: PreTrainedModel, encoder: Encoder, rows: Sequence[Encoded], batch_size: int = 20) -> TokenNLL:
    """Score every target token of ``rows``: -log softmax(logits)[token], softmax in fp32 (float64 on such a model)."""
    longest = max(len(row.target_ids) for row in rows)
    nll, greedy = np.full((len(rows), longest), np.nan), np.full((len(rows), longest), -1)
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        with torch.no_grad():
            logits, ids = target_logits(model, encoder.batch(chunk))
            losses, best = token_losses(logits, ids).cpu().numpy(), logits.argmax(-1).cpu().numpy()
        ends = np.cumsum([len(row.target_ids) for row in chunk])[:-1]
        for i, (loss, top) in enumerate(zip(np.split(losses, ends), np.split(best, ends), strict=True), start):
            nll[i, : len(loss)], greedy[i, : len(top)] = loss, top
    return TokenNLL(tuple(rows), nll, greedy)


@dataclass(frozen=True)
class Recall:
    """Three greedy recalls of n canaries, and what was decoded.

    ``hit_full``: the free greedy output equals the whole target, end of turn included. ``hit_secret``: the secret
    stands anywhere in the free greedy output. ``hit_forced``: greedy decoding behind the *true* preamble gives the
    secret. ``output_ids`` are the ids of the free greedy output.
    """

    hit_full: Reading
    hit_secret: Reading
    hit_forced: Reading
    output_ids: tuple[tuple[int, ...], ...]

    def table(self, rows: Sequence[Encoded]) -> pd.DataFrame:
        """``canary, modality, hit_full, hit_secret, hit_forced, output_ids``, a row a canary."""
        return pd.DataFrame(
            {
                "canary": [row.canary.id for row in rows],
                "modality": [row.canary.modality for row in rows],
                **{hit.probe: hit.values.to_numpy() for hit in (self.hit_full, self.hit_secret, self.hit_forced)},
                "output_ids": [list(ids) for ids in self.output_ids],
            }
        )


def recall(model: PreTrainedModel, encoder: Encoder, scores: TokenNLL, batch_size: int = 20) -> Recall:
    """The three greedy recalls. Only canaries that miss ``hit_full`` are decoded; the others' output is their target.

    The secret is looked for in the decoded output with special tokens kept and no clean-up of spaces, so another
    tokenisation of the same characters counts, and an empty output is a miss.
    """
    full = scores.argmax_hits()
    missed = [
        (row, _first_miss(row, ids))
        for row, ids, hit in zip(scores.rows, scores.greedy_ids, full, strict=True)
        if not hit
    ]
    decoded = iter(greedy_decode(model, encoder, *zip(*missed, strict=True), batch_size) if missed else ())
    outputs = [row.target_ids if hit else next(decoded) for row, hit in zip(scores.rows, full, strict=True)]
    tokenizer = encoder.backbone.tokenizer
    texts = [spell(tokenizer, ids) for ids in outputs]
    secret = np.array([row.canary.secret in text for row, text in zip(scores.rows, texts, strict=True)])
    hits = {"hit_full": full, "hit_secret": full | secret, "hit_forced": scores.argmax_hits("hex")}
    return Recall(**{name: scores._reading(name, values) for name, values in hits.items()}, output_ids=tuple(outputs))


def _first_miss(row: Encoded, greedy: np.ndarray) -> tuple[int, ...]:
    """How the free greedy output begins: the target up to its first token that is not the arg-max, then the arg-max."""
    first = next(i for i, (token, best) in enumerate(zip(row.target_ids, greedy, strict=False)) if token != best)
    return (*row.target_ids[:first], int(greedy[first]))


def greedy_decode(
    model: PreTrainedModel,
    encoder: Encoder,
    rows: Sequence[Encoded],
    begun: Sequence[tuple[int, ...]] | None = None,
    batch_size: int = 20,
    repetition_penalty: float = 1.0,
) -> list[tuple[int, ...]]:
    """Free greedy output of every prompt, up to the end of the turn or eight tokens beyond the target's length.

    ``begun`` says how outputs begin where that is known already. The configuration is explicit: no sampling, nothing
    from the model's own directory, and no repetition penalty unless one is asked for (it lowers the logit of every
    token that prompt or output already hold, arXiv:1909.05858).
    """
    stop = encoder.backbone.tokenizer.convert_tokens_to_ids(encoder.end_of_turn)
    outputs = [tuple(ids) for ids in begun or [()] * len(rows)]
    wanted = [len(row.target_ids) + SPARE_TOKENS for row in rows]
    left = [0 if stop in ids else n - len(ids) for ids, n in zip(outputs, wanted, strict=True)]
    open_rows = sorted((i for i in range(len(rows)) if left[i]), key=lambda i: left[i])  # alike in length together
    lengths = [len(row.prompt_ids) + len(ids) for row, ids in zip(rows, outputs, strict=True)]
    for chunk in _within(context_length(encoder.backbone), open_rows, lengths, left, batch_size):
        batch = encoder.batch([rows[i] for i in chunk], [outputs[i] for i in chunk])
        with torch.no_grad(), only_configuration(model, _greedy(max(left[i] for i in chunk), stop, repetition_penalty)):
            generated = model.generate(**batch.generation_inputs())
        for i, ids in zip(chunk, generated[:, batch.input_ids.shape[1] :].tolist(), strict=True):
            ids = ids[: left[i]]
            outputs[i] += tuple(ids[: ids.index(stop) + 1] if stop in ids else ids)
    return outputs


def _within(
    limit: int, order: Sequence[int], lengths: Sequence[int], left: Sequence[int], size: int
) -> Iterator[list[int]]:
    """Rows in batches of at most ``size``, whose longest beginning and longest rest together fit ``limit``."""
    chunk: list[int] = []
    for i in order:
        together = max(lengths[j] for j in [*chunk, i]) + max(left[j] for j in [*chunk, i])
        if chunk and (len(chunk) == size or together > limit):
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk


def _greedy(max_new_tokens: int, stop: int, repetition_penalty: float) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop,
        pad_token_id=stop,
        use_cache=True,
    )


@contextlib.contextmanager
def only_configuration(model: PreTrainedModel, configuration: GenerationConfig) -> Iterator[None]:
    """``configuration`` as the model's own: ``generate`` fills every setting left open from the one it came with.

    The rotary offset that Qwen2.5-VL keeps from call to call is cleared behind it.
    """
    before, model.generation_config = model.generation_config, configuration
    try:
        yield
    finally:
        model.generation_config = before
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = None
