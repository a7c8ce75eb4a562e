NPUS_PER_NODE=16
NNODES=8
TP=1
PP=4
EP=16
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --moe-grouped-gemm \
    --moe-alltoall-overlap-comm \
    --moe-permutation-async-comm \
    --moe-token-dispatcher-type alltoall_seq \
    --first-k-dense-replace 1 \
    --moe-layer-freq 1 \
    --n-shared-experts 1 \
    --num-experts 128 \
    --moe-router-topk 8 \
    --moe-ffn-hidden-size 1408 \
    --moe-router-num-groups 1 \
    --moe-router-group-topk 1 \
    --norm-topk-prob \
    --moe-router-score-function sigmoid \
    --moe-router-enable-expert-bias \
    --moe-router-dtype fp32 \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --recompute-method uniform \
    --recompute-granularity full \
    --recompute-num-layers 1 \
    --noop-layers 1,47 \
    --sequence-parallel \
    --use-mcore-models \
    --use-flash-attn \
    --mtp-num-layers 1 \
    --kv-channels 128 \
    --use-fused-swiglu \
    --overlap-grad-reduce \
    --use-distributed-optimizer \
    --num-layers 48 \
    --hidden-size 4096 \
    --ffn-hidden-size 10944 \
    --num-attention-heads 96 \
    --seq-length 4096 \
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --disable-bias-linear \
    --add-qkv-bias \
    --position-embedding-type rope \
    --rotary-percent 0.5 \
    --rotary-base 1000000 \
    --no-rope-fusion \
    --normalization RMSNorm \
    --swiglu \
    --norm-epsilon 1e-05 \
    --untie-embeddings-and-output-weights \
    --no-gradient-accumulation-fusion \
    --bf16
