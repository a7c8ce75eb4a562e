NPUS_PER_NODE=16
NNODES=16
TP=1
PP=8
VPP=6
EP=8
MBS=1
GBS=2048
SEQ_LENGTH=8192
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
"
MOE_ARGS="
    --num-experts 128 \
    --moe-intermediate-size 1536 \
    --moe-alltoall-overlap-comm \
    --use-distributed-optimizer \
"
RECOMPUTE_ARGS="
    --recompute-granularity full \
    --recompute-method block \
    --recompute-num-layers 8 \
"
TRAIN_ARGS="
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --bf16 \
    --seq-length ${SEQ_LENGTH} \
"
MODEL_PARALLEL_ARGS="
    --sequence-parallel \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --num-layers-per-virtual-pipeline-stage ${VPP} \
"
GPT_ARGS="
    --qk-layernorm \
    --reuse-fp32-param \
    --noop-layers 94,95 \
    --num-layers 96 \
    --hidden-size 4096 \
    --ffn-hidden-size 12288 \
    --num-attention-heads 64 \
    --untie-embeddings-and-output-weights \
    --swiglu \
    --num-query-groups 4 \
"
DATA_ARGS="
"
    $MODEL_PARALLEL_ARGS \
	$RECOMPUTE_ARGS \
