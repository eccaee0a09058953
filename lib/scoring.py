"""The one place where logits of target tokens are taken from a model."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.encoding import Batch


def target_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [N, V] that predict the N target tokens of a batch, row by row, and their ids [N].

    Position t is predicted from position t - 1. A hook hands the output layer those N hidden states and no others, so
    whatever the model does behind that layer (scaling, soft caps) is done to the logits here, too.
    """
    predicts = batch.target_mask[:, 1:]
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0][:, :-1][predicts][None],)
    )
    with hook:
        logits = model(**batch.model_inputs(), use_cache=False).logits
    return logits[0], batch.input_ids[batch.target_mask]


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """NLL [N] in nats of ``ids`` [N] under ``logits`` [N, V], the softmax taken in fp32 or better."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(precise, ids, reduction="none")
