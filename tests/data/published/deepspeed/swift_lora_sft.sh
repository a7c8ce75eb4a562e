NPROC_PER_NODE=4 \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --lora_rank 16 \
    --gradient_accumulation_steps 1 \
    --max_length 2048 \
    --deepspeed zero2
