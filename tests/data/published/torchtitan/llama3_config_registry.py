def llama3_70b():
    model_spec = model_registry('70B')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8 * 8192, max_context_length=8192), parallelism=ParallelismConfig(tensor_parallel_degree=8), activation_checkpoint=FullAC.Config())

def llama3_405b():
    compile_config = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    model_spec = model_registry('405B', converters=[Float8LinearConverter.Config(filter_fqns=['lm_head'], model_compile_enabled=compile_config.enable and 'model' in compile_config.components)])
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192), parallelism=ParallelismConfig(tensor_parallel_degree=8), activation_checkpoint=FullAC.Config(), compile=compile_config)
