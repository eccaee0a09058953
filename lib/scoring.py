"""The one place where logits of target tokens are taken from a model."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.encoding import Batch


def target_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [N, V] that predict the N target tokens of a batch, row by row, and their ids [N].

    Position t is predicted from position t - 1. The output layer is evaluated where some row has a target and
    nowhere else, and never for padding.
    """
    predicts = batch.target_mask[:, 1:]
    columns = predicts.any(0).nonzero().squeeze(1)
    logits = model(**batch.model_inputs(), logits_to_keep=columns, use_cache=False).logits
    return logits[predicts[:, columns]], batch.input_ids[batch.target_mask]


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """NLL [N] in nats of ``ids`` [N] under ``logits`` [N, V], the softmax taken in fp32 or better."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(precise, ids, reduction="none")
