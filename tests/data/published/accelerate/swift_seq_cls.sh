swift sft \
    --model Qwen/Qwen2.5-0.5B \
    --tuner_type lora \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --lora_rank 8 \
    --gradient_accumulation_steps 16 \
    --max_length 2048 \
