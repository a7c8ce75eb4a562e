NPUS_PER_NODE=16
NNODES=16
TP=2
PP=2
VPP=11
EP=128
CP=1
CP_TYPE='kvallgather_cp_algo'
NUM_LAYERS=44
SEQ_LEN=4096
MBS=1
GBS=1024
torchrun pretrain_gpt.py \
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --enable-mhc \
    --hc-mult 4 \
    --use-triton-mhc \
    --use-fused-mhc \
    --enable-dsa-indexer \
    --index-n-heads 64 \
    --index-head-dim 128 \
    --index-topk 512 \
    --use-fused-lightning-indexer-loss \
    --use-fused-lightning-indexer \
    --use-sparse-flash-attn \
    --indexer-loss-coeff 1.0 \
    --multi-latent-attention \
    --qk-pos-emb-head-dim 64 \
    --qk-head-dim 512 \
    --v-head-dim 128 \
    --qk-layernorm \
    --kv-compress \
    --o-groups 8 \
    --sliding-window-size 128 \
    --compress-rope-theta 160000.0 \
    --max-batch-size 4 \
    --compress-ratios 0 0 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 128 4 \
    --moe-grouped-gemm \
    --moe-permutation-async-comm \
    --moe-token-dispatcher-type alltoall \
    --moe-layer-freq 1 \
    --first-k-dense-replace -1 \
    --num-experts 256 \
    --moe-router-topk 6 \
    --moe-ffn-hidden-size 2048 \
    --moe-router-group-topk 1 \
    --moe-router-num-groups 1 \
    --seq-aux \
    --moe-aux-loss-coeff 0.001 \
    --moe-router-score-function sqrtsoftplus \
    --moe-router-enable-expert-bias \
    --moe-shared-expert-intermediate-size 2048 \
    --moe-router-dtype fp32 \
    --n-hash-layers 3 \
    --moe-permute-fusion \
    --moe-fb-overlap \
    --swiglu-limit 10.0 \
    --mtp-num-layers 1 \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
    --swap-optimizer \
    --use-distributed-optimizer \
    --use-flash-attn \
    --use-mcore-models \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --expert-tensor-parallel-size 1 \
    --sequence-parallel \
    --context-parallel-size ${CP} \
    --context-parallel-algo ${CP_TYPE} \
    --num-layers ${NUM_LAYERS} \
    --num-layers-per-virtual-pipeline-stage ${VPP} \
    --noop-layers 43 \
    --hidden-size 4096 \
    --ffn-hidden-size 4096 \
    --num-attention-heads 64 \
    --seq-length ${SEQ_LEN} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type deepseek4 \
    --normalization RMSNorm \
    --use-fused-swiglu \
    --swiglu \
    --vocab-size 129280 \
    --rotary-base 10000 \
    --norm-epsilon 1e-6 \
    --bf16 \
    --no-gradient-accumulation-fusion
