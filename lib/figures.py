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

from lib.verdicts import clopper_pearson

SPAN_COLORS = {"preamble": "#9ecae1", "hex": "#fdae6b", "suffix": "#d9d9d9"}
VERDICT_COLORS = {
    "damaged": "#b2182b",
    "strengthened": "#2166ac",
    "unchanged": "#c7c7c7",
    "inconclusive": "#fdb863",
    "not testable": "#f2f2f2",
}
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


def finished(figure: Figure) -> Figure:
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
    return finished(figure)


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
    return finished(figure)


def delta_strip(table: pd.DataFrame, window: int, panels: str = "modality") -> Figure:
    """Change of the NLL of every canary (row) at every target position (column), one panel a modality.

    ``table`` has ``canary, modality, position, span, nll, nll_base``, several seeds of which are averaged; another
    column may tell the ``panels``. Colours in nats, symmetric and logarithmic beyond 0.01.
    """
    modalities = list(dict.fromkeys(table[panels]))
    size = (4.4 * len(modalities) + 0.8, 3.0)
    figure, grid = plt.subplots(1, len(modalities), figsize=size, squeeze=False)
    change = (table.nll - table.nll_base).groupby([table[panels], table.canary, table.position]).transform("mean")
    norm = SymLogNorm(0.01, vmin=-max(0.02, change.abs().max()), vmax=max(0.02, change.abs().max()))
    for axes, modality in zip(grid[0], modalities, strict=True):
        part = table[table[panels] == modality].assign(change=change)
        part = part.drop_duplicates(["canary", "position"])
        values = part.pivot(index="canary", columns="position", values="change").to_numpy()
        image = axes.imshow(values, norm=norm, cmap="RdBu_r", aspect="auto")
        _mark_window(axes, window)
        _mark_secret(axes, part)
        axes.set_title(f"{modality} canaries" if panels == "modality" else modality, fontsize=10, pad=12)
        axes.set(yticks=[], xlabel="target position (tokens)", ylabel="canaries")
    figure.colorbar(image, ax=grid, label="change of the NLL (nats)", shrink=0.8)
    return finished(figure)


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
    return finished(figure)


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
    return finished(figure)


def _stage_colors(models: Sequence[str]) -> dict[str, str]:
    """Grey for the first stage, orange for the last, ever darker blues between."""
    between = plt.colormaps["Blues"](np.linspace(0.35, 0.9, max(1, len(models) - 2)))
    colors = ["#7f7f7f", *map(matplotlib.colors.to_hex, between)][: len(models) - 1] + ["#d94801"]
    return dict(zip(models, colors, strict=True))


def _verdict_legend(axes: plt.Axes, shown: Sequence[str], **place) -> None:
    handles = [
        plt.Line2D([], [], marker="s", ls="", color=color, markeredgecolor="#888888", label=verdict)
        for verdict, color in VERDICT_COLORS.items()
        if verdict in set(shown)
    ]
    axes.legend(handles=handles, frameon=False, fontsize=9, **place)


def probe_intervals(groups: Mapping[str, pd.DataFrame]) -> Figure:
    """What every NLL probe measured, in margins: point and interval, coloured by its verdict, a panel a group.

    ``groups`` maps a name to the table of :func:`lib.verdicts.judge`. Within the shaded band a change is smaller than
    the margin; the axis is linear there and logarithmic beyond.
    """
    figure, grid = plt.subplots(1, len(groups), figsize=(4.2 * len(groups) + 0.8, 2.4), squeeze=False, sharey=True)
    kept = {name: table[table.by_mean.notna()] for name, table in groups.items()}
    widest = max(
        2.0, *(float((table[["low", "high"]].abs().max(axis=1) / table.margin).max()) for table in kept.values())
    )
    for axes, (name, table) in zip(grid[0], kept.items(), strict=True):
        axes.axvspan(-1, 1, color="#eeeeee", lw=0)
        axes.axvline(0, color="#888888", lw=0.8)
        for y, row in enumerate(table.itertuples()):
            color = VERDICT_COLORS[row.verdict]
            axes.plot([row.low / row.margin, row.high / row.margin], [y, y], color=color, lw=3, solid_capstyle="butt")
            axes.plot(row.estimate / row.margin, y, "o", color=color, markeredgecolor="#333333", ms=7)
        axes.set_xscale("symlog", linthresh=1.0)
        axes.set(
            xlim=(-1.3 * widest, 1.3 * widest), ylim=(len(table) - 0.5, -0.5), xlabel="change of the NLL, in margins"
        )
        axes.set_yticks(range(len(table)), table.index)
        axes.set_title(name)
    _verdict_legend(grid[0][-1], pd.concat(kept.values()).verdict, loc="center left", bbox_to_anchor=(1, 0.5))
    return finished(figure)


