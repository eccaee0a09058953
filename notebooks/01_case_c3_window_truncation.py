# %% [markdown]
# # C3: damage behind the window
#
# *To compute anew: 20 minutes on two CPU cores, 4 GB of memory · scales smoke, laptop, paper · exercises [07](exercises/07_flip_the_verdict.ipynb), [06](exercises/06_hit_at_k.ipynb)*
#
# **Question.** The usual probe reads the first 20 tokens of a target. The secret has 13 tokens, and the last four of
# them lie behind that window. Can a secret be hurt while the probe sees nothing?
#
# **Answer.** It can: built on purpose, it happens exactly as the paper says. By itself it **did not happen here**: no
# cell of our sweep at laptop scale shows the pattern. Benign tuning hurts this model from the secret's first token on,
# so the window sees the damage as well. The nearest cell, and how far it is from the pattern, comes first; the
# constructed case that shows the mechanism stands beside it, labelled as constructed.

# %% [markdown]
# **You will** see how the cell was picked, what each probe says of it, where in the target the damage lies, how the
# window's verdict depends on its length K, and what two other explanations (a repetition penalty, luck in sampling)
# would look like. **You need** nothing to read; about twenty minutes on two CPU cores to compute it anew on top of the
# sweep's tables.
#
# The four sources, the 34 cells and three seeds, the ranks and K = 20 are the paper's. Learning rates, steps, margins,
# rules and the way a cell is picked are **ours** (`params/verdicts.yaml`): committed before the sweep was run, and changed
# once while it ran, after the text verdicts of eight cells had been seen (what and why stands in that file). What is
# constructed is ours altogether (`params/cases.yaml`). A rise of the NLL is damage. Claims of the paper decided here:
# `window-truncation`, `late-damage`, `few-canaries`; the last two are about a cell that shows the pattern, so that they
# stay open where none does.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml
cell = None  # a cell of params/cells.yaml in place of the one that the rule picks
decoys = 255  # random decoys a canary, and at most as many shuffled ones

# %%
import numpy as np
import pandas as pd

from lib import cases, casework, config, extraction, figures, paper, probes, rules, verdicts

params = config.from_notebook(globals(), config.CaseRun)
case = casework.study(params, "c3")
print(case.origin)
print(cases.headline(case))

# %% [markdown]
# The number behind a failed condition is its distance, in margins, from holding; for a recall it is in canaries.
#
# ## What the paper reports
#
# The window mean does not move, the mean over the whole secret does, and exact recall falls from 1.00 to 0.88. Seven of
# 60 decodes fail, all of them in three of the 20 canaries and in the last one or two characters. The paper publishes no
# per-token table, so here is one that gives these numbers, and what our rules say of it.

# %%
wanted = rules.load_verdicts()
reported = verdicts.judge_group(*paper.consistent_tables("c3"), wanted)
print("paper:", paper.REPORTED["c3"], "| patterns by our rules:", reported.shown)
columns = ["verdict", "decided_by", "estimate", "low", "high", "margin", "up", "down"]
reported.verdicts[columns].round(4)

# %% [markdown]
# Mind who decides. With damage in three of 20 canaries the *mean* over canaries has an interval that reaches almost to
# zero; it is the *count* of canaries beyond their margin that fires. A verdict from the mean alone would have missed the
# paper's own case.
#
# ## How the cell was picked
#
# Among trained cells on the full base, the one that shows the pattern with the largest change of the secret; if none
# does, the one with the fewest failed conditions and then the smallest distance. Picking after looking is post hoc, in
# the paper as here, which is why the picked cell is repeated below with other seeds and other secrets. The five nearest:

# %%
candidates = case.table("candidates.csv")
allowed = candidates[candidates.kind.isin(wanted["picking"]["window_truncation"]["kinds"])]
allowed.head().set_index("cell")[["shown", "fails", "distance", "mean20", "hex", "hit_full", "change"]]

# %% [markdown]
# All of them fail the same condition: the window is *not* unchanged. The repeats, each judged alone: seeds that the
# sweep did not use, and a second injection (numbered 1) with new secrets.

# %%
confirmed = case.table("confirmed.csv")
confirmed[["injection", "seed", "shown", "fails", *(c for c in ("mean20", "hex", "hit_full") if c in confirmed)]]

# %% [markdown]
# ## The probes side by side
#
# Verdicts on the cell, its seeds pooled, and on a **constructed** case: three of 20 canaries were taught another token at
# one randomly drawn position of the secret behind the window, everything else being held where it was.

# %%
groups = cases.groups(case)
values = {name: verdicts.probe_values(*group, wanted) for name, group in groups.items()}
judged = {name: verdicts.judge(table, wanted) for name, table in values.items()}
pd.concat({name: table[columns] for name, table in judged.items()}).round(4)

