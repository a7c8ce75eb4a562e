NPUS_PER_NODE=8
NNODES=2
TP=4
PP=4
EP=1
MBS=1
GBS=64
SEQ_LEN=4096
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --expert-model-parallel-size ${EP} \
    --num-experts 16 \
    --moe-router-topk 2 \
    --moe-grouped-gemm \
    --moe-input-jitter-eps 0.01 \
    --moe-token-dispatcher-type allgather \
    --moe-permutation-async-comm \
    --moe-layer-freq -1 \
    --first-k-dense-replace -1 \
    --use-mcore-models \
    --no-rope-fusion \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage 2 \
    --sequence-parallel \
    --seq-length ${SEQ_LEN} \
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 6400 \
    --num-attention-heads 32 \
    --group-query-attention \
    --num-query-groups 8 \
    --rotary-base 10000 \
    --add-qkv-bias \
    --disable-bias-linear \
    --add-dense-bias \
    --add-output-layer-bias \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --normalization LayerNorm \
    --norm-epsilon 1e-5 \
    --swiglu \
    --bf16 \
    --use-distributed-optimizer \
    --use-flash-attn \
    --use-fused-swiglu \
    --use-fused-rotary-pos-emb \
    --no-gradient-accumulation-fusion \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS}
