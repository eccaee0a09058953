"""Extraction by sampling: the chance of k generations to hold a secret, in closed form and counted."""

import numpy as np
import torch
from scipy.special import comb
from transformers import GenerationConfig, PreTrainedModel

from lib.encoding import Encoded, Encoder
from lib.errors import LeakbookError
from lib.probes import TokenNLL, only_configuration
from lib.scoring import target_logits


class ExtractionError(LeakbookError, ValueError):
    """A number of samples, or of candidates, that means nothing."""


def log_probability(scores: TokenNLL, with_preamble: bool = False) -> np.ndarray:
    """log p_z [n]: of the secret's tokens given prompt and preamble, or of preamble and secret given the prompt.

    The canonical token path only, so a lower bound for the string, at temperature 1.
    """
    logs = []
    for row, nll in zip(scores.rows, scores.nll, strict=True):
        span = row.spans["hex"]
        logs.append(-nll[0 if with_preamble else span.start : span.stop].sum())
    return np.array(logs)


def hit_at_k(log_p: np.ndarray, k: int) -> np.ndarray:
    """Chance of at least one hit in ``k`` independent samples, 1 - (1 - p)^k (arXiv:2410.19482), from log p.

    Raises:
        ExtractionError: ``k`` is below 1.
    """
    _check(k)
    log_p = np.minimum(np.asarray(log_p, dtype=float), 0.0)
    with np.errstate(divide="ignore"):
        return -np.expm1(k * np.log1p(-np.exp(log_p)))


def sampled_hit_at_k(hits: np.ndarray, samples: np.ndarray, k: int) -> np.ndarray:
    """hit@k from ``hits`` among ``samples`` generations, 1 - C(n - c, k) / C(n, k), unbiased (arXiv:2107.03374).

    Raises:
        ExtractionError: ``k`` is below 1 or above the number of generations.
    """
    _check(k)
    if k > np.min(samples):
        raise ExtractionError(f"hit@k: got k = {k}, expected at most {np.min(samples)}, the number of generations")
    return 1.0 - comb(np.asarray(samples) - np.asarray(hits), k) / comb(samples, k)


def reliability(log_p: np.ndarray, k: int) -> np.ndarray:
    """Chance that all of ``k`` independent samples hit, p^k, from log p.

    Raises:
        ExtractionError: ``k`` is below 1.
    """
    _check(k)
    return np.exp(k * np.minimum(np.asarray(log_p, dtype=float), 0.0))


def _check(k: int) -> None:
    if k < 1:
        raise ExtractionError(f"hit@k: got k = {k}, expected at least one generation")


def top_k_log_probability(
    model: PreTrainedModel, encoder: Encoder, rows: list[Encoded], top_k: int, batch_size: int = 20
) -> np.ndarray:
    """log p_z [n] of the secret given prompt and preamble under sampling from the ``top_k`` likeliest tokens only.

    -inf where a token of the secret is not among them.

    Raises:
        ExtractionError: ``top_k`` is below 1.
    """
    if top_k < 1:
        raise ExtractionError(f"top-k sampling: got {top_k} candidates, expected at least 1")
    logs = []
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        with torch.no_grad():
            logits, ids = target_logits(model, encoder.batch(chunk))
            precise = logits if logits.dtype == torch.float64 else logits.float()
            least = precise.topk(min(top_k, precise.shape[-1])).values[
                :, -1:
            ]  # ties with the k-th stay, as in sampling
            kept = precise.masked_fill(precise < least, -torch.inf)
            scores = (kept.gather(-1, ids[:, None]) - kept.logsumexp(-1, keepdim=True))[:, 0].cpu().numpy()
        ends = np.cumsum([len(row.target_ids) for row in chunk])[:-1]
        for row, values in zip(chunk, np.split(scores, ends), strict=True):
            logs.append(float(values[row.spans["hex"].start : row.spans["hex"].stop].sum()))
    return np.array(logs)


def sampled_hits(
    model: PreTrainedModel,
    encoder: Encoder,
    row: Encoded,
    samples: int,
    seed: int,
    top_k: int | None = None,
    batch_size: int = 256,
) -> np.ndarray:
    """Whether each of ``samples`` continuations of the true preamble is exactly the secret's tokens.

    Temperature 1, from all tokens, or from the ``top_k`` likeliest; an explicit configuration, as in greedy decoding.

    Raises:
        ExtractionError: ``samples`` is below 1.
    """
    _check(samples)
    span = row.spans["hex"]
    secret = torch.tensor(row.target_ids[span.start : span.stop])
    stop = encoder.backbone.tokenizer.convert_tokens_to_ids(encoder.end_of_turn)
    configuration = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=top_k or 0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=len(secret),
        eos_token_id=stop,
        pad_token_id=stop,
        use_cache=True,
    )
    hits = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, samples, batch_size):
            count = min(batch_size, samples - start)
            batch = encoder.batch([row] * count, [row.target_ids[: span.start]] * count)
            with only_configuration(model, configuration):
                ids = model.generate(**batch.generation_inputs())[:, batch.input_ids.shape[1] :].cpu()
            padded = torch.nn.functional.pad(ids, (0, len(secret) - ids.shape[1]), value=-1)
            hits.append((padded == secret).all(-1).numpy())
    return np.concatenate(hits)
