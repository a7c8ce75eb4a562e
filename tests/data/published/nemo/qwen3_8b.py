NAME = 'qwen3_8b'

def model():
    return qwen3_model(version=NAME)

def pretrain_recipe(dir=None, name='default', tensor_parallelism=4, pipeline_parallelism=1, pipeline_parallelism_type=None, virtual_pipeline_parallelism=None, context_parallelism=1, sequence_parallelism=False, num_nodes=1, num_gpus_per_node=8, max_steps=300000, precision='bf16-mixed', accumulate_grad_batches=1, gradient_clip_val=1.0, limit_test_batches=32, limit_val_batches=32, log_every_n_steps=10, val_check_interval=500, global_batch_size=32, micro_batch_size=2, seq_length=4096, warmup_steps=500, constant_steps=0, min_lr=3e-05, max_lr=0.0003, fn=pretrain):
    return run.Partial(fn, model=model(), trainer=qwen3_trainer(tensor_parallelism=tensor_parallelism, pipeline_parallelism=pipeline_parallelism, pipeline_parallelism_type=pipeline_parallelism_type, virtual_pipeline_parallelism=virtual_pipeline_parallelism, context_parallelism=context_parallelism, sequence_parallelism=sequence_parallelism, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node, precision=precision, accumulate_grad_batches=accumulate_grad_batches), data=run.Config(MockDataModule, seq_length=seq_length, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size), optim=distributed_fused_adam_with_cosine_annealing(precision=precision, clip_grad=gradient_clip_val))
