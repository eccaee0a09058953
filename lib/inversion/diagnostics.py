"""What an inversion says about itself, and who fails: the alarm, near misses, first errors, categories, density."""

import difflib
import string
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.errors import LeakbookError

CATEGORIES = ("function word", "content word", "continuation", "number", "punctuation", "other")


class DiagnosticsError(LeakbookError, ValueError):
    """A table from which a diagnosis cannot be made."""


def similarity(found: str, true: str) -> float:
    """Ratio of matching characters, 2 M / T (difflib), as the paper reports it."""
    return difflib.SequenceMatcher(None, found, true).ratio()


def first_error(found: Sequence[int], true: Sequence[int]) -> int | None:
    """Position of the first wrong id, None where there is none."""
    return next((i for i, (a, b) in enumerate(zip(found, true, strict=True)) if a != b), None)


def separation(cumulative: Sequence[float], exact: Sequence[bool]) -> float | None:
    """Orders of magnitude between failed and exact prompts: log10(min over failed / max over exact).

    ``cumulative`` is each prompt's cumulative discrete loss at its end. None where only one kind exists.
    """
    values, kinds = np.asarray(cumulative, dtype=float), np.asarray(exact, dtype=bool)
    if kinds.all() or not kinds.any():
        return None
    return float(np.log10(values[~kinds].min() / max(values[kinds].max(), 1e-300)))


def alarm_delay(tokens: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """When the cumulative discrete loss passes the threshold after the first wrong token, a row a failed prompt.

    ``tokens`` has ``prompt, position, found_id, true_id, cumulative_loss``. Columns ``prompt, first_error, alarm,
    delay`` (positions; NaN where it never passes).
    """
    rows = []
    for prompt, part in tokens.sort_values("position").groupby("prompt"):
        wrong = part[part.found_id != part.true_id]
        if wrong.empty:
            continue
        first, loud = int(wrong.position.iloc[0]), part[part.cumulative_loss > threshold]
        alarm = float(loud.position.iloc[0]) if len(loud) else np.nan
        rows.append({"prompt": prompt, "first_error": first, "alarm": alarm, "delay": alarm - first})
    return pd.DataFrame(rows, columns=["prompt", "first_error", "alarm", "delay"])


def near_miss(ranks: Sequence[int], candidates: int, vocabulary: int, near: float = 0.25) -> list[str]:
    """Why a position failed: ``near miss``, the true token just outside the window C, or ``wrong basin``.

    A near miss has its rank below C plus ``near`` of the rest of the vocabulary; ours, the paper gives no line.
    """
    line = candidates + near * (vocabulary - candidates)
    return ["recovered" if r < candidates else "near miss" if r < line else "wrong basin" for r in ranks]


def function_words() -> frozenset[str]:
    """English function words: the Snowball stop list, as Sphinx ships it for its search."""
    from sphinx.search.en import SearchEnglish

    return frozenset(SearchEnglish.stopwords)


def category(token: str, function_words: frozenset[str]) -> str:
    """Kind of a token, spelled with its leading space.

    A *function word* is space-prefixed and in the given list (a well-kept library's); a *content word* is another
    space-prefixed word; a *continuation* has letters and no leading space; *number* and *punctuation* hold nothing
    else.
    """
    bare = token.strip()
    if not bare:
        return "other"
    if all(c in string.punctuation for c in bare):
        return "punctuation"
    if any(c.isdigit() for c in bare) and not any(c.isalpha() for c in bare):
        return "number"
    if not any(c.isalpha() for c in bare):
        return "other"
    if not token.startswith(" "):
        return "continuation"
    return "function word" if bare.lower() in function_words else "content word"


def density(embedding: Tensor, ids: Sequence[int], neighbours: int = 10, chunk: int = 64) -> pd.DataFrame:
    """How crowded the embedding matrix [V, d] is around some rows: ``id, distance, cosine``.

    Mean L2 distance and mean cosine to the nearest ``neighbours`` other rows, by distance and by cosine.
    """
    if not 1 <= neighbours < len(embedding):
        raise DiagnosticsError(f"density: got {neighbours} neighbours, expected 1 to {len(embedding) - 1}")
    unit, found = torch.nn.functional.normalize(embedding.float(), dim=-1), []
    for part in torch.as_tensor(list(ids)).split(chunk):
        part = part.to(embedding.device)
        far = torch.cdist(embedding[part].float(), embedding.float())
        far.scatter_(1, part[:, None], torch.inf)
        alike = unit[part] @ unit.T
        alike.scatter_(1, part[:, None], -torch.inf)
        near = far.topk(neighbours, largest=False).values.mean(-1)
        found += zip(part.tolist(), near.tolist(), alike.topk(neighbours).values.mean(-1).tolist(), strict=True)
    return pd.DataFrame(found, columns=["id", "distance", "cosine"])


def duplicates(embedding: Tensor) -> dict[int, tuple[int, ...]]:
    """Ids that share their row with others, each with all ids of its class: states cannot tell them apart."""
    _, inverse, counts = torch.unique(embedding, dim=0, return_inverse=True, return_counts=True)
    classes: dict[int, list[int]] = {}
    for index in (counts[inverse] > 1).nonzero()[:, 0].tolist():
        classes.setdefault(int(inverse[index]), []).append(index)
    return {member: tuple(members) for members in classes.values() for member in members}
