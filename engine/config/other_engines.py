"""Setting names of other engines, each with Trine's equivalent key or the reason why there is none. Pure data.

They are arguments of Megatron-LM, FSDP2, TorchTitan, Accelerate, the Hugging Face Trainer, Lightning and PyTorch, in
lower case with underscores. Suggestions by spelling alone would name wrong keys for them.
"""

from collections.abc import Mapping
from types import MappingProxyType

_KEYS: Mapping[str, str] = MappingProxyType({
    "parallel.data":
        "dp dp_size dp_degree data_parallel data_parallelism data_parallel_degree dp_replicate dp_replicate_size"
        " data_parallel_replicate_degree",
    "parallel.data, with zero_optimization.stage 3 for sharded parameters":
        "dp_shard dp_shard_size data_parallel_shard_degree fsdp_size",
    "parallel.tensor":
        "tp tp_size tp_degree tensor_parallel tensor_parallelism tensor_parallel_size tensor_parallel_degree"
        " tensor_model_parallel_size model_parallel_size model_parallel mp mp_size autotp autotp_size",
    "parallel.expert":
        "ep ep_size ep_degree expert_parallelism expert_parallel_size expert_parallel_degree"
        " expert_model_parallel_size moe_ep_size autoep_size",
    "parallel.expert_tensor":
        "etp etp_size expert_tensor_parallel expert_tensor_parallel_size expert_tensor_parallel_degree",
    "parallel.tensor_plan": "tp_plan parallelize_plan injection_policy",
    "parallel.pipeline":
        "pp pp_size pp_degree pipeline_parallel pipeline_parallelism pipeline_parallel_size pipeline_parallel_degree"
        " pipeline_model_parallel_size num_stages num_pipeline_stages pipeline_stages",
    "parallel": "parallelism parallel_dims parallelism_config mesh device_mesh mesh_shape grid topology",
    "parallel.schedule": "pp_schedule pipeline_schedule pipeline_parallel_schedule",
    "parallel.virtual_stages":
        "num_virtual_stages virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "parallel.split":
        "split_points pipeline_split_points pipeline_parallel_split_points pipeline_model_parallel_layout",
    "parallel.sequence_parallel": "sp enable_sequence_parallel use_sequence_parallel",
    "parallel.context":
        "cp cp_size cp_degree context context_parallel context_parallelism context_parallel_size"
        " context_parallel_degree sp_size ulysses ulysses_sequence_parallel_size",
    "train_batch_size (rows of a step over all data ranks)": "global_batch_size total_batch_size gbs",
    "train_batch_size (rows of a step over all data ranks) or train_micro_batch_size_per_gpu (rows of one forward)":
        "batch_size bs batch",
    "train_micro_batch_size_per_gpu":
        "micro_batch_size microbatch_size mbs local_batch_size device_batch_size per_device_train_batch_size"
        " per_gpu_train_batch_size per_device_batch_size train_micro_batch_size pipeline_parallel_microbatch_size",
    "gradient_accumulation_steps":
        "gas accumulation accumulation_steps grad_accumulation grad_accumulation_steps grad_accum grad_accum_steps"
        " gradient_accumulation accumulate_grad_batches num_microbatches num_micro_batches microbatches"
        " n_microbatches chunks",
    "gradient_clipping":
        "max_grad_norm max_norm clip clip_grad clip_norm grad_clip grad_clipping clip_grad_norm max_gradient_norm"
        " gradient_clip gradient_clip_val gradient_clip_norm grad_norm_clip grad_clip_norm clip_grad_max_norm",
    'activation_checkpointing.mode ("full" recomputes every block)':
        "gradient_checkpointing gradient_checkpointing_enable activation_checkpoint activation_recomputation"
        " checkpoint_activations use_checkpoint use_checkpointing recompute recompute_method remat ac_mode"
        " activation_checkpoint_mode grad_checkpointing gradient_checkpointing_kwargs recompute_activations",
    'activation_checkpointing.mode ("full" or "selective"), and .save or .every for a part':
        "recompute_granularity recompute_num_layers recompute_modules selective_ac_option selective_ac"
        " per_op_sac_force_recompute_mm_shapes_by_fqns checkpoint_num_layers",
    "bf16.enabled or fp16.enabled":
        "precision mixed_precision mixed_precision_policy mp_policy dtype torch_dtype model_dtype param_dtype"
        " params_dtype mixed_precision_param compute_dtype amp_dtype half half_precision autocast autocast_dtype"
        " data_type training_dtype",
    "quantize_frozen (frozen weights in 8 or 4 bits)":
        "quantization quantization_config quantize qlora load_in_4bit load_in_8bit bnb bnb_4bit bnb_4bit_quant_type"
        " bnb_4bit_compute_dtype bitsandbytes quant_type nf4",
    "bf16.enabled": "use_bf16 bf16_full_eval bf16_training",
    "fp16.enabled": "use_fp16 half_precision_backend fp16_opt_level",
    "fp16.loss_scale (0 makes it dynamic)": "dynamic_loss_scale grad_scaler use_grad_scaler",
    "fp16.initial_scale_power": "init_scale initial_loss_scale",
    "communication_data_type":
        "reduce_dtype mixed_precision_reduce grad_reduce_dtype grad_reduce_in_fp32"
        " accumulate_allreduce_grads_in_fp32 fp32_reduce_scatter allreduce_dtype",
    "keep_fp32": "keep_in_fp32 keep_in_fp32_modules _keep_in_fp32_modules fp32_modules",
    "cast_forward_inputs": "cast_inputs auto_cast",
    "buffer_dtype": "buffers_dtype",
    "zero_optimization.stage (1: optimizer state, 2: gradients too, 3: parameters too)":
        "zero zero_stage zero_level zero1 zero2 zero3 zero_config fsdp fsdp2 fsdp_config fsdp_plugin"
        " fully_sharded_data_parallel fully_shard sharding_strategy fsdp_sharding_strategy sharded_ddp"
        " data_parallel_sharding_strategy ddp_sharded deepspeed_plugin",
    "zero_optimization.stage (1 shards the optimizer state)":
        "use_distributed_optimizer distributed_optimizer zero_redundancy_optimizer shard_optimizer",
    'zero_optimization.gather ("step" keeps gathered parameters until the step ends)':
        "reshard_after_forward fsdp_reshard_after_forward",
    "zero_optimization.offload_optimizer.device":
        "optimizer_cpu_offload offload optimizer_offload offload_policy fsdp_offload_params"
        " enable_cpu_offload offload_optimizer_device",
    "zero_optimization.reduce_bucket_size (in elements)":
        "bucket_cap_mb bucket_size ddp_bucket_size ddp_bucket_cap_mb grad_bucket_size",
    "optimizer.type": "optim optimizer_name optimizer_type optimizer_class opt optimizer.name optimizer.class",
    "optimizer.params.lr": "lr learning_rate base_lr max_lr peak_lr init_lr initial_lr lr_max max_learning_rate",
    "optimizer.params.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas beta_1 beta_2",
    "optimizer.params.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.params.weight_decay": "wd decay weight_decay adam_weight_decay l2",
    "optimizer.params.momentum": "sgd_momentum",
    "ema.decay": "ema_decay use_ema",
    "optimizer.groups": "param_groups parameter_groups optimizer.param_groups lr_groups optimizer_groups",
    "optimizer.no_weight_decay": "no_decay no_weight_decay_params weight_decay_exclude decay_exclude",
    "scheduler": "lr_scheduler lr_schedule learning_rate_schedule learning_rate_scheduler",
    "scheduler.type":
        "lr_scheduler_type lr_decay_style decay_type scheduler_type schedule_type lr_policy lr_scheduler_name"
        " scheduler.name scheduler.decay_type",
    "scheduler.params.warmup_num_steps":
        "warmup warmup_steps warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters lr_warmup_samples",
    "scheduler.params.warmup_num_steps, as a number of steps":
        "warmup_ratio warmup_fraction lr_warmup_fraction warmup_proportion",
    "scheduler.params.total_num_steps": "lr_decay_iters lr_decay_steps lr_decay_samples decay_steps decay_iters",
    "scheduler.params.cos_min_ratio of WarmupCosineLR or warmup_min_lr of the others":
        "min_lr lr_min end_lr final_lr min_learning_rate min_lr_ratio min_lr_factor",
    "compile": "torch_compile use_compile use_torch_compile compile_model torchcompile jit dynamo_backend"
        " dynamo_config torch_compile_backend",
    'kernels ("reference" is plain torch, "triton" its own kernels)':
        "fused fused_kernels use_fused_kernels use_triton use_liger_kernel use_liger liger_kernel"
        " replace_with_kernel_inject kernel_inject transformer_impl",
    "seed": "random_seed manual_seed torch_seed rng_seed",
    "checkpoint.every":
        "save_steps save_interval save_every save_freq save_every_n_steps checkpoint_interval checkpoint_every"
        " checkpoint_freq ckpt_interval ckpt_every every_n_train_steps checkpoint.interval checkpoint.save_interval"
        " checkpoint.interval_steps",
    "checkpoint.keep":
        "save_total_limit keep_latest_k max_checkpoints keep_last_n total_limit save_top_k checkpoint.keep_latest_k"
        " checkpoint.limit checkpoint.total_limit",
    "checkpoint.folder":
        "output_dir out_dir save save_dir save_path checkpoint_dir checkpoint_path checkpoint_folder ckpt_dir"
        " ckpt_path dump_folder default_root_dir project_dir checkpoint.dir checkpoint.path checkpoint.save_dir",
    "checkpoint.async": "async_save async_checkpoint async_checkpointing async_mode checkpoint.async_mode"
        " checkpoint.async_save",
    "checkpoint.init_from":
        "pretrained pretrained_model pretrained_model_name_or_path model_name_or_path init_weights"
        " pretrained_checkpoint initial_load_path checkpoint.initial_load_path from_pretrained",
    "monitor.every":
        "log_interval log_every log_freq log_steps logging_steps log_every_n_steps logging_interval print_every"
        " print_interval print_freq metrics.log_freq report_every",
    "monitor.tensorboard": "tensorboard_dir tensorboard_log_dir logging_dir enable_tensorboard use_tensorboard",
    "monitor.jsonl (a file) or monitor.tensorboard (a folder)":
        "logging logger log log_dir log_file log_path metrics report_to log_with trackers",
    "communication.timeout_seconds":
        "timeout ddp_timeout timeout_seconds nccl_timeout init_timeout_seconds train_timeout_seconds"
        " distributed_timeout_minutes",
    "monitor.wandb": "wandb_project wandb_config use_wandb enable_wandb",
    "monitor.mlflow": "mlflow mlflow_experiment",
})  # fmt: skip

