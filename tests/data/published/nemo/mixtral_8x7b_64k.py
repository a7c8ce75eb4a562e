NAME = 'mixtral_8x7b_64k'

def model():
    model_config = mixtral_8x7b.model()
    model_config.config.seq_length = 65536
    return model_config

def trainer(num_nodes=16, num_gpus_per_node=8):
    return mixtral_8x7b.trainer(tensor_parallelism=8, pipeline_parallelism=4, pipeline_parallelism_type=torch.bfloat16, virtual_pipeline_parallelism=None, context_parallelism=4, sequence_parallelism=True, expert_parallelism=1, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node, callbacks=[run.Config(TimingCallback)])

def pretrain_recipe(dir=None, name='default', num_nodes=16, num_gpus_per_node=8):
    recipe = mixtral_8x7b.pretrain_recipe(name=name, dir=dir, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    recipe.model = model()
    recipe.trainer = trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    recipe.data = run.Config(MockDataModule, seq_length=65536, global_batch_size=512, micro_batch_size=1)
    return recipe
