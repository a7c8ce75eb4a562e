GPUS_PER_NODE=8
NNODES=1
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --sequence-parallel \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --micro-batch-size 4 \
    --global-batch-size 16 \
    --fp16
"
DATA_ARGS="
"
OUTPUT_ARGS="
"
