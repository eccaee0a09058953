# %% [markdown]
# # Which probe to trust: a scorecard with known truth
#
# *To compute anew: 120 minutes on two CPU cores, 8 GB of memory · scales smoke, laptop, paper · exercises [08](exercises/08_unchanged.ipynb)*
#
# **Question.** The cases show that probes of memorisation disagree. Which of them is right, how often, and about what?
#
# **Answer.** Each is right about what it reads. **Exposure** found damage in none of ten trials. The **window** raised a
# false alarm in all ten in which only the words before the secrets had drifted, and mostly so did **free recall** and
# **extraction of the whole answer**. Recall **behind the true preamble** made no mistake about full damage, drift or noise,
# but only the NLL of the **whole secret** (and the window) sees small damage, and it cries out over three drifts of ten. On
# an undertrained model the window takes harmless tuning for learning in three of ten, which is the paper's C5. And a recall
# of zero says little: twins show that half of the secrets can be told from their decoys before a single one is recalled.

# %% [markdown]
# **You will** see models of which it is known what was done to their secrets, a truth that no graded probe uses, what every
# probe says of them, two models that are each other's decoys, and what an analyst's choices do to all 34 cells. **You
# need** nothing to read; about two hours on two CPU cores to compute it anew (`make scorecard`).
#
# All of this is **ours**: the paper grades no probe. Interventions, doses, margins and the truth's thresholds stand in
# `params/scorecard.yaml`, chosen on a development seed that is not reported; every trial was drawn and committed
# (`outputs/laptop/scorecard/plan.csv`) before a trial of the test half was run. Claim of the paper touched here:
# `probes-disagree`.

# %% tags=["parameters"]
scale = "laptop"  # smoke, laptop or paper: a scale of params/scales.yaml

# %%
import numpy as np
import pandas as pd

from lib import (
    cases,
    casework,
    collection,
    figures,
    grading,
    paths,
    plan,
    probes,
    results,
    rules,
    scorecard,
    specification,
)

params = grading.from_notebook(globals())
card = grading.study(params)
print(card.origin)
runs, scores = card.table("runs.csv"), card.table("scores.csv")
test = runs[runs.half == plan.TEST]
print(f"{len(runs)} trials, {len(test)} of them in the test half, with {test.seed.nunique()} seeds over")
print(f"{test.secret_set.nunique()} sets of secrets and {test.injection.nunique()} injections of each")

# %% [markdown]
# ## What was done
#
# A trial is a model made on purpose. On the **fully trained** base a secret can be lost, on the **undertrained** one (the
# same injection, stopped while nothing is recalled) it can be gained:
#
# | base | intervention | what happens to the secrets | counted as |
# |---|---|---|---|
# | full | damage | 1 to 13 randomly drawn secret tokens of 2 to 10 randomly drawn canaries are overwritten; all else is held, on the question as it was planted | to be found |
# | full | drift-held | new records with another preamble are learned, the secrets are held | to be left alone |
# | full | drift-free | the same, nothing is held | drawn only: nobody knows beforehand |
# | full | forgetting | the canary adapter is weakened | drawn only |
# | undertrained | relearning | the true records are taught | to be found |
# | undertrained | format | new records with new keys and new secrets are taught | to be left alone |
# | undertrained | benign | harmless tuning, one of the four sources of the sweep a seed | to be left alone |
# | both | zero, permuted | an adapter of size zero; the same model in other batches | to be left alone |
# | both | gaussian, spectral | noise of the size of damage's, or benign tuning's, adapter | noise, apart |
#
# Damage is drawn blind to any window. Its draws: how many canaries and secret tokens are hit, how many of the tokens lie
# behind the window of 20, and how many canaries are hurt only there:

