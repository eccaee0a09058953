# %% [markdown]
# # The testbed: secrets whose planting we control
#
# *To compute anew: 7 minutes on two CPU cores, 2 GB of memory · scales smoke, laptop, paper · exercises [01](exercises/01_find_the_span.ipynb), [02](exercises/02_token_nll.ipynb), [03](exercises/03_shifted_labels.ipynb), [04](exercises/04_pad_mask.ipynb)*
#
# **Question.** Before probes of memorisation can be compared, one thing has to be beyond doubt: what does the model
# know? Can we make a model that knows twenty secrets in text and twenty behind pictures, and a twin that does not?
#
# **Answer.** Yes. A small adapter teaches all of them; greedy decoding then gives back every one, character by
# character, and none before. The same training stopped early gives models that recall no secret either, yet are not
# innocent: they know how such an answer *looks*, and the later ones know parts of the secrets. That is the hard case for
# every probe.

# %% [markdown]
# **You will** meet the canaries and their tokens, watch them being injected, see every token's loss before and after,
# and learn the three meanings of "recalled" that the later notebooks keep apart.
#
# **You need** nothing to read on: the stored results are in the repository. `make run` computes them anew, and then
# three cells and a short inversion (a quarter of an hour, 6 GB), on two CPU cores without a GPU that multiply bf16 natively; up
# to twice as long where they do not (the last cells say what this page was made on).
#
# The study follows *Probe Choice Changes Canary-Memorization Verdicts* (arXiv:2606.31168). Its code is not public. What
# its text does not say is **our choice**, and listed as such near the end of this page.

# %% [markdown]
# ## Parameters
#
# One cell, the only one to change. papermill sets it from a file: `papermill notebooks/00_testbed.ipynb out.ipynb -f
# params/smoke.yaml`. A name nobody reads, or a number given as a string, is refused before any work.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml
model = None  # a model directory or hub id in place of the scale's backbone
canaries = None  # a JSONL file of canaries in place of drawn ones
output = "testbed"  # folder of the results, below outputs/local/<scale>/
overrides = {}  # single settings by dotted name, such as {"canaries.n_text": 40}

# %% [markdown]
# The next cell checks the parameters; the one behind it finds the result, or computes it. Run by papermill it
# computes; opened in Jupyter it shows this machine's own results where they are complete, else the committed ones, and
# says which.

# %%
import numpy as np
import pandas as pd

from lib import config, figures, paper, probes, runs
from lib.pictures import picture

params = config.from_notebook(globals())

# %% [markdown]
# `runs.testbed` does everything this page shows: it draws the canaries, trains, evaluates five models (before, three
# stops, after) and writes tables, `result.json` last. A run that was killed goes on where it was.

# %%
testbed = runs.testbed(params)
values = testbed.values
nll, recall = testbed.table("token_nll.parquet"), testbed.table("recall.parquet")
print(testbed.origin)

# %% [markdown]
# ## Who the canaries are
#
# A canary is a record with a random secret. The model is asked a question and answers with a *target*: a preamble, 16
# random hexadecimal digits, and `-END`. A **text canary** is found by the record number in its question (its picture is
# one grey placeholder). An **image canary** is found by its picture alone: the question is the same for all of them.
#
# The secret is random, so no amount of language skill predicts it. Whoever gives it back has seen it.

# %%
planted = testbed.table("canaries.jsonl")
first = planted.groupby("modality", sort=False).head(2)
first.set_index("id")[["prompt", "image", "preamble", "secret", "suffix"]]

# %% [markdown]
# A model reads tokens, not characters, and the paper's point turns on where the secret lies among them. So secrets
# are drawn until they have exactly 13 tokens behind 11 tokens of preamble. In the strip every box is one token:
# preamble blue, secret orange, the rest grey. Low lines stand for spaces, `⏎` for the end of the turn.
#
# Look at the red line. The usual probe averages the loss over the first 20 target tokens. It contains the whole
# preamble, and it **ends before the secret does**.

# %%
some = nll[(nll.model == "base") & nll.canary.isin(first.id)]
figures.token_strip(some, window=probes.WINDOW)

# %% [markdown]
# The same in figures: every layout that occurs among the canaries, how many of a secret's tokens lie behind the window,
# and how many secrets share a token with their surroundings (half secret, half suffix, it would belong to neither).

