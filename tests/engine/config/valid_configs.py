"""Configurations that load on 8 ranks: every file in configs/, and some that have what those leave out. Pure data."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

Tree = dict[str, Any]

FULL: Tree = json.loads("""{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "parallel": {"data": 2, "tensor": 2, "pipeline": 2, "context": 1, "context_method": "ring",
               "expert": 2, "expert_tensor": "cut", "order": "tp-pp-dp",
               "sequence_parallel": true, "sequence_parallel_regather": true,
               "overlap": "fused", "overlap_buffer_bytes": 1000000,
               "schedule": "zb-h1", "virtual_stages": 2,
               "schedule_costs": {"forward": 1, "input": 1, "weight": 0.5, "transfer": 0.1}, "split": ["h.1", "h.2"],
               "balance": "time", "activation_limit_bytes": 1000000,
               "tensor_plan": {"*.q": "column", "*.o": "row"}, "gpus_per_node": 8,
               "tensor_proof": "full", "prove_plan": true, "check_replicas": true},
  "zero_optimization": {"stage": 3, "reduce": "step", "gather": "microbatch", "keep_gathered_bytes": 100,
                        "reduce_bucket_size": 5e6, "zero_quantized_weights": true, "zero_quantized_weights_bits": 4,
                        "zero_quantized_gradients": true, "zero_quantized_gradients_bits": 4,
                        "zero_gradient_error_feedback": false, "zero_quantized_block_size": 512,
                        "zero_hpz_partition_size": 1, "shard_size": 2,
                        "offload_optimizer": {"device": "nvme",
                         "ratio": 0.5, "pin_memory": false, "nvme_path": "/disk", "buffer_count": 3,
                         "map_memory": false, "memory_limit": null, "delayed_update": false},
                        "offload_param": {"device": "none", "pin_memory": true}},
  "wire": {"pipeline": "int8", "tensor": "exact", "block_size": 512, "error_feedback": false},
  "quantize_frozen": {"dtype": "int8", "block_size": 128, "skip": ["*.router.*"]},
  "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true,
           "check_grad_overflow": true},
  "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2,
           "consecutive_hysteresis": false, "min_loss_scale": 1},
  "torch_autocast": {"enabled": false, "dtype": "bfloat16"},
  "communication_data_type": "fp32", "keep_fp32": ["*norm*"],
  "cast_forward_inputs": true, "buffer_dtype": "bf16",
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                                             "bias_correction": true},
                "update_unused": true, "include_frozen": ["embedding.*"],
                "no_weight_decay": ["*.bias"], "groups": [{"params": ["head.*"], "lr": 1e-4, "weight_decay": 0}]},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_min_ratio": 0.1,
                "warmup_num_steps": 100, "cos_min_ratio": 0.01, "warmup_type": "linear"}},
  "ema": {"decay": 0.99},
  "serve": {"host": "0.0.0.0", "port": 8101, "token_env": "TOKEN", "models": ["Qwen/Qwen3-8B"], "folder": "service",
            "sampler": {"vllm": "http://vllm:8000"},
            "tenants": {"most": 8, "full": 2},
            "queue": {"depth": 128, "per_session": 16, "body_bytes": 1e6, "seconds": 60.0},
            "session_seconds": 60.0, "journal": {"snapshot_every": 20}, "tls_certificate": "crt", "tls_key": "key",
            "held": {"bytes": 5e8, "seconds": 30.0, "staleness": 1}},
  "weights_out": {"every": 5, "host": "0.0.0.0", "port": 8150, "deadline": 10.0, "copies": 1, "frozen": true,
                  "to": [{"folder": "versions", "keep": 3, "vllm": null, "sglang": null, "pause": "wait",
                          "check": false, "ranks": 1},
                         {"folder": null, "keep": 2, "vllm": "http://vllm:8000", "sglang": null, "pause": "keep",
                          "check": true, "ranks": 1},
                         {"folder": null, "keep": 2, "vllm": null, "sglang": "http://sglang:30000", "pause": "retract",
                          "check": true, "ranks": 2}],
                  "token_file": "token"},
  "outer": {"url": "http://store:8140", "serve": true,
    "site": 1, "sites": 3, "rule": "quorum", "period": 100, "staleness": 4,
    "least": 2, "grace": "adaptive", "fragments": 4, "delay": 5, "mixing": 0.5, "wire": "int4", "density": 0.02,
    "bits": 2, "feedback": 0.0, "weights": "steps", "lease": 20.0, "most_steps": 400, "folder": "store",
    "snapshot_every": 10, "token_file": "token", "optimizer": {"type": "SGD", "params": {"lr": 0.7, "momentum": 0.8,
    "dampening": 0.0, "weight_decay": 0.0, "nesterov": true}}},
  "gradient_clipping": 1.0, "gradient_allreduce_op": "mean",
  "managed_gradient_accumulation": true, "uneven_microbatches": false,
  "activation_checkpointing": {"mode": "offload", "save": ["matmul", "aten.bmm"], "every": 2, "others": "selective",
    "inputs": "host", "tile_tokens": null},
  "kernels": "auto", "compile": false, "seed": 1234, "initial_weights": "rank0",
  "checkpoint": {"folder": "out", "every": 10, "keep": 2, "async": true, "on_failure": "stop", "init_from": "weights",
    "memory_every": 5, "frozen": false},
  "integrity": {"every": 10, "on_failure": "warn", "rerun": true},
  "monitor": {"jsonl": "steps.jsonl", "csv": "steps.csv", "tensorboard": "board", "wandb": "project",
    "mlflow": "experiment", "every": 10, "progress": true, "metrics": ["accuracy"], "expert_load": true,
    "report": "run", "profile": null},
  "watchdog": {"enabled": false, "folder": null, "straggler_factor": null, "straggler_steps": 100},
  "communication": {"timeout_seconds": 60}, "max_skipped_steps": 50, "router_bias_update_rate": 0.001,
  "router_replay": true
}""")
"""Every key of every section."""
CYCLE: Tree = json.loads("""{
  "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true},
  "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": true}},
  "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": true}}
}""")
DEEPSPEED: Tree = json.loads("""{
  "train_batch_size": 32, "steps_per_print": 100, "wall_clock_breakdown": false, "prescale_gradients": false,
  "fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0, "initial_scale_power": 16},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true, "allgather_bucket_size": 5e8,
                        "offload_optimizer": {"device": "none", "pin_memory": true},
                        "offload_param": {"device": "none"}},
  "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": true, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
  "tensorboard": {"enabled": true, "output_path": "board", "job_name": "run"}, "wandb": {"enabled": false},
  "pipeline": {"stages": "auto"}, "tensor_parallel": {"autotp_size": 2}, "data_types": {"grad_accum_dtype": "fp32"},
  "flops_profiler": {"enabled": true, "profile_step": 1}, "comms_logger": {"enabled": false}
}""")
_FOLDER = Path(__file__).parents[3] / "configs"
VALID: Mapping[str, Tree] = MappingProxyType(
    {"full": FULL, "cycle": CYCLE, "deepspeed": DEEPSPEED}
    | {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.json"))}
)
