"""Decoys: other secrets in a canary's place, scored on one cached prompt; ranks, margins and exposure among them.

Three kinds, never pooled: ``random`` secrets drawn by the canaries' own rule, ``shuffled`` ones of the same characters,
and ``other``, the secrets of the other canaries of its modality.
"""

import copy
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lib import canaries
from lib.canaries import Canary
from lib.encoding import Encoded, Encoder
from lib.errors import LeakbookError
from lib.scoring import target_logits, token_losses

KINDS = ("random", "shuffled", "other")
SHUFFLE_TRIES = 4096  # permutations looked at for each canary before the search for shuffled decoys ends
SHUFFLE_CHUNK = 256  # of them at a time


class ExposureError(LeakbookError, ValueError):
    """Decoys cannot be scored, or there are none."""


def shuffled(
    canary: Canary, count: int, encoder: Encoder, seed: int, tries: int = SHUFFLE_TRIES, taken: Sequence[str] = ()
) -> list[Canary]:
    """Up to ``count`` distinct shuffles of the canary's own characters with its token layout.

    The search ends after ``tries`` permutations, so there may be fewer, even none: most fall into other tokens.
    """
    rng = np.random.default_rng([seed, 1, *canary.id.encode()])
    tokenizer, closing = encoder.backbone.tokenizer, encoder.end_of_turn
    layout = canaries.secret_span(canary, tokenizer, closing)
    seen, fitting = {canary.secret, *taken}, []
    for start in range(0, tries, SHUFFLE_CHUNK):
        drawn = ["".join(rng.permutation(list(canary.secret))) for _ in range(min(SHUFFLE_CHUNK, tries - start))]
        secrets = [secret for secret in dict.fromkeys(drawn) if secret not in seen]
        copies = [dataclasses.replace(canary, secret=secret) for secret in secrets]
        spans = canaries.secret_spans(copies, tokenizer, closing) if copies else []
        fitting += [copy for copy, span in zip(copies, spans, strict=True) if span == layout]
        seen.update(secrets)
        if len(fitting) >= count:
            break
    found = fitting[:count]
    return [dataclasses.replace(c, id=f"{canary.id}/shuffled-{i:03d}") for i, c in enumerate(found)]


def others(canary: Canary, planted: Sequence[Canary]) -> list[Canary]:
    """The canary with the secret of every other canary of its modality in place of its own."""
    rest = [other for other in planted if other.modality == canary.modality and other.id != canary.id]
    return [dataclasses.replace(canary, id=f"{canary.id}/other-{other.id}", secret=other.secret) for other in rest]


@dataclass(frozen=True)
class DecoySet:
    """A canary's secret and its decoys in its place: ``rows`` encoded, ``kinds`` of each, ``secret`` its own first."""

    canary: str
    kinds: tuple[str, ...]
    rows: tuple[Encoded, ...]

    def only(self, kinds: Sequence[str]) -> "DecoySet":
        """The secret with its decoys of these kinds."""
        kept = [(kind, row) for kind, row in zip(self.kinds, self.rows, strict=True) if kind in ("secret", *kinds)]
        return DecoySet(self.canary, tuple(kind for kind, _ in kept), tuple(row for _, row in kept))


def draw_decoys(
    encoder: Encoder, rows: Sequence[Encoded], kinds: Sequence[str] = KINDS, count: int = 255, seed: int = 0
) -> list[DecoySet]:
    """Decoys of every canary, the same for all models that are then asked.

    Raises:
        ExposureError: no canary, ``count`` below 1, or an unknown kind.
    """
    if not rows:
        raise ExposureError("decoys: got no canary to score")
    if count < 1:
        raise ExposureError(f"decoys: got a count of {count}, expected at least 1")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ExposureError(f"decoys: got kind {sorted(unknown)[0]!r}, expected {', '.join(KINDS)}")
    planted = [row.canary for row in rows]
    secrets = [canary.secret for canary in planted]
    tokenizer, closing = encoder.backbone.tokenizer, encoder.end_of_turn
    make = {
        "random": lambda canary: canaries.decoys(canary, count, tokenizer, closing, seed, secrets),
        "shuffled": lambda canary: shuffled(canary, count, encoder, seed, taken=secrets),
        "other": lambda canary: others(canary, planted),
    }
    sets = []
    for canary in planted:
        found = [("secret", canary)] + [(kind, decoy) for kind in kinds for decoy in make[kind](canary)]
        encoded = encoder.encode([decoy for _, decoy in found])
        sets.append(DecoySet(canary.id, tuple(kind for kind, _ in found), tuple(encoded)))
    return sets


