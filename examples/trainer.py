"""Train a tiny Llama with transformers' Trainer and all optimizer state offloaded: python examples/trainer.py

Needs pip install -c constraints.txt '.[transformers]'; no GPU and no network. Model and data are random, so only the
mechanics are of interest.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hostward
from hostward.integrations.transformers import offloading

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=512,
    max_position_embeddings=64,
)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (32, 32))]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=2,
        save_steps=4,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    # The one line: Trainer(...) becomes offloading(Trainer, ...)(...).
    trainer = offloading(
        Trainer,
        offload_fraction=1.0,
        activations=hostward.Activations(num_layers=2, min_bytes=0),  # of the first two layers, however small
    )(model=LlamaForCausalLM(config), args=args, train_dataset=data)
    trainer.train()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")

optimizer = trainer.optimizer.optimizer  # a hostward.AdamW
print(optimizer.plan.explain())
print(f"last gradient norm {optimizer.grad_norm:.3f}")
