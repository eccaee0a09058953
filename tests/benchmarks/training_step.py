"""Seconds a step of benign fine-tuning, in a process of its own: ours, or ``transformers.Trainer`` with peft.

Both get the same model, the same LoRA and the same examples in batches of the sweep's size, and both print the median
over the steps after the second one. The Trainer is what its documentation shows: padding to the longest example,
labels of -100 outside the target, its defaults for everything that is not named here.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import click
import peft
import torch
import transformers

from lib import adapters, benign, config, models, training
from lib.encoding import Encoded, Encoder


@click.command()
@click.option("--method", type=click.Choice(["ours", "trainer"]), required=True)
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), required=True)
@click.option("--source", default="SAFETY")
@click.option("--steps", default=10)
@click.option("--scale", default="laptop")
def main(method: str, precision: str, source: str, steps: int, scale: str) -> None:
    settings = config.load_scale(scale)
    common = config.load_sweep(settings).training
    torch.set_num_threads(settings.threads)
    encoder = Encoder(models.load(settings.backbone))
    rows = encoder.encode(benign.generate(source, steps * common.batch_size, 0, encoder.backbone.takes_images))
    run = ours if method == "ours" else trainer
    seconds, losses = run(encoder, rows, common, precision, steps)
    tokens = sum(len(row.input_ids) for row in rows) / steps
    result = {"method": method, "precision": precision, "source": source, "tokens_a_step": round(tokens)}
    print(json.dumps(result | {"seconds": round(statistics.median(seconds[2:]), 4), "last_loss": round(losses[-1], 4)}))


def ours(encoder: Encoder, rows: list[Encoded], common: config.BenignTraining, precision: str, steps: int):
    """Times and losses of our training loop."""
    lora = config.LoraSettings(
        rank=common.rank,
        alpha=common.alpha,
        learning_rate=2e-4,
        warmup_steps=common.warmup_steps,
        batch_size=common.batch_size,
        max_steps=steps,
        check_every=steps + 1,
        seed=0,
        precision=precision,
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        run = training._Training(encoder, rows, lora, Path(folder))
        for _ in range(steps):
            started = time.perf_counter()
            run._advance()
            times.append(time.perf_counter() - started)
    return times, [entry["loss"] for entry in run.log]


def trainer(encoder: Encoder, rows: list[Encoded], common: config.BenignTraining, precision: str, steps: int):
    """Times and losses of the Trainer on the same examples."""
    model = encoder.backbone.copy().model
    model.config.text_config.vocab_size = model.lm_head.out_features  # its own loss takes this for the logits' width
    lora = peft.LoraConfig(r=common.rank, lora_alpha=common.alpha, target_modules=adapters.ADAPTED.pattern)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=common.batch_size,
            max_steps=steps,
            learning_rate=2e-4,
            warmup_steps=common.warmup_steps,
            bf16=precision == "bf16",
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        examples = [_example(encoder, row) for row in rows]
        run = transformers.Trainer(
            model=peft.get_peft_model(model, lora),
            args=arguments,
            train_dataset=examples,
            data_collator=_Collator(
                encoder.backbone.tokenizer.pad_token_id or 0, getattr(model.config, "image_token_id", None)
            ),
            callbacks=[clock],
        )
        run.train()
    return clock.times, [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def _example(encoder: Encoder, row: Encoded) -> dict:
    labels = [-100] * row.target_start + list(row.target_ids)
    example = {"input_ids": list(row.input_ids), "labels": labels}
    if row.canary.image is not None:
        example |= dict(encoder._processed(row.canary.image))
    return example


class _Collator:
    """Pads to the longest example, and puts pictures one behind the other as Qwen2.5-VL wants them."""

    def __init__(self, padding: int, image_token: int | None):
        self.padding, self.image_token = padding, image_token

    def __call__(self, examples: list[dict]) -> dict:
        def padded(name: str, value: int) -> torch.Tensor:
            rows = [torch.tensor(example[name]) for example in examples]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        batch = {"input_ids": padded("input_ids", self.padding), "labels": padded("labels", -100)}
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        if "pixel_values" in examples[0]:
            for name in ("pixel_values", "image_grid_thw"):
                batch[name] = torch.cat([example[name] for example in examples])
            slots = batch["input_ids"] == self.image_token
            batch["mm_token_type_ids"] = slots.int()
        return batch


class _Clock(transformers.TrainerCallback):
    """Wall time between the beginnings of steps and their ends."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_begin(self, *_, **__) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        self.times.append(time.perf_counter() - self.started)


if __name__ == "__main__":
    main()
