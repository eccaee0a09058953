# %% [markdown]
# # Find the bug: a score that depends on its neighbours
#
# *10 minutes · difficulty 2 of 3 · seen in loss functions and evaluation suites that pad records into batches*
#
# **You will learn** that a mask made for tokens has to be shifted together with what it selects, and the test that finds
# it when it is not: a record scored alone and in a batch.

# %% [markdown]
# ## Look
#
# Two records in one batch, the second padded on the right. Which losses belong to it?

# %%
import torch

ids = torch.tensor([[5, 1, 4, 2], [3, 2, 0, 0]])
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
for row, real in zip(ids, mask, strict=True):
    print("tokens", row.tolist(), "real", real.tolist(), "losses", int(real.sum()) - 1)

# %% [markdown]
# ## Your turn
#
# The function below has a bug: the second record's score changes with what is padded behind it. Repair it.

# %% tags=["solution"]
import torch


def record_nll(logits, ids, mask):
    """Mean NLL in nats a record, over its own tokens but the first.

    ``logits`` [B, T, V]; ``ids`` and ``mask`` [B, T], padded on the right, the mask 1 at real tokens. Gives [B]. Every
    record has at least two tokens.
    """
    log_p = logits[:, :-1].float().log_softmax(-1)
    losses = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    # student: counted = mask[:, :-1].float()
    counted = mask[:, 1:].float()
    return (losses * counted).sum(1) / counted.sum(1)

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("04_pad_mask", globals())

# %% [markdown] tags=["hint"]
# `losses[:, 0]` is the loss of token 1. Which entry of the mask says whether token 1 is real? Count what is counted: a
# record of two tokens has one loss.

# %% [markdown]
# ## Why it matters
#
# One wrong token a record is enough to move a mean over thirteen, and only for the short ones. The package selects
# logits by the shifted mask in `lib.scoring.target_logits`, and its tests hold batches against a loop over single
# records.
#
# Read on: [The padding mask](../../book/gotchas/padding_mask.md).
