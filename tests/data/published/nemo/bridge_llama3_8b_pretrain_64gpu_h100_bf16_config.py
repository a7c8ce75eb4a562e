def llama3_8b_pretrain_8gpu_h100_bf16_config():
    cfg = llama3_8b_pretrain_config()
    cfg.mixed_precision = _perf_precision('bf16')
    cfg.model.should_pad_vocab = True
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.context_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.sequence_parallel = False
    cfg.train.global_batch_size = 128
    cfg.train.micro_batch_size = 1
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    cfg.model.moe_token_dispatcher_type = 'alltoall'
    _llama_benchmark_common(cfg)
    return cfg

def llama3_8b_pretrain_64gpu_h100_bf16_config():
    cfg = _with_global_batch_size(llama3_8b_pretrain_8gpu_h100_bf16_config(), 1024)
    return cfg