_LOOP = "the loop is yours; call eng.train_batch(batch) as often as you train"
_EVALUATION = "your loop decides when to evaluate; call eng.eval_batch(batch)"
_DATA = "your loop reads the data; pass each batch to eng.train_batch"
_MODEL = "the model is the one passed to engine.initialize"
_LAUNCHER = 'the launcher (torchrun) sets the number of processes, and parallel.data "auto" uses all of them'
_AUTOMATIC = "the engine does this by itself"
_NOT_KEYS: Mapping[str, str] = MappingProxyType({
    _LOOP:
        "epochs epoch num_epochs n_epochs max_epochs num_train_epochs train_epochs total_epochs max_steps steps"
        " num_steps n_steps total_steps train_steps training_steps num_training_steps max_train_steps max_iters"
        " num_iters iterations train_iters train_samples total_iters max_iterations training trainer training_args"
        " train do_train max_time",
    _EVALUATION:
        "eval_interval eval_iters eval_steps eval_every eval_freq evaluation_strategy eval_strategy do_eval eval"
        " evaluation validation val_check_interval val_interval per_device_eval_batch_size eval_batch_size"
        " check_val_every_n_epoch load_best_model_at_end metric_for_best_model early_stopping",
    _DATA:
        "data dataset datasets data_path train_data data_dir train_file dataloader data_loader training_data"
        " num_workers dataloader_num_workers shuffle split_batches dispatch_batches tokenizer tokenizer_type seq_len"
        " seq_length sequence_length max_seq_len max_seq_length max_length context_length block_size packing"
        " dataloader_pin_memory drop_last",
    _MODEL:
        "model model_name model_type model_config architecture num_layers n_layer n_layers num_hidden_layers"
        " hidden_size n_embd d_model num_attention_heads n_head n_heads num_heads vocab_size dropout lora lora_config"
        " peft peft_config",
    "the attention is the model's own; choose it there":
        "attention attn_implementation flash_attn flash_attention use_flash_attn use_flash_attention attention_backend",
    _LAUNCHER:
        "world_size num_processes num_gpus n_gpu n_gpus gpus nproc nproc_per_node nnodes num_nodes num_machines"
        " devices accelerator machine_rank rank local_rank node_rank master_addr master_port main_process_ip"
        " main_process_port hostfile launcher strategy distributed_type compute_environment rdzv_backend downcast_bf16",
    "the process group is NCCL on GPUs and gloo otherwise, or the one that you opened before":
        "backend dist_backend distributed_backend ddp_backend comm comm_backend distributed",
    _AUTOMATIC:
        "find_unused_parameters ddp_find_unused_parameters static_graph broadcast_buffers gradient_as_bucket_view"
        " auto_wrap_policy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap"
        " transformer_layer_cls wrap_policy backward_prefetch fsdp_backward_prefetch forward_prefetch"
        " fsdp_forward_prefetch limit_all_gathers use_orig_params fsdp_use_orig_params sync_module_states"
        " fsdp_sync_module_states fsdp_cpu_ram_efficient_loading fsdp_state_dict_type state_dict_type fsdp_version"
        " overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step align_grad_reduce"
        " tp_comm_overlap zero3_init_flag zero3_save_16bit_model sync_batchnorm no_sync",
    "the engine finds the experts of the model; parallel.expert is the number of ranks that share them":
        "experts num_experts",
    "training is in fp32, bf16 or fp16 (bf16.enabled, fp16.enabled)":
        "fp8 float8 fp8_config fp8_recipe fp8_format enable_fp8 fp4 int8 torchao",
    "TF32 is a switch of torch: torch.backends.cuda.matmul.allow_tf32": "tf32 allow_tf32 use_tf32",
    "call eng.load_checkpoint(folder) before the loop":
        "resume resume_from resume_from_checkpoint auto_resume load load_dir load_path load_checkpoint ckpt_resume"
        " checkpoint.resume checkpoint.load checkpoint.load_step checkpoint.resume_from finetune",
    "give the keys of that file here, or its path as config": "deepspeed deepspeed_config deepspeed_config_file"
        " ds_config deepspeed_path config_file",
    "profile your loop with torch.profiler; the step report has seconds, FLOPs and bytes":
        "profile profiler profiling enable_profiling use_profiler memory_profiling enable_memory_snapshot",
    "the engine computes an exponential average, ema; compute other averages in your loop": "swa",
})  # fmt: skip

_ANSWERS = MappingProxyType({word: key for key, words in _KEYS.items() for word in words.split()})
_REASONS = MappingProxyType({word: why for why, words in _NOT_KEYS.items() for word in words.split()})


def other_engines_word(path: str) -> str | None:
    """Returns advice about a configuration key of another training engine; None if the key is unknown.

    The advice is Trine's equivalent key, or the reason why there is none. Ambiguous words, such as ``name``, are
    recognized only with their section, as in ``optimizer.name``.
    """
    plain = path.lower().replace("-", "_")
    section, _, word = plain.rpartition(".")
    written = word != "ep" or section in ("", "parallel")
    if key := _ANSWERS.get(plain) or (_ANSWERS.get(word) if written else None):
        return f"the key for it here is {key}"
    why = _REASONS.get(plain) or (_REASONS.get(word) if section in ("", "parallel") else None)
    return f"no key here: {why}" if why else None
