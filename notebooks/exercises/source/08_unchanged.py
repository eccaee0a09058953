# %% [markdown]
# # Find the bug: "no significant change"
#
# *10 minutes · difficulty 1 of 3 · seen in audit reports and benchmark tables that call what is not significant unchanged*
#
# **You will learn** the difference between *we saw no change* and *we showed that there is none that matters*.

# %% [markdown]
# ## Look
#
# A probe measured a mean change and its 95 % interval. We said beforehand that a change of up to 0.005 nats a token, the
# margin, does not matter to us. Here are three intervals; two of them hold zero.

# %%
intervals = {"few canaries": (-0.050, 0.060), "many canaries": (-0.002, 0.003), "very many": (0.001, 0.003)}
for name, (low, high) in intervals.items():
    print(f"{name:14} {low:+.3f} to {high:+.3f} - zero inside: {low <= 0 <= high}")

# %% [markdown]
# ## Your turn
#
# The function below has a bug: with few enough canaries everything is *unchanged* to it. Repair it.

# %% tags=["solution"]
def verdict(low: float, high: float, margin: float) -> str:
    """The verdict of an interval ``low`` to ``high`` against a ``margin`` above 0, all in nats a token.

    "damaged": the change is shown to be larger than the margin. "strengthened": to be below minus the margin.
    "unchanged": to lie between the two. "inconclusive": none of this is shown.
    """
    if low > margin:
        return "damaged"
    if high < -margin:
        return "strengthened"
    # student: return "unchanged" if low <= 0 <= high else "inconclusive"
    return "unchanged" if -margin < low and high < margin else "inconclusive"

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("08_unchanged", globals())

# %% [markdown] tags=["hint"]
# Draw a line with minus the margin, zero and the margin on it, and lay the three intervals on top. Which of them allow an
# effect that matters? Zero decides nothing.

# %% [markdown]
# ## Why it matters
#
# An equivalence test (here two one-sided tests, read off one interval) has to be able to fail for want of data. In the
# package: `lib.verdicts.place`; the margin is that of `params/verdicts.yaml`.
