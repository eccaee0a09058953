"""Figures of the inversion notebooks. Every function takes tables and gives back a matplotlib figure."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lib.figures import finished, printable

EXACT, FAILED = "#2166ac", "#b2182b"
START_COLORS = {"zeros": "#d95f02", "prior": "#1b9e77", "random": "#7570b3", "mean": "#e7298a"}
NO_RANK = 0.5  # rank 0 on a logarithmic axis


def search_paths(path: pd.DataFrame) -> Figure:
    """The search of single tokens: its way through the embedding's two principal components, its loss, its rank.

    ``path`` is the study's ``path.parquet``: a row of panels a position, a line a start.
    """
    crowd, ends = path[path.kind == "crowd"], path[path.kind == "true"]
    figure, grid = plt.subplots(len(ends), 3, figsize=(12.5, 3.1 * len(ends)), squeeze=False)
    for row, (axes, end) in enumerate(zip(grid, ends.itertuples(), strict=True)):
        plane, loss, rank = axes
        plane.plot(crowd.pc1, crowd.pc2, ".", color="#dddddd", ms=2, zorder=0, label="tokens of the vocabulary")
        walked = path[(path.kind == "proxy") & (path.position == end.position)]
        for start, part in walked.groupby("start", sort=False):
            color = START_COLORS[start]
            plane.plot(part.pc1, part.pc2, "-", color=color, lw=1.2)
            plane.plot(part.pc1.iloc[0], part.pc2.iloc[0], "o", color=color, mfc="white", ms=6)
            plane.plot(part.pc1.iloc[-1], part.pc2.iloc[-1], "s", color=color, ms=6)
            loss.plot(part.step, part.loss, color=color, lw=1.5, label=f"from {start}")
            rank.plot(part.step, part["rank"].clip(lower=NO_RANK), color=color, lw=1.5, label=f"from {start}")
        plane.plot(end.pc1, end.pc2, "*", color="#000000", ms=13, zorder=5, label="the true token")
        title = f"position {int(end.position)}: “{printable(end.token.replace(' ', 'Ġ'))}”"
        plane.set(title=title, xlabel="first component", ylabel="second")
        loss.set(yscale="log", xlabel="step", ylabel="loss (MSE of the state)")
        rank.set(yscale="log", xlabel="step", ylabel="rank of the true token")
        rank.set_yticks([NO_RANK, 10, 1000, 10000], ["0", "10", "1,000", "10,000"])
        if row == 0:
            loss.axhline(1e-4, color="#888888", lw=0.8, ls=":")
            loss.text(loss.get_xlim()[1], 1.1e-4, "tolerance", ha="right", va="bottom", fontsize=8, color="#888888")
            loss.legend(frameon=False, fontsize=9)
            plane.legend(frameon=False, fontsize=8, loc="best")
        else:
            loss.axhline(1e-4, color="#888888", lw=0.8, ls=":")
    return finished(figure)


def recovery_grid(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Share of positions recovered against the window C, a panel a title, a line a run, with Wilson intervals.

    ``panels`` are rows of :func:`lib.inversion.analysis.grid`.
    """
    figure, grid = plt.subplots(1, len(panels), figsize=(4.7 * len(panels) + 2.4, 3.8), sharey=True, squeeze=False)
    names = list(dict.fromkeys(name for table in panels.values() for name in table.name))
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axes, (title, table) in zip(grid[0], panels.items(), strict=True):
        for name, part in table.groupby("name", sort=False):
            style = "--" if part.configuration.iloc[0] in ("lm-order", "random-proxy") else "-"
            axes.plot(part.candidates, part.share, style, marker="o", ms=4, color=colors[name], label=name)
            axes.fill_between(part.candidates, part.low, part.high, color=colors[name], alpha=0.12, lw=0)
        axes.set(xscale="log", ylim=(-0.02, 1.02), title=title, xlabel="candidates verified at most (C)")
    grid[0][0].set_ylabel("positions recovered")
    labelled = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled, loc="outside right center", frameon=False, fontsize=9)
    return finished(figure)


