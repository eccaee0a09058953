"""Checks of the exercises: they say what is wrong with an answer, and not how to put it right.

Expectations are worked out by hand or are properties that every right answer has; none is computed by the solution.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.errors import LeakbookError
from lib.inversion import channels
from lib.models import tiny_tokenizer

PLACE = "the cell under “Your turn”"


class NotYet(LeakbookError, AssertionError):
    """An answer is missing or wrong; a notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback."""
        return [f"Not yet. {self}"]


class Answer:
    """A reader's function, called on copies; whatever goes wrong inside becomes a :class:`NotYet` that says so."""

    def __init__(self, name: str, function: Callable):
        self.name, self._function = name, function

    def __call__(self, *arguments: Any) -> Any:
        """The function's value.

        Raises:
            NotYet: it is not written, raises, or changes its arguments.
        """
        given = copy.deepcopy(arguments)
        try:
            value = self._function(*given)
        except NotImplementedError:
            raise NotYet(f"`{self.name}` is still empty: write it in {PLACE}, run that, then this cell.") from None
        except NameError as error:
            raise NotYet(f"`{self.name}`: {error}. Run {PLACE} first, or look for a slip of the pen in it.") from None
        except Exception as error:
            raise NotYet(f"`{self.name}` raised {type(error).__name__} ({error}) on {_shown(arguments)}.") from error
        if any(_differ(mine, theirs) for mine, theirs in zip(arguments, given, strict=True)):
            raise NotYet(f"`{self.name}` changed what it was given; whoever called it still needs that as it was.")
        return value

    def number(self, *arguments: Any) -> float:
        """The function's value as a float.

        Raises:
            NotYet: it is not a number.
        """
        value = self(*arguments)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise NotYet(f"`{self.name}` gave {value!r} on {_shown(arguments)}; expected one number.") from None

    def refuses(self, *arguments: Any) -> bool:
        """Whether the function raises ``ValueError``; a stub does not count as refusing."""
        try:
            self._function(*copy.deepcopy(arguments))
        except NotImplementedError:
            raise NotYet(f"`{self.name}` is still empty: write it in {PLACE}, run that, then this cell.") from None
        except ValueError:
            return True
        except Exception:
            return False
        return False


def _differ(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return not torch.equal(mine, theirs)
    return isinstance(mine, np.ndarray) and not np.array_equal(mine, theirs, equal_nan=True)


def _shown(arguments: tuple) -> str:
    parts = [f"a {type(a).__name__} of shape {tuple(a.shape)}" if hasattr(a, "shape") else repr(a) for a in arguments]
    return ", ".join(part if len(part) < 70 else f"{part[:67]}..." for part in parts)


def expect(holds: Any, message: str) -> None:
    """Refuse an answer of which something does not hold.

    Raises:
        NotYet: with the message.
    """
    if not bool(holds):
        raise NotYet(message)


def _expect_close(found: Any, wanted: Any, message: str, tolerance: float = 1e-5) -> None:
    """Same shape, every number within ``tolerance`` (absolute, plus as much of its size)."""
    try:
        found, wanted = (torch.as_tensor(value).detach().double().numpy() for value in (found, wanted))
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"Got {found!r}, expected numbers: does the function return them? {message}") from None
    expect(found.shape == wanted.shape, f"Got shape {found.shape}, expected {wanted.shape}. {message}")
    expect(np.allclose(found, wanted, rtol=tolerance, atol=tolerance), f"{message} Got {np.round(found, 4).tolist()}.")


def secret_span(answer: Answer) -> None:
    """Positions [start, stop) whose tokens cover the secret, no token more, counted in the joined text."""
    tokenizer = tiny_tokenizer()
    texts = [("Record 7: ", "a3f9", "-END"), ("it was th", "ey are", " done"), ("12 is not ", "12", "!")]
    texts += [
        ("it was ", "they a", "re done"),
        ("the pass", "word is", "n't"),
        ("", "pretend", " well"),
        ("Say ", "TEXTCAN", "-1"),
        ("x: ", "0", ""),
    ]
    for prefix, secret, suffix in texts:
        found = answer(tokenizer, prefix, secret, suffix)
        what = f"On {prefix!r} + {secret!r} + {suffix!r} the answer {found!r}"
        pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(i, int | np.integer) for i in found)
        expect(pair, f"{what} is not a pair of whole numbers (start, stop).")
        ids = tokenizer(prefix + secret + suffix, add_special_tokens=False)["input_ids"]
        expect(0 <= found[0] < found[1] <= len(ids), f"{what} is no stretch of the text's {len(ids)} tokens.")
        begin, end = len(prefix), len(prefix) + len(secret)
        reach = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
        expect(reach[found[0]] <= begin and reach[found[1]] >= end, f"{what} leaves a character of the secret out.")
        expect(reach[found[0] + 1] > begin, f"{what} begins with a token that holds nothing of the secret.")
        expect(reach[found[1] - 1] < end, f"{what} ends with a token that holds nothing of the secret.")


