# %% [markdown]
# # Find the bug: a text known by heart scores like noise
#
# *10 minutes · difficulty 2 of 3 · seen in training and evaluation scripts written around a model library's loss*
#
# **You will learn** to ask of every loss who does the shift by one, and to test that somebody does, once.

# %% [markdown]
# ## Look
#
# A model that is sure, and right, about every next token. Behind a prompt of two tokens its target should cost nothing.

# %%
import torch

ids = torch.tensor([5, 1, 4, 2, 3])
logits = 40.0 * torch.nn.functional.one_hot(ids.roll(-1), 6).float()
print("what every row expects next:", logits.argmax(-1).tolist()[:-1], "- and what comes:", ids.tolist()[1:])

# %% [markdown]
# ## Your turn
#
# The function below has a bug: of that model it says that the target costs tens of nats a token. Find it, and repair it.

# %% tags=["solution"]
import torch


def target_nll(logits, ids, target_start: int):
    """Mean NLL in nats of the tokens from ``target_start`` on, each given all tokens before it.

    ``logits`` [T, V], ``ids`` [T], ``target_start`` at least 1. Tokens before it are the prompt, and do not count.
    """
    labels = ids.clone()
    labels[:target_start] = -100  # the prompt is ignored
    labels = labels.roll(-1)  # row t speaks of token t + 1
    labels[-1] = -100  # nothing follows the last row
    # student: return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("03_shifted_labels", globals())

# %% [markdown] tags=["hint"]
# Take a text of five tokens and write down, row by row, which label stands beside which row when `cross_entropy` is
# called. How often was something moved by one?

# %% [markdown]
# ## Why it matters
#
# Some interfaces shift inside and take the labels as they are, others leave it to the caller. Done never, or twice,
# every figure looks plausible and is wrong. In the package there is one place that does it:
# `lib.scoring.target_logits`.
#
# Read on: [Shifted labels](../../book/gotchas/shifted_labels.md).
