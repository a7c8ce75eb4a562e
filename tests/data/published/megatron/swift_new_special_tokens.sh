NPROC_PER_NODE=2 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --tuner_type lora \
    --lora_rank 8 \
    --expert_model_parallel_size 2 \
    --moe_shared_expert_overlap true \
    --micro_batch_size 32 \
    --global_batch_size 64 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --max_length 2048 \
    --sequence_parallel true \