# %% [markdown]
# The same as a picture, for the probes that read an NLL. Every change is divided by its margin, so that probes of
# different length can be compared: between -1 and 1 it is smaller than the margin.

# %%
figures.probe_intervals(judged)

# %% [markdown]
# And seed by seed, since a pooled verdict can hide three different ones.

# %%
pd.concat({name: verdicts.by_seed(table, wanted) for name, table in values.items()}, axis=1)

# %% [markdown]
# ## Where the damage lies
#
# Each square is one token of one canary, averaged over seeds; red is a rise. Left, nature: the damage starts with the
# secret's first tokens. Right, the construction: three dark squares behind the green line, next to nothing before it.

# %%
strip = pd.concat([group[0].assign(group=name) for name, group in groups.items()])
figures.delta_strip(strip, probes.WINDOW, panels="group")

# %% [markdown]
# Shares of the spans in the absolute movement of the *whole* target, the paper's numbers (as far as they say) first.

# %%
spans = {"the paper's numbers": paper.consistent_tables("c3")[0]} | {name: group[0] for name, group in groups.items()}
figures.share_bars(pd.DataFrame({name: verdicts.span_shares(table) for name, table in spans.items()}).T)

# %% [markdown]
# ## The verdict as a function of K
#
# K = 20 is one choice. Here is the window probe for every K, in nats of the whole window. In the constructed case the
# window must be silent up to the damaged tokens (dotted lines: the K from which a window reads them) and change its mind
# there, and nowhere else.

# %%
curves = {name: verdicts.along_windows(*group, wanted) for name, group in groups.items()}
marks = list(case.values["constructed_at"].values())
secret = groups[case.values["cell"]][0].query("span == 'hex'").position
constructed = [name for name in curves if name != case.values["cell"]]
figures.window_curves(curves, probes.WINDOW, range(secret.min(), secret.max() + 1), dict.fromkeys(constructed, marks))

# %% [markdown]
# Around the crossing, reading by reading. Two canaries are damaged at one position and the third behind it, so the window
# first stops saying *unchanged* and then says *damaged*: the mean of a few large values among twenty has a wide interval,
# and the count is *mixed* as long as holding the other canaries has let one of them gain more than the margin.

# %%
for name, curve in curves.items():
    fires = [int(k) for k in curve.index[curve.verdict == verdicts.DAMAGED]]
    print(f"{name}: damaged at K = {fires}")
print("damaged positions (read from K = position + 1 on):", sorted(marks))
curves[constructed[0]].loc[19:25, ["verdict", "by_mean", "by_count", "up", "down"]]

# %% [markdown]
# ## How few canaries carry it

# %%
secrets = {name: table[table.probe == "hex"].eval("total = change * tokens") for name, table in values.items()}
by_canary = {name: table.groupby("canary").total.mean() for name, table in secrets.items()}
figures.canary_bars(by_canary, "change of the secret (nats)")

# %% [markdown]
# ## The failed answers, token by token
#
# Every answer that is not the whole target, the position at which it leaves it, and the canary whose secret it says
# instead, if it is one. The paper's failures sit in the last one or two characters. In the natural cell an answer that
# fails leaves at the *first* token of the secret and goes on with the whole secret of another canary: what broke is whose
# secret it is, not how it ends.

# %%
answers = case.table("answers.csv")
print(answers.groupby("cell").agg(failed=("seed", "size"), canaries=("canary", "nunique")).to_string())
answers.assign(expected=answers.expected.str[-24:], said=answers.said.str[-24:]).sort_values("first_wrong").head(11)

# %% [markdown]
# ## Another explanation: the repetition penalty
#
# Models of this family ship a `generation_config.json` with a repetition penalty above 1, and `generate` reads it
# unless told otherwise. It lowers every token seen before, which late in a hex string is more than every third. What would
# it do alone, on a model that knows every secret? Recalls with the penalty off and on, and where the first wrong token is.

# %%
penalty = case.table("penalty.csv")
shown = penalty.groupby(["model", "penalty"], sort=False)
shown.agg(
    hit_full=("hit_full", "mean"), hit_secret=("hit_secret", "mean"), first_wrong=("first_wrong", "median")
).round(2)

# %% [markdown]
# Had recall fallen on `full`, the base that was never tuned, then a fall of exact recall in late characters need not be
# damage at all. At 1.05 it does not: this base is far surer of its secrets than the penalty is strong. Larger models with
# longer prompts may differ, and whether the paper's decodes had the penalty on is not known to us; every decode of this
# package passes its own greedy configuration.
#
# ## Recall by sampling: hit@k
#
# The probability p of a secret is exp(-NLL) of its tokens, so the chance of at least one hit among k samples is
# 1 - (1 - p)^k, without sampling anything; p^k is the chance that all k hit. Means over canaries, for all tokens and for
# sampling from the 40 likeliest.

