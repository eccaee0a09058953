# %% [markdown]
# # hit@k without sampling
#
# *10 minutes · difficulty 2 of 3*
#
# **You will learn** how one loss gives the chance that a secret is said at least once in $k$ samples, and how rounding
# loses just the chances that an audit asks about.

# %% [markdown]
# ## Look
#
# The NLL of a whole secret is $-\log p$, with $p$ the chance that one sample at temperature 1 is this secret. Samples are
# independent. The formula is short; what a float does with it is not.

# %%
import math

p = math.exp(-60)
print("p =", p, "and 1 - p =", 1 - p)
print("a million samples, as one would write it down:", 1 - (1 - p) ** 1_000_000)

# %% [markdown]
# That says never. The chance is small and it is not 0; an attacker with more samples or a secret of fewer nats lives off
# the difference.
#
# ## Your turn

# %% tags=["solution"]
import math


def hit_at_k(log_p: float, k: int) -> float:
    """Chance of at least one hit in ``k`` independent samples, from the log-probability of one hit.

    Accurate where p is tiny, and right where p is 1 (``log_p`` = 0). Raises ValueError for ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"got k = {k}, expected at least one sample")
    p = math.exp(log_p)
    return 1.0 if p == 1.0 else -math.expm1(k * math.log1p(-p))

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("06_hit_at_k", globals())

# %% [markdown] tags=["hint"]
# The chance that all $k$ miss is $(1 - p)^k = \exp(k \log(1 - p))$. `math.log1p(x)` is $\log(1 + x)$ and `math.expm1(x)`
# is $\exp(x) - 1$, both right for tiny $x$. `log1p(-1)` has no value, so $p = 1$ wants a line of its own.

# %% [markdown]
# ## Why it matters
#
# hit@k asks whether a secret can be had at all, $p^k$ whether it comes every time; a probe that mixes them up can
# answer either way. In the package: `lib.extraction.hit_at_k`, `reliability`, and in [notebook
# 01](../01_case_c3_window_truncation.ipynb) the check by sampling.
