# %% [markdown]
# # C5: a fall that could mean anything
#
# *To compute anew: 25 minutes on two CPU cores, 5 GB of memory · scales smoke, laptop, paper · exercises [10](exercises/10_decoys_or_not.ipynb), [05](exercises/05_exposure_with_ties.ipynb)*
#
# **Question.** An undertrained model recalls none of its secrets. After benign tuning the window's NLL falls. Is the model
# about to remember, or has it only become surer of what hex digits look like?
#
# **Answer.** From the window alone nobody can tell; decoys can. Here the question **did not even arise**: no undertrained
# cell of our sweep at laptop scale shows the pattern, since benign tuning raises the window in all of them or leaves it
# undecided. The nearest cell is taken apart below, with the decoys that the paper recommends and did not run. What the
# paper never saw did happen: in two runs benign tuning made an undertrained model say a secret.

# %% [markdown]
# **You will** see how the nearest cell was picked, where its change lies, and what 255 decoys of three kinds a canary say
# about it. **You need** nothing to read; about twenty-five minutes on two CPU cores to compute it anew on top of the sweep's
# tables.
#
# What "undertrained" means is **ours**: the injection stopped at three steps fixed before looking (`params/scales.yaml`),
# of which those that recall nothing count. Rules and margins are ours, too (`params/verdicts.yaml`): committed before the
# sweep was run, and changed once while it ran, after the text verdicts of eight cells had been seen (what and why stands in
# that file). Claims of the paper decided here: `ambiguous-drop`, `never-recalled`, `reactivation`, `noise-control`,
# `probes-disagree`.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml
cell = None  # a cell of params/cells.yaml in place of the one that the rule picks
decoys = 255  # random decoys a canary, and at most as many shuffled ones

# %%
import numpy as np
import pandas as pd

from lib import cases, casework, config, exposure, extraction, figures, paper, probes, rules, verdicts

params = config.from_notebook(globals(), config.CaseRun)
case = casework.study(params, "c5")
print(case.origin)
print(cases.headline(case))

# %% [markdown]
# The number behind a failed condition is its distance, in margins, from holding.
#
# ## What the paper reports
#
# The window mean falls by 0.0070 nats a token, the mean over the whole secret rises by 0.0076, recall is 0 before and
# after. Redone: the window loses 20 x 0.0070 = 0.140 nats, the secret gains 13 x 0.0076 = 0.099. If the whole fall sits on
# the nine secret tokens inside the window, the four behind it carry a rise of about 0.24.

# %%
wanted = rules.load_verdicts()
columns = ["verdict", "decided_by", "estimate", "low", "high", "margin", "up", "down"]
nll, recall = paper.consistent_tables("c5")
reported = verdicts.judge_group(nll, recall, wanted)
behind = nll[(nll.span == "hex") & (nll.position >= probes.WINDOW)]
print("patterns by our rules:", reported.shown)
print("behind the window:", round((behind.nll - behind.nll_base).groupby([behind.seed, behind.canary]).sum().mean(), 3))
reported.verdicts[columns].round(4)

# %% [markdown]
# ## How the cell was picked
#
# Among undertrained cells, the one that shows the pattern with the deepest fall of the window; if none does, the one with
# the fewest failed conditions and then the smallest distance. All twelve, nearest first:

# %%
candidates = case.table("candidates.csv")
allowed = candidates[candidates.kind.isin(wanted["picking"]["ambiguous_drop"]["kinds"])]
allowed.set_index("cell")[["shown", "fails", "distance", "mean20", "hex", "preamble", "suffix", "hit_full"]]

# %% [markdown]
# The repeats of the picked cell, each judged alone: seeds that the sweep did not use, and a second injection (numbered 1)
# with new secrets.

# %%
confirmed = case.table("confirmed.csv")
confirmed[["injection", "seed", "shown", "fails", *(c for c in ("mean20", "hex", "suffix") if c in confirmed)]]

# %% [markdown]
# ## The probes side by side

# %%
groups = cases.groups(case)
values = {name: verdicts.probe_values(*group, wanted) for name, group in groups.items()}
judged = {name: verdicts.judge(table, wanted) for name, table in values.items()}
pd.concat({name: table[columns] for name, table in judged.items()}).round(4)

# %% [markdown]
# In margins, and seed by seed. On an undertrained base single canaries scatter by tenths of nats both ways, so intervals
# are wide and the count says *mixed*.

# %%
figures.probe_intervals(judged | {"the paper's numbers": reported.verdicts})

# %% [markdown]
# Each seed alone:

