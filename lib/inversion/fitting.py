"""What proposers are fitted on, and how: states of docstrings, of what the model writes itself, and of random ids."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lib.inversion.reader import Reader

TOKENS = 24_000  # read to fit later tokens: docstrings, text that the model writes, and random ids, a third each
PAIRS = 12_000  # of tokens, read to fit second ones: random, from docstrings, and words' beginnings, a third each
SEQUENCE = 128  # tokens of a sequence that is read
READ = 1024  # tokens that are read at once
RIDGE = 1e-3  # of each input's mean square
SHRINKAGE = 0.05  # of the covariance towards a multiple of the identity

Fitted = tuple[Tensor, Tensor]  # weights and covariance


def features(reader: Reader) -> Tensor:
    """What is known of every token [V, 2d]: its unit embedding, and its state as a prompt of its own."""
    return torch.cat([torch.nn.functional.normalize(reader.embedding, dim=-1), reader.first_states], -1)


def sequences(reader: Reader, texts: Sequence[str], tokens: int, seed: int) -> Tensor:
    """Ids [n, 128] to fit on: a third of them ``texts``, a third written by the model, a third drawn at random;
    fewer of the first two where there are few texts."""
    length = min(SEQUENCE, reader.context)
    part = max(1, tokens // 3 // length)
    rng = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for ids in _shuffled(reader, texts, rng):
        rows += torch.tensor(ids[: len(ids) // length * length], dtype=torch.long).view(-1, length)
        if len(rows) >= part:
            break
    drawn = torch.randint(len(reader.embedding), (part, length), generator=rng)
    begun = [ids[0] for ids, _ in zip(_shuffled(reader, texts, rng), range(part), strict=False)]
    own = written(reader, torch.tensor(begun), length, seed) if begun else drawn[:0]
    return torch.cat([*([torch.stack(rows[:part])] if rows else []), own, drawn])


def _shuffled(reader: Reader, texts: Sequence[str], rng: torch.Generator) -> Iterator[list[int]]:
    """The ids of texts in a drawn order; without such as the reader's vocabulary does not have."""
    for place in torch.randperm(len(texts), generator=rng).tolist():
        ids = reader.backbone.tokenizer(texts[place], add_special_tokens=False)["input_ids"]
        known = [one for one in ids if one < len(reader.embedding)]
        if known:
            yield known


def written(reader: Reader, begun: Tensor, length: int, seed: int) -> Tensor:
    """What the model writes behind first ids [n]: sampled ids [n, length], at temperature 1."""
    model = reader.backbone.model
    with torch.random.fork_rng(devices=[reader.device] if reader.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        begun = begun[:, None].to(reader.device)
        found = model.generate(
            begun,
            attention_mask=torch.ones_like(begun),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=length - 1,
            max_new_tokens=length - 1,
            pad_token_id=0,
        )
    return found.clamp(max=len(reader.embedding) - 1).cpu()


def pairs(reader: Reader, texts: Sequence[str], words: Sequence[Sequence[int]], count: int, seed: int) -> Tensor:
    """First and second ids [n, 2] to fit on: random, neighbours in ``texts``, and how split ``words`` begin
    (:func:`lib.inversion.corpus.split_words`), a third each."""
    rng, part = torch.Generator().manual_seed(seed), max(1, count // 3)
    drawn = torch.randint(len(reader.embedding), (part, 2), generator=rng)
    rows: list[Tensor] = []
    for ids in _shuffled(reader, texts, rng):
        places = torch.randperm(max(0, len(ids) - 1), generator=rng)[: max(1, len(ids) // 4)]
        rows += [torch.tensor(ids[place : place + 2]) for place in places.tolist()]
        if len(rows) >= part:
            break
    begun = sorted({tuple(ids[:2]) for ids in words if len(ids) > 1})
    begun = torch.tensor([pair for pair in begun if max(pair) < len(reader.embedding)], dtype=torch.long).view(-1, 2)
    begun = begun[torch.randperm(len(begun), generator=rng)[:part]]
    return torch.cat([drawn, *([torch.stack(rows[:part])] if rows else []), begun])


def fit(reader: Reader, ids: Tensor) -> Fitted:
    """The weights [2d + d + 1, d] and covariance [d, d] of states for :class:`Usual`, by ridge regression on prompts,
    ids [n, T], their first tokens left out; in float64.

    The covariance is that of each state from what is fitted without it, e_i / (1 - x_i' (X'X + R)^-1 x_i) for the
    residual e_i, and is drawn towards its mean variance.
    """
    known, width = features(reader), reader.width
    inputs, outputs = [], []
    for part in ids.split(max(1, READ // ids.shape[1])):
        states = reader.states(part.to(reader.device)).cpu()
        before = states[:, :-1].flatten(0, 1)
        own = known[part[:, 1:].flatten().to(reader.device)].cpu()
        inputs.append(torch.cat([own, before, before.new_ones(len(before), 1)], -1))
        outputs.append(states[:, 1:].flatten(0, 1))
    size = 3 * width + 1
    square, cross = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, width, dtype=torch.float64)
    for x, y in zip(inputs, outputs, strict=True):
        square += x.double().T @ x.double()
        cross += x.double().T @ y.double()
    scale = square.diagonal()
    inverse = torch.linalg.inv(square + RIDGE * torch.diag(scale + 1e-6 * scale.mean()))
    weights, count = inverse @ cross, sum(map(len, outputs))
    covariance = torch.zeros(width, width, dtype=torch.float64)
    for x, y in zip(inputs, outputs, strict=True):
        leverage = (x.double() @ inverse * x.double()).sum(-1, keepdim=True)
        apart = (y.double() - x.double() @ weights) / (1 - leverage)
        covariance += apart.T @ apart / count
    even = covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(width, dtype=torch.float64)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * even
    return weights.to(known), covariance.to(known)
