NAME = 'llama3_8b_128k'

def model():
    model_config = llama3_8b.model()
    model_config.config.seq_length = 131072
    return model_config

def trainer(num_nodes=8, num_gpus_per_node=8):
    return llama3_8b.trainer(tensor_parallelism=4, pipeline_parallelism=2, pipeline_parallelism_type=torch.bfloat16, virtual_pipeline_parallelism=None, context_parallelism=8, sequence_parallelism=True, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)

def pretrain_recipe(dir=None, name='default', num_nodes=8, num_gpus_per_node=8):
    recipe = llama3_8b.pretrain_recipe(name=name, dir=dir, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    recipe.model = model()
    recipe.trainer = trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    recipe.data = run.Config(MockDataModule, seq_length=131072, global_batch_size=512, micro_batch_size=1)
    return recipe
