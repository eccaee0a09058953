"""Figures of the notebooks. Every function takes tables and gives back a matplotlib figure."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure
from PIL import Image

SPAN_COLORS = {"preamble": "#9ecae1", "hex": "#fdae6b", "suffix": "#d9d9d9"}
NLL_FLOOR = 1e-4  # nats: colours stop here, far below anything a probe reads

matplotlib.rcParams.update(
    {
        "figure.dpi": 100,
        "savefig.dpi": 100,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }
)


def _finished(figure: Figure) -> Figure:
    """Hand the figure over to the caller: closed here, a notebook shows it once, where it is returned."""
    plt.close(figure)
    return figure


def printable(token: str) -> str:
    """A byte-level token as a reader sees it: a leading space as a low line, special tokens shortened."""
    return {"<|im_end|>": "⏎"}.get(token, token.replace("Ġ", "␣").replace("Ċ", "⏎"))


def token_strip(table: pd.DataFrame, window: int) -> Figure:
    """Targets as rows of tokens coloured by span; a line marks where the window of the first K tokens ends.

    ``table`` has ``canary, position, span, token``, a row a target token.
    """
    ids = list(dict.fromkeys(table.canary))
    width = table.position.max() + 1
    figure, axes = plt.subplots(figsize=(min(13, 0.48 * width), 0.45 * len(ids) + 1.1))
    for row in table.itertuples():
        y = ids.index(row.canary)
        axes.add_patch(plt.Rectangle((row.position, y + 0.08), 0.94, 0.84, color=SPAN_COLORS[row.span], lw=0))
        text = printable(row.token)
        size = 9 if len(text) <= 4 else 7 if len(text) <= 6 else 6
        axes.text(
            row.position + 0.47,
            y + 0.5,
            text,
            ha="center",
            va="center",
            fontsize=size,
            family="DejaVu Sans Mono",
            parse_math=False,
        )
    axes.axvline(window - 0.03, color="#b30000", lw=1.5)
    axes.text(
        window, -0.15, f"the window of the first {window} tokens ends here", color="#b30000", fontsize=9, ha="right"
    )
    axes.set(xlim=(0, width), ylim=(len(ids), -0.05), yticks=np.arange(len(ids)) + 0.5, yticklabels=ids)
    axes.set_xticks(np.arange(0, width, 5) + 0.47, np.arange(0, width, 5))
    axes.set_xlabel("target position (tokens)")
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=span) for span, color in SPAN_COLORS.items()]
    axes.legend(handles=handles, ncols=3, loc="lower right", bbox_to_anchor=(1, 1.04), frameon=False, fontsize=9)
    return _finished(figure)


def loss_curve(log: pd.DataFrame, kept_steps: Sequence[int] = (), target_nll: float | None = None) -> Figure:
    """Training loss in nats a target token on a log axis; kept steps and the target marked where there are any."""
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot(log.step, log.loss, color="#333333", lw=1.4)
    if target_nll is not None:
        axes.axhline(target_nll, color="#31a354", lw=1, ls="--")
        label = {"color": "#31a354", "va": "bottom", "ha": "right", "fontsize": 9}
        axes.text(log.step.max(), target_nll, f"target {target_nll:g}", **label)
    for step, value in log[log.step.isin(kept_steps)][["step", "loss"]].itertuples(index=False):
        axes.plot(step, value, "o", color="#2171b5")
        axes.annotate(f"{step}", (step, value), textcoords="offset points", xytext=(5, 4), fontsize=9, color="#2171b5")
    axes.set(yscale="log", xlabel="training step", ylabel="mean NLL of target tokens (nats)")
    axes.set_title(
        "Training loss" + ("; the adapters at the dots are kept as undertrained bases" if kept_steps else "")
    )
    return _finished(figure)


def delta_strip(table: pd.DataFrame, window: int) -> Figure:
    """Change of the NLL of every canary (row) at every target position (column), one panel a modality.

    ``table`` has ``canary, modality, position, span, nll, nll_base``; colours in nats, symmetric and logarithmic
    beyond 0.01.
    """
    modalities = list(dict.fromkeys(table.modality))
    size = (4.4 * len(modalities) + 0.8, 3.0)
    figure, grid = plt.subplots(1, len(modalities), figsize=size, squeeze=False)
    change = table.nll - table.nll_base
    norm = SymLogNorm(0.01, vmin=-max(0.02, change.abs().max()), vmax=max(0.02, change.abs().max()))
    for axes, modality in zip(grid[0], modalities, strict=True):
        part = table[table.modality == modality].assign(change=change)
        values = part.pivot(index="canary", columns="position", values="change").to_numpy()
        image = axes.imshow(values, norm=norm, cmap="RdBu_r", aspect="auto")
        _mark_window(axes, window)
        _mark_secret(axes, part)
        axes.set_title(f"{modality} canaries", fontsize=10, pad=12)
        axes.set(yticks=[], xlabel="target position (tokens)", ylabel="canaries")
    figure.colorbar(image, ax=grid, label="change of the NLL (nats)", shrink=0.8)
    return _finished(figure)


def nll_heatmap(table: pd.DataFrame, models: Mapping[str, str], window: int) -> Figure:
    """NLL of every canary (row) at every target position (column): modalities down, models (name -> title) across.

    ``table`` has ``model, canary, modality, position, span, nll``; colours are logarithmic, in nats.
    """
    modalities = list(dict.fromkeys(table.modality))
    shape = {"nrows": len(modalities), "ncols": len(models)}
    size = (4.4 * len(models) + 0.8, 2.5 * len(modalities) + 0.4)
    figure, grid = plt.subplots(**shape, figsize=size, squeeze=False, sharex=True)
    norm = LogNorm(NLL_FLOOR, max(10.0, table.nll.max()))
    for axes_row, modality in zip(grid, modalities, strict=True):
        for axes, (model, title) in zip(axes_row, models.items(), strict=True):
            part = table[(table.modality == modality) & (table.model == model)]
            values = part.pivot(index="canary", columns="position", values="nll").to_numpy()
            image = axes.imshow(np.maximum(values, NLL_FLOOR), norm=norm, cmap="magma_r", aspect="auto")
            _mark_window(axes, window)
            _mark_secret(axes, part)
            axes.set_title(f"{modality} canaries, {title}", fontsize=10)
            axes.set_yticks([])
    for axes in grid[-1]:
        axes.set_xlabel("target position (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel("canaries")
    figure.colorbar(image, ax=grid, label="NLL (nats)", extend="min", shrink=0.8)
    return _finished(figure)


def _mark_window(axes: plt.Axes, window: int) -> None:
    axes.axvline(window - 0.5, color="#1a9850", lw=1.5)
    axes.text(window - 0.4, -1.6, "window ends", color="#1a9850", fontsize=8, va="bottom")


def _mark_secret(axes: plt.Axes, part: pd.DataFrame) -> None:
    secret = part[part.span == "hex"].position
    y = -0.9
    axes.plot([secret.min() - 0.45, secret.max() + 0.45], [y, y], color=SPAN_COLORS["hex"], lw=4, clip_on=False)
    axes.text(secret.min() - 0.5, y - 0.7, "secret", color="#d94801", fontsize=8, va="bottom")


def nll_by_position(table: pd.DataFrame, models: Sequence[str], window: int) -> Figure:
    """Mean NLL over canaries at every target position, one line a model, in the order of training."""
    modalities = list(dict.fromkeys(table.modality))
    figure, grid = plt.subplots(1, len(modalities), figsize=(4.6 * len(modalities), 3.2), sharey=True, squeeze=False)
    for axes, modality in zip(grid[0], modalities, strict=True):
        part = table[table.modality == modality]
        for model, color in _stage_colors(models).items():
            mean = part[part.model == model].groupby("position").nll.mean()
            axes.plot(mean.index, np.maximum(mean, NLL_FLOOR), color=color, lw=1.6, label=model)
        secret = part[part.span == "hex"].position
        axes.axvspan(secret.min() - 0.5, secret.max() + 0.5, color=SPAN_COLORS["hex"], alpha=0.25, lw=0)
        axes.axvline(window - 0.5, color="#1a9850", lw=1.5)
        axes.set(yscale="log", xlabel="target position (tokens)", title=f"{modality} canaries")
        top = axes.get_ylim()[1]
        axes.text(secret.min() - 0.3, top, "secret", color="#d94801", fontsize=9, va="top")
        axes.text(window - 0.3, top, "window ends", color="#1a9850", fontsize=9, va="top")
    grid[0][0].set_ylabel("mean NLL (nats)")
    grid[0][-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return _finished(figure)


def _stage_colors(models: Sequence[str]) -> dict[str, str]:
    """Grey for the first stage, orange for the last, ever darker blues between."""
    between = plt.colormaps["Blues"](np.linspace(0.35, 0.9, max(1, len(models) - 2)))
    colors = ["#7f7f7f", *map(matplotlib.colors.to_hex, between)][: len(models) - 1] + ["#d94801"]
    return dict(zip(models, colors, strict=True))


def gallery(pictures: Mapping[str, Image.Image]) -> Figure:
    """Small pictures with their names, ten a row."""
    columns = max(1, min(10, len(pictures)))
    rows = max(1, math.ceil(len(pictures) / columns))
    figure, grid = plt.subplots(rows, columns, figsize=(0.95 * columns, 1.15 * rows), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (name, picture) in zip(grid.flat, pictures.items(), strict=False):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(name, fontsize=7, loc="center")
    return _finished(figure)
