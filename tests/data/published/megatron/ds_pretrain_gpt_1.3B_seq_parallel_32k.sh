seq_len=32768
num_layers=24
hidden_size=2048
num_attn_heads=16
sp_size=4
pp_size=1
zero_stage=1
megatron_options=" \
    --ds-sequence-parallel-size ${sp_size} \
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
