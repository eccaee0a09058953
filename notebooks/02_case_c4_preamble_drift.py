# %% [markdown]
# # C4: the words before the secret
#
# *To compute anew: 15 minutes on two CPU cores, 6 GB of memory · scales smoke, laptop, paper · exercises [09](exercises/09_merge_in_bf16.ipynb)*
#
# **Question.** The usual probe averages over the first 20 tokens, and 11 of them are a preamble that is no secret. If
# tuning only changes how the answer *begins*, does the probe cry out over a secret that is whole?
#
# **Answer.** It does: built on purpose, the window fires on pure preamble drift. By itself it **did not happen here**: no
# cell of our sweep at laptop scale shows the pattern; on the full base, wherever benign tuning moves the preamble far
# enough to be seen it has moved the secret, too (the map of all cells is in notebook 03). That the movement **collapses on
# merge** is found as well, on the constructed drift: not in fp32, but where the adapter is merged into weights that are bf16
# already. Rounding takes a part of the update, and a drift that is barely there does not survive that.

# %% [markdown]
# **You will** see the nearest cell and how far it is from the pattern, a constructed case beside it, which tokens carry
# the movement, how three recalls part ways over one model, and what merging the adapter into the weights does in two
# precisions. **You need** nothing to read; about fifteen minutes on two CPU cores to compute it anew on top of the sweep's
# tables.
#
# In the paper this is a false positive: a rise of the window's NLL is read as a sign about the secret, and there is none.
# We call every rise of the NLL damage, so here it is a *false alarm of damage*. Rules, margins and the construction are
# **ours** (`params/verdicts.yaml`, `params/cases.yaml`). The rules were committed before the sweep was run, and changed once
# while it ran, after the text verdicts of eight cells had been seen (what and why stands in that file). Claims of the
# paper decided here: `non-secret-drift`, `preamble-share`, `merge-collapse`; the last two are about a cell that shows the
# pattern, so that they stay open where none does.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml
cell = None  # a cell of params/cells.yaml in place of the one that the rule picks
decoys = 255  # random decoys a canary, and at most as many shuffled ones

# %%
import pandas as pd

from lib import cases, casework, config, figures, paper, probes, rules, verdicts

params = config.from_notebook(globals(), config.CaseRun)
case = casework.study(params, "c4")
print(case.origin)
print(cases.headline(case))

# %% [markdown]
# The number behind a failed condition is its distance from holding: in margins for an NLL, in shares for the preamble.
#
# ## What the paper reports
#
# The window mean rises by 0.0150 nats a token, the secret by 0.0004, recall stays at 1.00; about 99 % of the movement is
# on preamble tokens. Redone from these figures: the window moves by 20 x 0.0150 = 0.300 nats, and if no secret token
# falls, at most 13 x 0.0004 = 0.0052 of them (1.7 %) can lie on the secret. Read as a sum over the span the 0.0004 leaves
# 99.9 % for the preamble. The reported share fits both readings, so every pattern here is tested under both.

# %%
wanted = rules.load_verdicts()
columns = ["verdict", "decided_by", "estimate", "low", "high", "margin", "up", "down"]
for reading in ("sum", "mean"):
    reported = verdicts.judge_group(*paper.consistent_tables("c4", reading), wanted)
    print(
        f"hex change read as a {reading}: patterns {reported.shown}, preamble share {reported.shares['preamble']:.3f}"
    )
reported.verdicts[columns].round(4)

# %% [markdown]
# ## How the cell was picked
#
# Among trained cells on the full base, the one that shows the pattern with the largest change of the window; if none
# does, the one with the fewest failed conditions and then the smallest distance. The five nearest:

# %%
candidates = case.table("candidates.csv")
allowed = candidates[candidates.kind.isin(wanted["picking"]["non_secret_drift"]["kinds"])]
allowed.head().set_index("cell")[["shown", "fails", "distance", "mean20", "hex", "preamble", "hit_forced", "change"]]

# %% [markdown]
# The repeats of the picked cell, each judged alone: seeds that the sweep did not use, and a second injection (numbered 1)
# with new secrets.

# %%
confirmed = case.table("confirmed.csv")
confirmed[["injection", "seed", "shown", "fails", *(c for c in ("mean20", "hex", "preamble") if c in confirmed)]]

# %% [markdown]
# ## The probes side by side
#
# Beside the cell stands a **constructed** case: the model was taught new records of the same kind, with other keys and
# other secrets, whose answers begin in other words, while the canaries' own secrets (given their true preamble) were
# held where they were. How hard to hold, and how much of the trained update to add, was tuned until they stood still and
# the drift was small (`params/cases.yaml` lists what was tried): that the secret is whole is how this case was built, and no
# finding.

