LAUNCH_CMD="accelerate launch \
    --mixed_precision bf16 \
    --num_processes 1 \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --max_seq_length 1024 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --with_tracking"