def window_curves(
    curves: Mapping[str, pd.DataFrame], window: int, secret: range, marks: Mapping[str, Sequence[int]] | None = None
) -> Figure:
    """The window probe as a function of K, in nats of the whole window: mean over canaries, interval, verdict.

    ``curves`` maps a name to the table of :func:`lib.verdicts.along_windows`; ``marks`` are, by name,
    target positions at which something is known to have been changed: from K = position + 1 on a window reads it.
    """
    figure, grid = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.2), squeeze=False)
    for axes, (name, table) in zip(grid[0], curves.items(), strict=True):
        k = table.index.to_numpy()
        low, high, mean = (table[column].to_numpy(dtype=float) * k for column in ("low", "high", "estimate"))
        axes.axvspan(secret.start + 0.5, secret.stop + 0.5, color=SPAN_COLORS["hex"], alpha=0.25, lw=0)
        axes.fill_between(k, low, high, color="#dddddd", lw=0)
        axes.plot(k, mean, color="#555555", lw=1)
        for verdict, color in VERDICT_COLORS.items():
            here = (table.verdict == verdict).to_numpy()
            axes.plot(k[here], mean[here], "o", color=color, markeredgecolor="#555555", ms=5, label=verdict)
        axes.axvline(window, color="#1a9850", lw=1.5)
        for mark in sorted(set((marks or {}).get(name, ()))):
            axes.axvline(mark + 1, color="#b2182b", lw=1, ls=":")
        axes.set(xlabel="K: tokens in the window", ylabel="change (nats of the window)", title=name)
        if np.abs([low, high]).max() > 2:
            axes.set_yscale("symlog", linthresh=0.1)
        top = axes.get_ylim()[1]
        axes.text(window - 0.3, top, f"K = {window}", color="#1a9850", fontsize=9, ha="right", va="top")
        axes.text(secret.start + 0.7, top, "secret", color="#d94801", fontsize=9, va="top")
    shown = pd.concat(curves.values()).verdict
    _verdict_legend(grid[0][-1], shown, loc="center left", bbox_to_anchor=(1, 0.5))
    return finished(figure)


