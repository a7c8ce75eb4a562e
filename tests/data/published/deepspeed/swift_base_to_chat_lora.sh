nproc_per_node=2
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen2.5-1.5B \
    --tuner_type lora \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --lora_rank 8 \
    --max_length 2048 \
    --deepspeed zero2
