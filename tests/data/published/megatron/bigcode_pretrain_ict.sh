python pretrain_ict.py \
        --num-layers 12 \
        --hidden-size 768 \
        --tensor-model-parallel-size 1 \
        --micro-batch-size 32 \
