NAME = 'deepseek_v3'

def model(use_mtp=False):
    if use_mtp:
        conf = run.Config(DeepSeekV3Config, mtp_num_layers=1)
    else:
        conf = run.Config(DeepSeekV3Config)
    return run.Config(DeepSeekModel, config=conf)

def pretrain_recipe(dir=None, name='default', num_nodes=128, num_gpus_per_node=8, fn=pretrain, use_mtp=True, performance_mode=False):
    recipe = run.Partial(fn, model=model(use_mtp), trainer=trainer(tensor_parallelism=1, pipeline_parallelism=16, expert_parallelism=64, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node), data=run.Config(MockDataModule, seq_length=4096, global_batch_size=4096, micro_batch_size=1), optim=distributed_fused_adam_with_cosine_annealing())
    recipe.trainer.strategy.num_layers_in_first_pipeline_stage = 3
    recipe.trainer.strategy.num_layers_in_last_pipeline_stage = 2
    recipe.trainer.strategy.virtual_pipeline_model_parallel_size = None
    recipe.trainer.strategy.expert_tensor_parallel_size = 1
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.trainer.strategy.ddp.grad_reduce_in_fp32 = False
    recipe.model.config.recompute_granularity = 'selective'
    recipe.model.config.recompute_modules = ['mla_up_proj', 'layernorm']
    deepep_callback = run.Config(DeepEPCallback)
    recipe.optim.config.use_precision_aware_optimizer = True
    recipe.optim.config.main_params_dtype = torch.float32
    recipe.optim.config.main_grads_dtype = torch.bfloat16
    recipe.optim.config.exp_avg_dtype = torch.bfloat16
    recipe.optim.config.exp_avg_sq_dtype = torch.bfloat16
    garbage_collection_callback = run.Config(GarbageCollectionCallback)
    comm_overlap_callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=False)
    if performance_mode:
        recipe = pretrain_performance_optimizations(recipe)
    return recipe

def pretrain_performance_optimizations(recipe):
    garbage_collection_callback = run.Config(GarbageCollectionCallback)
    comm_overlap_callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=False)
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    return recipe
