NPUS_PER_NODE=8
NNODES=8
TP=1
PP=1
EP=64
CP=16
CP_TYPE=ulysses_cp_algo
NUM_LAYERS=8
SEQ_LEN=262144
MBS=1
GBS=16
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
"
FP8="
    --fp8-format e4m3 \
    --fp8-recipe mxfp8 \
"
MLA_ARGS="
    --multi-latent-attention \
    --num-experts 128 \
    --moe-ffn-hidden-size 2048 \
"
MEM_ARGS="
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
    --swap-optimizer \
"
GPT_ARGS="
    --use-distributed-optimizer \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --sequence-parallel \
    --context-parallel-size ${CP} \
    --context-parallel-algo  ${CP_TYPE} \
    --expert-tensor-parallel-size 1 \
    --num-layers ${NUM_LAYERS} \
    --hidden-size 7168 \
    --ffn-hidden-size 18432 \
    --num-attention-heads 128 \
    --seq-length ${SEQ_LEN} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --bf16
"
    $FP8 \
