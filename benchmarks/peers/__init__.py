"""Contenders: the same model trained by plain torch, DDP, FSDP2, DTensor, pipelining, DeepSpeed and Trine."""
