"""Where the arguments of Megatron-LM stand in a recipe of NeMo."""

from collections.abc import Mapping

STRATEGY, DDP, MODEL = "trainer.strategy.", "trainer.strategy.ddp.", "model.config."

PATHS: Mapping[str, str] = {
    "nnodes": "trainer.num_nodes",
    "nproc-per-node": "trainer.devices",
    "tensor-model-parallel-size": f"{STRATEGY}tensor_model_parallel_size",
    "pipeline-model-parallel-size": f"{STRATEGY}pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": f"{STRATEGY}virtual_pipeline_model_parallel_size",
    "pipeline-model-parallel-layout": f"{STRATEGY}pipeline_model_parallel_layout",
    "context-parallel-size": f"{STRATEGY}context_parallel_size",
    "sequence-parallel": f"{STRATEGY}sequence_parallel",
    "expert-model-parallel-size": f"{STRATEGY}expert_model_parallel_size",
    "expert-tensor-parallel-size": f"{STRATEGY}expert_tensor_parallel_size",
    "num-distributed-optimizer-instances": f"{STRATEGY}num_distributed_optimizer_instances",
    "ckpt-format": f"{STRATEGY}save_ckpt_format",
    "use-distributed-optimizer": f"{DDP}use_distributed_optimizer",
    "use-megatron-fsdp": f"{DDP}use_megatron_fsdp",
    "data-parallel-sharding-strategy": f"{DDP}data_parallel_sharding_strategy",
    "overlap-grad-reduce": f"{DDP}overlap_grad_reduce",
    "overlap-param-gather": f"{DDP}overlap_param_gather",
    "tp-comm-overlap": f"{MODEL}tp_comm_overlap",
    "ddp-bucket-size": f"{DDP}bucket_size",
    "cp-comm-type": f"{MODEL}cp_comm_type",
    "recompute-granularity": f"{MODEL}recompute_granularity",
    "recompute-method": f"{MODEL}recompute_method",
    "recompute-num-layers": f"{MODEL}recompute_num_layers",
    "recompute-modules": f"{MODEL}recompute_modules",
    "micro-batch-size": "data.micro_batch_size",
    "global-batch-size": "data.global_batch_size",
    "seq-length": "data.seq_length",
    "optimizer": "optim.config.optimizer",
    "clip-grad": "optim.config.clip_grad",
    "num-layers": f"{MODEL}num_layers",
    "hidden-size": f"{MODEL}hidden_size",
    "ffn-hidden-size": f"{MODEL}ffn_hidden_size",
    "num-attention-heads": f"{MODEL}num_attention_heads",
    "num-query-groups": f"{MODEL}num_query_groups",
    "kv-channels": f"{MODEL}kv_channels",
    "norm-epsilon": f"{MODEL}layernorm_epsilon",
    "attention-dropout": f"{MODEL}attention_dropout",
    "hidden-dropout": f"{MODEL}hidden_dropout",
    "rotary-base": f"{MODEL}rotary_base",
    "qk-layernorm": f"{MODEL}qk_layernorm",
    "make-vocab-size-divisible-by": f"{MODEL}make_vocab_size_divisible_by",
    "num-experts": f"{MODEL}num_moe_experts",
    "moe-router-topk": f"{MODEL}moe_router_topk",
    "moe-ffn-hidden-size": f"{MODEL}moe_ffn_hidden_size",
    "moe-token-dispatcher-type": f"{MODEL}moe_token_dispatcher_type",
    "moe-grouped-gemm": f"{MODEL}moe_grouped_gemm",
    "moe-router-load-balancing-type": f"{MODEL}moe_router_load_balancing_type",
    "moe-aux-loss-coeff": f"{MODEL}moe_aux_loss_coeff",
    "moe-shared-expert-intermediate-size": f"{MODEL}moe_shared_expert_intermediate_size",
    "moe-layer-freq": f"{MODEL}moe_layer_freq",
    "moe-router-pre-softmax": f"{MODEL}moe_router_pre_softmax",
}
"""Where the arguments of Megatron-LM stand in a recipe."""

ARGUMENTS = {path: name for name, path in PATHS.items()}
"""The other way round."""