# %%
groups = cases.groups(case)
values = {name: verdicts.probe_values(*group, wanted) for name, group in groups.items()}
judged = {name: verdicts.judge(table, wanted) for name, table in values.items()}
pd.concat({name: table[columns] for name, table in judged.items()}).round(4)

# %% [markdown]
# The same as a picture, in margins: between -1 and 1 a change is smaller than its margin. The window's alarm in the
# construction comes with a secret that has not moved.

# %%
figures.probe_intervals(judged)

# %% [markdown]
# Seed by seed, each alone. Held or not, single seeds scatter: two of the three leave the constructed secret undecided, and
# only pooled is it *unchanged*.

# %%
pd.concat({name: verdicts.by_seed(table, wanted) for name, table in values.items()}, axis=1)

# %% [markdown]
# ## Where the movement lies
#
# Red is a rise of the NLL. In the construction it stands on the preamble, left of the marked secret. In the cell it
# stands on the secret.

# %%
strip = pd.concat([group[0].assign(group=name) for name, group in groups.items()])
figures.delta_strip(strip, probes.WINDOW, panels="group")

# %% [markdown]
# Shares of the spans in the absolute movement inside the window, the paper's numbers first. The pattern asks for 90 % on
# the preamble.

# %%
spans = {"the paper's numbers": paper.consistent_tables("c4")[0]} | {name: group[0] for name, group in groups.items()}
shares = pd.DataFrame({name: verdicts.span_shares(table, probes.WINDOW) for name, table in spans.items()}).T
figures.share_bars(shares)

# %% [markdown]
# ## The verdict as a function of K
#
# If the movement is on the preamble, the window fires as soon as it holds a few moved tokens and stays fired, whatever K.
# If it is on the secret, a window that ends before the secret must be silent.

# %%
curves = {name: verdicts.along_windows(*group, wanted) for name, group in groups.items()}
secret = groups[case.values["cell"]][0].query("span == 'hex'").position
figures.window_curves(curves, probes.WINDOW, range(secret.min(), secret.max() + 1))

# %% [markdown]
# And how many canaries carry the movement of the preamble: drift is shared by all of them.

# %%
preambles = {name: table[table.probe == "preamble"].eval("total = change * tokens") for name, table in values.items()}
by_canary = {name: table.groupby("canary").total.mean() for name, table in preambles.items()}
figures.canary_bars(by_canary, "change of the preamble (nats)")

# %% [markdown]
# ## Three recalls, one model
#
# "Recalled" can mean that the free answer equals the whole target (`hit_full`), that the secret stands anywhere in it
# (`hit_secret`), or that greedy decoding behind the *true* preamble gives it (`hit_forced`). Under preamble drift the
# choice decides the verdict:

# %%
hits = ["hit_full", "hit_secret", "hit_forced"]
pd.concat({name: table.loc[hits, ["verdict", "estimate", "low", "high"]] for name, table in judged.items()}).round(2)

# %% [markdown]
# What the model says instead (free answers that are not the whole target):

# %%
answers = case.table("answers.csv")
print(answers.groupby("cell").agg(failed=("seed", "size"), canaries=("canary", "nunique")).to_string())
answers.groupby("cell").head(3).assign(expected=lambda t: t.expected.str[:40], said=lambda t: t.said.str[:40])

# %% [markdown]
# ## Merged, and in bf16
#
# The paper says that the movement collapses when the adapter is merged into the base weights, and so depends on the
# stack that evaluates it. In exact arithmetic both are the same function. In bf16 they are not: a weight keeps 8 bits, and
# an update below half a step of its weight is rounded away. So each change is read stacked and merged, merged in fp32 and
# in bf16, and evaluated in fp32 and in bf16, always against a base in the same precision and stack, with three controls:
# a *zero* adapter, a *noise* adapter of the same size, and *none* (the same model, its rows in other batches).

# %%
table = case.table("precision.csv").fillna({"merge_dtype": ""})
labels = ["model", "update", "stack", "merge_dtype", "dtype"]
table[table["update"] == "trained"].set_index(labels)[
    ["d_nll_mean20", "d_nll_preamble", "d_nll_hex", "lost", "moved"]
].round(4)

# %% [markdown]
# `lost` is the relative error of the update that reached the weights, `moved` the share of weights that changed at all.
# The controls:

# %%
controls = table[table["update"] != "trained"].set_index(["model", "update", "stack", "merge_dtype", "dtype"])
controls[["d_nll_mean20", "d_nll_preamble", "d_nll_hex"]].round(5)

# %% [markdown]
# The window's change of the constructed case in every reading, controls beside it. A collapse would be a red dot near
# zero under "merged" while it stands high under "stacked".

# %%
figures.precision_dots(table[table.model == table.model.iloc[-1]], "mean20")