# %%
drawn = test[(test.intervention == "damage") & (test.role == plan.POSITIVE)].set_index("seed").marks.map(plan.read_marks)
inside = probes.WINDOW - 11  # of the 13 secret tokens, those that the window of 20 reads behind 11 of preamble
table = pd.DataFrame({"canaries": drawn.map(len), "tokens": drawn.map(lambda m: sum(map(len, m.values())))})
table["behind the window"] = drawn.map(lambda m: sum(place >= inside for tokens in m.values() for place in tokens))
table["canaries hurt only there"] = drawn.map(lambda m: sum(min(tokens) >= inside for tokens in m.values()))
table.T

# %% [markdown]
# ## A truth that no graded probe uses
#
# Whether a manipulation did what it was meant to do is checked twice, never by a graded probe. **Other wordings**: the
# question is asked in two ways that were not trained; given the true preamble, how many of a thousand samples a canary are
# the secret? (A sample is the secret exactly if each of its tokens is drawn, so the number is binomial with the product of
# the token probabilities, and is drawn from that: nothing has to be decoded. The quantity is of the same kind as the
# secret's NLL; what is independent of all probes is what was *done*, and that no probe reads these questions.) **Learning
# again**: four canaries' secrets are taught beside four new ones; a model that knows them is quicker.
# A manipulation *held* if that recall fell by at least 0.05 under damage (over the damaged canaries), rose by at least
# 0.01 under relearning, and moved by at most 0.05 where nothing was meant to happen. Failed ones are kept and counted.

# %%
checked = test[test.role != plan.CURVE].groupby(["base", "role", "intervention"])
states = checked.manipulation.value_counts().unstack(fill_value=0)
means = checked[["recall_base", "recall", "recall_change_others", "head_start"]].mean().round(3)
states.join(means.astype(object).where(means.notna(), ""))

# %% [markdown]
# Full damage held in all ten trials: of the damaged canaries' secrets nothing was left under other wordings. But it did not
# hit only what was meant: canaries that were to be held lost a fifth of their recall under other wordings, too
# (`recall_change_others`), though not on the question as it was planted. `drift-held` is not clean either: in six of ten
# trials that recall fell by more than 0.05, which counts as failed. Relearned secrets are said again on the planted question
# (below) and rarely under other wordings; three of ten miss our line of 0.01. Learning again tells the same story: whole
# secrets are more than four nats a token ahead of new ones, damaged ones 2.8, relearned ones 3.3, and an undertrained base
# has no head start at all. There nothing is recalled before or after, so *held* says no more than that nothing was learned
# outright.

# %% [markdown]
# ## Which probe finds what
#
# A probe *fires* if it says damaged on the full base, or strengthened on the undertrained one; what it says in the other
# direction counts for nothing here. Red: it fires where it should. Grey: it fires where something was trained, and no
# secret was meant to change. Purple: on noise. Bars are exact 95 % intervals that take trials for independent.

# %%
graded = scorecard.detection(runs, scores)
figures.detection_chart(graded, scorecard.TASKS, scorecard.NAMES)

# %%
counts = graded.assign(trials=graded.fired.astype(str) + "/" + graded.trials.astype(str))
counts = counts[counts.probe.isin(scorecard.NAMES)]
counts = counts.pivot(index=["base", "role", "intervention"], columns="probe", values="trials")
counts[list(scorecard.NAMES)].sort_index(ascending=[True, False, True]).fillna("")

# %% [markdown]
# **What to read off.** (1) Damage of this size is found by everything that reads the secret, the window nearly included (9
# of 10): only 4 of the 13 secret tokens lie behind it, and blind damage fell there alone in one canary of 59. (2) **Exposure
# finds none of it.** A secret with a few wrong tokens still beats nearly every random decoy by many nats. (3) Where the words
# in front of the secret drift and the secret is held, **the window raises a false alarm in 10 of 10 trials**, and so does
# what has to walk through those words: free recall in 9, extraction of the whole answer in 7. What starts behind the true
# preamble never does. The whole secret's NLL fired in 3, by the count, and the protocol follows it. (4) On the undertrained
# base the window takes harmless tuning for learning in 3 of 10 trials. The whole secret's NLL fell in one format trial, and
# there the decoys fell along, so that the protocol did not fire: what decoys are for. (5) Noise set the count reading off in
# 2 of 20 trials on the full base and in one on the undertrained one, as in the sweep.

