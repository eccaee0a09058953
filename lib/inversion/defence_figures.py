"""Figures of exact inversion and of defences. Every function takes tables and gives back a matplotlib figure."""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lib.figures import finished

OURS, PEER = "#1b9e77", "#d95f02"
FAMILIES = {
    "gaussian": ("#4477aa", "o"),
    "laplace": ("#66ccee", "s"),
    "private": ("#228833", "D"),
    "quantised": ("#ee6677", "^"),
    "clipped": ("#aa3377", "v"),
    "top": ("#ccbb44", "P"),
    "dropout": ("#888888", "X"),
    "permuted": ("#000000", "*"),
    "rotated": ("#000000", "h"),
}
NO_KL = 1e-5  # where no loss at all stands on a logarithmic axis


def method_costs(table: pd.DataFrame) -> Figure:
    """Seconds a token and the share of exact prompts or tokens, a row a method.

    ``table``: ``method, seconds, exact``; the first rows are drawn at the top, ours in green (``ours`` is true).
    """
    figure, (cost, exact) = plt.subplots(
        1, 2, figsize=(10, 0.42 * len(table) + 1.3), sharey=True, width_ratios=[2.2, 1], layout="constrained"
    )
    places = np.arange(len(table))[::-1]
    colors = [OURS if ours else PEER for ours in table.ours]
    cost.hlines(places, table.seconds.min() / 2, table.seconds, color="#dddddd", lw=1)
    cost.scatter(table.seconds, places, c=colors, s=45, zorder=3)
    for place, seconds in zip(places, table.seconds, strict=True):
        cost.annotate(
            f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s",
            (seconds, place),
            xytext=(7, -3),
            textcoords="offset points",
            fontsize=8,
        )
    cost.set(xscale="log", xlabel="seconds a token", xlim=(table.seconds.min() / 2, table.seconds.max() * 3))
    cost.set_yticks(places, table.method)
    exact.scatter(table.exact, places, c=colors, s=45)
    exact.set(xlim=(-0.05, 1.05), xlabel="share exact")
    return finished(figure)


def tries(ours: pd.Series, peer: pd.Series) -> Figure:
    """Candidates a token: which share of tokens needs more than so many, ours and the language model's order."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for name, counts, color in (("this package", ours, OURS), ("the language model's order", peer, PEER)):
        sizes = np.sort(counts.to_numpy())
        more = 1 - np.arange(1, len(sizes) + 1) / len(sizes)
        axes.step(sizes, np.maximum(more, 0.5 / len(sizes)), where="post", color=color, lw=1.8, label=name)
    axes.set(xscale="log", yscale="log", xlabel="candidates", ylabel="tokens that need more (share)")
    axes.legend(frameon=False)
    return finished(figure)


def privacy_against_utility(table: pd.DataFrame, attackers: dict[str, str]) -> Figure:
    """Share of tokens recovered against what the release costs whoever goes on from it, a panel an attacker.

    ``table`` is :func:`lib.inversion.weighing.weighed`; ``attackers`` are names and titles. Where an attacker does not
    suit a channel its panel shows the one that knows the channel. The dotted line is what text alone gives away.
    """
    figure, grid = plt.subplots(1, len(attackers), figsize=(4.3 * len(attackers), 3.9), sharey=True, squeeze=False)
    alone = table[table.attacker == "prior alone"].recovered.mean()
    for axes, (name, title) in zip(grid[0], attackers.items(), strict=True):
        for kind, (color, marker) in FAMILIES.items():
            part = table[table.family == kind]
            own = part[part.attacker == name] if (part.attacker == name).any() else part[part.attacker == "aware"]
            own = own.sort_values("kl")
            x = own.kl.clip(lower=NO_KL)
            axes.plot(x, own.recovered, marker=marker, color=color, lw=1.2, ms=5, label=kind)
        axes.axhline(alone, color="#888888", lw=0.8, ls=":")
        axes.text(NO_KL, alone + 0.01, "no states", fontsize=8, color="#888888")
        axes.set(xscale="log", title=title, xlabel="cost to the holder: KL of the next token, nats", ylim=(-0.03, 1.05))
        axes.set_xlim(NO_KL / 1.6, 400)
        axes.set_xticks([NO_KL, 1e-3, 1e-1, 10], ["none", "0.001", "0.1", "10"])
    grid[0, 0].set_ylabel("tokens recovered")
    grid[0, -1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finished(figure)


def noise_and_bounds(table: pd.DataFrame, alone: float) -> Figure:
    """Gaussian noise: tokens that the nearest candidate recovers, beside what the margins foretell.

    ``table`` is :func:`lib.inversion.weighing.bounds`; ``alone`` the share that is recovered without states.
    """
    figure, axes = plt.subplots(figsize=(6.6, 3.7))
    axes.plot(table.sigma, table.measured, "o-", color=PEER, lw=1.8, label="measured: the nearest candidate")
    axes.plot(table.sigma, table.union, "s--", color="#4477aa", lw=1.3, label="at least, by the union bound")
    axes.plot(table.sigma, table["half margin"], "^:", color="#888888", lw=1.3, label="noise within half the margin")
    axes.axhline(alone, color="#bbbbbb", lw=0.8)
    axes.text(table.sigma.min(), alone + 0.01, "no states", fontsize=8, color="#888888")
    axes.set(
        xscale="log", xlabel="sigma, of the state's root mean square", ylabel="tokens recovered", ylim=(-0.03, 1.05)
    )
    axes.legend(frameon=False, fontsize=9)
    return finished(figure)
