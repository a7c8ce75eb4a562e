OPTIONS=" \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 1 \
    --num-layers 32 \
    --hidden-size 4096 \
    --num-attention-heads 32 \
    --num-query-groups 8 \
    --group-query-attention \
    --seq-length 576 \
    --decoder-seq-length 1024 \
    --ffn-hidden-size 14336 \
    --micro-batch-size 1 \
    --swiglu \
    --bf16 \
    --img-h 336 \
    --img-w 336 \
    --language-model-type=mistral_7b \
"
torchrun --nproc_per_node 8 examples/multimodal/train.py ${OPTIONS}