def _sure(ids: Tensor, vocabulary: int = 6) -> Tensor:
    """Logits [T, V] of a model that is sure, and right, about every next token."""
    return 40.0 * torch.nn.functional.one_hot(ids.roll(-1), vocabulary).float()


def token_nll(answer: Answer) -> None:
    """Losses of all tokens but the first, in nats and fp32, however large the logits."""
    ids = torch.tensor([5, 1, 4, 2])
    even = answer(torch.zeros(4, 6), ids)
    expect(isinstance(even, Tensor), f"Got a {type(even).__name__}, expected a tensor.")
    _expect_close(even, [math.log(6)] * 3, "Six tokens alike: log 6 nats for each token but the first.")
    _expect_close(answer(_sure(ids), ids), [0.0] * 3, "A model that is sure of every next token should lose nothing.")
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]])
    wanted = [math.log(4), math.log(10)]
    message = "Chances 1/2 1/4 1/4, then 0.1 0.1 0.8, for the ids 0, 2, 1: wrong losses. A loss is -log of one chance."
    _expect_close(answer(chances.log(), torch.tensor([0, 2, 1])), wanted, message)
    message = "Adding 10,000 to all logits changes no chance, and must change no loss."
    _expect_close(answer(chances.log() + 1e4, torch.tensor([0, 2, 1])), wanted, message, 5e-3)
    coarse = torch.tensor([[8.0, 1.0], [1.0, 8.0]], dtype=torch.bfloat16)
    loss = answer(coarse, torch.tensor([0, 1]))
    expect(loss.dtype == torch.float32, f"From bf16 logits came losses in {loss.dtype}, expected torch.float32.")
    _expect_close(loss, [7 + math.log1p(math.exp(-7))], "bf16 logits 8 and 1: the loss is too coarse.", 1e-5)


def target_nll(answer: Answer) -> None:
    """Mean loss of the target's tokens, each predicted by the row before it."""
    ids = torch.tensor([5, 1, 4, 2, 3])
    for start in (1, 2, 4):
        found = answer.number(_sure(ids), ids, start)
        _expect_close(found, 0.0, f"A model sure of every next token should lose nothing (target from {start} on).")
    logits = torch.zeros(4, 2)
    logits[2] = torch.tensor([math.log(3), 0.0])
    found = answer.number(logits, torch.tensor([0, 0, 1, 1]), 2)
    wanted = (math.log(2) + math.log(4)) / 2
    _expect_close(found, wanted, "Two target tokens with the chances 1/2 and 1/4: the mean loss is not theirs.")
    other = logits.clone()
    other[0] += torch.tensor([9.0, 0.0])
    same = answer.number(other, torch.tensor([0, 0, 1, 1]), 2)
    _expect_close(same, found, "What the model says of a prompt's token must not count.")


