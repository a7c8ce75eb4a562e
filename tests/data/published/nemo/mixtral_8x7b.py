NAME = 'mixtral_8x7b'

def model():
    return run.Config(MixtralModel, config=run.Config(MixtralConfig8x7B))

def trainer(tensor_parallelism=1, pipeline_parallelism=4, pipeline_parallelism_type=torch.bfloat16, virtual_pipeline_parallelism=8, context_parallelism=1, sequence_parallelism=False, expert_parallelism=8, num_nodes=8, num_gpus_per_node=8, max_steps=1168251, callbacks=None):
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, pipeline_model_parallel_size=pipeline_parallelism, pipeline_dtype=pipeline_parallelism_type, virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism, context_parallel_size=context_parallelism, sequence_parallel=sequence_parallelism, expert_model_parallel_size=expert_parallelism, gradient_as_bucket_view=True, ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, average_in_collective=True))
    trainer = run.Config(nl.Trainer, accumulate_grad_batches=1, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=run.Config(nl.MegatronMixedPrecision, precision='bf16-mixed'), strategy=strategy)
    return trainer

def pretrain_recipe(dir=None, name='default', num_nodes=8, num_gpus_per_node=8, performance_mode=False, fn=pretrain):
    recipe = run.Partial(fn, model=model(), trainer=trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node), data=run.Config(MockDataModule, seq_length=4096, global_batch_size=512, micro_batch_size=1), optim=distributed_fused_adam_with_cosine_annealing())
    if performance_mode:
        recipe = pretrain_performance_optimizations(recipe)
    return recipe

def pretrain_performance_optimizations(recipe):
    garbage_collection_callback = run.Config(GarbageCollectionCallback)
    mcomm_overlap_callback = run.Config(MegatronCommOverlapCallback, overlap_param_gather_with_optimizer_step=False)
    recipe.trainer.strategy.expert_model_parallel_size = 1
    recipe.trainer.strategy.tensor_model_parallel_size = 8
    recipe.trainer.strategy.sequence_parallel = True
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    recipe.optim.config.use_precision_aware_optimizer = False
    return recipe
