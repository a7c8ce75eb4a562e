    NUM_LAYERS=27
    HIDDEN_SIZE=2048
    FFN_HIDDEN_SIZE=10944
    MOE_FFN_HIDDEN_SIZE=1408
    SHARED_INTERMEDIATE_SIZE=$((MOE_FFN_HIDDEN_SIZE * NUM_SHARED_EXPERTS))
    NUM_LAYERS=60
    HIDDEN_SIZE=5120
    FFN_HIDDEN_SIZE=12288
    MOE_FFN_HIDDEN_SIZE=1536
    SHARED_INTERMEDIATE_SIZE=$((MOE_FFN_HIDDEN_SIZE * NUM_SHARED_EXPERTS))
distributed_options=" \
    --target-tensor-model-parallel-size ${TP} \
    --target-pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size 1 \
    --target-expert-model-parallel-size ${EP}"
training_options=" \
    --micro-batch-size 1 \
    --no-async-tensor-model-parallel-allreduce \
    --num-layers ${NUM_LAYERS} \
    --hidden-size ${HIDDEN_SIZE} \
    --ffn-hidden-size ${FFN_HIDDEN_SIZE} \
    --moe-ffn-hidden-size ${MOE_FFN_HIDDEN_SIZE} \
    --rotary-scaling-factor ${ROPE_SCALING_FACTOR}"
    mla_options="${mla_options} \
        --q-lora-rank ${Q_RANK}"
checkpointing_options=" \
    --save-interval 1"
mix_precision_options=" \
    --bf16"
python ${WORKSPACE}/deepseek_v2_hf_to_mg.py \
    ${mix_precision_options}
