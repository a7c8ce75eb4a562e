elif [ ${PR} = bf16 ]; then
        --bf16
        --num-layers 28
        --hidden-size 1024
        --ffn-hidden-size 3072
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 4
        --num-layers 28
        --hidden-size 2048
        --ffn-hidden-size 6144
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 4
        --num-layers 36
        --hidden-size 2560
        --ffn-hidden-size 9728
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 4
        --num-layers 36
        --hidden-size 4096
        --ffn-hidden-size 12288
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 4
        --num-layers 40
        --hidden-size 5120
        --ffn-hidden-size 17408
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 8
        --num-layers 64
        --hidden-size 5120
        --ffn-hidden-size 25600
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 8
        --num-layers 48
        --hidden-size 2048
        --ffn-hidden-size 6144
        --moe-ffn-hidden-size 768
    if [ -z  "$MODEL_PARALLEL_ARGS" ]; then
        MODEL_PARALLEL_ARGS=(
            --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 1
            --expert-model-parallel-size 8
    --micro-batch-size 1
    --global-batch-size 1024
    --bf16
cmd="torchrun ${DISTRIBUTED_ARGS[@]} impl/convert.py \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${OTHER_ARGS[@]}"
