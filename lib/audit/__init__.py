"""The protocol on a model of one's own: any causal language model, its adapters, and a file of canaries.

``formats`` draws secrets, ``reader`` reads canaries, ``settings`` checks what is asked; ``decoys``, ``scoring`` and
``study`` do the work block by block; ``analysis`` turns tables into verdicts, ``report`` into a page; ``planting``
writes canaries to train on, and ``example`` trains on them.
"""
