"""What a language model gives away: memorised canaries, and text recovered from hidden states.

Modules import in one direction: ``errors``, ``paths``, ``config``, ``files`` -> ``embedded``, ``models`` -> ``spans``,
``pictures``, ``canaries``, ``benign`` -> ``encoding``, ``scoring`` -> ``adapters``, ``training`` -> ``probes`` ->
``results``, ``runs``, ``sweep``, ``runner`` -> ``figures``, ``paper``; ``python -m lib`` stands on all of them.
``plan``, ``trials``, ``twins``, ``truth`` and ``scorecard`` grade probes; ``inversion`` is a study of its own;
``audit`` asks the protocol of a model of the user's own.
"""

import warnings

# transformers and peft import tqdm's notebook bar, which asks for a package that nothing here needs.
warnings.filterwarnings("ignore", message="IProgress not found")
# peft asks a model for an attribute that transformers is about to rename.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
