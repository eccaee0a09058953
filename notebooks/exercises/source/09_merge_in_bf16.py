# %% [markdown]
# # Find the bug: gone after the merge
#
# *15 minutes · difficulty 2 of 3 · seen in libraries that add an adapter into a model's own weights*
#
# **You will learn** what bf16 keeps of a small update, and why an audit merges into a copy in fp32.

# %% [markdown]
# ## Look
#
# A LoRA changes a weight to $W + \frac{\alpha}{r} B A$. A bf16 number has eight bits of precision: its neighbours are far
# away, and an update of less than half a step is rounded back to where it came from.

# %%
import torch

weight = torch.tensor(1.0)
for update in (0.0001, 0.001, 0.01):
    merged = (weight.bfloat16() + torch.tensor(update).bfloat16()).item()
    print(f"1 + {update:g} in bf16 is {merged:.4f}: {(merged - 1) / update:.0%} of the update is there")

# %% [markdown]
# ## Your turn
#
# The function below has a bug: an adapter that plainly changes the model beside the weights is gone after the merge. Repair it,
# also for weights that come in bf16.

# %% tags=["solution"]
def merge(weight, a, b, alpha: float):
    """The weight with a LoRA added in: W + (alpha / rank) B A, in fp32, on a copy.

    ``weight`` [out, in] in fp32 or bf16, ``a`` [rank, in] and ``b`` [out, rank] in fp32. The weight that was given stays
    as it was.
    """
    update = alpha / a.shape[0] * (b @ a)
    # student: return (weight.bfloat16() + update.bfloat16()).float()
    return weight.float() + update.float()

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("09_merge_in_bf16", globals())

# %% [markdown] tags=["hint"]
# Which dtype has the sum at the moment at which it is taken? Going back to fp32 afterwards brings nothing back. A weight
# in bf16 can still be added to in fp32: widen it first.

# %% [markdown]
# ## Why it matters
#
# "The effect collapses on merge" can be a finding about a model, or about eight bits. [Notebook
# 02](../02_case_c4_preamble_drift.ipynb) tells them apart with controls; `lib.precision` has the table.
#
# Read on: [Merging in bf16](../../book/gotchas/bf16_merge.md).
