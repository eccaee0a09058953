"""Text from hidden states: the prompt that a decoder-only model read, from the states it released.

``reader`` (a model cut where the states were taken) -> ``continuous`` (arXiv:2607.00852), ``sipit`` (arXiv:2510.15511
and controls) -> ``diagnostics``.
"""
