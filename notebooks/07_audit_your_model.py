# %% [markdown]
# # Audit your own model
#
# *To compute anew: 6 minutes on two CPU cores, 3 GB of memory · scales smoke, laptop, paper (the worked example has the first two) · exercises at the end of this page*
#
# **Question.** You have a model that somebody fine-tuned, and a file of canaries. What did it memorise, and can you defend
# the answer?
#
# **Answer.** This page asks the protocol of the other notebooks of any causal language model: the level (what it knows) and the
# change (what the tuning did), each with the reading that decided, the probes that disagree, and what the numbers do not
# prove. It is one command, and its report is one file. Opened as it is, it shows a worked example.

# %% [markdown]
# **You will** read an audit from its verdicts down to single tokens, see how many decoys a statement about *one* canary takes,
# and what merging an adapter does to it. **You need** nothing to read. To audit a model of 135 million parameters with 40
# canaries and 255 decoys each, count minutes on two CPU cores; a GPU is used where there is one.
#
# **The example.** Ten canaries, `Record 003. What is its code?` answered by `Its code is` and 16 random hex digits, stand 60
# times each among 40 refusals in a training file. A plain script of `transformers` and `peft`
# (`examples/train_lora.py`, which knows nothing of this package) trains a LoRA on SmolLM2 for one
# epoch. The audit gets the model, the adapter, and the file of canaries.

# %% tags=["parameters"]
scale = "laptop"  # smoke or laptop: where results go, and the size of the worked example
model = None  # a built-in name, a directory or a hub id; None: the worked example
adapter = None  # None, a folder that peft wrote, or a list of folders, audited one by one
baseline = None  # a model, or an adapter on the model; None: the model without its adapter
canaries = None  # a .jsonl or .csv file: id, prompt, and target or prefix, secret, suffix
n_decoys = 63  # 31: quick, exposure ends at 5 bits; 255: 8 bits
decoys = "characters"  # or words, a .txt or .jsonl file, or module:function
hits = [1, 4, 16]  # samples, for the chance of at least one hit
windows = [20]  # tokens that the window probe reads
template = "auto"  # chat, plain, or auto: chat where the tokenizer has a template
seed = 0  # of the decoys
output = "audit"  # a name in outputs/local/<scale>, or a path

# %%
import pandas as pd
from IPython.display import display

from lib import figures
from lib.audit import report, settings, study

params = settings.from_notebook(globals())
found = study.find(params)
audited, rows = found.values["models"], pd.DataFrame(found.values["canaries"])
print(found.origin)
print(*study.told(found), sep="\n")

# %% [markdown]
# ## The verdicts, and what they rest on
#
# Two questions, two decision tables (`params/verdicts.yaml`). **Level**: do greedy answers hold the secrets, do the secrets
# rank before decoys of their own format, is their NLL below the baseline's? **Change**: which probe moved against the
# baseline, and did decoys move along? A model that merely learned *what codes look like* moves every decoy with the secret: it
# is called "format, not secret". Behind each model's name stand the numbers, and behind them what they leave open.

# %%
for name, summary in audited.items():
    print(f"{name}\n", *(f"  - {line}\n" for line in report.numbers(summary)))
    print("  not proved:\n", *(f"  - {line}\n" for line in report.limits(summary, rows[rows.model == name])))

# %% [markdown]
# *In the worked example* all ten secrets are said, and each comes before all its decoys: $64^{-10}$ by accident. Exposure is at
# its cap, so it cannot tell these canaries apart, nor this model from one that knows them better. And although the group
# is beyond doubt, rank alone could name none of the ten.
#
# Read the last lines of what is not proved. With $m$ canaries and $n$ decoys each, a secret nobody planted comes first among its decoys with
# chance $1/(n+1)$, and one of $m$ does by accident; so naming **one** canary by its rank takes $n + 1 \ge m/0.05$ (Holm: 5 %
# over all canaries). The **group** needs far less, although its level is stricter: its mean normalised rank is 0.5 for
# secrets nobody planted, and *low* where chance alone gives as little in at most 2.5 % of cases. This is a p-value only where
# the file states how the secrets were drawn (`generator`), because only then are a secret and its decoys alike before
# training. For secrets of unknown origin a rank decides nothing: how the *change* of the secret ranks among its decoys' is
# only shown.
#
# ## Probe by probe
#
# Changes against the baseline, in nats a token. The margin is 0.04 nats of the whole span, so that a long span and a short one
# are judged alike. What to look for: a window that says something else than the whole secret.

# %%
for name, summary in audited.items():
    print(name, summary["disagreements"] or "no probe contradicts another, no known failure pattern holds")
    display(report.probe_table(summary, params.windows))