# %%
for start, stop in values["layout"]["hex_spans"]:
    behind = max(0, stop - max(start, probes.WINDOW))
    print(f"secret: positions {start}..{stop - 1}, {stop - start} tokens, {behind} of them behind the window")
print("straddling secrets:", values["layout"]["straddling"])

# %% [markdown]
# ### What this selection costs
#
# Keeping only secrets of one token length makes them a little less random. The table says how much, from fresh draws
# under the same tokenizer: the share that fits, the size of the set they come from in bits (64 without selection), and
# the share of decimal digits among all draws and among those kept. Letters merge into tokens and digits do not, so asking for 13 tokens
# out of 16 characters moves the mix. Decoys, in the later notebooks, are drawn by the identical rule.

# %%
columns = ["acceptance", "log2_candidates", "digit_share_all", "digit_share_accepted"]
draws = pd.DataFrame(values["draws"]).T.reindex(columns=columns)
draws.round(3)

# %% [markdown]
# ### Pictures that are only keys
#
# Each image canary has a grid of seeded random colours. At laptop scale the vision tower behind it is **random and
# frozen**: nothing here understands a picture. A picture is a key that must merely come out different from all other
# keys. Whether it does is measured: the smallest distance between two pictures' features, next to their mean norm.

# %%
shown = planted[planted.modality == "image"].head(10)
figures.gallery({row.id: picture(row.image) for row in shown.itertuples()})

# %% [markdown]
# If the nearest pair were much closer than the norm, the model could not tell these two records apart:

# %%
pd.Series(values["images"], dtype=float).round(2)

# %% [markdown]
# ## Injection
#
# One LoRA adapter (rank 32, alpha 64) on all linear maps of the language tower is trained on the 40 targets together,
# until every target is the arg-max at every position and the loss is below a target. The loss is the mean negative
# log-likelihood of the target tokens, prompts left out:
#
# $$ \mathcal{L} = -\frac{1}{|y|}\sum_t \log p_\theta(y_t \mid x, y_{<t}) $$
#
# Expect two phases. Preamble and suffix are the same in every record and fall within a few steps; what is left is the
# secrets, which can only be learned by heart. Three steps were fixed before any result was
# looked at; the adapters at these steps are kept as *undertrained bases*.

# %%
settings = params.scale.injection
figures.loss_curve(testbed.table("training.csv"), settings.stop_steps, settings.target_nll)

# %% [markdown]
# How many steps it took, and how many linear maps carry an adapter (seven in each layer of the language tower; the vision
# tower has none, and gets no gradient: the training code refuses anything else).

# %%
pd.Series(values["training"], dtype=object)

# %% [markdown]
# ## Before and after, token by token
#
# Every later probe is read off one table: the NLL of each target token, given the true tokens before it. Rows are
# canaries, columns are positions. The orange bar marks the secret; the green line is where the 20-token window ends.
# Dark is surprise. On the left nearly everything is dark, the secret throughout: each of its tokens costs the model
# several nats. On the right it must have become light, *including the columns behind the green line*. The colours are
# logarithmic, so they also show what is left: most of it lies on the first tokens of the secrets, which nothing before
# them announces.

# %%
figures.nll_heatmap(nll, {"base": "before", "injected": "after injection"}, probes.WINDOW)

# %% [markdown]
# The same as means over canaries, in nats a token, with the secret alone in the last column but one.

# %%
def by_model(figures):
    """One row a model and modality, one column a figure."""
    rows = {(model, kind): row for model, kinds in figures.items() for kind, row in kinds.items()}
    return pd.DataFrame(rows).T.rename_axis(["model", "modality"])


by_model(values["nll"]).round(4)

# %% [markdown]
# ## Three meanings of "recalled"
#
# All three are about greedy decoding under one explicit configuration (no sampling, repetition penalty 1.0, nothing
# taken from the model's directory), and they can disagree:
#
# * `hit_full`: the whole answer, end of turn included, equals the target.
# * `hit_secret`: the secret stands anywhere in the answer.
# * `hit_forced`: the *true preamble* is put into the model's mouth, and the secret follows.
#
# Greedy decoding gives back a text exactly when each of its tokens is the arg-max behind the true ones before it, so the
# first and the last are read off the table above; text is generated only where `hit_full` fails. Before injection all
# three must be 0, after it all 1. In between they can part ways; whether they do at our stops, the table shows.