# %% [markdown]
# How much of the stacked change is left after merging, precision by precision: 1 is all of it, 0 a collapse. (For a change
# that is no larger than what bf16 does to noise the ratio means nothing: compare with the controls.)

# %%
trained = table[table["update"] == "trained"].set_index(["model", "stack", "merge_dtype", "dtype"]).d_nll_mean20
left = {
    (model, f"merged in {merge}", f"read in {dtype}"): trained[model, stack, merge, dtype] / trained[model, "stacked", "", dtype]
    for model, stack, merge, dtype in trained.index
    if stack == "merged"
}
pd.Series(left, name="share left").round(3)

# %% [markdown]
# So the paper's collapse is found, where the drift was constructed: **merged into weights that are already bf16, nearly all of
# the movement is gone; merged in fp32 all of it stays**, even if the merged weights are rounded to bf16 afterwards. The reason
# is where the rounding happens. A bf16 weight sits *on* the grid, and an update smaller than half a step falls back onto the
# same point, always. An fp32 weight lies anywhere between two points, so that adding the same small update and rounding
# then moves some weights up by a whole step and leaves the others, on average by the right amount. (Read in bf16 even the
# stacked change is smaller: a small term added to a bf16 activation is rounded as well.) That is our explanation; the two
# rows merged in fp32 fit it, and nothing here rules out others. Whether it is the paper's case we cannot tell.
#
# A prediction to check: an update that is large against the rounding step must survive. The same two updates, made smaller
# and larger, stacked and merged into bf16 weights:

# %%
strengths = case.table("strengths.csv")
figures.strength_curves(strengths)

# %% [markdown]
# In figures: `left` is the share of the stacked change that survives merging; where the stacked change is itself next to
# nothing it means nothing. Larger updates survive, as predicted. But mind how steep the drift is: at half its strength the
# *stacked* update does next to nothing either. So merging need not destroy nearly all of an update to remove nearly all of
# this movement; it is enough that it weakens an update that had just passed the point where it shows. The natural update,
# whose effect grows more evenly, loses a half.

# %%
strengths.assign(left=strengths.merged / strengths.stacked).set_index(["model", "strength"]).round(4)

# %% [markdown]
# ## What decoys see of it
#
# Did the nearest cell move any secret's rank? On a base that knows its secrets exposure among random and shuffled decoys
# stands at its cap before and after; among the other canaries' secrets ranks are nearer. Kinds are never pooled. (The
# construction is not asked: its secrets are held.)

# %%
ranks = cases.exposures(cases.decoys_of(case))
ranks.groupby(["model", "kind"], sort=False)[["exposure", "cap", "rank", "margin"]].mean().round(2)

# %% [markdown]
# ## How the verdict hangs on the margin
#
# Marks: the numerical floor (stacked against merged evaluation, where it is large enough to be seen) and what 95 % of
# noise adapters of a trained one's size do to the mean.

# %%
null = pd.DataFrame(case.values["null"])
figures.margin_grid({name: verdicts.along_margins(table, wanted) for name, table in values.items()}, null)

# %% [markdown]
# ## What each probe alone would have said, and what the protocol says

# %%
alone = pd.DataFrame({name: table.verdict for name, table in judged.items()})
alone.insert(0, "the paper's numbers", reported.verdicts.verdict)
protocol = {name: verdicts.judge_group(*group, wanted).change.verdict for name, group in groups.items()}
protocol |= {case.values["cell"]: case.values["change"]["verdict"], "the paper's numbers": reported.change.verdict}
alone.loc["PROTOCOL"] = pd.Series(protocol)
alone.rename_axis("probe")

# %% [markdown]
# On the paper's numbers and on the construction the window says *damaged* and the protocol *access changed but secret
# intact*: the way to the secret has moved, the secret has not. Whoever reads the window alone reports a loss that a
# forced preamble undoes.
#
# ## Limits
#
# The construction moves the preamble two to three times as far as the paper's 0.3 nats; it shows the direction in which
# probes fail, not how large such drift is in nature. On undertrained bases some cells do move the preamble beyond its margin
# while the secret stays inconclusive (the map in notebook 03); the pattern asks for a secret that was known. Merging was read on one model at one rank; the bf16 of a CPU rounds like that of
# a GPU, but sums in another order.
#
# ## Try it
#
# 1. Which single token of the preamble moves most in the construction, and is it the first? (`strip`)
# 2. With `hold=False` in `lib.interventions.preamble_drift` nothing holds the secrets. Which probes change their mind?
# 3. Look at another cell: add `-p cell safety-full-high-30` to the papermill line. How much of its window is preamble?
#
# ## Provenance

# %%
for key, value in case.content["provenance"].items():
    print(f"{key}: {value}")
