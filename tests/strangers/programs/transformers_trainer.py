# needs: transformers accelerate
# steps: 4
"""transformers' own Trainer: accumulation over two batches, clipping, a schedule, an evaluation."""

import tempfile

import torch
from ending import told
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 12))]
with tempfile.TemporaryDirectory() as folder:
    words = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="cosine",
        warmup_steps=1,
    )
    trainer = Trainer(model, words, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
told([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)
