"""Under which names, and in which order of numbers, Hugging Face's transformers keeps the weights of these models.

    parts.py      a box of a tensor here that is a box of one there; all that is known of a model
    rules.py      tables of names, from which parts are made
    gpt.py, …     the table of a family, the class that computes the same, and what no class computes
    of_model.py   what is known of a model by its reference

Nothing here reads a weight: `runtime.checkpoint.renamed` does.
"""
