# %% [markdown]
# # Find the secret among its tokens
#
# *10 minutes · difficulty 1 of 3*
#
# **You will learn** why a text is tokenised once, as a whole, and how character offsets then tell which tokens hold a
# stretch of it.

# %% [markdown]
# ## Look
#
# The embedded tiny tokenizer, on a text whose secret is `ey are`. Which tokens hold it? Mind the token that reaches over
# the boundary, and count how many tokens the three parts have when each is tokenised by itself.

# %%
from lib.models import tiny_tokenizer

tokenizer = tiny_tokenizer()
parts = ("it was th", "ey are", " done")
encoded = tokenizer("".join(parts), add_special_tokens=False, return_offsets_mapping=True)
for token, (first, last) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
    print(f"{tokenizer.decode([token])!r:10} characters {first} to {last}")
alone = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts]
print("tokens of the parts:", alone, "- of the whole:", len(encoded["input_ids"]))

# %% [markdown]
# ## Your turn
#
# A token belongs to the secret if it holds at least one of its characters.

# %% tags=["solution"]
def secret_span(tokenizer, prefix: str, secret: str, suffix: str) -> tuple[int, int]:
    """Positions of the tokens that hold the secret in the text prefix + secret + suffix.

    Returns (start, stop): token ``start`` is the first that holds a character of the secret, ``stop`` is one behind the
    last. Nothing is added to the text (``add_special_tokens=False``).
    """
    encoded = tokenizer(prefix + secret + suffix, add_special_tokens=False, return_offsets_mapping=True)
    begin, end = len(prefix), len(prefix) + len(secret)
    inside = [i for i, (first, last) in enumerate(encoded["offset_mapping"]) if first < end and last > begin]
    return inside[0], inside[-1] + 1

# %% [markdown]
# ## Check

# %% tags=["check"]
from lib.checks import check

check("01_find_the_span", globals())

# %% [markdown] tags=["hint"]
# You know where the secret lies in *characters*: behind `len(prefix)` of them. `return_offsets_mapping=True` gives every
# token's first and last character. Two stretches overlap when each begins before the other ends. Looking the secret up
# with `text.find` fails where the prefix holds the same characters.

# %% [markdown]
# ## Why it matters
#
# A secret scored on tokens that the model never saw in training has a loss of its own kind. The package finds spans
# with `lib.spans.find_span`, which also says when a token straddles a boundary.
#
# Read on: [Glued tokens](../../book/gotchas/glued_tokens.md) and [Tokens that straddle a
# span](../../book/gotchas/straddling_tokens.md).
