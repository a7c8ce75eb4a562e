NPUS_PER_NODE=16
NNODES=4
TP=8
PP=2
MBS=2
GBS=256
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --use-mcore-models \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --sequence-parallel \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 29568 \
    --num-attention-heads 64 \
    --reuse-fp32-param \
    --seq-length 4096 \
    --swap-attention \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --rotary-base 1000000 \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --use-rotary-position-embeddings \
    --use-fused-swiglu \
    --norm-epsilon 1e-5 \
    --add-qkv-bias \
    --no-gradient-accumulation-fusion \
    --bf16 \
    --group-query-attention \
    --num-query-groups 8 \
    --use-distributed-optimizer \
    --o2-optimizer \
    --o2-gradient \
    --exit-on-missing-checkpoint \
    --reset-attention-mask \
    --recompute-activation-function \
    --num-layers-per-virtual-pipeline-stage 5