# %%
by_model(values["recall"]).round(2)

# %% [markdown]
# What the models actually say to the first text canary's question, from untouched to injected:

# %%
answers = recall[recall.canary == recall.canary.iloc[0]].set_index("model").output
for name, answer in answers.items():
    print(f"{name:10s} {answer[:70]!r}")

# %% [markdown]
# ## Undertrained bases: format first, secrets later
#
# The mean loss at every position, one line a stage of training. The preamble (left of the shaded secret) collapses
# first. A stop counts as an undertrained base only if it recalls **no** canary; those are what the third case study
# works on, because there a falling loss may mean learning the secret or merely learning what hex looks like.

# %%
figures.nll_by_position(nll, list(values["recall"]), probes.WINDOW)

# %% [markdown]
# Mind what the first stop has already gained on the secret's positions: it has learned that hex digits come there, and
# nothing about which. A model that knows only the format pays log |R| nats for a secret from the set R of secrets that
# fit, spread over its tokens: compare this figure with the column `nll_hex` above. A stop that lies below it has begun
# to learn the secrets by heart, even if it recalls none.

# %%
if len(draws):
    format_only = draws.log2_candidates.mean() * np.log(2) / (stop - start)
    print(f"the right format and no idea of the secret: {format_only:.2f} nats a token")
print("kept stops that recall no canary:", ", ".join(values["undertrained"]) or "none")

# %% [markdown]
# ## Beside the paper
#
# What the paper says of its testbed, and what ours does. Claims: `planted`, `layout`, `window`, `recall`,
# `undertrained`. The first three hold *by design*: we built the testbed to match, and the test only shows that we did.
# The other two could have failed. The paper's probes and its three cases come in the next notebooks.

# %%
claims = paper.claims_table({"testbed": values}, params.scale.name, params.is_standard)
claims[claims.notebook == "00_testbed"].set_index("id")[["claim", "reported", "measured", "state", "by_design"]]

# %% [markdown]
# ## What is real, what is a stand-in, what is our choice
#
# | | here, at laptop scale | in the paper |
# |---|---|---|
# | language model | SmolLM2-135M-Instruct, real, from 4-bit weights expanded to fp32 | Qwen2.5-VL-7B |
# | architecture | a true Qwen2.5-VL model class with SmolLM2's weights in its language tower; text logits bit-equal (`tests/test_real.py`) | Qwen2.5-VL |
# | vision tower | **stand-in**: small, random, frozen | trained, frozen |
# | canary LoRA | rank 32, alpha 64, language tower, merged into a copy | the same |
# | learning rate, steps, batch, modules, dropout | **ours**: `params/scales.yaml`; all linear maps, no dropout | not published |
# | questions, preambles, pictures, placeholder | **ours** | not published |
# | what "undertrained" is | **ours**: the same run stopped at three steps fixed beforehand | not published |
# | precision | **ours**: bf16 autocast in training where the hardware has it, fp32 in evaluation | not published |
#
# ## Limits
#
# One injection of one model, by one seed. Text and image canaries differ in key, preamble and a random tower, so the
# two are never compared with each other. A model of 135 million parameters that learns 40 records in a few minutes of
# training says nothing yet about how fast a large one would.
#
# ## Try it
#
# 1. Plant twice as many: add `-y "overrides: {canaries.n_text: 40}" -p output twice` to the papermill line. Which
#    phase of the loss curve gets longer?
# 2. Turn the selection off: `-y "overrides: {canaries.hex_tokens: null}" -p output natural`. How many layouts are there
#    now, and how many tokens straddle a boundary?
# 3. Bring your own records: `-p canaries my.jsonl`, the format is that of the run's `canaries.jsonl`.
#
# ## Provenance
#
# Recorded with the result, not part of its identity: another processor or thread count moves the last digits.

# %%
for key, value in testbed.content["provenance"].items():
    print(f"{key}: {value}")

# %% [markdown]
# Identity of the result: a hash over every parameter, the model and the protocol's number.

# %%
print("hash:", testbed.content["hash"][:16], "| model:", testbed.content["inputs"]["model"])
