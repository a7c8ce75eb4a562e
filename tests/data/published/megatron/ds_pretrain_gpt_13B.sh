seq_len=2048
num_layers=40
hidden_size=5120
num_attn_heads=40
global_batch_size=1024
mp_size=4
pp_size=8
zero_stage=1
batch_size=2
megatron_options=" \
    --tensor-model-parallel-size ${mp_size} \
    --micro-batch-size ${batch_size} \
    --global-batch-size ${global_batch_size} \
    --num-layers ${num_layers} \
    --hidden-size ${hidden_size} \
    --num-attention-heads ${num_attn_heads} \
    --seq-length ${seq_len} \
    --fp16 \
    --checkpoint-activations"
deepspeed_options=" \
    --deepspeed \
    --zero-stage ${zero_stage} \
    --pipeline-model-parallel-size ${pp_size}"
deepspeed_options="${deepspeed_options} \
    --deepspeed-activation-checkpointing"
