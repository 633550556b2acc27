"""The Trainer of transformers, with DDP or FSDP2: ``with_transformers.py ddp|fsdp2 cpu|device``."""

import json
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

how, device = sys.argv[1:3]
set_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
options: dict[str, object] = {}
if how == "fsdp2":
    config = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": config | {"cpu_ram_efficient_loading": False}}
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    max_steps=10,
    logging_steps=5,
    report_to=[],
    save_strategy="no",
    use_cpu=device == "cpu",
    learning_rate=1e-3,
    disable_tqdm=True,
    **options,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
trained, tested = trainer.train(), trainer.evaluate()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
if arguments.process_index == 0:
    print("RESULT", json.dumps([trained.training_loss, *losses, tested["eval_loss"]]))
torch.distributed.destroy_process_group()