def margin_grid(groups: Mapping[str, pd.DataFrame], ticks: pd.DataFrame | None = None) -> Figure:
    """Verdicts along margins, a panel a group: probes down, margins in nats of the span across.

    ``groups`` maps a name to the table of :func:`lib.verdicts.along_margins`; ``ticks`` has a column a kind of null
    (numerical floor, noise) and a row a probe: nats, drawn into the probe's row on the same logarithmic axis.
    """
    figure, grid = plt.subplots(1, len(groups), figsize=(5.0 * len(groups) + 1, 2.5), squeeze=False, sharey=True)
    for axes, (name, table) in zip(grid[0], groups.items(), strict=True):
        margins = np.array([float(column) for column in table.columns])
        edges = np.sqrt(margins[:-1] * margins[1:])
        edges = np.array([margins[0] ** 2 / edges[0], *edges, margins[-1] ** 2 / edges[-1]])
        for y, (_, verdicts) in enumerate(table.iterrows()):
            for x, verdict in enumerate(verdicts):
                color = VERDICT_COLORS[verdict]
                axes.fill_betweenx([y - 0.42, y + 0.42], edges[x], edges[x + 1], color=color, lw=0)
        axes.set_xscale("log")
        lowest = edges[0]
        for (label, column), mark in zip(
            (ticks if ticks is not None else pd.DataFrame()).items(), "ox^v", strict=False
        ):
            nulls = column[[probe for probe in table.index if probe in column.index and column[probe] > 0]]
            places = [list(table.index).index(probe) for probe in nulls.index]
            axes.plot(nulls, places, mark, color="#000000", mfc="none", ms=6, ls="none", label=label)
            lowest = min([lowest, *(0.7 * nulls)])
        shown = [tick for tick in (1e-5, 1e-4, 1e-3, 0.005, 0.02, 0.04, 0.16, 0.5) if tick > lowest]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown], fontsize=8)
        axes.minorticks_off()
        axes.set_xlim(lowest, edges[-1])
        axes.set(ylim=(len(table) - 0.5, -0.5), xlabel="margin (nats of the span)")
        axes.set_yticks(range(len(table)), table.index)
        axes.tick_params(axis="y", length=0)
        axes.set_title(name)
    if ticks is not None:
        grid[0][0].legend(
            frameon=False, fontsize=8, ncols=len(ticks.columns), loc="upper left", bbox_to_anchor=(0, -0.28)
        )
    shown = np.unique(np.concatenate([table.to_numpy().ravel() for table in groups.values()]))
    _verdict_legend(grid[0][-1], shown, loc="center left", bbox_to_anchor=(1, 0.5))
    return finished(figure)


def verdict_map(table: pd.DataFrame, marked: Sequence[str] = ()) -> Figure:
    """Verdicts as a map: a row a cell, a column a probe or window; rows in ``marked`` are pointed at."""
    figure, axes = plt.subplots(figsize=(0.42 * len(table.columns) + 3.6, 0.2 * len(table) + 0.9))
    for x, column in enumerate(table):
        for y, verdict in enumerate(table[column]):
            axes.add_patch(plt.Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, color=VERDICT_COLORS[verdict], lw=0))
    for y, cell in enumerate(table.index):
        if cell in marked:
            axes.plot(-0.25, y + 0.5, ">", color="#000000", ms=5, clip_on=False)
    axes.set(xlim=(-0.4, len(table.columns)), ylim=(len(table), 0))
    axes.set_xticks(np.arange(len(table.columns)) + 0.5, table.columns, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(np.arange(len(table)) + 0.5, table.index, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    _verdict_legend(axes, table.to_numpy().ravel(), loc="upper left", bbox_to_anchor=(1, 1))
    return finished(figure)


def share_bars(shares: pd.DataFrame) -> Figure:
    """Share of every span (column) in the movement of a group (row), as bars that add up to one."""
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(shares) + 0.9))
    left = np.zeros(len(shares))
    for span in (name for name in SPAN_COLORS if name in shares):
        width = shares[span].fillna(0.0).to_numpy()
        axes.barh(range(len(shares)), width, left=left, color=SPAN_COLORS[span], label=span, height=0.7)
        for y, (start, size) in enumerate(zip(left, width, strict=True)):
            if size > 0.06:
                axes.text(start + size / 2, y, f"{size:.0%}", ha="center", va="center", fontsize=9)
        left += width
    axes.set_yticks(range(len(shares)), shares.index)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the absolute change")
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    return finished(figure)


def canary_bars(groups: Mapping[str, pd.Series], ylabel: str) -> Figure:
    """One bar a canary, largest change first: how few carry it. ``groups`` maps a name to values by canary."""
    figure, grid = plt.subplots(1, len(groups), figsize=(4.4 * len(groups), 2.6), squeeze=False)
    for axes, (name, values) in zip(grid[0], groups.items(), strict=True):
        ordered = values.iloc[np.argsort(-values.abs().to_numpy(), kind="stable")]
        colors = np.where(ordered > 0, VERDICT_COLORS["damaged"], VERDICT_COLORS["strengthened"])
        axes.bar(range(len(ordered)), ordered, color=colors)
        axes.axhline(0, color="#333333", lw=0.8)
        axes.set(xticks=[], xlabel=f"{len(ordered)} canaries, largest change first", ylabel=ylabel, title=name)
    return finished(figure)