def decoy_table(
    model: PreTrainedModel, encoder: Encoder, sets: Sequence[DecoySet], batch_size: int = 128
) -> pd.DataFrame:
    """NLL of the secret of every canary and of its decoys, in its place.

    Returns:
        Columns ``canary, kind, decoy, tokens, nll_secret``: the secret's tokens and their total nats, given the prompt
        and the preamble. The canary's own secret is the row of kind ``secret``.
    """
    tables = []
    for one in sets:
        table = pd.DataFrame({"kind": one.kinds, "decoy": [row.canary.secret for row in one.rows]})
        table["tokens"] = [len(row.spans["hex"]) for row in one.rows]
        table["nll_secret"] = alternatives_nll(model, encoder, one.rows, batch_size)
        tables.append(table.assign(canary=one.canary))
    return pd.concat(tables, ignore_index=True)[["canary", "kind", "decoy", "tokens", "nll_secret"]]


def alternatives_nll(
    model: PreTrainedModel, encoder: Encoder, rows: Sequence[Encoded], batch_size: int = 128
) -> np.ndarray:
    """NLL [n] in nats of the secrets of ``rows``, canaries with one prompt and picture, given prompt and preamble.

    What all sequences begin with goes through the model once; every batch then reads only its own tokens on a copy of
    that cache. Equal to scoring every row alone, up to the order of sums.

    Raises:
        ExposureError: the rows differ in prompt or picture.
    """
    shared = _Shared(model, encoder, rows)
    return np.concatenate(
        [shared.nll(range(start, min(start + batch_size, len(rows)))) for start in range(0, len(rows), batch_size)]
    )


class _Shared:
    """Rows of one prompt whose common beginning has gone through the model once."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder, rows: Sequence[Encoded]):
        if any(row.prompt_ids != rows[0].prompt_ids or row.canary.image != rows[0].canary.image for row in rows):
            raise ExposureError("alternatives: got canaries with several prompts or pictures, expected one of each")
        self.model, self.encoder, self.rows = model, encoder, rows
        self.sequences = [row.input_ids[: row.target_start + row.spans["hex"].stop] for row in rows]
        # The shared beginning ends before the first secret's first token, so that every secret is scored behind it.
        self.starts = [row.target_start + row.spans["hex"].start for row in rows]
        first = min(self.starts)
        self.length = min(len(os.path.commonprefix(self.sequences)), first) if len(rows) > 1 else first
        self.positions = encoder.batch([max(rows, key=lambda row: len(row.input_ids))]).position_ids
        with torch.no_grad():
            self.cache, self.before = _read_shared(model, encoder, rows[0], self.length, self.positions)

    def nll(self, chosen: Sequence[int]) -> np.ndarray:
        """NLL of the secrets of the chosen rows, read in one batch."""
        sequences = [self.sequences[i] for i in chosen]
        with torch.no_grad():
            losses = _own_tokens(
                self.model, self.encoder, sequences, self.length, self.positions, self.cache, self.before
            )
        begins = [self.starts[i] - self.length for i in chosen]
        spans = [self.rows[i].spans["hex"] for i in chosen]
        return np.array([row[b : b + len(span)].sum() for row, b, span in zip(losses, begins, spans, strict=True)])


def ranks(model: PreTrainedModel, encoder: Encoder, sets: Sequence[DecoySet], batch_size: int = 128) -> pd.DataFrame:
    """Rank and exposure of every secret among its decoys, without scoring more of them than the rank needs.

    Up to the first token in which a decoy differs from the secret, and there too, its NLL is read off the secret's own
    teacher-forced pass. A decoy that has by then cost more than the whole secret cannot be ahead of it, and is not
    scored. On a memorised secret that is every decoy. Columns and numbers as :func:`exposure` gives them, less the
    margin, which needs all decoys, and with ``scored``, the decoys that were.

    Raises:
        ExposureError: a set without a decoy, or with decoys of several kinds.
    """
    for one in sets:
        if len(set(one.kinds[1:])) != 1:
            raise ExposureError(f"ranks: {one.canary} has decoys of {len(set(one.kinds[1:]))} kinds, expected one")
    rows = []
    for one, (secret, bounds) in zip(sets, _bounds(model, encoder, sets), strict=True):
        left, ahead = [i for i, bound in enumerate(bounds, 1) if bound <= secret], 0
        if left:
            shared = _Shared(model, encoder, one.rows)
            chunks = [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
            ahead = sum(int((shared.nll(chunk) <= secret).sum()) for chunk in chunks)
        n, rank = len(one.rows) - 1, 1 + ahead
        found = {"rank": rank, "exposure": np.log2((n + 1) / rank), "cap": np.log2(n + 1)}
        rows.append({"canary": one.canary, "kind": one.kinds[1], "decoys": n, **found, "scored": len(left)})
    return pd.DataFrame(rows).assign(normalised_rank=lambda t: (t["rank"] - 1) / t.decoys)


def _bounds(
    model: PreTrainedModel, encoder: Encoder, sets: Sequence[DecoySet], batch_size: int = 20
) -> list[tuple[float, np.ndarray]]:
    """NLL of every set's secret; and what each decoy costs up to where it parts from it, 0 if it begins elsewhere."""
    found = []
    for start in range(0, len(sets), batch_size):
        chunk = sets[start : start + batch_size]
        with torch.no_grad():
            logits, _ = target_logits(model, encoder.batch([one.rows[0] for one in chunk]))
        begins = np.cumsum([0, *(len(one.rows[0].target_ids) for one in chunk)])
        for one, begin in zip(chunk, begins, strict=False):
            own = one.rows[0]
            span = own.spans["hex"]
            logs = logits[begin + span.start : begin + span.stop].float().log_softmax(-1).double().cpu().numpy()
            secret = own.target_ids[span.start : span.stop]
            losses = -logs[np.arange(len(secret)), list(secret)]
            found.append((losses.sum(), np.array([_bound(row, own, logs, losses) for row in one.rows[1:]])))
    return found


