def deepseek_v3_16b():
    model_spec = model_registry('16B', attn_backend='flex')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(local_batch_size=4, seq_len=4096), parallelism=ParallelismConfig(pipeline_parallel_schedule='Interleaved1F1B', expert_parallel_degree=8), activation_checkpoint=SelectiveAC.Config(), compile=CompileConfig(enable=True, components=['loss']))

def deepseek_v3_671b():
    model_spec = model_registry('671B', attn_backend='flex')
    return Trainer.Config(model_spec=model_spec, optimizer=default_adamw(), training=TrainingConfig(local_batch_size=4, seq_len=4096), parallelism=ParallelismConfig(pipeline_parallel_schedule='Interleaved1F1B', expert_parallel_degree=2), activation_checkpoint=SelectiveAC.Config(), compile=CompileConfig(enable=True, components=['loss']))
