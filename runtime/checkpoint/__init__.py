"""Checkpoints: the training state of a plan on disk, so that any plan can continue from it.

    runs/a/step-000120/
        manifest.json             step, samples, seed, plan; shape, dtype and slices of every tensor; bytes and
                                  checksum of every file
        rank-00000.safetensors    the slices that rank 0 writes
        rank-00001.safetensors    ...

The plan alone says which rank holds which slice (`spread`), so writing needs no communication: of the ranks that hold
the same slice, one writes it. `state` gives the live tensors of a rank by name. Every rank writes its file and leaves a
note (`saving`). When all notes are there, rank 0 writes the manifest and renames the folder (`folder`), which makes the
checkpoint whole. Reading asks for boxes of tensors by name (`source`), so it does not matter which rank wrote them:
another plan loads them (`restoring`), or one process writes them again as the ranks of another plan would (`offline`).

Nothing here reads a pickle. Randomness of a training step is counter based (`runtime.ops.randomness`): seed and step
are its whole state.
"""
