#!/bin/bash
GPUS_PER_NODE=4
export TP=2
LAYERS=4
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES:-1}"
MODEL_ARGS=(
    --num-layers $LAYERS
    --seq-length 128
)
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-layout 'Et*2|t*2L' \
    --pipeline-model-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 8 --bf16