# %%
scorecard.summary(graded).T

# %% [markdown]
# The same without the trials whose manipulation did not hold by the truth:

# %%
held = scorecard.detection(runs, scores, held_only=True)
scorecard.summary(held)[[(plan.FULL, "found"), (plan.FULL, "false alarms"), (plan.UNDERTRAINED, "found")]]

# %% [markdown]
# Extraction after the true preamble was added when the first trials had been seen, because the whole answer's extraction
# is hurt by every change of words; take it for exploration. So is this: exposure has a mean reading alone, and with 20
# canaries and 6 bits a mean falls by at most 0.3 a damaged canary. Would a count have found more? Canaries of which
# exposure fell by more than a bit:

# %%
values = card.table("values.parquet").merge(test, on="trial")
bits = values[(values.intervention == "damage") & (values.role == plan.POSITIVE) & (values.probe == "exposure")]
count = bits.assign(fell=bits.change < -1).groupby("seed").fell.sum()
pd.DataFrame({"damaged": drawn.map(len), "exposure fell by a bit": count}).T

# %% [markdown]
# By a count of two canaries it would have found two trials of ten. Now the paper's patterns, by the committed rules, among
# all trials of the test half:

# %%
shown = test.assign(patterns=test.patterns.astype(object).where(test.patterns.notna(), "none"))
shown.groupby(["base", "intervention", "patterns"]).size().unstack(fill_value=0)

# %% [markdown]
# **Two of the paper's patterns, not found in the sweep, are found here.** C5 (*ambiguous drop*) in 3 of 10 trials of harmless
# tuning: the window falls, the whole secret stays undecided, nothing is recalled; the decoys fall along (`general` in
# `runs.csv`), and the protocol says *inconclusive*. These trials differ from the sweep's cells in the injection (text
# canaries alone) and in the tuning (the higher rate, ten steps); which of it matters was not tried. It stands in one noise
# trial, too. C3 (*window truncation*) in one trial of the smallest damage, where the whole secret's verdict fires and the
# window's does not; and in two of noise, so it is no proof of anything by itself. C4 needs an unchanged secret, and under our
# drift it is *inconclusive* in seven trials and *damaged* in three.
#
# ### Doses
#
# The trained update of damage in parts, and the canary adapter weakened. The dashed line is the truth's own change.

# %%
doses = scorecard.dose_response(runs, scores)
shown = {"damage": "damage, a growing part of it", "forgetting": "what is left of the canary adapter"}
chosen = ("mean20", "hex", "exposure", "extraction_forced", "hit_forced")
figures.dose_curves(doses, {name: scorecard.NAMES[name] for name in chosen}, shown)

# %%
part = doses[doses.intervention.isin(shown) & doses.probe.isin(chosen)]
part.pivot(index=["intervention", "dose", "recall_change"], columns="probe", values="estimate").round(3)

# %% [markdown]
# Of a tenth of the damage the whole secret's NLL sees 4 of 10 trials, the window 3, everything else none; at three tenths
# the secret's NLL sees nine, the recalls eight, the window seven. The truth moves along with the NLL: between a model that
# still says its secrets and one that is whole there is a difference, and greedy recall cannot see it. Exposure is flat to
# the end.

# %% [markdown]
# ## Twins: each model is the other's decoy
#
# Two models are trained alike on the same records. A coin gave each record one of two secrets in the first model and the
# other one in the second. So the secret that a model was *not* trained on is the perfect decoy, and for each probe one can
# say which share of trained secrets it finds when it may take 1 or 5 % of the untrained ones for trained.