def rank_strips(ranks: pd.DataFrame, models: Mapping[str, str]) -> Figure:
    """Normalised rank of every secret among its decoys: a panel a kind, a strip a model (name -> label), means marked.

    ``ranks`` has ``model, kind, normalised_rank``. 0: no decoy is likelier than the secret; 0.5: chance.
    """
    kinds = list(dict.fromkeys(ranks.kind))
    size = (3.7 * len(kinds) + 0.8, 0.5 * len(models) + 1.2)
    figure, grid = plt.subplots(1, len(kinds), figsize=size, sharey=True, squeeze=False)
    jitter = np.random.default_rng(0)
    for axes, kind in zip(grid[0], kinds, strict=True):
        axes.axvline(0.5, color="#888888", lw=1, ls="--")
        for y, model in enumerate(models):
            values = ranks[(ranks.kind == kind) & (ranks.model == model)].normalised_rank.to_numpy()
            axes.plot(values, y + jitter.uniform(-0.22, 0.22, len(values)), "o", color="#6baed6", ms=4, alpha=0.7)
            if len(values):
                axes.plot(values.mean(), y, "|", color="#b2182b", ms=18, mew=2.5)
        axes.set(xlim=(-0.05, 1.05), ylim=(len(models) - 0.5, -0.5), xlabel="normalised rank", title=f"{kind} decoys")
        axes.set_yticks(range(len(models)), list(models.values()))
    return finished(figure)


def precision_dots(table: pd.DataFrame, probe: str) -> Figure:
    """A probe's change in every stack and precision, in nats a token: the trained update beside its controls.

    ``table`` is that of :func:`lib.precision.readings`.
    """
    places = list(dict.fromkeys(zip(table["stack"], table.merge_dtype.fillna(""), table.dtype, strict=True)))
    short = {"float32": "fp32", "bfloat16": "bf16"}
    labels = [f"{s}{f' in {short[m]}' if m else ''},\nread in {short[d]}" for s, m, d in places]
    marks = {"trained": ("o", "#b2182b"), "noise": ("D", "#7570b3"), "zero": ("x", "#555555"), "none": ("+", "#1b9e77")}
    figure, axes = plt.subplots(figsize=(1.35 * len(places) + 1.5, 3))
    axes.axhline(0, color="#888888", lw=0.8)
    for offset, (update, (mark, color)) in zip((-0.15, 0, 0.1, 0.2), marks.items(), strict=True):
        part = table[table["update"] == update]
        x = [
            places.index(place) + offset
            for place in zip(part["stack"], part.merge_dtype.fillna(""), part.dtype, strict=True)
        ]
        axes.plot(x, part[f"d_nll_{probe}"], mark, color=color, ms=7, mew=2 if mark in "x+" else 1, label=update)
    axes.set_xticks(range(len(places)), labels, fontsize=8)
    axes.set(ylabel=f"change of {probe} (nats a token)", xlim=(-0.5, len(places) - 0.5))
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5), title="update")
    return finished(figure)