# %%
chances = case.table("extraction.csv")
for name in ("log_p", "log_p_top_k"):
    for k in (1, 4, 16):
        chances[f"{name.replace('log_p', 'hit')}@{k}"] = extraction.hit_at_k(chances[name].to_numpy(), k)
    chances[f"{name.replace('log_p', 'all')}@4"] = extraction.reliability(chances[name].to_numpy(), 4)
chances.groupby("model", sort=False).mean(numeric_only=True).filter(regex="@").round(3)

# %% [markdown]
# And the check that sampling says the same: hits among samples of the first canaries of the tuned model, beside what p
# expects. The difference is given in standard deviations of a binomial.

# %%
samples = case.table("samples.csv").merge(chances, on=["model", "canary"])
p = np.exp(samples.log_p_top_k.where(samples.top_k > 0, samples.log_p).clip(upper=0))
samples["expected"] = samples.samples * p
samples["deviations"] = (samples.hits - samples.expected) / (samples.expected * (1 - p)).clip(lower=1e-9) ** 0.5
samples[["canary", "top_k", "samples", "hits", "expected", "deviations"]].round(2)

# %% [markdown]
# The same as hit@k: estimated from the samples without bias (the share of k-subsets that hold a hit), and in closed form.

# %%
rows = {}
for k in (1, 4, 16):
    counted = extraction.sampled_hit_at_k(samples.hits.to_numpy(), samples.samples.to_numpy(), k)
    closed = extraction.hit_at_k(np.log(np.maximum(p.to_numpy(), 1e-300)), k)
    rows[k] = pd.DataFrame({"sampled": counted, "closed form": closed}).groupby(samples.top_k).mean().stack()
pd.DataFrame(rows).rename_axis(columns="k").round(3)

# %% [markdown]
# ## What decoys see of it
#
# Exposure is the rank of the secret among decoys, in bits. Among random and shuffled decoys a secret known by heart stands
# at its cap before and after, so they **cannot see C3** at all: it would take damage of dozens of nats (the margin to the best
# decoy) to lose a rank. The secrets of the *other* canaries are nearer: the margin there is a few nats, and damage that
# confuses canaries shows up in it. The three kinds answer three different questions and are never pooled.

# %%
ranks = cases.exposures(cases.decoys_of(case))
means = ranks.groupby(["model", "kind"], sort=False)[["exposure", "cap", "rank", "margin"]].mean()
means.assign(least_decoys=ranks.groupby(["model", "kind"]).decoys.min()).round(2)

# %% [markdown]
# ## How the verdict hangs on the margin
#
# Every verdict along margins from 0.005 to 0.5 nats of the span. Marks: the numerical floor (stacked against merged
# evaluation, where it is large enough to be seen) and what 95 % of noise adapters of a trained one's size do to the mean.

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
# The constructed case is the paper's C3: the window says *unchanged*, the whole secret and all three recalls say
# *damaged*. Who had only the window would have published the opposite of the truth. In the natural cell window and whole
# secret say the same, and recalls are undecided; there, the window was enough.
#
# ## The count reading and noise
#
# The paper's C3 is seen by the count of canaries alone, so it matters what else that reading fires on. The cells of
# LoRA-NOISE, random adapters of a trained one's size:

# %%
candidates[candidates.kind == "noise"].set_index("cell")[["shown", "fails", "mean20", "hex", "hit_full", "change"]]

# %% [markdown]
# A noise cell that is called *damaged* here is no error of the probe: random weights of that size do move some secrets by
# more than the margin. It is a reminder that "damaged" says that something changed, and not that benign *data* did it.
#
# ## Limits
#
# One model of 135 million parameters, one injection behind all cells of the sweep (two behind the repeats). That the
# pattern was not found here says nothing about 7 billion parameters, other learning rates or other data; it does say
# that the pattern is no necessity. The construction shows how probes answer to late damage, and nothing about how often
# tuning brings it about.
#
# ## Try it
#
# 1. Look at another cell: `papermill notebooks/01_case_c3_window_truncation.ipynb out.ipynb -p cell random-full-high-30`.
# 2. Which K would you commit to before looking, and what does it cost where nothing is wrong? (`curves`; to try it without code,
#    [drag K](../book/explorer.md).)
# 3. In `params/cases.yaml`, damage a single canary. Which reading still sees it, and at which margin?
#
# ## Provenance

# %%
for key, value in case.content["provenance"].items():
    print(f"{key}: {value}")
