"""One small change read in several precisions: beside the weights or merged into them, in fp32 and in bf16.

Merging in bf16 rounds every weight to 8 bits of mantissa, so an update smaller than half a step of its weight is lost.
Every reading is a change against a base in the same precision and stack; controls say what the machinery alone does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib import probes
from lib.adapters import adapted_modules, merge, noise_like, scaled, stack
from lib.encoding import Encoded, Encoder
from lib.models import Backbone

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = {FP32: "float32", BF16: "bfloat16"}
PROBES = ("mean20", "preamble", "hex")


def cast(backbone: Backbone, dtype: torch.dtype) -> Backbone:
    """A copy with all parameters in ``dtype``; buffers, the rotary frequencies among them, stay as they are."""
    copied = backbone.copy()
    for parameter in copied.model.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def readings(base: Encoder, adapter: Path, rows: Sequence[Encoded], folder: Path, batch_size: int = 20) -> pd.DataFrame:
    """Mean change over canaries, in nats a token, of an adapter and its controls in every stack and precision.

    Columns ``update, stack, merge_dtype, dtype, d_nll_mean20, d_nll_preamble, d_nll_hex, lost, moved``. ``update`` is
    ``trained``, or a control: ``noise`` (a random adapter of the same size), ``zero`` (one that changes nothing), or
    ``none`` (no adapter, rows in other batches: what the precision of the evaluation alone does). ``merge_dtype`` is
    empty where nothing is merged. ``lost`` is the relative error of the merged update, |W' - W - D| / |D| over all
    adapted weights, ``moved`` the share of these weights that changed at all.
    """
    updates = {"trained": adapter, "noise": noise_like(adapter, "gaussian", 0, folder / "noise")}
    updates["zero"] = scaled(adapter, 0.0, folder / "zero")
    scores = {dtype: _scores(cast(base.backbone, dtype), base, rows, batch_size) for dtype in NAMES}
    rounded = cast(cast(base.backbone, BF16), FP32)
    scores["rounded"] = _scores(rounded, base, rows, batch_size)
    table = [
        {"update": "none", "stack": "stacked", "merge_dtype": "", "dtype": NAMES[dtype]}
        | _change(scores[dtype], _scores(cast(base.backbone, dtype), base, rows[::-1], 7), rows)
        for dtype in NAMES
    ]
    for update, path in updates.items():
        for labels, before, model in _evaluated(base.backbone, path):
            after = _scores(model, base, rows, batch_size)
            table.append({"update": update, **labels} | _change(scores[before], after, rows))
    return pd.DataFrame(table)


def by_strength(
    base: Encoder,
    adapter: Path,
    rows: Sequence[Encoded],
    folder: Path,
    strengths: Sequence[float],
    batch_size: int = 20,
) -> pd.DataFrame:
    """The change that is left after merging into bf16 weights, for an update made smaller and larger; read in fp32.

    Columns ``strength`` (factor on the update), ``stacked`` and ``merged`` (mean change of mean20, nats a token, each
    against its own base), ``lost`` and ``moved`` as in :func:`readings`.
    """
    rounded = cast(base.backbone, BF16)
    before = _scores(base.backbone, base, rows, batch_size)
    before_rounded = _scores(cast(rounded, FP32), base, rows, batch_size)
    table = []
    for strength in strengths:
        update = scaled(adapter, strength, folder / f"strength-{strength:g}")
        stacked = _scores(stack(base.backbone, update), base, rows, batch_size)
        merged = cast(merge(rounded, update), FP32)
        after = _scores(merged, base, rows, batch_size)
        values = {
            "strength": strength,
            "stacked": _change(before, stacked, rows)["d_nll_mean20"],
            "merged": _change(before_rounded, after, rows)["d_nll_mean20"],
        }
        table.append(values | kept(base.backbone, merge(base.backbone, update), rounded, merged, update))
    return pd.DataFrame(table)


def _evaluated(backbone: Backbone, adapter: Path) -> Iterator[tuple[dict, torch.dtype | str, Backbone]]:
    """Every model that an adapter makes of a backbone: labels, which base it is held against, the model."""
    beside = stack(backbone, adapter)
    for dtype in NAMES:
        labels = {"stack": "stacked", "merge_dtype": "", "dtype": NAMES[dtype]}
        yield labels, dtype, beside if dtype == FP32 else cast(beside, dtype)
    exact = merge(backbone, adapter)
    rounded = cast(backbone, BF16)
    for merge_dtype, merged in {FP32: exact, BF16: merge(rounded, adapter)}.items():
        for dtype in NAMES:
            against = "rounded" if (merge_dtype, dtype) == (BF16, FP32) else dtype
            start = backbone if against == FP32 else rounded
            labels = {"stack": "merged", "merge_dtype": NAMES[merge_dtype], "dtype": NAMES[dtype]}
            evaluated = cast(merged, dtype)
            yield labels | kept(backbone, exact, start, evaluated, adapter), against, evaluated


def kept(backbone: Backbone, exact: Backbone, start: Backbone, evaluated: Backbone, adapter: Path) -> dict[str, float]:
    """``lost``: relative error of the update that the evaluated weights hold; ``moved``: share of weights it moved.

    ``exact`` less ``backbone`` is the update in fp32, ``evaluated`` less ``start`` what is left of it; of the modules
    that ``adapter`` changes.
    """
    old, aim, first, new = (dict(m.model.named_parameters()) for m in (backbone, exact, start, evaluated))
    error = size = moved = count = 0.0
    for name in sorted(f"{module}.weight" for module in adapted_modules(adapter)):
        update = aim[name].double() - old[name].double()
        written = new[name].double() - first[name].double()
        error += float((written - update).square().sum())
        size += float(update.square().sum())
        moved += float((written != 0).sum())
        count += written.numel()
    return {"lost": (error / size) ** 0.5 if size else 0.0, "moved": moved / count}


def _scores(backbone: Backbone, encoder: Encoder, rows: Sequence[Encoded], batch_size: int) -> dict[str, np.ndarray]:
    """NLLs by canary id."""
    found = probes.token_nll(backbone.model, encoder, rows, batch_size)
    return dict(zip(found.ids, found.nll, strict=True))


def _change(before: dict[str, np.ndarray], after: dict[str, np.ndarray], rows: Sequence[Encoded]) -> dict[str, float]:
    means = {probe: [] for probe in PROBES}
    for row in rows:
        change = (after[row.canary.id] - before[row.canary.id])[: len(row.target_ids)]
        means["mean20"].append(change[: probes.WINDOW].mean())
        for span in ("preamble", "hex"):
            means[span].append(change[row.spans[span].start : row.spans[span].stop].mean())
    return {f"d_nll_{probe}": float(np.mean(values)) for probe, values in means.items()}