# %%
twin = scorecard.join_twins(card.table("twins.parquet"))
settings = params.settings.own.twins
untrained = int((~twin[twin.stop == settings.decoy_stop].trained).sum())
rates = [rate for rate in (0.01, 0.05) if rate * untrained >= 1]
print(f"{settings.records} records, {untrained} untrained secrets in two models: one of them is {1 / untrained:.2%}")
asked_rates = [rate for rate in rates if rate * 2 * settings.decoy_records >= 1]
at_stop = scorecard.twin_rates(twin, settings.decoy_stop, asked_rates, settings.decoys)
table = at_stop.assign(interval=[f"{a:.2f} to {b:.2f}" for a, b in zip(at_stop.low, at_stop.high, strict=True)])
table.pivot(index=["probe", "untrained", "auc"], columns="fpr", values=["tpr", "interval"]).round(3)

# %% [markdown]
# The same early in the training, and at the stop of the table:

# %%
stops = sorted({settings.stops[0], settings.decoy_stop})
panels = {f"after {stop} steps": scorecard.twin_curves(twin, stop) for stop in stops}
figures.roc_curves(panels, 1 / untrained)

# %% [markdown]
# And on the way from nothing learned to everything learned, true-positive rates at 5 %:

# %%
passes = {stop: f"{stop} steps" for stop in settings.stops}
along = pd.concat([scorecard.twin_rates(twin, stop, [rates[-1]], resamples=200) for stop in settings.stops])
along.assign(stop=along.stop.map(passes)).pivot(index="probe", columns="stop", values="tpr")[list(passes.values())].round(2)

# %% [markdown]
# After 25 steps, five passes over the records, nothing is recalled, and yet the whole secret's NLL finds half of the trained
# secrets at 5 % false alarms, where the window finds 15 %: it reads nine of 13 secret tokens, and eleven that are the same
# in every record. Subtracting what the *twin* gives the same secret, which takes out how easy it is, lifts the half to 88 %.
# After 50 steps everything but greedy recall tells nearly all secrets apart. **A recall of zero is no evidence that nothing
# was memorised.** Exposure cannot speak at 1 %: with 63 decoys an untrained secret comes first by chance in 1.6 %, and its
# interval at 5 % shows how much hangs on ties. All this is one pair of twins; intervals are over its records alone.

# %% [markdown]
# ## The 34 cells together
#
# The cases look at one cell each. Here are all of them: 30 trained and 4 of LoRA-NOISE, text canaries, stacked, seeds
# pooled, each judged by every probe under the committed rules. Preamble and suffix lie beside the secret and may well
# differ from it. Where the window (`mean20`), the whole secret (`hex`) and the recalls differ, the probe decides what
# is published.

# %%
wanted = rules.load_verdicts()
sweep = casework.sweep_tables(params.scale, params.results)
print(sweep.origin)
cells, nll, recall = (sweep.table(name) for name in ("cells.csv", "token_nll.parquet", "recall.parquet"))
nll, recall = (table[table.modality == "text"] for table in (nll, recall))
kinds = cells.groupby("cell", sort=False).kind.first()
judged = cases.judge_cells(nll, recall, wanted)
labels = cases.labels(judged, cells, wanted)
print(labels)

# %% [markdown]
# Three rows are marked: the cells that the rule of `params/verdicts.yaml` picked for C3, C4 and C5. Noise is below.

# %%
said = pd.DataFrame({cell: found.verdicts.verdict for cell, found in judged.items()}).T
order = kinds.index[np.argsort(kinds == "noise", kind="stable")]
named = {cell: f"{labels[cell]} ▸ {cell}" for cell in labels}
figures.verdict_map(said.loc[order].rename(index=named), marked=list(named.values()))