# %% [markdown]
# The same in margins, and where every secret stands among its decoys, on the audited model (above) and on the baseline.

# %%
for name, summary in audited.items():
    for caption, figure in report.drawings(summary, rows[rows.model == name], params.windows).items():
        print(f"{name}. {caption}")
        display(figure)

# %% [markdown]
# Where the lower strip (the baseline) is far from 0.5, decoys are *unlike* the secrets, and the upper strip says nothing by
# itself. Words against random letters do that: use `decoys = "words"`, or a list of your own.
#
# ## Token by token
#
# The change of the NLL of every canary at every position of its target; up to forty canaries. Blue is better known than by the
# baseline; the line is where the window ends, the bar above marks where secrets lie.

# %%
tokens = found.table(study.TOKENS)
for name, part in tokens.groupby("model", sort=False):
    if "nll_base" in part:
        shown = part[part.canary.isin(part.canary.unique()[:40])].assign(modality=name)
        display(figures.delta_strip(shown, params.windows[0], "modality"))

# %% [markdown]
# ## Merged or stacked
#
# An adapter is shipped beside the weights or merged into them. In fp32 both are the same model up to rounding. Merged into
# *bf16* weights, an update smaller than half a step of its weight is lost: how much of it, and whether a recall hangs on
# it. Canaries alone; nats of the whole secret.

# %%
merged = {
    (name, report.MERGED[kind]): values for name, summary in audited.items() for kind, values in summary["merged"].items()
}
pd.DataFrame.from_dict(merged, orient="index").round(4) if merged else print("no adapter, nothing to merge")

# %% [markdown]
# *In the worked example* merging into bf16 loses an eighth of the update (`lost`), and yet no recall hangs on it: an update
# that says ten secrets is large. Notebook 02 shows one that is small enough to vanish.

# %% [markdown]
# ## Canary by canary
#
# The ten best known; all of them with every number are in `canaries.csv`, and `report.html` shows their tokens.

# %%
columns = [name for name in report.COLUMNS if name in rows and rows[name].notna().any()]
best = rows.sort_values(["nll_secret", "canary"])[columns].head(10)
best.rename(columns=report.COLUMNS).round(4).set_index("canary")

# %% [markdown]
# Nothing is dropped silently: a row that could not be audited is listed with its line and the reason.

# %%
print(f"{len(found.values['skipped'])} of {found.values['rows']} rows of the file were not audited")
pd.DataFrame(found.values["skipped"]).head(20) if found.values["skipped"] else None

# %% [markdown]
# ## Your own
#
# Plant: `make canaries N=40 FORMAT=hex:16` writes `canaries.jsonl` (keep it) and `train.jsonl` (mix it in). Prove that they
# arrive, from the training set as it is tokenised: `python -m lib check-canaries canaries.jsonl tokenised.jsonl --model ...`
# says which canary is masked, truncated, split or absent, and whether a decoy got in. Then:
#
# ```sh
# papermill notebooks/07_audit_your_model.ipynb out.ipynb -p model <directory> -p adapter <folder> -p canaries canaries.jsonl \
#     -p n_decoys 255 -p output my-audit
# ```
#
# or `python -m lib audit --model ... --adapter ... --canaries ...` for the report alone. Stopped or killed, it goes on where it
# was; scores are kept in `<output>-parts`, and other windows and hits need no new ones.
#
# ### Exercises
#
# 1. *(easy, 2 minutes)* Take 31 decoys (`n_decoys = 31`). Which sentence under "not proved" changes, and which verdict?
# 2. *(middle, 15 minutes)* Train the example on 20 repetitions instead of 60 (`lib.audit.example.RECIPES`). Which reading
#    decides the level now?
# 3. *(hard, 20 minutes)* Write a file in which every secret is two English words, state no generator, and audit it with `decoys =
#    "characters"` and with `"words"`. What does the baseline's rank say of either?
#
# ### Limits
#
# One training, one wording of every prompt, teacher forcing and greedy decoding. "No evidence" is not absence: the notebook on
# twins (`04_probe_scorecard`) shows secrets that are known long before any is said. Pictures are accepted for Qwen2.5-VL
# models. Evaluation is in fp32, and an adapter takes three copies of the model for a while.

# %%
made = found.content["provenance"]
print("made with", ", ".join(f"{name} {version}" for name, version in made["versions"].items()))
print(f"{made['cpu']}, threads: {made['threads']}, {made['device']}, {made['evaluation_dtype']}")
print(f"scoring took {made['scoring_seconds']:.0f} s")
print(found.content["inputs"]["parameters"])
