NPUS_PER_NODE=16
NNODES=8
TP=1
PP=2
EP=64
CP=1
VPP=8
MBS=1
GBS=2048
SEQ_LENGTH=4096
CP_TYPE='ulysses_cp_algo'
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --num-experts 256 \
    --moe-router-topk 8 \
    --moe-ffn-hidden-size 1536 \
    --moe-grouped-gemm \
    --moe-permutation-async-comm \
    --moe-token-dispatcher-type alltoall_seq \
    --moe-layer-freq -1 \
    --first-k-dense-replace -1 \
    --moe-aux-loss-coeff 0.001 \
    --moe-router-enable-expert-bias \
    --moe-router-dtype fp32 \
    --moe-alltoall-overlap-comm \
    --gemm-gradient-accumulation-fusion \
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --sequence-parallel \
    --use-rotary-position-embeddings \
    --use-fused-swiglu \
    --use-distributed-optimizer \
    --recompute-method uniform \
    --recompute-granularity full \
    --recompute-num-layers 1 \
    --noop-layers 62,63 \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --bf16 \
    --seq-length ${SEQ_LENGTH} \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --context-parallel-size ${CP} \
    --context-parallel-algo ${CP_TYPE} \
    --num-layers-per-virtual-pipeline-stage ${VPP} \
    --use-mcore-models \
    --kv-channels 128 \
    --qk-layernorm \
    --norm-topk-prob \
    --normalization RMSNorm \
    --num-layers 64 \
    --hidden-size 3072 \
    --ffn-hidden-size 1536 \
    --num-attention-heads 48 \
    --rotary-base 5000000 \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type rope \
    --norm-epsilon 1e-6 \
    --swiglu \
    --no-gradient-accumulation-fusion \
    --group-query-attention \
    --num-query-groups 8