def record_nll(answer: Answer) -> None:
    """Mean loss a record, the same in any batch."""
    ids = torch.tensor([[5, 1, 4, 2], [3, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    sure = torch.stack([_sure(row) for row in ids])
    sure[1, 1:] = torch.tensor([-40.0, 0, 0, 0, 0, 0])  # what a model says behind the end means nothing
    message = "Both records are predicted without error, so both should lose nothing, padding or not."
    _expect_close(answer(sure, ids, mask), [0.0, 0.0], message)
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    together = answer(logits, ids, mask)
    for row, length in ((0, 4), (1, 2)):
        alone = answer(logits[row : row + 1, :length], ids[row : row + 1, :length], mask[row : row + 1, :length])
        _expect_close(together[row : row + 1], alone, f"Record {row} scores differently alone and beside the other.")
    _expect_close(answer(torch.zeros(2, 4, 6), ids, mask), [math.log(6)] * 2, "Six tokens alike: a mean of log 6 nats.")


def exposure(answer: Answer) -> None:
    """log2(n + 1) - log2(rank), ties against the claim, gaps refused."""
    cases = [
        (1.0, [2.0, 3.0, 4.0], 2.0, "The secret is likelier than its three decoys: the most that three can show."),
        (1.0, [9.0, 0.5, 3.0], 1.0, "One decoy of three is ahead, wherever it stands in the list."),
        (9.0, [2.0, 3.0, 4.0], 0.0, "All decoys are ahead: nothing is exposed."),
        (
            5.0,
            [5.0] * 7,
            0.0,
            "Secret and decoys score alike. Such a score is no proof.",
        ),
        (1.0, [1.0, 2, 3, 4, 5, 6, 7], 2.0, "One decoy of seven scores exactly like the secret, six are behind."),
    ]
    for secret, decoys, wanted, story in cases:
        _expect_close(answer.number(secret, np.array(decoys)), wanted, f"Secret {secret}, decoys {decoys}. {story}")
    for odd in (math.nan, math.inf, -math.inf):
        for secret, decoys in ((odd, [1.0, 2.0]), (1.0, [odd, 2.0])):
            shown = f"`{answer.name}({secret}, {decoys})`"
            expect(
                answer.refuses(secret, np.array(decoys)), f"{shown} should raise ValueError: that is no finite number."
            )


def hit_at_k(answer: Answer) -> None:
    """1 - (1 - p)^k from log p, near 0 and near 1 too."""
    cases = [(math.log(0.5), 4, 0.9375), (math.log(0.5), 1, 0.5), (math.log(0.25), 2, 0.4375), (0.0, 3, 1.0)]
    for log_p, k, wanted in cases:
        _expect_close(answer.number(log_p, k), wanted, f"p = {math.exp(log_p):g}, k = {k}.")
    ratio = answer.number(-60.0, 10**6) / (10**6 * math.exp(-60.0))
    story = "p = exp(-60), a million samples: where k p is tiny the chance is k p, to many digits."
    expect(abs(ratio - 1) < 1e-6, f"{story} The answer is {ratio:g} times that: was something rounded to 1 on the way?")
    _expect_close(
        answer.number(-18.0, 10**9), 1.0, "p = exp(-18), a billion samples: k p is 15, and no chance is above 1."
    )
    gone = answer.number(-800.0, 1)
    expect(gone == 0.0, f"log p = -800, below all floats: expected 0, got {gone}.")
    expect(
        answer.refuses(-1.0, 0),
        "k = 0: without a sample there is no chance; expected ValueError.",
    )


def first_alarm(answer: Answer) -> None:
    """The smallest K at which two canaries are hurt and none has gained; None where there is none."""
    for name, (delta, wanted) in _windows().items():
        found = answer(delta, 0.04)
        expect(found is None or isinstance(found, int | np.integer), f"Got {found!r}, expected a whole number or None.")
        expect(
            found is None or wanted is not None,
            f"{name}: got K = {found}, where no window fires: fewer than two are hurt, or somebody has gained.",
        )
        early = found is not None and wanted is not None and found == wanted - 1
        expect(not early, f"{name}: got K = {found}. A window of K tokens reads the positions 0 to K - 1.")
        expect(found == wanted, f"{name}: got {found}, and that is not the first K that fires.")


def _windows() -> dict[str, tuple[np.ndarray, int | None]]:
    """Changes [canaries, positions] in nats, and the K at which two canaries lie beyond 0.04 nats and none below."""

    def table(**moves: float) -> np.ndarray:
        delta = np.zeros((5, 26))
        for place, nats in moves.items():
            canary, position = map(int, place.removeprefix("at_").split("_"))
            delta[canary, position] = nats
        return delta

    late = {"at_0_23": 1.15, "at_3_23": 1.15}
    return {
        "Two canaries lose their last token, at position 23": (table(**late), 24),
        "Two canaries hurt, at 5 and at 9": (table(at_1_5=0.5, at_2_9=0.5), 10),
        "Hurt at 5, and mended again at 8": (table(at_1_5=0.5, at_2_5=0.5, at_1_8=-0.5, at_2_8=-0.5), 6),
        "One canary is hurt, nobody else": (table(at_2_7=3.0), None),
        "Two are hurt, and a third has gained from the start": (table(**late, at_4_2=-0.3), None),
        "The third loses its gain at position 24": (table(**late, at_4_2=-0.3, at_4_24=0.3), 25),
        "Two canaries lose the very last token of all, at position 25": (table(at_0_25=1.0, at_3_25=1.0), 26),
        "Every token of every canary loses 0.015": (np.full((5, 26), 0.015), 3),
        "Nothing moves": (table(), None),
    }


def merge(answer: Answer) -> None:
    """W + (alpha / rank) B A in fp32, on a copy."""
    eye, ones = torch.eye(2), torch.ones(2, 2)
    found = answer(eye, ones, 2 * ones, 4.0)
    expect(isinstance(found, Tensor), f"Got a {type(found).__name__}, expected the merged weight, a tensor.")
    message = "Rank 2, alpha 4, A of ones and B of twos: the update should be 8 everywhere, beside the identity."
    _expect_close(found, [[9.0, 8.0], [8.0, 9.0]], message)
    a, b = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0], [3.0]])
    wanted = [[2.0, 0.0, 4.0], [6.0, 0.0, 12.0]]
    _expect_close(
        answer(torch.zeros(2, 3), a, b, 2.0), wanted, "Rank 1, alpha 2, W of two rows and three columns of zeros."
    )
    small = answer(torch.ones(1, 1), torch.full((1, 1), 1e-2), torch.full((1, 1), 1e-2), 1.0)
    kept = (small.double() - 1).item() / 1e-4
    expect(abs(kept - 1) < 0.01, f"Of an update of 0.0001 on a weight of 1 there is {kept:.0%} left after the merge.")
    third = answer(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 1 / 3), 1.0)
    expect(
        abs(third.item() - 1 / 3) < 1e-5, f"An update of a third on a weight of zero came out as {third.item():.6f}."
    )
    coarse = answer(torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 1e-2), torch.full((1, 1), 1e-2), 1.0)
    expect(coarse.dtype == torch.float32, f"A bf16 weight merged into {coarse.dtype}, expected torch.float32.")
    kept = (coarse.double() - 1).item() / 1e-4
    expect(abs(kept - 1) < 0.01, f"On a weight that comes in bf16 there is {kept:.0%} of the update left.")


