NPROC_PER_NODE=4 \
swift sft \
    --model Qwen/Qwen2.5-7B \
    --per_device_train_batch_size 8 \
    --per_device_eval_batch_size 8 \
    --gradient_accumulation_steps 1 \
    --max_length 8192 \
    --deepspeed zero3 \
    --use_liger_kernel true \
