"""What the tables of exact inversion and of defences say: costs, privacy against utility, bounds beside measured."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lib.inversion import attackers, channels
from lib.scorecard import area

BUDGETS = (0.01, 0.1, 1.0)  # nats of KL within which defences are compared at equal utility
NAIVE = ("tolerance", "nearest")  # attackers that do not know the channel
ATTACKERS = tuple(attackers.ATTACKERS.values())
DELTA = 1e-5  # of differential privacy


def costs(prompts: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """A row a set: prompts, tokens, exact ones, the least certain status, seconds and candidates a token (mean, worst),
    tokens read a token, the overhead: time over that of one plain forward pass of the same prompts; and the seconds of
    set-up, where they are known."""
    rows = []
    for name, part in prompts.groupby("configuration", sort=False):
        own, count = tokens[tokens.configuration == name], part.n_tokens.sum()
        row = {"set": name, "prompts": len(part), "tokens": count, "batch": int(part.batch.max())}
        row |= {"exact": part.exact_match.mean(), "best effort": int((own.status == "best effort").sum())}
        row |= {"seconds": part.seconds.sum() / count, "mean": own.candidates.mean(), "worst": own.candidates.max()}
        row |= {"guessed": (own.candidates == 1).mean(), "read": part.read.sum() / count}
        rows.append(row | {"overhead": part.seconds.sum() / part.forward.sum(), "set-up": part.setup.iloc[0] or np.nan})
    return pd.DataFrame(rows).set_index("set")


def against_peers(tokens: pd.DataFrame, prompts: pd.DataFrame, peers: pd.DataFrame) -> pd.DataFrame:
    """The language model's order beside ours on the same prompts, a row a set: candidates (mean, worst) and seconds a
    token of both, behind the first token, and how many times ours they are.

    ``seconds`` of ours are those of whole prompts, the first token and what failed included.
    """
    rows = []
    for name, part in peers.groupby("configuration", sort=False):
        own = tokens[(tokens.configuration == name) & tokens.prompt.isin(part.prompt) & (tokens.position > 0)]
        whole = prompts[(prompts.configuration == name) & prompts.prompt.isin(part.prompt)]
        row = {"set": name, "tokens": len(part), "exact": (part.found_id == part.true_id).mean()}
        row |= {"candidates": part.candidates.mean(), "worst": part.candidates.max(), "seconds": part.seconds.mean()}
        row |= {"ours": own.candidates.mean(), "our worst": own.candidates.max()}
        row["our seconds"] = whole.seconds.sum() / whole.n_tokens.sum()
        rows.append(row | {"candidates ratio": row["candidates"] / row["ours"]})
        rows[-1]["seconds ratio"] = row["seconds"] / row["our seconds"]
    return pd.DataFrame(rows).set_index("set")


def methods(bench: pd.DataFrame) -> pd.DataFrame:
    """What `make bench` measured, as a figure needs it: ``method, seconds`` (mean a token; a lower bound where tokens
    were stopped at the cap: the method's name, with how many tokens it met, then says so), ``exact`` (share of its
    tokens) and ``ours``."""
    kinds = {True: ", at least", False: ""}
    names = [f"{row.method} ({row.tokens} tokens{kinds[row.capped > 0]})" for row in bench.itertuples()]
    table = pd.DataFrame({"method": names, "seconds": bench["mean"], "exact": bench.right / bench.tokens})
    return table.assign(ours=bench.method.str.contains("exact").to_numpy())


def at_first_sight(proposals: pd.DataFrame) -> pd.DataFrame:
    """A row a set and order: how many tokens, the share that stands first and among the first 8, 64 and 512, the mean
    number of others before the true one, and the largest."""
    rows = []
    for (name, order), part in proposals.groupby(["configuration", "order"], sort=False):
        row = {"set": name, "order": order, "tokens": len(part), "first": (part["rank"] == 0).mean()}
        row |= {f"of {size}": (part["rank"] < size).mean() for size in (8, 64, 512)}
        rows.append(row | {"mean before": part["rank"].mean(), "worst": part["rank"].max()})
    return pd.DataFrame(rows).set_index(["set", "order"])


def rounds(tokens: pd.DataFrame, configuration: str) -> pd.DataFrame:
    """The first prompt of a set, a row a token: what was guessed, what it took, how sure it is."""
    own = tokens[tokens.configuration == configuration]
    first = own[own.prompt == own.prompt.iloc[0]].sort_values("position")
    names = {"round": "round", "guess": "guess", "token": "token", "candidates": "tried"}
    table = first[list(names)].rename(columns=names)
    return table.assign(status=first.status, residual=first.residual, margin=first.margin).reset_index(drop=True)


def family(channel: str) -> str:
    """The kind of a channel: ``gaussian`` of ``gaussian 0.1``, ``quantised`` of ``4-bit``."""
    return "quantised" if channel.endswith("-bit") else channel.split()[0]


def recovery(sweep: pd.DataFrame, draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """A row a channel and attacker: ``recovered``, the share of positions, with a 95 % interval over prompts, ``low,
    high`` (bootstrap of whole prompts), and ``auc``: of the discrete loss as an alarm, where some are right and some
    wrong.
    """
    rows = []
    rng = np.random.default_rng(seed)
    for (channel, attacker), part in sweep.groupby(["channel", "attacker"], sort=False):
        by_prompt = part.groupby("prompt").recovered.mean().to_numpy()
        drawn = by_prompt[rng.integers(len(by_prompt), size=(draws, len(by_prompt)))].mean(1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        right = part.found_id == part.true_id
        alarm = area(part.loss.to_numpy(), (~right).to_numpy()) if right.any() and not right.all() else np.nan
        row = {"channel": channel, "attacker": attacker, "family": family(channel)}
        rows.append(row | {"recovered": part.recovered.mean(), "low": low, "high": high, "alarm": alarm})
    return pd.DataFrame(rows)


def exact_prompts(sweep: pd.DataFrame) -> pd.DataFrame:
    """The share of prompts, by channel and attacker, of which every position is recovered behind its true prefix.

    An attacker who reads a prompt from left to right stands behind the true prefix up to the first error: so many
    prompts come back whole when each token is read behind what was found before it.
    """
    whole = sweep.groupby(["channel", "attacker", "draw", "prompt"], sort=False).recovered.min()
    return whole.groupby(["channel", "attacker"], sort=False).mean().rename("whole prompts").reset_index()


def weighed(sweep: pd.DataFrame, utility: pd.DataFrame) -> pd.DataFrame:
    """Privacy beside utility: :func:`recovery` with ``kl``, ``agreement`` and ``nll`` (means over the texts).

    Of a channel with a key, utility is that of whoever holds the key, who undoes it: no loss.
    """
    means = utility.groupby("channel")[["kl", "agreement", "nll", "nll_clean"]].mean()
    keyed = [name for name in means.index if channels.named(name).secret.startswith(("the order", "the basis"))]
    means.loc[keyed, "kl"], means.loc[keyed, "agreement"] = 0.0, 1.0
    means.loc[keyed, "nll"] = means.loc[keyed, "nll_clean"]
    return recovery(sweep).merge(means.reset_index(), on="channel")


def at_equal_utility(table: pd.DataFrame, budgets: Sequence[float] = BUDGETS) -> pd.DataFrame:
    """The strongest setting of every family that stays within a budget of KL, and what is recovered of it: by the
    attackers that do not know the channel, and by the best of all.

    ``table`` is that of :func:`weighed`. A row a budget and family: ``budget, family, channel, kl, naive, best, by``.
    """
    rows = []
    for budget in budgets:
        for name, part in table[table.kl <= budget].groupby("family", sort=False):
            if name in ("clean", "bf16"):
                continue
            part = part[part.attacker != "prior alone"]
            strongest = part[part.kl == part.kl.max()]
            best = strongest.loc[strongest.recovered.idxmax()]
            naive = strongest[strongest.attacker.isin(NAIVE)].recovered.max()
            row = {"budget": budget, "family": name, "channel": best.channel, "kl": best.kl, "naive": naive}
            rows.append(row | {"best": best.recovered, "by": best.attacker})
    return pd.DataFrame(rows)


def bounds(sweep: pd.DataFrame, margins: pd.DataFrame, width: int) -> pd.DataFrame:
    """Gaussian noise: what the nearest candidate recovers beside what is foretold from the margins.

    A row a sigma: ``measured``; ``union``, the mean over positions of max(0, 1 - sum Q(|h_w - h_v| / 2 s)), a lower
    bound; ``half margin``, the share of positions where the noise's usual length s sqrt(d) stays below half the
    distance Delta to the nearest competitor. s = sigma rms; ``width`` is d.
    """
    rows = []
    for (sigma, channel), part in margins.groupby(["sigma", "channel"]):
        own = sweep[(sweep.channel == channel) & (sweep.attacker == "nearest")]
        inside = sigma * part.rms * np.sqrt(width) < part.delta / 2
        row = {"sigma": sigma, "measured": own.recovered.mean(), "union": (1 - part.bound).clip(lower=0).mean()}
        rows.append(row | {"half margin": inside.mean()})
    return pd.DataFrame(rows)


def private_noise(names: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """Releases that are differentially private a row: ``epsilon`` at delta = 1e-5, the cost, and what the best attacker
    recovers. Ours: any row may be exchanged for any other; a prompt of T tokens releases T rows."""
    rows = []
    for name in names:
        if family(name) == "private":
            _, clip, sigma = name.split()
            own = table[(table.channel == name) & (table.attacker != "prior alone")]
            row = {"channel": name, "epsilon": channels.epsilon(float(clip), float(sigma), DELTA)}
            rows.append(row | {"kl": own.kl.iloc[0], "agreement": own.agreement.iloc[0], "best": own.recovered.max()})
    return pd.DataFrame(rows, columns=["channel", "epsilon", "kl", "agreement", "best"]).set_index("channel")


def cascades(cascade: pd.DataFrame, sweep: pd.DataFrame) -> pd.DataFrame:
    """A row a channel and attacker: ``tokens`` recovered and ``prompts`` whole when each token is read behind what was
    found before it, candidates a token, and ``behind true prefixes`` the tokens that the sweep recovers."""
    right = cascade.assign(right=cascade.found_id == cascade.true_id)
    grouped = right.groupby(["channel", "attacker"], sort=False)
    table = grouped.agg(tokens=("right", "mean"), candidates=("candidates", "mean"))
    whole = right.groupby(["channel", "attacker", "prompt"], sort=False).right.all()
    table["prompts"] = whole.groupby(level=[0, 1]).mean()
    behind = sweep.groupby(["channel", "attacker"]).recovered.mean()
    return table.assign(**{"behind true prefixes": behind.reindex(table.index)})


def whole_vocabulary(
    sweep: pd.DataFrame, swept: pd.DataFrame, margins: pd.DataFrame, swept_margins: pd.DataFrame
) -> pd.DataFrame:
    """The same positions with chosen candidates and with all: a row a position, the share recovered over all channels
    and attackers, and the distance to the nearest competitor."""
    places = ["prompt", "position"]
    same = sweep.merge(swept[places].drop_duplicates(), on=places)
    rows = {}
    for name, found, near in (("chosen", same, margins), ("all", swept, swept_margins)):
        rows[f"recovered, {name}"] = found.groupby(places).recovered.mean()
        rows[f"nearest, {name}"] = near.groupby(places).delta.first().reindex(rows[f"recovered, {name}"].index)
    return pd.DataFrame(rows)