def what_decoys_say(answer: Answer) -> None:
    """at cap, specific or general, from one canary's change and those of its decoys."""
    known = ("at cap", "specific", "general")
    cases = [
        (-2.0, [-1.0, -1.0, -1.0], 1.5, "specific", "It fell by 2 nats, its decoys by 1 each."),
        (-2.0, [-2.0, -2.01, -1.99], 1.5, "general", "It fell by 2 nats, and so did the strings nobody planted."),
        (-1.02, [-4.0, 0.0, 0.0, 0.0], 1.5, "general", "It fell by 1.02; one of four decoys fell by 4, three stayed."),
        (1.0, [0.2, 0.4], 2.0, "specific", "It rose by 1 nat, its decoys by 0.2 and 0.4."),
        (0.5, [1.0, 1.0], 2.0, "general", "It rose by 0.5 nats, its decoys by 1: it did not move away upwards."),
        (-0.5, [-1.0, -1.0], 2.0, "general", "It fell by 0.5, its decoys by 1: it did not fall more than they."),
        (
            -0.4,
            [0.0, 0.0],
            0.05,
            "at cap",
            "It cost 0.05 nats a token before: next to nothing was left to lose.",
        ),
        (0.6, [0.0, 0.0], 0.1, "at cap", "It cost exactly 0.1 nats a token before, which is the floor itself."),
        (-0.03, [0.0, 0.0], 2.0, "general", "It fell by 0.03 nats, its decoys by nothing: less than the margin."),
        (
            -0.03,
            [0.5, 0.5],
            2.0,
            "general",
            "It fell by 0.03 nats, less than the margin, though its decoys rose by 0.5.",
        ),
    ]
    for secret, decoys, base, wanted, story in cases:
        found = answer(secret, np.array(decoys), base)
        expect(isinstance(found, str) and found in known, f"Got {found!r}, expected one of {', '.join(known)}.")
        expect(found == wanted, f"{story} Got {found!r}.")


