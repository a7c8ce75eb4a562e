"""Checkpoints: what a plan trains, on disk, so that any plan can go on with it.

    runs/a/step-000120/
        manifest.json             step, samples, seed, plan; of every tensor its shape, dtype and slices; of every
                                  file its bytes and its checksum
        rank-00000.safetensors    the slices that rank 0 writes
        rank-00001.safetensors    ...

Who holds which slice is known from the plan alone (`spread`), so nothing is asked of anybody before writing: of the
ranks that hold the same slice one writes it. What a rank holds are live tensors by name (`state`). Every rank writes
its file and leaves a note (`saving`); when all notes are there rank 0 writes the manifest and renames the folder
(`folder`), which is whole from then on. Reading asks for boxes of tensors by name (`source`), so that it does not
matter who wrote them: another plan loads them (`restoring`), or has them written as its own ranks would, in one process
(`offline`).

Nothing here reads a pickle. Randomness of a training step is counter based (`runtime.ops.randomness`): seed and step
are all of its state.
"""