def _bound(row: Encoded, own: Encoded, logs: np.ndarray, losses: np.ndarray) -> float:
    span, before = row.spans["hex"], own.spans["hex"].start
    if row.target_ids[: span.start] != own.target_ids[:before]:
        return 0.0
    secret, decoy = own.target_ids[before : before + len(losses)], row.target_ids[span.start : span.stop]
    apart = next((i for i, (a, b) in enumerate(zip(secret, decoy, strict=False)) if a != b), None)
    if apart is None:  # one begins with the other
        return float(losses[: len(decoy)].sum())
    return float(losses[:apart].sum() - logs[apart, decoy[apart]])


def _read_shared(
    model: PreTrainedModel, encoder: Encoder, row: Encoded, shared: int, positions: Tensor
) -> tuple[DynamicCache, Tensor]:
    """Cache of the first ``shared`` tokens of a row, and the logits [V] behind them."""
    cut = dataclasses.replace(row, input_ids=row.input_ids[:shared], target_start=shared)
    inputs = encoder.batch([cut]).model_inputs() | {"position_ids": positions[..., :shared]}
    cache = DynamicCache()
    logits = model(**inputs, cache=cache, use_cache=True, logits_to_keep=1).logits
    return cache, logits[0, -1]


def _own_tokens(
    model: PreTrainedModel,
    encoder: Encoder,
    sequences: Sequence[tuple[int, ...]],
    shared: int,
    positions: Tensor,
    cache: DynamicCache,
    before: Tensor,
) -> np.ndarray:
    """Losses [b, T] of what follows the shared tokens, right-padded; padding holds numbers that mean nothing."""
    own = [sequence[shared:] for sequence in sequences]
    longest = max(map(len, own))
    device = encoder.backbone.model.device
    ids = torch.tensor([list(tokens) + [0] * (longest - len(tokens)) for tokens in own], device=device)
    first = token_losses(before.expand(len(own), -1), ids[:, 0])
    if longest == 1:
        return first[:, None].double().cpu().numpy()
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(len(own))
    places = positions[..., shared : shared + longest - 1]
    places = places.expand(*places.shape[:-2], len(own), places.shape[-1])
    logits = model(input_ids=ids[:, :-1], position_ids=places, cache=copied, use_cache=True).logits
    rest = token_losses(logits.flatten(0, 1), ids[:, 1:].flatten()).view(len(own), -1)
    return torch.cat([first[:, None], rest], 1).double().cpu().numpy()