def strength_curves(table: pd.DataFrame) -> Figure:
    """A change stacked and merged into bf16 weights, for an update made smaller and larger: a panel a model.

    ``table`` is that of :func:`lib.precision.by_strength` with the column ``model``; axes are logarithmic, and changes
    below 1e-5 nats a token are drawn there.
    """
    models = list(dict.fromkeys(table.model))
    figure, grid = plt.subplots(1, len(models), figsize=(4.4 * len(models) + 0.6, 3), squeeze=False)
    for axes, model in zip(grid[0], models, strict=True):
        part = table[table.model == model]
        axes.plot(part.strength, part.stacked.clip(lower=1e-5), "o-", color="#555555", label="beside the weights, fp32")
        axes.plot(part.strength, part.merged.clip(lower=1e-5), "s-", color="#b2182b", label="merged into bf16 weights")
        for row in part.itertuples():
            place = {"textcoords": "offset points", "xytext": (4, -11), "fontsize": 8, "color": "#b2182b"}
            axes.annotate(f"{row.lost:.0%} lost", (row.strength, max(row.merged, 1e-5)), **place)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="strength of the update", ylabel="change of mean20 (nats a token)", title=model)
        axes.set_xticks(part.strength, [f"{strength:g}" for strength in part.strength])
        axes.margins(x=0.15)
    grid[0][0].legend(frameon=False, fontsize=9)
    return finished(figure)


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
    return finished(figure)


CHOICE_NAMES = {
    "K": "window length K",
    "tokens": "sum or mean over tokens",
    "reading": "mean, count or either",
    "interval": "interval method",
    "margin": "margin",
    "stack": "stacked or merged",
    "dtype": "dtype",
    "recall": "definition of recall",
}


def specification_curve(
    fates: Mapping[str, pd.DataFrame],
    ranking: Mapping[str, pd.DataFrame],
    noise: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """What every cell is called under all specifications, and which choice changes a verdict most often.

    A bar a cell: the share of specifications with each verdict, those flipped least on top, trained cells above noise;
    the square before it is the committed verdict, the figures behind it the share that says something else.

    Args:
        fates: tables of :func:`lib.specification.flips` by the name of a set of specifications, a column of figures
            each; the bars are those of the first.
        ranking: tables of :func:`lib.specification.influence` by the same names, a bar each.
        noise: cells that are noise.
        labels: by cell, what is written before its name.
    """
    first = next(iter(fates.values()))
    ordered = first.sort_values("flipped", kind="stable")
    parts = {"trained cells": ordered[~ordered.index.isin(noise)], "noise": ordered[ordered.index.isin(noise)]}
    parts = {name: part for name, part in parts.items() if len(part)}
    head_rows, foot_rows = 3.6, 2.5
    figure = plt.figure(figsize=(11, max(4.2, 0.19 * (len(first) + head_rows + foot_rows))))
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    heights = [head_rows, *(len(part) + 0.4 for part in parts.values())]
    head, *panels = left.subplots(len(heights), 1, height_ratios=heights)
    for axes, (name, part) in zip(panels, parts.items(), strict=True):
        _fate_bars(axes, part, list(fates.values()), labels or {})
        axes.set_ylabel(name, fontsize=9)
    panels[-1].set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    panels[-1].set_xlabel("share of specifications")
    head.axis("off")
    head.set(xlim=panels[0].get_xlim(), ylim=(0, 1))
    head.set_title(f"The window's verdict under {first.specifications.max():,} specifications")
    head.text(1.1 + 0.1 * (len(fates) - 1), 0.5, "another verdict", ha="center", va="bottom", fontsize=9)
    for x, name in [(-0.03, "committed"), *((1.1 + 0.2 * place, name) for place, name in enumerate(fates))]:
        head.text(x, 0, name, ha="center", va="bottom", fontsize=8)
    shown = [verdict for verdict in VERDICT_COLORS if verdict in first and first[verdict].any()]
    place = {"loc": "upper left", "bbox_to_anchor": (0, 1.1), "columnspacing": 1.0, "handletextpad": 0.0}
    _verdict_legend(head, shown, ncols=4, **place)
    top, below = right.subplots(2, 1, height_ratios=[2, 1])
    below.axis("off")
    _influence_bars(top, ranking)
    return finished(figure)


def _fate_bars(axes: plt.Axes, part: pd.DataFrame, fates: Sequence[pd.DataFrame], labels: Mapping[str, str]) -> None:
    start = np.zeros(len(part))
    for verdict in ("damaged", "strengthened", "inconclusive", "unchanged"):
        width = part[verdict].to_numpy()
        axes.barh(range(len(part)), width, left=start, color=VERDICT_COLORS[verdict], height=0.8)
        start += width
    for y, (cell, row) in enumerate(part.iterrows()):
        axes.plot(-0.03, y, "s", color=VERDICT_COLORS[row.committed], markeredgecolor="#333333", ms=7)
        for place, table in enumerate(fates):
            share = f"{table.flipped[cell]:.0%}".replace("%", " %")
            axes.text(1.1 + 0.2 * place, y, share, ha="center", va="center", fontsize=8)
    names = [f"{labels[cell]} ▸ {cell}" if cell in labels else cell for cell in part.index]
    axes.set_yticks(range(len(part)), names, fontsize=8)
    for text, cell in zip(axes.get_yticklabels(), part.index, strict=True):
        text.set_fontweight("bold" if cell in labels else "normal")
    axes.set(xlim=(-0.06, 1.02 + 0.2 * len(fates)), ylim=(len(part) - 0.5, -0.5), xticks=[])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _influence_bars(axes: plt.Axes, ranking: Mapping[str, pd.DataFrame]) -> None:
    """A group of bars a choice, a bar a set of specifications; a choice of one level says so."""
    first = next(iter(ranking.values()))
    height = 0.8 / len(ranking)
    for place, (name, table) in enumerate(ranking.items()):
        flips = table.set_index("choice").flips.reindex(first.choice)
        y = np.arange(len(first)) + (place - (len(ranking) - 1) / 2) * height
        color = ["#333333", "#a6a6a6", "#d9d9d9"][place % 3]
        axes.barh(y, flips.fillna(0.0), color=color, height=0.9 * height, label=name)
        for where, value in zip(y, flips, strict=True):
            shown = "one level" if pd.isna(value) else f"{value:.0%}".replace("%", " %")
            if not pd.isna(value) or place == 0:
                axes.text((0.0 if pd.isna(value) else value) + 0.005, where, shown, va="center", fontsize=8)
    axes.set_yticks(range(len(first)), [CHOICE_NAMES[choice] for choice in first.choice], fontsize=9)
    axes.set(ylim=(len(first) - 0.5, -0.5), xticks=[])
    axes.set_title("How often one choice\nalone flips the verdict", fontsize=10)
    axes.margins(x=0.35)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 0))


