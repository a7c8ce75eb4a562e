NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=8
PP=2
EP=1
CP=1
SEQ_LENGTH=4096
DISTRIBUTED_ARGS="
    --worker_num $WORLD_SIZE \
    --micro-batch-size 1 \
    --global-batch-size 16 \
    --bf16 \
    --seq-length ${SEQ_LENGTH} \
"
MODEL_PARALLEL_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --context-parallel-size ${CP} \
    --context-parallel-algo ${CP_TYPE} \
"
GPT_ARGS="
    --qk-layernorm \
    --num-layers 64 \
    --hidden-size 5120 \
    --ffn-hidden-size 25600 \
    --num-attention-heads 64 \
    --untie-embeddings-and-output-weights \
    --swiglu \
    --num-query-groups 8 \
"
DATA_ARGS="
"
    $MODEL_PARALLEL_ARGS \