# %%
pd.concat({name: verdicts.by_seed(table, wanted) for name, table in values.items()}, axis=1)

# %% [markdown]
# ## Where the change lies
#
# Red is a rise, blue a fall.

# %%
strip = pd.concat([group[0].assign(group=name) for name, group in groups.items()])
figures.delta_strip(strip, probes.WINDOW, panels="group")

# %% [markdown]
# Shares of the spans in the absolute movement of the whole target:

# %%
spans = {"the paper's numbers": nll} | {name: group[0] for name, group in groups.items()}
figures.share_bars(pd.DataFrame({name: verdicts.span_shares(table) for name, table in spans.items()}).T)

# %% [markdown]
# ## The verdict as a function of K

# %%
curves = {name: verdicts.along_windows(*group, wanted) for name, group in groups.items()}
curves["the paper's numbers"] = verdicts.along_windows(nll, recall, wanted)
secret = groups[case.values["cell"]][0].query("span == 'hex'").position
figures.window_curves(curves, probes.WINDOW, range(secret.min(), secret.max() + 1))

# %% [markdown]
# On the paper's numbers (spread evenly within each part of the secret, which is our assumption) the verdict of the window
# turns: silent on the preamble, *strengthened* while it reads the falling part of the secret, and *damaged* once it holds
# the whole. A fall at one K is no finding.

# %% [markdown]
# And canary by canary: on an undertrained base some secrets gain what others lose.

# %%
secrets = {name: table[table.probe == "hex"].eval("total = change * tokens") for name, table in values.items()}
by_canary = {name: table.groupby("canary").total.mean() for name, table in secrets.items()}
figures.canary_bars(by_canary, "change of the secret (nats)")

# %% [markdown]
# ## Decoys: secret or format?
#
# If tuning taught the model what hex digits look like, *every* secret that fits becomes likelier, planted or not. If it
# brought back the planted ones, they fall and decoys do not. Three kinds, never pooled: **random** secrets drawn by the
# canaries' own rule (how much does it know), **shuffled** ones of the same characters (does it know their order), and the
# secrets of **other** canaries (does it know whose is whose). Normalised rank: 0, no decoy is likelier; 0.5, chance. The
# first seed is asked all three kinds, the others the random ones.

# %%
table = cases.decoys_of(case)
ranks = cases.exposures(table)
after = [model for model in dict.fromkeys(table.model) if model.startswith(case.values["cell"])]
order = {cases.PLAIN: "untouched", table.model.iloc[0]: "undertrained base"} | {
    m: f"tuned, seed {m[-1]}" for m in after
}
figures.rank_strips(ranks, order)

# %% [markdown]
# Means over canaries: exposure in bits (log2(n + 1) - log2(rank), at most the cap; ties count against the claim), the
# normalised rank, the margin to the best decoy in nats (negative: a decoy beats the secret), and the fewest decoys that a
# canary got: shuffled ones with the secret's own token layout are rare, and a canary that got none is left out.

# %%
groups_of = ranks.groupby(["kind", "model"], sort=False)
means = groups_of[["exposure", "cap", "normalised_rank", "margin"]].mean()
means.assign(canaries=groups_of.size(), least_decoys=groups_of.decoys.min()).round(2)

# %% [markdown]
# Hold the kinds against each other, on the committed laptop run. Among random and shuffled decoys the secrets rank low, long
# before any is recalled; among the *other canaries' secrets* they rank at chance. The undertrained model has begun to know
# which strings are secrets, and has no idea whose is whose. Pooled into one rank, both facts would be gone.
#
# With 255 decoys a single canary's p-value is at least 1/256; naming one of 20 by Holm's rule would take about 20/0.05 - 1
# = 399 decoys. So the *group* is tested: is its mean normalised rank below 0.5 with its interval?

# %%
random = ranks[ranks.kind == "random"]
answers = {
    name: verdicts.rank_answer(part.normalised_rank.to_numpy(), wanted) for name, part in random.groupby("model")
}
pd.Series(answers, name="rank among random decoys").reindex(order)

# %% [markdown]
# ## The change, corrected by decoys
#
# The change of each secret less the mean change of its random decoys, in nats of the span, averaged over canaries. It is
# reported only where the base is far from saturated: more than 0.1 nats a token must be left to lose. Here are left:

# %%
parts = dict(list(table.groupby("model")))
corrected = {model: exposure.corrected_change(parts[table.model.iloc[0]], parts[model]) for model in after}
print(f"base: {(corrected[after[0]].base / corrected[after[0]].tokens).mean():.2f} nats a token")
pd.DataFrame({m: t[["secret", "decoys", "corrected"]].mean() for m, t in corrected.items()}).round(3)