def first_wrong(answer: Answer) -> None:
    """The first position whose own loss is above the tolerance, None where there is none."""
    tolerance = 1e-4
    cases = [
        ([1e-12, 2e-12, 0.3, 0.7], 2, "The curve leaps at position 2."),
        ([0.4, 0.9, 1.5], 0, "It is high from the first position on."),
        ([0.4, 0.4 + 1e-12], 0, "It leaps at the first position, and nowhere else."),
        ([1e-12, 1e-11, 2e-11], None, "It never leaves the ground."),
        (
            (1e-6 * np.arange(1, 301)).tolist(),
            None,
            "300 right tokens, 0.000001 each, pass a tolerance in sum.",
        ),
        ([1e-12, 5e-4, 5e-4 + 1e-12, 0.4], 1, "A small leap, a right token, then a large leap."),
        ([], None, "A prompt without tokens."),
    ]
    for curve, wanted, story in cases:
        found = answer(np.array(curve), tolerance)
        expect(found is None or isinstance(found, int | np.integer), f"Got {found!r}, expected a position or None.")
        expect(found == wanted, f"{story} Got {found}.")


_HINTS = {
    "repeatable": "Two releases with two different generators: what do they share?",
    "keyed": "Two different generators give two releases here. What of a release does not depend on the generator?",
    "noisy": "Compare to many digits: a little noise is noise.",
}


def place(answer: Answer) -> None:
    """repeatable, keyed or noisy, told from what a release does and not from its name."""
    known = ("repeatable", "keyed", "noisy")
    states = torch.randn(6, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kinds = {
        "repeatable": ["clean", "bf16", "4-bit", "clipped 1", "top 0.5"],
        "keyed": ["permuted", "rotated"],
        "noisy": ["gaussian 0.3", "gaussian 0.001", "laplace 0.1", "dropout 0.2", "private 2 0.5"],
    }
    for wanted, names in kinds.items():
        for name in names:
            found = answer(channels.named(name).release, states)
            expect(isinstance(found, str) and found in known, f"Got {found!r}, expected one of {', '.join(known)}.")
            expect(found == wanted, f"The channel `{name}` was called {found!r}. {_HINTS[wanted]}")


def verdict(answer: Answer) -> None:
    """The verdict of an interval against a margin on both sides of zero."""
    known = ("damaged", "strengthened", "unchanged", "inconclusive")
    cases = [
        (0.010, 0.050, "damaged", "all of it above the margin"),
        (-0.050, -0.010, "strengthened", "all of it below minus the margin"),
        (-0.002, 0.003, "unchanged", "within the margin on both sides"),
        (0.001, 0.003, "unchanged", "surely above zero, and surely smaller than what was declared to matter"),
        (-0.050, 0.060, "inconclusive", "zero is in it, and so is every effect worth a headline"),
        (-0.001, 0.009, "inconclusive", "it reaches over the margin on one side"),
        (-0.009, 0.001, "inconclusive", "it reaches below minus the margin on one side"),
    ]
    for low, high, wanted, story in cases:
        found = answer(low, high, 0.005)
        expect(isinstance(found, str) and found in known, f"Got {found!r}, expected one of {', '.join(known)}.")
        expect(found == wanted, f"Interval {low} to {high}, margin 0.005: {story}. That was called {found!r}.")


@dataclass(frozen=True)
class Task:
    """What an exercise asks for: the function's name, and what tells whether it is right."""

    function: str
    check: Callable[[Answer], None]


TASKS = {
    "01_find_the_span": Task("secret_span", secret_span),
    "02_token_nll": Task("token_nll", token_nll),
    "03_shifted_labels": Task("target_nll", target_nll),
    "04_pad_mask": Task("record_nll", record_nll),
    "05_exposure_with_ties": Task("exposure", exposure),
    "06_hit_at_k": Task("hit_at_k", hit_at_k),
    "07_flip_the_verdict": Task("first_alarm", first_alarm),
    "08_unchanged": Task("verdict", verdict),
    "09_merge_in_bf16": Task("merge", merge),
    "10_decoys_or_not": Task("what_decoys_say", what_decoys_say),
    "11_cumulative_loss": Task("first_wrong", first_wrong),
    "12_place_a_defence": Task("place", place),
}


def check(exercise: str, names: Mapping[str, Any]) -> str:
    """Check the answer to an exercise among a notebook's names, ``globals()``.

    Raises:
        NotYet: what is missing or wrong; a notebook shows that message and no traceback.
    """
    if exercise not in TASKS:
        raise NotYet(f"There is no exercise {exercise!r}; there are {', '.join(TASKS)}.")
    task = TASKS[exercise]
    if not callable(names.get(task.function)):
        raise NotYet(f"`{task.function}` is not there. Run {PLACE} first, then this one.")
    task.check(Answer(task.function, names[task.function]))
    return f"Right: {task.function} holds on every input that was tried."
