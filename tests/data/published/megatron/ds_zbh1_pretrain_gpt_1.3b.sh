seq_len=2048
num_layers=24
hidden_size=2048
num_attn_heads=16
global_batch_size=16
pp_size=8
zero_stage=0
data_options=" \
   --global-batch-size ${global_batch_size} \
   --num-layers ${num_layers} \
   --hidden-size ${hidden_size} \
   --num-attention-heads ${num_attn_heads} \
   --seq-length ${seq_len} \
   --fp16 \
   --tensorboard-dir ${tensorboard_path}"
deepspeed_options=" \
   --enable-zbh1-pipeline \
   --pipeline-model-parallel-size ${pp_size}"
