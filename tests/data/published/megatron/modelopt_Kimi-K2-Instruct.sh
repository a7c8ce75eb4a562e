MODEL_ARGS=" \
    --micro-batch-size 1 \
    --bf16 \
    --num-layers 61 \
    --hidden-size 7168 \
    --ffn-hidden-size 18432 \
    --num-attention-heads 64 \
    --multi-latent-attention \
    --num-experts 384 \
    --moe-ffn-hidden-size 2048 \
    --moe-shared-expert-overlap \
    --seq-length 4096 \
    --recompute-activations \
    --moe-layer-recompute \
    --sequence-parallel \
"
