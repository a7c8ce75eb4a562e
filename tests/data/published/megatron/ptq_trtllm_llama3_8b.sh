options=" \
    --swiglu \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size 1 \
    --num-layers 32 \
    --hidden-size 4096 \
    --group-query-attention \
    --num-query-groups 8 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --seq-length 8192 \
    --micro-batch-size 4 \
    --fp16"
torchrun --nproc_per_node=${TP} examples/export/ptq_and_trtllm_export/text_generation_ptq.py ${options}
