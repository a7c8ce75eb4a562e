NPUS_PER_NODE=8
NNODES=1
TP=8
PP=1
CP=1
MBS=4
GBS=128
SEQ_LENGTH=4096
CP_TYPE='ulysses_cp_algo'
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --use-fused-swiglu \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --use-ascend-coc \
    --coc-fused-kernel \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --bf16 \
    --seq-length ${SEQ_LENGTH} \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --context-parallel-algo ${CP_TYPE} \
    --use-mcore-models \
    --kv-channels 128 \
    --qk-layernorm \
    --num-layers 40 \
    --hidden-size 5120 \
    --untie-embeddings-and-output-weights \
    --num-attention-heads 40 \
    --ffn-hidden-size 17408 \
    --use-rotary-position-embeddings \
    --rotary-base 1000000 \
    --disable-bias-linear \
    --swiglu \
    --normalization RMSNorm \
    --position-embedding-type rope \
    --norm-epsilon 1e-6 \
    --no-gradient-accumulation-fusion \
    --group-query-attention \
    --num-query-groups 8 \
    --sequence-parallel
