NUM_LAYERS=24
HIDDEN_SIZE=2048
NUM_ATTN_HEADS=16
EP_SIZE=128
megatron_options=" \
        --num-experts ${EP_SIZE} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --tensorboard-dir ${TENSORBOARD_DIR}"