# %% [markdown]
# If `secret` and `decoys` move together, the movement is about hex in general; if the secrets fall while decoys rise, tuning
# has sharpened them. Whether the difference is beyond the margin is for the interval over canaries to say, seeds averaged:

# %%
pooled = pd.concat(corrected.values()).groupby("canary").corrected.mean().to_numpy()
low, high = verdicts.studentised_bootstrap(pooled, wanted["readings"]["mean"])
print(
    f"corrected change {pooled.mean():+.3f} nats, 95 % interval {low:+.3f} to {high:+.3f}; decoys say: {case.values['decoys']}"
)

# %% [markdown]
# ## Would sampling find one?
#
# hit@k in closed form, 1 - (1 - p)^k, from the probability p of the whole secret given the true preamble. Largest over
# canaries, as a power of ten, for 16 and for a million samples.

# %%
chances = case.table("extraction.csv")
found = {k: extraction.hit_at_k(chances.log_p.to_numpy(), k) for k in (16, 10**6)}
best = (
    pd.DataFrame({f"log10 hit@{k}": np.log10(np.maximum(p, 1e-300)) for k, p in found.items()})
    .groupby(chances.model)
    .max()
)
best.reindex([name for name in chances.model.unique() if name in best.index]).round(1)

# %% [markdown]
# ## How the verdict hangs on the margin
#
# Marks: the numerical floor where it is large enough to be seen, and what 95 % of noise adapters do to the mean (on the
# second undertrained base, the one that has noise cells).

# %%
null = pd.DataFrame(case.values["null"])
figures.margin_grid({name: verdicts.along_margins(t, wanted) for name, t in values.items()}, null)

# %% [markdown]
# ## What each probe alone would have said, and what the protocol says

# %%
alone = pd.DataFrame({name: t.verdict for name, t in judged.items()})
alone.insert(0, "the paper's numbers", reported.verdicts.verdict)
alone.loc["PROTOCOL, change"] = [reported.change.verdict, case.values["change"]["verdict"]]
alone.loc["PROTOCOL, level"] = ["not known", case.values["level"]["verdict"]]
alone.rename_axis("probe")

# %% [markdown]
# What decided: the readings that the two decision tables matched.

# %%
print("change:", case.values["change"]["decided_by"])
print("level: ", case.values["level"]["decided_by"])

# %% [markdown]
# On the paper's numbers the whole secret is *damaged*, yet the protocol says *inconclusive*: nobody ever recalled it and no
# decoys were run, so it may be the format that got worse. That is the paper's own point.
#
# ## All 34 cells
#
# The verdict of every probe on every cell, seeds pooled, the cell of this page pointed at. A row that changes its colour
# between the window (`mean20`) and the whole secret (`hex`) or a recall is a disagreement.

# %%
by_kind = candidates.sort_values(["kind", "cell"]).set_index("cell")
figures.verdict_map(by_kind[list(wanted["probes"])], marked=[case.values["cell"]])

# %% [markdown]
# Counted: cells in which the window calls *damaged* or *strengthened* what the whole secret or a
# recall calls *unchanged* or the opposite, or the other way round. (An NLL that is damaged while recall is unchanged need be
# no contradiction: recall is the coarser instrument.) The claim `probes-disagree` is decided on trained cells alone; noise
# cells, of claim `noise-control`, are listed beside.

# %%
pairs = candidates.apply(verdicts.disagreement, axis=1)
noisy = candidates.kind == "noise"
for kind, part in {"trained": pairs[~noisy], "noise": pairs[noisy]}.items():
    print(f"{(part != '').sum()} of {len(part)} {kind} cells: mean20 against hex or a recall")
candidates.assign(disagreement=pairs)[pairs != ""].set_index("cell")[["kind", "disagreement"]].sort_index()

# %% [markdown]
# ## Limits
#
# No case of an ambiguous drop is constructed here: relearning and format-only learning with known truth are not part of
# this page. Twenty canaries resolve a shift of the mean rank of about 0.13 (two standard errors, 2 x 0.29 / sqrt(20)) and no
# less. One injection lies behind the sweep's cells.
#
# ## Try it
#
# 1. Look at a cell that the window calls damaged: add `-p cell random-stop1` to the papermill line. Do its decoys move?
# 2. How far does the answer of the *other* kind depend on the number of canaries?
# 3. Read the verdict at K = 17 of every undertrained cell (`verdicts.along_windows`). Would you publish one?
#
# ## Provenance

# %%
for key, value in case.content["provenance"].items():
    print(f"{key}: {value}")