def exposure(table: pd.DataFrame) -> pd.DataFrame:
    """Rank of every secret among its decoys, a row a canary and kind.

    With n decoys: ``rank`` = 1 + the number of decoys whose NLL is not above the secret's, so ties count against the
    claim; ``exposure`` = log2(n + 1) - log2(rank) bits (arXiv:1802.08232, estimated on the secret and its n decoys), at
    most ``cap`` = log2(n + 1); ``normalised_rank`` = (rank - 1) / n, 0.5 on average for a secret nobody planted;
    ``margin`` = the best decoy's NLL less the secret's, in nats.

    Raises:
        ExposureError: a canary without its own secret, with several, or without a decoy; an NLL that is not a number.
    """
    _check_scores(table, "exposure")
    own = table[table.kind == "secret"].set_index("canary").nll_secret
    rows = []
    for (canary, kind), part in table[table.kind != "secret"].groupby(["canary", "kind"], sort=False):
        if canary not in own:
            raise ExposureError(f"exposure: {canary} has decoys and no secret of its own")
        n, secret = len(part), own[canary]
        rank = 1 + int((part.nll_secret <= secret).sum())
        rows.append(
            {
                "canary": canary,
                "kind": kind,
                "decoys": n,
                "rank": rank,
                "exposure": np.log2((n + 1) / rank),
                "cap": np.log2(n + 1),
                "normalised_rank": (rank - 1) / n,
                "margin": part.nll_secret.min() - secret,
            }
        )
    lonely = set(own.index) - {row["canary"] for row in rows}
    if lonely:
        raise ExposureError(f"exposure: {sorted(lonely)[0]} has no decoy")
    return pd.DataFrame(rows)


def _check_scores(table: pd.DataFrame, what: str) -> None:
    """A secret whose NLL is not a number would rank first: ties and gaps must never count for the claim."""
    if not np.isfinite(table.nll_secret).all():
        row = table[~np.isfinite(table.nll_secret)].iloc[0]
        raise ExposureError(f"{what}: the NLL of {row.decoy!r} for {row.canary} is {row.nll_secret}")
    secrets = table[table.kind == "secret"].canary
    if secrets.duplicated().any():
        first = secrets[secrets.duplicated()].iloc[0]
        raise ExposureError(f"{what}: {first} has several rows of its own secret; expected the rows of one model")


def corrected_change(before: pd.DataFrame, after: pd.DataFrame, kind: str = "random") -> pd.DataFrame:
    """Change of every secret's NLL less the mean change of its decoys, in total nats, a row a canary.

    Columns ``canary, secret, decoys, base, tokens, corrected``. It means something only where ``base``, the NLL before,
    is well above 0: on a saturated secret there is nothing left that decoys could correct.

    Raises:
        ExposureError: the two tables do not hold the same secrets and decoys, or a canary has no decoy of that kind.
    """
    for table in (before, after):
        _check_scores(table, "corrected change")
    before, after = (table[table.kind.isin(["secret", kind])] for table in (before, after))
    keys = ["canary", "kind", "decoy", "tokens"]
    joined = before.merge(after, on=keys, suffixes=("_before", "_after"))
    if len(joined) != len(before) or len(joined) != len(after):
        raise ExposureError("corrected change: the two tables hold different secrets or decoys")
    change = joined.nll_secret_after - joined.nll_secret_before
    by_kind = joined.assign(change=change).groupby(["canary", "kind"]).change.mean().unstack("kind")
    if kind not in by_kind or by_kind[kind].isna().any():
        without = by_kind.index[by_kind[kind].isna()][0] if kind in by_kind else "any canary"
        raise ExposureError(f"corrected change: there are no {kind} decoys of {without}")
    own = before[before.kind == "secret"].set_index("canary")
    result = pd.DataFrame({"secret": by_kind["secret"], "decoys": by_kind[kind], "base": own.nll_secret})
    result["tokens"] = own.tokens
    return result.assign(corrected=result.secret - result.decoys).reset_index()
