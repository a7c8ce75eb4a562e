def llama31_405b_pretrain_1024gpu_h100_bf16_config():
    cfg = llama31_405b_pretrain_config()
    cfg.mixed_precision = _perf_precision('bf16')
    cfg.model.should_pad_vocab = True
    cfg.model.seq_length = 8192
    cfg.model.tensor_model_parallel_size = 8
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.context_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 8
    cfg.model.sequence_parallel = True
    cfg.model.moe_token_dispatcher_type = 'alltoall'
    cfg.train.global_batch_size = 1536
    cfg.train.micro_batch_size = 1
    cfg.comm_overlap.tp_comm_overlap_cfg = userbuffers_bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192
    _llama_benchmark_common(cfg)
    _enable_overlap_param_gather_with_optimizer_step(cfg)
    return cfg
