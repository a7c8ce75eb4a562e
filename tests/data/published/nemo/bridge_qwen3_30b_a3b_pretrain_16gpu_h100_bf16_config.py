def qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config():
    cfg = _qwen3_30b_a3b_default_pretrain_config()
    cfg.mixed_precision = _perf_precision('bf16')
    cfg.model.moe_router_force_load_balancing = True
    cfg.model.moe_permute_fusion_into_hybridep = True
    cfg.comm_overlap.overlap_moe_expert_parallel_comm = True
    cfg.comm_overlap.delay_wgrad_compute = False
    _benchmark_common(cfg)
    return cfg
