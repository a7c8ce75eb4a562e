NPUS_PER_NODE=16
NNODES=4
TP=1
PP=8
EP=8
CP=1
VPP=1
MBS=1
GBS=128
SEQ_LENGTH=16384
CP_TYPE='ulysses_cp_algo'
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --num-experts 512 \
    --moe-router-topk 10 \
    --n-shared-experts 1 \
    --shared-expert-gate \
    --moe-alltoall-overlap-comm \
    --moe-ffn-hidden-size 512 \
    --moe-grouped-gemm \
    --moe-permutation-async-comm \
    --moe-token-dispatcher-type alltoall_seq \
    --moe-layer-freq 1 \
    --norm-topk-prob \
    --moe-aux-loss-coeff 0.001 \
    --topk-softmax-in-fp32 \
    --moe-router-pre-softmax \
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --use-rotary-position-embeddings \
    --use-fused-swiglu \
    --use-distributed-optimizer \
    --gemm-gradient-accumulation-fusion \
    --swap-optimizer \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
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
    --qk-layernorm \
    --mamba-d-conv 4 \
    --mamba-expand 1 \
    --kv-channels 256 \
    --linear-key-head-dim 128 \
    --linear-num-key-heads 16 \
    --linear-num-value-heads 32 \
    --linear-value-head-dim 128 \
    --partial-rotary-factor 0.25 \
    --num-layers 48 \
    --hidden-size 2048 \
    --ffn-hidden-size 5120 \
    --num-attention-heads 16 \
    --rotary-base 10000000 \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --no-enable-linear-qkv \
    --swiglu \
    --no-gradient-accumulation-fusion \
    --group-query-attention \
    --num-query-groups 2 \
    --norm-epsilon 1e-06 \
    --mamba-chunk-size 64 \
    --use-triton-gdn \
    --loss-compute-mode default \
    --loss-chunk-size 1024
