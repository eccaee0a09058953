"""The harness's side of ``decoys.py``: it runs in the harness's own environment, so it knows nothing of ``lib``."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch


def main(file: str, batch: int) -> None:
    from lm_eval.api.instance import Instance  # here, since our own side takes `watched` from this file
    from lm_eval.models.huggingface import HFLM

    task = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    harness = HFLM(pretrained=task["model"], device="cpu", dtype="float32", batch_size=batch)
    check_tokens(harness, task["strings"])
    pairs = [(string["context"], string["continuation"]) for string in task["strings"]]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    with watched(harness.model) as seen:
        answers = harness.loglikelihood(requests, disable_tqdm=True)
    print(json.dumps(seen | {"nll": [-loglikelihood for loglikelihood, _ in answers]}))


def check_tokens(harness, strings: list[dict]) -> None:
    """Refuse strings that the harness reads as other tokens than we do, or divides elsewhere."""
    for string in strings:
        context, continuation = harness._encode_pair(string["context"], string["continuation"])
        seen, expected = [context, continuation], [string["context_ids"], string["continuation_ids"]]
        if seen != expected:
            raise SystemExit(f"the harness reads {string} as {seen}, expected {expected}")


@contextlib.contextmanager
def watched(model: torch.nn.Module) -> Iterator[dict]:
    """Seconds that the block takes, and the tokens, padding included, that go through ``model`` in it."""
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long))  # loading may only map the weights; this reads them
    seen = {"tokens": 0}

    def count(_, inputs: tuple[torch.Tensor]) -> None:
        seen["tokens"] += inputs[0].numel()

    with model.get_input_embeddings().register_forward_pre_hook(count):
        started = time.perf_counter()
        yield seen
        seen["seconds"] = time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
