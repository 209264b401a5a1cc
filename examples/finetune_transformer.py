"""Fine-tune a transformer by the Trainer of transformers, before and after its norms are swapped.

pip install "normswap[transformers]" && python examples/finetune_transformer.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import normswap
from normswap.integrations.transformers import NormSwap

ON_GPU = torch.cuda.is_available()
WIDTH, LAYERS, LENGTH, BATCH = (768, 12, 128, 32) if ON_GPU else (32, 2, 16, 8)


def model() -> BertForSequenceClassification:
    """A BERT with random weights, in the place of ``from_pretrained``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    return BertForSequenceClassification(BertConfig(vocab_size=100, num_attention_heads=4, num_labels=2, **sizes))


def data(rows: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of random tokens; those whose first token is in the upper half are of class 1."""
    ids = torch.randint(0, 100, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] >= 50).long()} for row in ids]


def train(steps: int, *callbacks: NormSwap) -> tuple[BertForSequenceClassification, float, float]:
    """The trained model, its loss, and the seconds a step took."""
    tuned = model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True, seed=0
        )
        trainer = Trainer(tuned, arguments, train_dataset=data(steps * BATCH), callbacks=[*callbacks])
        told = trainer.train().metrics
    return tuned, told["train_loss"], told["train_runtime"] / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    batch = {name: torch.stack([row[name] for row in data(BATCH)]) for name in ("input_ids", "labels")}
    train(3)  # warm up
    _, loss, before = train(steps)
    tuned, same_loss, after = train(steps, NormSwap(example_kwargs=batch))
    print(normswap.report(tuned))
    print(f"loss {loss:.4f} before, {same_loss:.4f} after")
    print(f"a step: {before * 1e3:.2f} ms before, {after * 1e3:.2f} ms after")


if __name__ == "__main__":
    main()
