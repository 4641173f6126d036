"""Fine-tune a causal model on a text file with Accelerate; it resumes after the last finished epoch."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from engine.huggingface import Accelerator

config, source, text, folder = sys.argv[1:5]
accelerator = Accelerator(engine_config=config, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
tokenizer = AutoTokenizer.from_pretrained(source)
ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"])
rows = ids[: len(ids) // 32 * 32].view(-1, 32)

model = AutoModelForCausalLM.from_pretrained(source)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 40 * accelerator.num_processes)
loader = DataLoader(rows[4:], batch_size=4 // accelerator.num_processes)
evaluation = DataLoader(rows[:4], batch_size=4 // accelerator.num_processes)
model, optimizer, loader, evaluation, scheduler = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)

done = [int(path.name) for path in Path(folder).glob("[0-9]")]
if done:
    accelerator.load_state(f"{folder}/{max(done)}")
for epoch in range(max(done, default=-1) + 1, 2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(f"{folder}/{epoch}")

model.eval()
with torch.no_grad():
    losses = [model(input_ids=batch, labels=batch).loss.repeat(len(batch)) for batch in evaluation]
mean = torch.cat([accelerator.gather_for_metrics(each) for each in losses]).mean()
accelerator.print(f"validation loss {float(mean):.5f}")
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
)
accelerator.end_training()
