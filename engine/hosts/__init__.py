"""What the modules for training loops of other libraries share: versions that are tested, and the engine as a module.

accelerate    engine.accelerate.Accelerator
huggingface   engine.huggingface.Trainer, over that Accelerator
trl           engine.trl.SFTTrainer and others, over that Trainer's parts
lightning     engine.lightning.Strategy

Each is imported when the user imports it; ``import engine`` imports none of them, nor their libraries.
"""