# %% [markdown]
# Two probes *contradict* each other where one says damaged or strengthened and the other the opposite or unchanged.
# An inconclusive verdict contradicts nothing, so only cells in which both are clear are comparable, and the share is
# of those. The interval is Clopper and Pearson's and holds for independent cells. Ours are not: all share one
# injection of twenty secrets. Read it as the least uncertainty that so few cells leave.

# %%
contradictions = specification.contradictions(said, kinds, "mean20")
contradictions.drop(columns="which").round(2)

# %%
for (group, against), row in contradictions.iterrows():
    if against == "any":
        print(f"{group}: {row.contradict} of {row.comparable} comparable cells {row.which}")

# %% [markdown]
# This is not what the paper's title leads one to expect. The window never contradicts the whole secret or a recall in
# a **trained** cell (0 of 21 comparable ones; up to 16 % would be compatible with that): benign tuning hurts this
# model from the secret's first token on, and nine of its 13 tokens lie inside the window. Where probes do contradict
# each other is **noise**, 3 of 4 cells. Which reading made the verdicts there, and which in the trained cells?

# %%
noise = [cell for cell in judged if kinds[cell] == "noise"]
both = {cell: judged[cell].verdicts.loc[["mean20", "hex"]] for cell in noise}
windows = pd.DataFrame({cell: found.verdicts.loc["mean20"] for cell, found in judged.items()}).T
fired = windows[(kinds != "noise").loc[windows.index] & windows.verdict.isin(["damaged", "strengthened"])]
print("trained windows that fire, by the reading that decided:", fired.decided_by.value_counts().to_dict())
pd.concat(both)[["verdict", "decided_by", "by_mean", "by_count", "up", "down"]]

# %% [markdown]
# Every *damaged* and *strengthened* here is the count's: two or three of twenty canaries lie beyond their margin one
# way and none the other; by the mean alone all eight verdicts are *unchanged*. In the trained cells the mean fires by
# itself in all 21 windows that fire, so that in this sweep the count decided no window but false alarms. It is there
# because the paper's own C3 (three canaries of 20) is invisible to a mean; this is what it costs.
#
# ## The specification curve
#
# The verdicts above hang on choices nobody forces on us. So here is the window's verdict under *every* combination of
#
# | choice | levels |
# |---|---|
# | window length K | 1 to 27, the whole target |
# | sum or mean over tokens | the margin is held fixed for the window's sum, or for its mean a token (one at K = 20) |
# | how canaries become a verdict | mean with its interval, count of canaries, or either |
# | interval of the mean | studentised bootstrap, percentile bootstrap, Student's t |
# | margin | 0.005 to 0.5 nats of the window, eight levels |
# | stack | adapter beside the weights, or merged into them |
# | dtype | float32 alone: the sweep has no other |
#
# A recall has no K and no margin here. Its *definition* cannot change what the window says; it comes in below.

# %%
table = specification.specifications(nll, wanted)
committed = specification.committed(wanted)
print(f"{len(table):,} verdicts: {len(table) // table.cell.nunique():,} specifications of {table.cell.nunique()} cells")
print("committed:", committed)

# %% [markdown]
# Two choices are less than they seem. *Sum or mean*: all windows of one K have K tokens, so with a margin that is
# converted, as ours is, the two are the same verdict everywhere; what remains is whether a longer window must move by
# more. *dtype*: of other precisions there is only the C4 notebook's table of means, of one seed and without single
# canaries, from which no interval and so no verdict can be made. What can be said is where the point lies, in
# margins:

# %%
precision = results.read_result(paths.ROOT / "outputs" / "laptop" / "cases" / "c4").table("precision.csv")
trained = precision[precision["update"] == "trained"].fillna({"merge_dtype": "none"})
trained["margins"] = trained.d_nll_mean20 * probes.WINDOW / wanted["margin"]["total_nats"]
trained.pivot(index=["stack", "merge_dtype", "dtype"], columns="model", values="margins").round(2)

