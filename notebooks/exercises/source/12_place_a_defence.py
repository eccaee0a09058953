# %% [markdown]
# # Place a defence
#
# *20 minutes · difficulty 3 of 3*
#
# **You will learn** what about a defence stops an attacker: not that states look different, but what the attacker cannot
# do again.

# %% [markdown]
# ## Look
#
# Hidden states pass a *channel* before they are handed on: rounded, quantised, noised, turned into a secret basis. An
# attacker tests candidates. Whatever can be done to a candidate's state as well does not stop that. One row, through three
# channels, twice each, with another draw of the generator:

# %%
import torch

from lib.inversion import channels

row = torch.tensor([[0.3, -1.2, 2.0, 0.7]])
for name in ("4-bit", "permuted", "gaussian 0.3"):
    twice = [channels.named(name).release(row, torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    print(f"{name:13}", *(released.numpy().round(2).tolist() for released in twice))

# %% [markdown]
# ## Your turn
#
# Tell three kinds apart by experiment. You get `release(states, generator)` and states. The generator is what the
# defender draws keys and noise from. A key moves all rows alike, so that distances *between* rows stay; noise does not.

# %% tags=["solution"]
import torch


def place(release, states) -> str:
    """The kind of a channel, told from what it does.

    ``release(states, generator)`` takes and gives states [n, d] (float64); its draws come from the ``torch.Generator``.

    "repeatable": it does the same whatever the generator draws, so anybody can do it to a candidate. "keyed": what it
    does depends on the draw, but distances between rows stay as they were. "noisy": neither.
    """
    one, two = (release(states, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if torch.equal(one, two):
        return "repeatable"
    kept = torch.allclose(torch.pdist(one), torch.pdist(states), rtol=1e-9)
    return "keyed" if kept else "noisy"

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("12_place_a_defence", globals())

# %% [markdown] tags=["hint"]
# Release the same states with two generators of different seeds and compare. Then take the distances between rows
# (`torch.pdist`) before and after. Weak noise is noise: compare tightly.

# %% [markdown]
# ## Why it matters
#
# A keyed channel keeps all that lies between rows, and so it gives way to whoever matches distances. What noise costs,
# and what it buys, has to be measured: `lib.inversion.channels` says of every channel what about it is secret, and can
# give the epsilon of one of them.
