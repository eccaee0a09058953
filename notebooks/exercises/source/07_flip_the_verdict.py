# %% [markdown]
# # The K that flips a verdict
#
# *15 minutes · difficulty 2 of 3*
#
# **You will learn** what a window of the first $K$ tokens reads, and to say for which $K$ it would have told the opposite.

# %% [markdown]
# ## Look
#
# The table that gives the paper's numbers for its case C3: 20 canaries, three seeds, the secret on positions 11 to 23.
# Which positions moved, in how many canaries? And what does the package's window probe say for every K?

# %%
from lib import paper, rules, verdicts

nll, recall = paper.consistent_tables("c3")
delta = (nll.nll - nll.nll_base).groupby([nll.canary, nll.position]).mean().unstack().to_numpy()
moved = (delta > 0.04).sum(axis=0)
print("canaries that moved by more than 0.04 nats, by position:", {int(t): int(moved[t]) for t in moved.nonzero()[0]})
print(verdicts.along_windows(nll, recall, rules.load_verdicts()).verdict.loc[20:25].to_dict())

# %% [markdown]
# ## Your turn
#
# Write a simpler probe: it fires by *count*. Two canaries or more must have lost more than the margin over the first K
# tokens together, and none may have gained more than the margin; else it is silent. Changes are sums over the window.

# %% tags=["solution"]
import numpy as np


def first_alarm(delta, margin: float):
    """The smallest K whose window fires, or None if no window does.

    ``delta``, an array [canaries, positions], holds the change of every token's NLL in nats, a rise being damage. The window of K
    reads the first K positions. It fires when the sum over them is above ``margin`` for at least two canaries and below
    ``-margin`` for none.
    """
    for k in range(1, delta.shape[1] + 1):
        total = np.asarray(delta)[:, :k].sum(axis=1)
        if (total > margin).sum() >= 2 and not (total < -margin).any():
            return k
    return None

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("07_flip_the_verdict", globals())

# %% [markdown] tags=["hint"]
# Go through K from 1 upwards and stop at the first that fires. `delta[:, :k]` has k columns: the positions 0 to k - 1. A
# change of sign on the way is no reason to go on looking behind the first K that fires.

# %% [markdown]
# ## Why it matters
#
# Nothing about the model changed while you moved K. On the page [The window explorer](../../book/explorer.md) you can
# drag it through every cell of the sweep. In the package: `lib.verdicts.along_windows`.
#
# Read on: [K shorter than the secret](../../book/gotchas/short_window.md).
