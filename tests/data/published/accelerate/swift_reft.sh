swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type reft \
    --per_device_train_batch_size 1 \
    --gradient_checkpointing false \
    --gradient_accumulation_steps 16 \
