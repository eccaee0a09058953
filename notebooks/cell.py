# %% [markdown]
# # One cell of the sweep
#
# *To compute anew: 1 minute on two CPU cores, 4 GB of memory · scales smoke, laptop, paper*
#
# **Question.** A model knows its canaries. It is then tuned on harmless data for a little while. What has changed for
# the secrets, and does every probe see it?
#
# **Answer.** For this cell and seed: the table of verdicts below. This page is the unit of the sweep. Open it when a cell looks odd.

# %% [markdown]
# **You will** see the cell's training curve, how the loss moved at every target position, and a one-line reading of each
# probe. **You need** about a minute on two CPU cores once the testbed of notebook `00_testbed` exists (it is made if not).
#
# Every number is a change against the same model before the tuning. A *rise* of the NLL is damage. The adapter is read
# twice: **stacked** (beside the weights) and **merged** (added into a copy of them).
#
# Four sources, 34 cells with three seeds (claim `grid`), stacking, rank 16 and alpha 32 are the paper's. The data itself, learning rates, step counts and which
# cells there are is **our choice** (`params/cells.yaml`), since the paper's are not published.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml
cell = "safety-full-high-30"  # a cell of params/cells.yaml
seed = 0  # initialisation, data and order of the benign tuning
grid = None  # another file of cells than params/cells.yaml
injection = 0  # 1, 2, ...: on another injection, with new secrets

# %% [markdown]
# The parameters are checked, then the run is found or computed.

# %%
import pandas as pd

from lib import config, figures, rules, sweep, verdicts

params = config.from_notebook(globals(), config.CellRun)

# %% [markdown]
# What this cell is: its source of benign data, the base it starts from, learning rate and steps.

# %%
run = sweep.cell(params)
print(run.origin)
pd.Series(run.content["inputs"]["cell"], name=f"seed {params.seed}")

# %% [markdown]
# ## Training
#
# The loss on the benign targets, in nats a token (a cell of LoRA-NOISE has none: its adapter is random, of the size of
# the one it is like).

# %%
log = run.table("training.csv") if "training.csv" in run.content["files"] else pd.DataFrame(columns=["step", "loss"])
figures.loss_curve(log, (), None)

# %% [markdown]
# ## What moved, position by position
#
# Each square is one token of one canary; red is a rise of the NLL (damage), blue a fall. The secret is marked, and so is
# the end of the 20-token window that the usual probe reads.

# %%
nll = run.table("token_nll.parquet")
figures.delta_strip(nll[nll["stack"] == "stacked"], window=20)

# %% [markdown]
# ## The probes, a row a modality and stack
#
# Mean changes over canaries, in nats a token.

# %%
rows = pd.DataFrame(run.values["rows"]).set_index(["modality", "stack"])
rows.filter(like="d_nll").round(4)

# %% [markdown]
# The recalls, in the same order: share of canaries, `_base` before the tuning.

# %%
rows.filter(like="hit").round(2)

# %% [markdown]
# ## What each probe says
#
# One verdict a probe, by the rules of `params/verdicts.yaml`, which are **ours**: the paper publishes none. This is one
# seed alone; the case notebooks pool all seeds of a cell. *Not testable* is a recall that nobody had before.

# %%
stacked, answered = nll[nll["stack"] == "stacked"], run.table("recall.parquet").query("stack == 'stacked'")
judged = {
    kind: verdicts.judge_group(part, answered[answered.modality == kind], rules.load_verdicts())
    for kind, part in stacked.groupby("modality")
}
pd.DataFrame({kind: found.verdicts.verdict for kind, found in judged.items()})

# %% [markdown]
# And what the protocol makes of them together, with the readings that decided, and the failure patterns that hold.

# %%
for kind, found in judged.items():
    print(f"{kind}: {found.change.verdict}, by {found.change.decided_by}; patterns: {', '.join(found.shown) or 'none'}")

# %% [markdown]
# How many canaries carry the change? The share of the total absolute change on the secret that the three most changed
# canaries hold: near 0.15 if all 20 share it alike, near 1 if three do.

# %%
secret = nll[(nll["stack"] == "stacked") & (nll.span == "hex")]
change = (secret.nll - secret.nll_base).abs().groupby([secret.modality, secret.canary]).sum()
(change.groupby("modality").nlargest(3).groupby(level=0).sum() / change.groupby("modality").sum()).round(2)

# %% [markdown]
# ## Provenance

# %%
for key, value in run.content["provenance"].items():
    print(f"{key}: {value}")
