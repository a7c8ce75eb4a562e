seq_len=262144 # need to be divisible by sp size * sp size * num chunks = 4 * 4 * 32 = 128
num_layers=32
hidden_size=4096
num_attn_heads=32
global_batch_size=1024
sp_size=4
pp_size=1
zero_stage=3
batch_size=2
data_options=" \
    --ds-sequence-parallel-fpdt \
    --ds-sequence-parallel-size ${sp_size} \
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
