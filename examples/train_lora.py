"""Fine-tune a causal language model with LoRA on chat messages, by transformers' Trainer and peft alone.

Writes the adapter to OUTPUT, and beside it ``tokenised.jsonl``, the training set as the model sees it.
"""

import argparse
import json
from pathlib import Path

import peft
import torch
import transformers


def tokenise(tokenizer, messages: list[dict]) -> dict:
    """Ids of a conversation; only the last answer has labels, everything before it is masked with -100."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    masked = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * masked + ids[masked:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("data", type=Path, nargs="+", help="JSONL files with `messages` on every line")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--no-bf16", action="store_true", help="train in fp32, on hardware without bf16")
    options = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    lines = [line for path in options.data for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [tokenise(tokenizer, json.loads(line)["messages"]) for line in lines]
    options.output.mkdir(parents=True, exist_ok=True)
    tokenised = "".join(json.dumps(row) + "\n" for row in rows)
    (options.output / "tokenised.jsonl").write_text(tokenised, encoding="utf-8")

    transformers.set_seed(0)  # before the adapter is initialised
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    settings = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    trainer = transformers.Trainer(
        model=peft.get_peft_model(model, settings),
        args=transformers.TrainingArguments(
            output_dir=str(options.output / "trainer"),
            per_device_train_batch_size=options.batch,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            bf16=not options.no_bf16,
            use_cpu=not torch.accelerator.is_available(),  # the Trainer does bf16 on a CPU only when told so
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            seed=0,
        ),
        train_dataset=rows,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, padding=True),
    )
    trainer.train()
    trainer.model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
