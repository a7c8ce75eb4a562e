TP=${10}
NUM_KEY_VALUE_HEADS=8
gqa_options=" \
		    --num-query-groups ${NUM_KEY_VALUE_HEADS}"
NUM_LAYERS=80
HIDDEN_SIZE=8192
NUM_ATTN_HEADS=64
    activation_checkpoint_options=" \
		    --cpu-offloading-num-layers ${MP_AC_LAYERS}"
    sp_options=" \
        --dataset MMAP"
megatron_options="  \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --tensor-model-parallel-size ${TP} \
        --swiglu \
        --untie-embeddings-and-output-weights \
        --rotary-base 500000 \
        "
