ADD_RETRIEVER=1
RETRO_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 2048
    --num-attention-heads 32
)
TRAINING_ARGS=" \
    --micro-batch-size 4 \
    --bf16 \
"
if [ "$ADD_RETRIEVER" = "1" ]; then
    TRAINING_ARGS+=" --retro-add-retriever"
fi
torchrun --nproc_per_node 8 pretrain_retro.py ${RETRO_MODEL_ARGS[@]} ${TRAINING_ARGS} --tensor-model-parallel-size 8
