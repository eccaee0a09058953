# %% [markdown]
# # Decoys, or not
#
# *15 minutes · difficulty 2 of 3*
#
# **You will learn** when decoys can tell that a change is about the secret, and when they have nothing to say.

# %% [markdown]
# ## Look
#
# An undertrained model's loss on a planted secret falls by 2 nats after harmless tuning. Is the secret coming back? If
# strings that nobody planted fall as well, the model has learned the format. What each did, in nats:

# %%
stories = {
    "A": ("fell by 2.0", "its decoys fell by 2.0 on average", "cost 1.5 nats a token before"),
    "B": ("fell by 2.0", "its decoys fell by 1.0 on average", "cost 1.5 nats a token before"),
    "C": ("rose by 0.6", "its decoys stayed", "cost 0.01 nats a token before"),
}
for name, story in stories.items():
    print(f"{name}: the secret {'; '.join(story)}")

# %% [markdown]
# In C the secret was known by heart. Its NLL had nowhere to fall to, and decoys of a saturated secret answer a question
# that cannot be asked there.
#
# ## Your turn
#
# The *corrected* change is the secret's change less the **mean** change of its decoys.

# %% tags=["solution"]
import numpy as np


def what_decoys_say(secret: float, decoys, base: float, margin: float = 0.04, floor: float = 0.1) -> str:
    """What decoys say of a secret's change.

    ``secret`` is the change of its NLL and ``decoys`` [n] are theirs, in nats of the whole secret; ``base`` is its NLL
    before, in nats a token.

    "at cap": ``base`` is not above ``floor``. Else "specific": secret and corrected change go the same way, each by more
    than ``margin``. Else "general".
    """
    if base <= floor:
        return "at cap"
    corrected = secret - np.mean(decoys)
    same_way = secret * corrected > 0
    return "specific" if same_way and min(abs(secret), abs(corrected)) > margin else "general"

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("10_decoys_or_not", globals())

# %% [markdown] tags=["hint"]
# Ask three questions in this order: was there anything left to correct? What is left of the change when the decoys' mean
# is taken off? Does what is left point where the secret went?

# %% [markdown]
# ## Why it matters
#
# The package asks it of a whole group, with an interval: `lib.exposure.corrected_change` and
# `lib.verdicts.decoy_answer`. [Notebook 03](../03_case_c5_undertrained.ipynb) shows what it does to case C5.
#
# Read on: [Decoys pooled](../../book/gotchas/pooled_decoys.md).
