NAME = 'llama31_405b'

def model():
    conf = run.Config(Llama31Config405B)
    conf.seq_length = 8192
    return run.Config(LlamaModel, config=conf)

def trainer(tensor_parallelism=8, pipeline_parallelism=8, pipeline_parallelism_type=torch.bfloat16, virtual_pipeline_parallelism=2, context_parallelism=4, sequence_parallelism=True, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True, num_nodes=64, num_gpus_per_node=8, max_steps=1168251, callbacks=None):
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, pipeline_model_parallel_size=pipeline_parallelism, pipeline_dtype=pipeline_parallelism_type, virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism, context_parallel_size=context_parallelism, sequence_parallel=sequence_parallelism, account_for_embedding_in_pipeline_split=account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split=account_for_loss_in_pipeline_split, gradient_as_bucket_view=True, ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, average_in_collective=True))
    trainer = run.Config(nl.Trainer, accumulate_grad_batches=1, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy)
    return trainer

def pretrain_recipe(dir=None, name='default', num_nodes=1, num_gpus_per_node=8, performance_mode=False, fn=pretrain):
    recipe = run.Partial(fn, model=model(), trainer=trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node), data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1), optim=distributed_fused_adam_with_cosine_annealing())
    if performance_mode:
        recipe = pretrain_performance_optimizations(recipe)
    return recipe

def pretrain_performance_optimizations(recipe):
    garbage_collection_callback = run.Config(GarbageCollectionCallback)
    mcomm_overlap_callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True, tp_comm_overlap_cfg=userbuffers_bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=50, overlap_param_gather_with_optimizer_step=False)
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    recipe.optim.config.use_precision_aware_optimizer = False
    return recipe
