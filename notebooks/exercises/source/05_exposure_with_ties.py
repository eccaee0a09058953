# %% [markdown]
# # Exposure, with ties
#
# *15 minutes · difficulty 2 of 3*
#
# **You will learn** what exposure measures, what the most is that a set of decoys can show, and why a tie must count
# against the claim.

# %% [markdown]
# ## Look
#
# Decoys are secrets drawn by the same rule that nobody planted. With $n$ of them, and the secret on rank $r$ among all
# $n + 1$ (1 is the likeliest), its exposure is
#
# $$ \log_2 (n + 1) - \log_2 r \quad \text{bits} \qquad \text{(arXiv:1802.08232)}. $$
#
# The rank is 1 plus the number of decoys ahead of it. What of decoys that score *exactly* like the secret? Imagine a
# broken scorer, one that gives the same number to everything.

# %%
import numpy as np

secret, decoys = 5.0, np.full(7, 5.0)
print("decoys strictly ahead:", int((decoys < secret).sum()), "of", len(decoys))
print("comparisons with what is no number:", float("nan") < 1.0, float("nan") > 1.0, float("nan") == float("nan"))

# %% [markdown]
# ## Your turn
#
# A broken scorer must not look like a leak. Decide what a tie counts, and refuse what has no rank.

# %% tags=["solution"]
import numpy as np


def exposure(secret_nll: float, decoy_nlls) -> float:
    """Exposure in bits of a secret among its decoys, by their NLLs (lower is likelier); ties count against the claim.

    Takes the secret's NLL and the decoys' [n]. Raises ValueError where one of them is not a finite number.
    """
    if not np.isfinite([secret_nll, *decoy_nlls]).all():
        raise ValueError("an NLL is not a finite number")
    rank = 1 + np.sum(np.asarray(decoy_nlls) <= secret_nll)
    return float(np.log2(len(decoy_nlls) + 1) - np.log2(rank))

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("05_exposure_with_ties", globals())

# %% [markdown] tags=["hint"]
# "Against the claim" means: whatever could be ahead is taken to be ahead. With NaN every comparison is false, so that a
# secret whose score is NaN has nothing ahead of it, and ranks first, unless you look before you compare.

# %% [markdown]
# ## Why it matters
#
# Exposure of 31 decoys ends at 5 bits, of 255 at 8, and a secret known by heart stands there before and after it was
# hurt. In the package: `lib.exposure.exposure`.
#
# Read on: [Ties in ranks](../../book/gotchas/ties.md), [NaN ranks first](../../book/gotchas/nan_ranks_first.md) and
# [Decoys pooled](../../book/gotchas/pooled_decoys.md).
