"""Text from hidden states: the prompt that a decoder-only model read, from the states it released.

``reader`` (a model cut where the states were taken) and ``conventions`` (where that was) -> ``continuous``
(arXiv:2607.00852), ``sipit`` (arXiv:2510.15511 and controls), ``verified`` (ours, on a ``proposer``) -> ``diagnostics``
and ``channels`` -> ``settings``, ``analysis``, ``study``, ``figures``.
"""