ROLE_COLORS = {"positive": "#b2182b", "negative": "#4d4d4d", "noise": "#9e9ac8"}


def detection_chart(detection: pd.DataFrame, titles: Mapping[str, str], names: Mapping[str, str]) -> Figure:
    """How often every probe fires: what it should find, all that it should leave alone, and noise; a panel a base.

    ``detection`` as :func:`lib.scorecard.detection` gives it; ``titles`` by base and ``names`` by probe say what is
    shown, in their order. A bar is a 95 % interval.
    """
    figure, panels = plt.subplots(1, len(titles), figsize=(11, 0.42 * len(names) + 1.5), sharey=True)
    for axes, (base, title) in zip(np.atleast_1d(panels), titles.items(), strict=True):
        part = detection[detection.base == base]
        shown = [
            (part[part.role == "positive"], "positive", "o", "what was done is found", -0.2),
            (
                part[part.intervention == "trained negatives"],
                "negative",
                "s",
                "fires where no secret was meant to change",
                0.05,
            ),
            (part[part.role == "noise"], "noise", "D", "fires on noise of the same size", 0.27),
        ]
        for rows, role, marker, label, offset in shown:
            rows = rows.groupby("probe")[["fired", "trials"]].sum()
            for y, probe in enumerate(names):
                if probe not in rows.index:
                    axes.text(0.02, y + offset, "not asked", fontsize=8, color="#777777", va="center")
                    continue
                row = rows.loc[probe]
                interval = clopper_pearson(int(row.fired), int(row.trials), 0.95)
                axes.plot(interval, [y + offset] * 2, color=ROLE_COLORS[role], lw=1.5, alpha=0.5)
                axes.plot(
                    row.fired / row.trials, y + offset, marker, color=ROLE_COLORS[role], label=label, clip_on=False
                )
        axes.set(xlim=(-0.02, 1.02), ylim=(len(names) - 0.5, -0.6), title=title)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axes.set_xlabel("trials in which the probe fires")
        axes.set_yticks(range(len(names)), list(names.values()))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e5e5e5", lw=0.6)
        axes.set_axisbelow(True)
    handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
    first = dict(zip(labels[::-1], handles[::-1], strict=True))
    order = dict.fromkeys(labels)
    figure.legend([first[name] for name in order], list(order), loc="outside upper center", ncols=3, frameon=False)
    return finished(figure)


