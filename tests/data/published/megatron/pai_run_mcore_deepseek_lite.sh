TP=2
PP=8
EP=16
CP=1
MBS=1
GBS=8192
SEQ_LEN=4096
    --num-layers 61
    --hidden-size 64
    --ffn-hidden-size 128
    --moe-ffn-hidden-size 256
    --num-attention-heads 8
    --seq-length ${SEQ_LEN}
    --num-experts 32
    --multi-latent-attention
    --global-batch-size ${GBS}
    --bf16
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size ${PP}
    --expert-model-parallel-size ${EP}
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --sequence-parallel
    --recompute-granularity selective
    --recompute-modules mla_up_proj
    --pipeline-model-parallel-layout 'Et\|\(tt\|\)*30L'
    --fp8-format hybrid 
    --fp8-recipe blockwise
