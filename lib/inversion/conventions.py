"""Which layer and norm were states taken at? Named by what reproduces them, where a statement is to be checked."""

import pandas as pd
import torch
from torch import Tensor

from lib.inversion.reader import InversionError, Reader, decoder_parts
from lib.models import Backbone

CHUNK = 256  # one-token prompts read at once
EXACTLY = "donot_use_mm_for_euclid_dist"
FAR = 100.0  # times better another convention must fit to be named where the stated one fits, too
FITS = 1e-4  # mean squared error below which a row counts as reproduced, as a share of the row's mean square


def fitting(backbone: Backbone, states: Tensor, ids: Tensor | None = None) -> pd.DataFrame:
    """How well every layer and norm of a model reproduces states [n, T, d], best first.

    With the prompts' ``ids`` [n, T], one forward pass and all rows are compared. Without them the first rows alone,
    with the states of every one-token prompt: half a minute to two minutes for a vocabulary of 50,000 on two cores.

    Returns:
        ``layer, norm, residual``: the largest over prompts of |h - h'|^2 / |h|^2, of the nearest token where ids are
        not given. Behind all layers the layer is called ``last``.
    """
    if ids is not None:
        rows, prompts = states, [ids.to(backbone.model.device)]
    else:
        rows = states[:, :1]
        rows_of_table = len(backbone.model.get_input_embeddings().weight)
        known = min(len(backbone.tokenizer), rows_of_table)
        prompts = torch.arange(known, device=backbone.model.device)[:, None].split(CHUNK)
    rows = rows.to(backbone.model.device)
    scale = rows.square().sum(-1)
    best: dict[tuple[int | str, str], Tensor] = {}
    for part in prompts:
        for place, found in _all_states(backbone, part).items():
            if ids is None:  # the nearest of these tokens to each first row
                apart = torch.cdist(rows[:, 0], found[:, 0], compute_mode=EXACTLY).square().amin(-1, keepdim=True)
            else:
                apart = (found - rows).square().sum(-1)
            best[place] = torch.minimum(best.get(place, apart / scale), apart / scale)
    table = [(layer, norm, float(residual.amax())) for (layer, norm), residual in best.items()]
    return pd.DataFrame(table, columns=["layer", "norm", "residual"]).sort_values("residual", ignore_index=True)


def check(reader: Reader, states: Tensor, ids: Tensor | None = None, fits: float | None = None) -> None:
    """Refuse states that the reader's convention does not reproduce; see :func:`fitting` for what it costs.

    ``fits`` is the residual below which a row counts as reproduced.

    Raises:
        InversionError: naming the convention that fits, or that none does.
    """
    table = fitting(reader.backbone, states, ids)
    best, stated = table.iloc[0], reader.convention
    layer = "last" if stated.layer in (None, len(decoder_parts(reader.backbone)[0])) else stated.layer
    own = table[(table.layer == layer) & (table.norm == stated.norm)].residual.iloc[0]
    fits = fits or FITS
    if own <= fits and own <= FAR * max(best.residual, fits / FAR**2):
        return
    if best.residual > fits:
        raise InversionError(
            f"hidden states: no layer of {reader.backbone.name} reproduces them (nearest: layer {best.layer}, "
            f"{best.norm}-norm, off by {best.residual:.2g} of their square): expected states of this model, undefended"
        )
    raise InversionError(
        f"hidden states: stated as {stated}, but layer {best.layer}, {best.norm}-norm reproduces them (off by "
        f"{best.residual:.2g} of their square, against {own:.2g})"
    )


@torch.no_grad()
def _all_states(backbone: Backbone, ids: Tensor) -> dict[tuple[int | str, str], Tensor]:
    """States [B, T, d] of every layer, before and behind the final norm."""
    layers, norm = decoder_parts(backbone)
    before_norm: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    try:
        output = backbone.model.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    found = {}
    for place, states in enumerate([*output.hidden_states[1:-1], before_norm[0]], 1):
        layer = "last" if place == len(layers) else place
        found |= {(layer, "pre"): states, (layer, "post"): norm(states)}
    return found


def check_norm(reader: Reader, states: Tensor) -> None:
    """Refuse states [n, T, d] that a final norm cannot have given, or plainly has, at no cost.

    Behind a final norm every row, its weight divided out, has a mean square of 1. Releases that alter the states a
    little (rounding, noise) pass.

    Raises:
        InversionError: the rows belie the reader's norm.
    """
    _, norm = decoder_parts(reader.backbone)
    weight = norm.weight.to(states)
    used = weight.abs() > 0.01 * weight.abs().median()
    bias = getattr(norm, "bias", None)
    bare = ((states if bias is None else states - bias.to(states)) / weight)[..., used].square().mean(-1)
    if reader.convention.norm == "post" and not (0.5 < bare.median() < 2.0):
        raise InversionError(
            f"hidden states: stated as {reader.convention}, but their mean square without the norm's weight is "
            f"{float(bare.median()):.3g}, expected 1: taken before the final norm, or of another model?"
        )
    if reader.convention.norm == "pre" and ((bare - 1).abs() < 0.05).all():
        raise InversionError(
            f"hidden states: stated as {reader.convention}, but every row's mean square without the norm's weight is "
            "1, as it is behind the final norm: state them as post"
        )
