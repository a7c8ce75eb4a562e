NPUS_PER_NODE=16
NNODES=1
TP=1
PP=1
MBS=2
GBS=256
SEQ_LENGTH=4096
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --use-rotary-position-embeddings \
    --use-fused-swiglu \
    --use-distributed-optimizer \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --bf16 \
    --seq-length ${SEQ_LENGTH} \
    --tensor-model-parallel-size ${TP} \
    --sequence-parallel \
    --pipeline-model-parallel-size ${PP} \
    --use-mcore-models \
    --qk-layernorm \
    --mamba-d-conv 4 \
    --mamba-expand 1 \
    --linear-key-head-dim 256 \
    --linear-num-key-heads 8 \
    --linear-num-value-heads 8 \
    --linear-value-head-dim 256 \
    --partial-rotary-factor 0.25 \
    --num-layers 24 \
    --hidden-size 2048 \
    --ffn-hidden-size 5632 \
    --num-attention-heads 16 \
    --rotary-base 10000 \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --no-gradient-accumulation-fusion \
    --group-query-attention \
    --num-query-groups 2 \
    --norm-epsilon 1e-06 \
    --mamba-chunk-size 64 \
    --use-triton-gdn \
    --loss-compute-mode default \
    --loss-chunk-size 1024 \
    --no-enable-linear-qkv \
    --use-ascend-mc2