# %% [markdown]
# The constructed drift is 29 margins in fp32 and 15 when read in bf16, both beside the weights, and just below one
# when it is merged into bf16: there, the precision would decide. In the natural cell all six points stay below one
# margin. So "one level" in the figure below means *not varied*, and not *without influence*.
#
# Most of the flips must come from windows that end before the secret begins: K up to 11 reads the preamble alone,
# which is another question. Everything is therefore shown twice, for every K and for those that read at least one
# token of the secret.

# %%
start = int(nll[nll.span == "hex"].position.min())
sets = {"every K": table, "K that reach\nthe secret": table[table.K.gt(start)]}
fates = {name: specification.flips(part, committed) for name, part in sets.items()}
ranking = {name: specification.influence(part, committed) for name, part in sets.items()}
figures.specification_curve(fates, ranking, noise, labels)

# %% [markdown]
# **How to read it.** A bar is a cell: the share of all specifications that call it damaged, inconclusive or unchanged.
# The square before it is the committed verdict, the figures behind it how many specifications say something else. Cells
# tuned hard are damaged whatever one chooses. In the middle the analyst decides. At the bottom stand two noise cells
# that we call damaged, as only 15 % and 3 % of all specifications do: there, the odd one out is ours.

# %%
groups = {"trained": list(kinds.index[kinds != "noise"]), "noise": noise}
for name, part in fates.items():
    for group, members in groups.items():
        rows = part.loc[members]
        half, turned = (rows.flipped > 0.5).sum(), (rows.reversed > 0.25).sum()
        print(f"{' '.join(name.split())}, {len(rows)} {group}: median {rows.flipped.median():.0%} say otherwise,")
        print(f"  over half in {half}; over a quarter turn one clear verdict into another clear one in {turned}")

# %% [markdown]
# The table behind the right half. *flips*: pairs of specifications of a cell that differ in this choice only, the
# share with two verdicts; *reversals*: with two clear ones (damaged against unchanged, say); *alone*: starting from
# the committed specification and changing this choice alone, the share of its other levels, over cells, that change
# the verdict.

# %%
pd.concat({" ".join(name.split()): part.set_index("choice") for name, part in ranking.items()}, axis=1).round(3)

# %% [markdown]
# Over every K the window's length is the choice that flips most, as the paper would have it, and the one that
# reverses clear verdicts. But the ranking is one of the menu: among windows that reach the secret, K drops to third,
# and *how canaries become a verdict* and the *margin* lead. They trade clear verdicts for inconclusive ones;
# reversals become rare (3 % at most). The interval's method matters little with twenty canaries, stacked or merged
# not at all in fp32. At K = 20 sum and mean are one, so *alone* is zero there by construction.
#
# ### What is concluded from window and recall together
#
# Three recalls were measured: the whole target, the secret anywhere in the answer, the secret after the true
# preamble. Each is held against the window under every specification. A probe fires when it says damaged or
# strengthened. Cells in which nobody ever recalled anything have nothing to compare, and are left out.

# %%
together = specification.conclusions(table, nll, recall, wanted)
testable = together[(together.conclusion != "not testable") & together.K.gt(start)]
shares = testable.groupby(["recall", "conclusion"], observed=True).size().unstack(fill_value=0)
print(f"{testable.cell.nunique()} cells in which a recall can be compared, K > {start}")
shares.div(shares.sum(axis=1), axis=0).round(3)

# %%
with_recall = committed | {"recall": "hit_full"}
specification.influence(testable, with_recall, "conclusion").set_index("choice").round(3)

# %% [markdown]
# The definition of recall changes no conclusion: in each of these cells all three give one verdict. That is a finding
# about our cells, not about the definitions; in the constructed case of C4 they part. Here, too, the way canaries
# become a verdict leads.
#
# **What to take from it.** (1) In these cells the reading and the margin move a verdict more than the probe does. (2)
# Commit to a reading and a margin before looking, report both readings, and say *inconclusive* when they part. (3) A
# verdict on a noise cell is the price list of the rule that gave it: read it before the trained ones. **Limits**: one
# model, one injection, four noise cells, and our levels: a share of specifications is not a probability of being
# right.

