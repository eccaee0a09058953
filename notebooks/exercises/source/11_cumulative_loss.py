# %% [markdown]
# # Read a cumulative-loss curve
#
# *10 minutes · difficulty 1 of 3*
#
# **You will learn** to see, without knowing the prompt, at which token an inversion went wrong.

# %% [markdown]
# ## Look
#
# A prompt is read back from its hidden states token by token. Each found token has a *discrete loss*: how far its state is
# from the true one. The curve adds them up. Here are prompts of the committed study, with the truth beside them, which an
# attacker does not have.

# %%
import pandas as pd

from lib import paths

tokens = pd.read_parquet(paths.reference("laptop") / "inversion" / "tokens.parquet")
kept = tokens[tokens.configuration == "layer 12 prior"].sort_values("position")
for prompt, part in list(kept.groupby("prompt"))[:4]:
    right = "".join(".x"[int(wrong)] for wrong in part.found_id != part.true_id)
    print(f"{prompt}: {right}", " ".join(f"{loss:.0e}" for loss in part.cumulative_loss))

# %% [markdown]
# ## Your turn
#
# Behind the first wrong token the prefix is wrong, and the curve stays up whatever comes. So ask of every position what
# *it* added, and compare that with the tolerance of one token.

# %% tags=["solution"]
import numpy as np


def first_wrong(cumulative, tolerance: float = 1e-4):
    """Position of the first token whose own discrete loss is above ``tolerance``, None where there is none.

    ``cumulative`` [T] holds the sum of the discrete losses up to and with each position.
    """
    own = np.diff(cumulative, prepend=0.0)
    above = np.flatnonzero(own > tolerance)
    return int(above[0]) if len(above) else None

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("11_cumulative_loss", globals())

# %% [markdown] tags=["hint"]
# The first position added all that the curve shows there. Every other one added the difference to the position before.
# Many right tokens add up: a long prompt without a mistake can pass a tolerance that was meant for one token.

# %% [markdown]
# ## Why it matters
#
# This is an alarm that needs no truth, and it names the position: whoever holds the states knows what to trust. Where tokens
# are verified before they are committed, part of it holds
# [by construction](../../book/gotchas/fallback_by_construction.md). In the package: `lib.inversion.diagnostics.alarm_delay`, and [notebook 05](../05_inversion.ipynb) for how often it is right.
