"""States of a user's own: read from a file, checked, inverted, and told in words."""

from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lib import models
from lib.inversion import conventions, proposer, verified
from lib.inversion.continuous import check_states
from lib.inversion.reader import Convention, InversionError, Reader
from lib.training import accelerator

SUFFIXES = (".npy", ".safetensors", ".pt")


def load_states(path: Path) -> Tensor:
    """States [n, T, d] from a file with one array: ``.npy``, ``.safetensors``, or a tensor in a ``.pt``.

    One prompt may come as [T, d]. Half precision is kept until it is inverted.

    Raises:
        InversionError: the file is missing, of another kind, or holds no such array.
    """
    if not path.exists():
        raise InversionError(f"states {path}: does not exist")
    if path.suffix not in SUFFIXES:
        raise InversionError(f"states {path}: got the ending {path.suffix!r}, expected one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".npy":
            found = torch.from_numpy(np.load(path, allow_pickle=False))
        elif path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            arrays = load_file(path)
            if len(arrays) != 1:
                raise InversionError(f"states {path}: holds {len(arrays)} arrays ({', '.join(arrays)}), expected one")
            (found,) = arrays.values()
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, TypeError, UnpicklingError) as error:
        if isinstance(error, InversionError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise InversionError(f"states {path}: cannot be read: {reason}") from error
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim not in (2, 3):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        kind = f" of {found.dtype}" if isinstance(found, Tensor) else ""
        raise InversionError(
            f"states {path}: got {shape}{kind}, expected floating-point numbers [prompts, positions, width]"
        )
    found = (found[None] if found.ndim == 2 else found).detach()
    if found.numel() == 0:
        raise InversionError(f"states {path}: got {list(found.shape)}, which is empty")
    return found


def read_back(
    model: str, states: Tensor, convention: Convention, trusted: bool = False, revision: str | None = None
) -> tuple[pd.DataFrame, verified.Found]:
    """Invert states of a model, after a check that they are what they are said to be (``trusted`` leaves it out).

    Half-precision states are compared within their own rounding: the tolerance follows.

    Returns:
        A row a prompt: ``prompt, text, status`` (the least certain of its tokens'), ``tokens, candidates, residual``
        (the largest); and all that was found.

    Raises:
        InversionError: see :func:`lib.inversion.continuous.check_states` and :func:`lib.inversion.conventions.check`.
    """
    backbone = models.load(model, revision, device=accelerator().device)
    reader = Reader(backbone, convention, len(backbone.tokenizer))
    given = states.to(reader.embedding.dtype)
    check_states(reader, given)
    settings = verified.Settings(tolerance=rounding(states.dtype))
    if not trusted and not _reproduced(reader, given, settings.tolerance or conventions.FITS):
        conventions.check(reader, given, fits=settings.tolerance)
    found = verified.invert(reader, given, proposer.fitted(reader), settings)
    rows = []
    for prompt, part in found.tokens.groupby("prompt"):
        status = next(kind for kind in verified.UNCERTAIN_FIRST if (part.status == kind).any())
        row = {"prompt": prompt, "text": backbone.tokenizer.decode(found.ids[prompt].tolist()), "status": status}
        rows.append(row | {"tokens": len(part), "candidates": part.candidates.sum(), "residual": part.residual.max()})
    return pd.DataFrame(rows), found


def _reproduced(reader: Reader, states: Tensor, fits: float) -> bool:
    """Whether all first rows of states [n, T, d] are those of one-token prompts, where that is known at no cost."""
    if not proposer.is_kept(reader):
        return False
    proposer.fitted(reader)  # brings the table
    rows = states[:, 0].to(reader.device)
    nearest = torch.stack([verified.residuals(reader.first_states, row).amin() for row in rows])
    return bool((nearest <= fits / conventions.FAR).all())


def rounding(dtype: torch.dtype) -> float | None:
    """The tolerance for states that were stored in half precision: their own rounding; None where it is measured."""
    return None if dtype in (torch.float32, torch.float64) else 4 * torch.finfo(dtype).eps ** 2
