T5_ARGS="
    --num-layers 12 \
    --hidden-size 768 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --micro-batch-size 16 \
    --global-batch-size 16 \
"
