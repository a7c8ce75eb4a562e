"""Small files that once ended with a fault, took all memory or very long, by the reader that they are for."""

import json
from collections.abc import Mapping

_MESH = "[parallelism]\ndata_parallel_shard_degree=1\n"
_TWO = f"{_MESH}pipeline_parallel_degree=2\n"
_CONTEXT = "--nproc-per-node 4 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
_RANKS = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
_ROW = {"parallel_strategy": [[1, 1], [1, 1]], "stage": 0}
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "import torchtitan": (
        f"{_MESH}pipeline_parallel_degree=2000000000",
        f"{_MESH}[training]\nlocal_batch_size=0",
        "[parallelism]\ndata_parallel_shard_degree=0",
        f"{_TWO}pipeline_parallel_microbatch_size=0",
        f"{_TWO}pipeline_parallel_layers_per_stage=-1",
        f"{_TWO}pipeline_parallel_layers_per_stage=1000",
        f"{_TWO}module_fqns_per_model_part=5",
        f"{_TWO}module_fqns_per_model_part=[1,2]",
        f"{_TWO}module_fqns_per_model_part=[[1],[2]]",
        f'{_MESH}[activation_checkpoint]\nselective_ac_option="²"',
    ),
    "import megatron": (
        f"{_CONTEXT} ² 2",
        f"{_CONTEXT} 3 2",
        f"{_CONTEXT} 0 2",
        f"{_CONTEXT} 1 {'9' * 5000}",
        f"{_RANKS} --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 5",
        f"{_RANKS} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    ),
    "import accelerate": ('distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_sharding_strategy: "²"}',),
    "import deepspeed": (
        '{"train_batch_size":1,"train_micro_batch_size_per_gpu":2}',
        '{"pipeline": {"stages": 2000000000}, "data_parallel_size": 1}',
    ),
    "import mindformers": (
        "recompute_config: {recompute: [-3]}",
        "parallel_config: {pipeline_stage: 2000000000}",
        'parallel_config: {"[/x]": 1}',
    ),
    "import mindspore": (
        json.dumps({"parallel_strategy_item": {f"MatMul_a{n}.b{n}.w": _ROW for n in range(2000)}}),
        json.dumps({"parallel_strategy_item": {"MatMul_[/x]": _ROW}}),
    ),
    "tensors": (
        "\x50\0\0\0\0\0\0\0" + '{"[/x]": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.ljust(80) + "\0" * 4,
    ),
}
FOUND: Mapping[str, tuple[bytes, ...]] = {name: tuple(map(str.encode, texts)) for name, texts in _TEXTS.items()}
"""Of each reader."""
