def llama3_70b_pretrain_64gpu_h100_bf16_config():
    cfg = llama3_70b_pretrain_config()
    cfg.mixed_precision = _perf_precision('bf16')
    cfg.model.should_pad_vocab = True
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 256
    cfg.train.micro_batch_size = 1
    cfg.comm_overlap.tp_comm_overlap_cfg = userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    cfg.model.moe_token_dispatcher_type = 'alltoall'
    _llama_benchmark_common(cfg)
    _enable_overlap_param_gather_with_optimizer_step(cfg)
    return cfg
