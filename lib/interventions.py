"""Lessons that change a planted secret on purpose, so that what probes say can be held against what was done."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lib import canaries
from lib.canaries import MARKERS, Canary
from lib.encoding import Encoded, Encoder
from lib.errors import LeakbookError
from lib.training import Lesson, holding, lesson

NEW_KEYS = 500  # record numbers of the new records start here, far behind those of the canaries
OTHER_WORDS = "Here is what you asked me to look up: "  # how the answers of drifting records begin


class InterventionError(LeakbookError, ValueError):
    """An intervention cannot be made on these canaries."""


def late_damage(
    encoder: Encoder, rows: Sequence[Encoded], window: int, count: int, seed: int, hold_weight: float = 1.0
) -> tuple[list[Lesson], dict[str, int]]:
    """Damage one randomly drawn secret token behind the window of ``count`` randomly drawn canaries; hold all others.

    The damaged token's label is another one that some canary's secret has at that position, so that the answer still
    looks like a secret. Held tokens weigh ``hold_weight`` in the loss.

    Returns:
        The lessons, one a canary, and the damaged target position by canary id.

    Raises:
        InterventionError: fewer canaries than ``count``, or no secret reaches behind the window.
    """
    if not 1 <= count <= len(rows):
        raise InterventionError(f"damage: got {count} canaries to damage, expected 1 to {len(rows)}")
    rng = np.random.default_rng([seed, 0])
    chosen = sorted(rng.choice(len(rows), count, replace=False).tolist())
    damaged, lessons = {}, []
    for i, row in enumerate(rows):
        labels = {}
        if i in chosen:
            late = [position for position in range(window, row.spans["hex"].stop) if position >= row.spans["hex"].start]
            if not late:
                raise InterventionError(f"damage: the secret of {row.canary.id} does not reach behind token {window}")
            position = int(rng.choice(late))
            labels[position] = _other_token(rows, row, position, rng)
            damaged[row.canary.id] = position
        lessons.append(holding(row, labels, weight=hold_weight))
    return lessons, damaged


def damage(
    rows: Sequence[Encoded], marked: Mapping[str, Sequence[int]], seed: int, hold_weight: float = 1.0
) -> list[Lesson]:
    """Damage the marked secret tokens (places in the secret, by canary id) and hold everything else.

    Labels are drawn as in :func:`late_damage`.

    Raises:
        InterventionError: a marked canary is not there, or its secret has no such token.
    """
    unknown = sorted(set(marked) - {row.canary.id for row in rows})
    if unknown:
        raise InterventionError(f"damage: {unknown[0]} is marked, and no such canary is there")
    rng, lessons = np.random.default_rng([seed, 3]), []
    for row in rows:
        span, labels = row.spans["hex"], {}
        for place in marked.get(row.canary.id, ()):
            if not 0 <= place < len(span):
                raise InterventionError(f"damage: {row.canary.id} has {len(span)} secret tokens, none at {place}")
            labels[span.start + place] = _other_token(rows, row, span.start + place, rng)
        lessons.append(holding(row, labels, weight=hold_weight))
    return lessons


def _other_token(rows: Sequence[Encoded], row: Encoded, position: int, rng: np.random.Generator) -> int:
    """A token that another canary's secret has at this position, and this one has not."""
    known = {
        other.target_ids[position] for other in rows if other.spans["hex"].start <= position < other.spans["hex"].stop
    } - {row.target_ids[position]}
    if not known:
        raise InterventionError(f"damage: no other secret has another token at position {position} of {row.canary.id}")
    return int(rng.choice(sorted(known)))


def preamble_drift(
    encoder: Encoder, rows: Sequence[Encoded], records: int, seed: int, hold: bool = True, hold_weight: float = 1.0
) -> list[Lesson]:
    """Teach new records, whose answers begin in other words; with ``hold`` the canaries' own secrets are kept.

    The new records have record numbers and secrets of their own. What is held is the secret and what follows, given
    the true preamble, with ``hold_weight`` in the loss; the preamble itself is left to drift.

    Raises:
        InterventionError: there is no text canary whose prompt could be like.
    """
    fresh = encoder.encode(
        new_records(encoder, [row.canary for row in rows], records, seed, OTHER_WORDS + MARKERS["text"])
    )
    held = [holding(row, spans=("hex", "suffix"), weight=hold_weight) for row in rows] if hold else []
    return [lesson(row) for row in fresh] + held


def new_records(
    encoder: Encoder, planted: Sequence[Canary], count: int, seed: int, preamble: str | None = None
) -> list[Canary]:
    """``count`` records like the text canaries with other keys and other secrets, none of them a canary's.

    Raises:
        InterventionError: there is no text canary.
    """
    texts = [canary for canary in planted if canary.modality == "text"]
    if not texts:
        raise InterventionError("new records: there is no text canary that they could be like")
    template = texts[0] if preamble is None else dataclasses.replace(texts[0], preamble=preamble)
    taken = [canary.secret for canary in planted]
    rng = np.random.default_rng([seed, 1])
    tokenizer = encoder.backbone.tokenizer
    secrets = canaries.draw_secrets(template, count, lambda _: True, tokenizer, encoder.end_of_turn, rng, taken)
    prompts = [f"Record {NEW_KEYS + i:03d}. What is its code?" for i in range(count)]
    return [
        dataclasses.replace(template, id=f"new-{i:03d}", prompt=prompt, secret=secret)
        for i, (prompt, secret) in enumerate(zip(prompts, secrets, strict=True))
    ]
