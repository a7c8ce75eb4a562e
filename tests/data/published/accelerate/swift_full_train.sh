swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --max_length 2048 \