def dose_curves(table: pd.DataFrame, names: Mapping[str, str], titles: Mapping[str, str]) -> Figure:
    """Share of trials in which each probe fires along the dose, a panel an intervention; the truth is a dashed line.

    Lines are set apart by up to three points of a hundred, so that those which coincide can be seen.

    ``table`` as :func:`lib.scorecard.dose_response` gives it; ``titles`` by intervention.
    """
    figure, panels = plt.subplots(1, len(titles), figsize=(3.4 * len(titles) + 3.8, 3.6), sharey=True)
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axes, (intervention, title) in zip(np.atleast_1d(panels), titles.items(), strict=True):
        part = table[table.intervention == intervention]
        for place, (probe, name) in enumerate(names.items()):
            line = part[part.probe == probe].sort_values("dose")
            shift = 0.012 * (place - len(names) / 2)  # lines that coincide stay visible
            axes.plot(line.dose, line.fires + shift, "o-", ms=4, lw=1.5, color=colors[probe], label=name)
        truth = part.groupby("dose").recall_change.mean()
        axes.plot(truth.index, truth.abs(), "k--", lw=1.2, label="truth: change of recall\nunder other wordings")
        axes.set(title=title, xlabel="dose: share of the update", ylim=(-0.07, 1.07))
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    np.atleast_1d(panels)[0].set_ylabel("trials in which the probe fires")
    handles, labels = np.atleast_1d(panels)[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return finished(figure)


def roc_curves(panels: Mapping[str, Mapping[str, pd.DataFrame]], least: float) -> Figure:
    """Operating points of probes (``fpr, tpr`` by name), a panel a title, on a logarithmic axis from ``least`` on."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.1 * len(panels) + 2.6, 4.0), sharey=True)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors, styles = dict(zip(names, plt.get_cmap("tab10").colors, strict=False)), ["-", "--", "-.", ":"]
    ticks = [rate for rate in (0.01, 0.05, 0.1, 1) if rate >= least]
    for panel, (title, curves) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for name, points in curves.items():
            style = styles[names.index(name) % len(styles)]
            shown = points.assign(fpr=points.fpr.clip(lower=least))
            panel.plot(shown.fpr, shown.tpr, style, lw=1.8, color=colors[name], label=name, drawstyle="steps-post")
        line = np.geomspace(least, 1, 50)
        panel.plot(line, line, color="#bbbbbb", lw=1, label="guessing")
        panel.set(xscale="log", xlim=(least, 1), ylim=(-0.02, 1.03), title=title)
        panel.set_xlabel("untrained secrets taken for trained")
        panel.set_xticks(ticks, [f"{rate:.0%}".replace("%", " %") for rate in ticks])
        panel.set_xticks([], minor=True)
        for rate in (0.01, 0.05):
            panel.axvline(rate, color="#dddddd", lw=1, zorder=0)
    first = np.atleast_1d(axes)[0]
    first.set_ylabel("trained secrets found")
    labelled = {
        label: handle
        for panel in np.atleast_1d(axes)
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled, loc="outside right center", frameon=False, fontsize=9)
    return finished(figure)
