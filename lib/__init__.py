"""What a language model gives away: memorised canaries, and text recovered from hidden states.

Modules import in one direction: ``paths``, ``config`` -> ``embedded``, ``models`` -> ``canaries``, ``encoding``
-> ``training`` -> ``probes`` -> ``runs`` -> ``figures``, ``paper``; ``python -m lib`` stands on all of them.
"""
