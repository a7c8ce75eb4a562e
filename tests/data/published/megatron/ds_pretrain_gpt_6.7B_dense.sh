NUM_LAYERS=32
HIDDEN_SIZE=4096
NUM_ATTN_HEADS=32
PP_SIZE=1
data_options=" \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --tensorboard-dir ${TENSORBOARD_DIR}"
deepspeed_options=" \
		    --deepspeed \
		    --pipeline-model-parallel-size ${PP_SIZE}"
