# %% [markdown]
# # The loss of every token
#
# *10 minutes · difficulty 1 of 3*
#
# **You will learn** what a per-token negative log-likelihood (NLL) is, which row of the logits speaks of which token, and
# why its softmax is taken in fp32.

# %% [markdown]
# ## Look
#
# A model gives one row of logits a position. Row $t$ is about token $t + 1$, and with the softmax of its logits $z_t$
#
# $$ \mathrm{NLL}_{t+1} = -\log \mathrm{softmax}(z_t)[x_{t+1}] \quad \text{nats}. $$
#
# Three rows, as chances: the first says that token 0, 1, 2 comes next with 1/2, 1/4, 1/4.

# %%
import torch

chances = torch.tensor([[0.50, 0.25, 0.25], [0.10, 0.10, 0.80], [0.20, 0.30, 0.50]])
logits, ids = chances.log(), torch.tensor([0, 2, 1])
print("the chance of token 2 behind token 0:", chances[0, 2].item())
print("the last row speaks of a token that is not there:", chances[2].tolist())

# %% [markdown]
# ## Your turn

# %% tags=["solution"]
import torch


def token_nll(logits, ids):
    """NLL in nats of every token but the first, each given the tokens before it.

    Takes ``logits`` [T, V] in any floating dtype and the ids [T]; gives losses [T - 1] in fp32. Logits may be large.
    """
    log_p = logits[:-1].float().log_softmax(-1)
    return -log_p.gather(-1, ids[1:, None])[:, 0]

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("02_token_nll", globals())

# %% [markdown] tags=["hint"]
# Three steps: leave out the row that nothing follows and the token that nothing precedes; go to fp32 and take
# `log_softmax`, which does not overflow as `exp` would; pick one number a row with `gather`, and mind the sign.

# %% [markdown]
# ## Why it matters
#
# Everything that the memorisation notebooks say comes from one table of such losses, canary by position. In the
# package: `lib.scoring.token_losses` and `lib.probes.token_nll`.
