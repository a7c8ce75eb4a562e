nnodes=2
nproc_per_node=4
    --nproc_per_node=$nproc_per_node \
    --nnodes=$nnodes \
    swift/cli/sft.py \
    --model Qwen/Qwen2.5-7B-Instruct \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node / $nnodes) \
    --max_length 8192 \
    --deepspeed zero2
