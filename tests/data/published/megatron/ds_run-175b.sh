TP=1
PP=1
NLAYERS=96
HIDDEN=12288
HEADS=96
SEQ=1024
MICRO_BATCH=4
ZERO_STAGE=3
ds_args=" "
ds_args=" --deepspeed ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
    --num-layers $NLAYERS \
    --hidden-size $HIDDEN \
    --num-attention-heads $HEADS \
    --seq-length $SEQ \
    --micro-batch-size $MICRO_BATCH \
    --fp16 \
    --checkpoint-activations \
    --exit-interval 5000 | tee ${OUTPUT_DIR}/output.log