def length_curves(panels: Mapping[str, Mapping[str, pd.DataFrame]], reported: Mapping[str, float]) -> Figure:
    """Prompts recovered exactly against their length, a panel a title, a line a configuration.

    ``reported`` maps a configuration to the paper's share at ten tokens, drawn as a star at the right edge.
    """
    figure, grid = plt.subplots(1, len(panels), figsize=(4.6 * len(panels) + 2.4, 3.6), sharey=True, squeeze=False)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axes, (title, curves) in zip(grid[0], panels.items(), strict=True):
        for name, part in curves.items():
            axes.plot(part.length, part.share, "-o", ms=4, color=colors[name], label=name)
            axes.fill_between(part.length, part.low, part.high, color=colors[name], alpha=0.12, lw=0)
            if name in reported:
                axes.plot(part.length.max() + 0.4, reported[name], "*", color=colors[name], ms=13, clip_on=False)
        axes.set(ylim=(-0.02, 1.02), title=title, xlabel="first tokens of a prompt")
    grid[0][0].set_ylabel("prompts exact so far")
    labelled = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    star = plt.Line2D([], [], color="#555555", marker="*", ls="none", ms=11)
    if reported:
        labelled["the paper, GPT-2, 10 tokens"] = star
    figure.legend(labelled.values(), labelled, loc="outside right center", frameon=False, fontsize=9)
    return finished(figure)


def loss_traces(panels: Mapping[str, pd.DataFrame], tolerance: float) -> Figure:
    """Cumulative discrete loss along every prompt, a panel a title; what failed is red from its first error on."""
    figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), sharey=True, squeeze=False)
    for axes, (title, tokens) in zip(grid[0], panels.items(), strict=True):
        for _, part in tokens.sort_values("position").groupby("prompt"):
            wrong = (part.found_id != part.true_id).to_numpy()
            first = int(wrong.argmax()) if wrong.any() else len(part)
            loss = part.cumulative_loss.clip(lower=1e-15).to_numpy()
            axes.plot(part.position[:first], loss[:first], "-", color=EXACT, lw=1, alpha=0.6)
            begin = max(first - 1, 0)
            axes.plot(part.position[begin:], loss[begin:], "-", color=FAILED, lw=1, alpha=0.6)
            if wrong.any():
                axes.plot(part.position.iloc[first], loss[first], "o", color=FAILED, ms=4)
        axes.axhline(tolerance, color="#888888", lw=0.8, ls=":")
        axes.text(0, tolerance * 1.3, "tolerance", fontsize=8, color="#888888", va="bottom")
        axes.set(yscale="log", title=title, xlabel="position")
    grid[0][0].set_ylabel("cumulative discrete loss")
    shown = [plt.Line2D([], [], color=EXACT), plt.Line2D([], [], color=FAILED, marker="o", ms=4)]
    grid[0][-1].legend(shown, ["all right so far", "from the first wrong token on"], frameon=False, fontsize=9)
    return finished(figure)


def signal_rocs(channels: Mapping[str, Mapping[str, pd.DataFrame]], flagged: str) -> Figure:
    """How well each signal tells wrong from right: a panel a channel, true against false alarms, a line a signal.

    ``flagged`` names what is counted, tokens or prompts.
    """
    columns = min(3, len(channels))
    rows = -(-len(channels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.2 * columns + 2, 2.9 * rows), squeeze=False, sharey=True, sharex=True
    )
    names = list(dict.fromkeys(name for curves in channels.values() for name in curves))
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axes in grid.flat[len(channels) :]:
        axes.set_visible(False)
    for axes, (channel, curves) in zip(grid.flat, channels.items(), strict=False):
        for name, points in curves.items():
            axes.plot(points.fpr, points.tpr, color=colors[name], lw=1.8, drawstyle="steps-post", label=name)
        axes.plot([0, 1], [0, 1], color="#bbbbbb", lw=1)
        axes.set(title=channel, xlim=(-0.02, 1), ylim=(0, 1.03))
    for axes in grid[-1]:
        axes.set_xlabel(f"right {flagged} flagged")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"wrong {flagged} flagged")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return finished(figure)


