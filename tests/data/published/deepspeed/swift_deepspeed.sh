NPROC_PER_NODE=8 \
swift sft \
    --model Qwen/Qwen2.5-14B \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --packing true \
    --max_length 8192 \
    --deepspeed zero2 \
