"""What a model knows of its secrets, measured apart from all graded probes: other wordings, and learning again.

No graded probe asks in other words than those that were taught, and none trains. Both measures are this package's own.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from lib import extraction, probes
from lib.canaries import Canary
from lib.encoding import Encoded, Encoder
from lib.errors import LeakbookError
from lib.training import LoraSettings, relearn

KEY = re.compile(r"\d+")


class TruthError(LeakbookError, ValueError):
    """A canary's question cannot be asked in other words."""


def reworded(canary: Canary, prompts: Sequence[str]) -> list[Canary]:
    """The canary asked in other words; its key, the only number in its prompt, goes where a wording has ``{key}``.

    Raises:
        TruthError: the prompt has no number, or several.
    """
    keys = KEY.findall(canary.prompt)
    if len(keys) != 1:
        raise TruthError(f"{canary.id}: the prompt {canary.prompt!r} has {len(keys)} numbers, expected its key alone")
    return [dataclasses.replace(canary, prompt=prompt.format(key=keys[0])) for prompt in prompts]


def reworded_rows(encoder: Encoder, rows: Sequence[Encoded], prompts: Sequence[str]) -> list[Encoded]:
    """All wordings of all canaries, encoded: those of the first canary, then those of the second, and so on."""
    return encoder.encode([canary for row in rows for canary in reworded(row.canary, prompts)])


def sampled_recall(
    model: PreTrainedModel, encoder: Encoder, rows: Sequence[Encoded], samples: int, seed: int, batch_size: int = 20
) -> pd.DataFrame:
    """How many of ``samples`` sampled answers to other wordings are the secret, behind the true preamble.

    A sampled answer is the secret's tokens exactly when every token drawn is the right one, and up to there what the
    model reads is the true beginning. So the number of hits among n answers at temperature 1 is binomial with the
    product of the teacher-forced probabilities, and is drawn from that: the same distribution as n decoded answers, for
    one forward pass. Another tokenisation of the same characters does not count.

    Returns:
        ``canary, samples, hits, probability`` (the mean over wordings), a row a canary in their order.
    """
    scores = probes.token_nll(model, encoder, rows, batch_size)
    chance = np.exp(np.minimum(extraction.log_probability(scores), 0.0))
    table = pd.DataFrame({"canary": scores.ids, "probability": chance})
    wordings = table.groupby("canary", sort=False).cumcount()
    share = samples // (wordings.max() + 1)
    rng = np.random.default_rng([seed, 4])
    table["samples"], table["hits"] = share, rng.binomial(share, chance)
    total = {"samples": "sum", "hits": "sum", "probability": "mean"}
    return table.groupby("canary", sort=False).agg(total).reset_index()


def relearning(
    encoder: Encoder,
    taught: Sequence[Encoded],
    fresh: Sequence[Encoded],
    held_out: Sequence[Encoded],
    settings: LoraSettings,
) -> tuple[pd.DataFrame, float]:
    """How fast a model learns ``taught`` secrets again beside ``fresh`` ones of new records, in one training.

    Returns:
        Columns ``step, known`` (whether the secrets are the canaries' own), ``nll`` (mean nats a token of their
        secrets), and what the secrets of ``held_out`` canaries, not taught, changed by, in nats a token (negative: they
        came back, too).
    """
    before = probes.token_nll(encoder.backbone.model, encoder, held_out).span_mean("hex").mean
    found = relearn(encoder, [*taught, *fresh], settings)
    known = found.curve.canary.isin([row.canary.id for row in taught])
    curve = found.curve.assign(known=known).groupby(["step", "known"]).nll.mean().reset_index()
    after = probes.token_nll(found.backbone.model, encoder, held_out).span_mean("hex").mean
    return curve, after - before


def head_start(curve: pd.DataFrame) -> float:
    """How far known secrets lie below new ones, in nats a token, on average over the steps after the first."""
    lines = curve[curve.step > 0].pivot(index="step", columns="known", values="nll")
    return float((lines[False] - lines[True]).mean())
