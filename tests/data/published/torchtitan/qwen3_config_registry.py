def qwen3_14b():
    model_spec = model_registry('14B')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(local_batch_size=4, seq_len=4096), parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=1, context_parallel_degree=1, pipeline_parallel_degree=1), activation_checkpoint=FullAC.Config())

def qwen3_30b_a3b():
    model_spec = model_registry('30B-A3B')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(local_batch_size=2, seq_len=4096), parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=1, context_parallel_degree=1, pipeline_parallel_degree=1), activation_checkpoint=FullAC.Config())

def qwen3_32b():
    model_spec = model_registry('32B')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(local_batch_size=2, seq_len=4096), parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=1, context_parallel_degree=1, pipeline_parallel_degree=1), activation_checkpoint=FullAC.Config())