def error_bars(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Error rate of every kind of token with its interval, a panel a title."""
    order = list(dict.fromkeys(kind for table in panels.values() for kind in table.category))
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.4 * len(panels) + 1.6, 0.36 * len(order) + 1.3), squeeze=False
    )
    for axes, (title, table) in zip(grid[0], panels.items(), strict=True):
        shown = table.set_index("category").reindex(order)
        places = np.arange(len(order))
        axes.barh(places, shown.rate, color="#9ecae1", height=0.62)
        axes.hlines(places, shown.low, shown.high, color="#333333", lw=1.5)
        for y, row in zip(places, shown.itertuples(), strict=True):
            if row.of == row.of:
                axes.text(1.03, y, f"{int(row.errors)} of {int(row.of)}", va="center", fontsize=8, color="#555555")
        axes.set(xlim=(0, 1), ylim=(len(order) - 0.4, -0.6), xlabel="error rate behind a true prefix", title=title)
        axes.set_yticks(places, order if axes is grid[0][0] else [""] * len(order))
    return finished(figure)


def odds_ratios(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Odds ratios of :func:`lib.inversion.analysis.error_model` with their intervals, a colour a run."""
    terms = list(dict.fromkeys(term for table in panels.values() for term in table.term))
    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(terms) + 1.2))
    colors, step = plt.get_cmap("tab10").colors, 0.6 / max(len(panels), 1)
    for number, (name, table) in enumerate(panels.items()):
        places = [terms.index(term) + (number - (len(panels) - 1) / 2) * step for term in table.term]
        axes.hlines(places, table.low.clip(lower=1e-3), table.high.clip(upper=1e3), color=colors[number], lw=1.5)
        axes.plot(table.odds_ratio.clip(1e-3, 1e3), places, "o", color=colors[number], ms=5, label=name)
    axes.axvline(1, color="#888888", lw=0.8)
    axes.set(xscale="log", xlabel="odds ratio of an error", ylim=(len(terms) - 0.5, -0.5), xlim=(0.04, 25))
    axes.set_yticks(range(len(terms)), terms)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return finished(figure)


def fates(panels: Mapping[str, pd.DataFrame], vocabulary: int) -> Figure:
    """Every position as a point, a panel a title: the search's last loss against the true token's final rank."""
    figure, grid = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.5), sharey=True, squeeze=False)
    for axes, (title, tokens) in zip(grid[0], panels.items(), strict=True):
        axes.plot(
            tokens.rank_final.astype(float).clip(lower=NO_RANK),
            tokens.loss_final,
            "o",
            color="#555555",
            ms=3,
            alpha=0.5,
            mew=0,
        )
        for line, name in ((100, "C = 100"), (2000, "2,000"), (10000, "10,000")):
            axes.axvline(line, color="#888888", lw=0.8, ls=":")
            axes.text(
                line,
                1.0,
                name,
                rotation=90,
                fontsize=7,
                color="#888888",
                ha="right",
                va="top",
                transform=axes.get_xaxis_transform(),
            )
        axes.set(
            xscale="log",
            yscale="log",
            title=title,
            xlabel="final rank of the true token",
            xlim=(NO_RANK * 0.7, vocabulary * 1.4),
        )
        axes.set_xticks([NO_RANK, 10, 1000, 10000], ["0", "10", "1,000", "10,000"])
        axes.minorticks_off()
    grid[0][0].set_ylabel("last loss of the search")
    return finished(figure)


def time_bars(table: pd.DataFrame) -> Figure:
    """Seconds a token on a logarithmic axis, a bar a method, exact match beside it.

    ``table`` has ``name, seconds, note``.
    """
    figure, axes = plt.subplots(figsize=(8.5, 0.36 * len(table) + 1.0))
    places = np.arange(len(table))
    axes.barh(places, table.seconds, color="#9ecae1", height=0.62)
    for y, row in zip(places, table.itertuples(), strict=True):
        axes.text(row.seconds * 1.08, y, f"{row.seconds:.2g} s, {row.note}", va="center", fontsize=8)
    axes.set(xscale="log", xlabel="seconds a token", ylim=(len(table) - 0.4, -0.6))
    axes.set_xlim(table.seconds.min() / 3, table.seconds.max() * 20)
    axes.set_yticks(places, table.name)
    return finished(figure)