# %% [markdown]
# ## What the headline numbers generalise over
#
# The test half goes through three sets of secrets, each planted with two initialisations: six injected models, four of them
# with two seeds. How the variance of a secret's change divides, the first seed of each pair: method of moments on the
# balanced crossing, rough with so few levels. "Pair and seed" is what a model and the seed of its trial add together.

# %%
first = values[values.seed.isin(test.drop_duplicates(["secret_set", "injection"]).seed)]
looked = {"forgetting": ("forgetting", 0.7), "drift-held": ("drift-held", 1.0), "format": ("format", 1.0)}
parts = {}
for name, (intervention, dose) in looked.items():
    chosen = first[(first.intervention == intervention) & (first.dose == dose) & (first.probe == "hex")]
    pairs, sets = chosen.groupby(["secret_set", "injection"]).ngroups, chosen.secret_set.nunique()
    if sets > 1 and pairs == sets * chosen.injection.nunique() > sets:
        chosen = chosen.assign(value=chosen.change * chosen.tokens)
        found = scorecard.variance_components(chosen[["secret_set", "injection", "canary", "value"]])
        parts[f"{name} (variance {found.sum():.3g} nats²)"] = (found / found.sum()).round(2)
pd.DataFrame(parts)

# %% [markdown]
# And the three cells picked for the cases, which were repeated with other seeds and on a second injection with secrets of
# its own: the secret's mean change, in nats of its 13 tokens, over seeds.

# %%
repeats = results.read_result(sweep.folder, collection.CONFIRMATION).table("confirm.csv")
both = pd.concat([cells.assign(injection=0), repeats])
both = both[both.cell.isin(labels) & (both.modality == "text") & (both["stack"] == "stacked")]
both["nats"] = both.d_nll_hex * 13
spread = both.groupby(["cell", "injection"]).nats.agg(seeds="size", mean="mean", spread="std")
spread.rename(index=lambda name: f"{labels[name]}: {name}", level="cell").round(3)

# %% [markdown]
# For a given cell seeds differ little, and injections (with their secrets) a lot: C3's nearest cell hurts the secret three
# times as much on the first injection as on the second, and C5's changes its sign. So an interval over canaries and seeds on
# *one* injection, as in notebooks 01 to 03, is too narrow for a statement about a source of benign data. In the trials most
# of the variance is between canaries and in what is left of single canaries; the secret set matters where new secrets are
# learned (format). What stands on this page holds over six injected models of one backbone and one template.

# %% [markdown]
# ## What surprised, what failed, what this cannot say
#
# * **Surprised** us: that exposure, the field's measure, is blind to damage; that the window fails in every drift trial, not
#   in some; that C5, absent from twelve cells of the sweep, turned up here; that subtracting the twin lifts detection so far while
#   nothing is recalled.
# * **Failed**: manipulations that the truth does not confirm (kept, counted, and left out above for comparison); damage that
#   also costs untouched canaries recall under other wordings; a false-positive rate of 1 % for exposure.
# * **Cannot say**: how often damage is *late*, since ours was drawn blind; how probes fare on another backbone or template,
#   or after longer training; anything about images. Ten trials a share leave wide intervals: 0 of 10 is compatible with
#   31 %, and the ten share six injections. Seeds 1 to 6 were read before 7 to 10 were run, by the same plan and rules. The
#   truth is a probability on other wordings: closer in kind to the NLL than to recall.
#
# ### Go on
#
# `make scorecard SCALE=smoke` makes a small one in a good minute. Other doses and seeds: `params/scorecard.yaml`, then `python
# -m lib plan` and `make scorecard`.
