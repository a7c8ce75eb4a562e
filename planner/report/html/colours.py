"""The colour of everything. A colour is a word of the style sheet, which has one value for light and one for dark
themes."""

STEP = {
    "forward": "@forward",
    "backward": "@backward",
    "input_gradient": "@backward",
    "weight_gradient": "@weight-gradient",
    "recomputation": "@recomputation",
    "optimizer": "@optimizer",
    "gradient accumulation": "@accumulation",
    "communication": "@communication",
    "hidden communication": "@hidden",
    "uncovered communication": "@hidden",
    "parameter gathering": "@gathering",
    "stage transfer": "@transfer",
    "gradient reduction": "@reduction",
    "gradient reduction of micro-batches": "@reduction",
    "weight gathering": "@weight-gathering",
    "offload": "@transfer",
    "activation offload": "@transfer",
    "weight offload": "@transfer",
    "weights going back": "@transfer",
    "offload under computation": "@bubble",
    "gathering under computation": "@bubble",
    "tensor parallelism under computation": "@bubble",
    "exchange of experts under computation": "@bubble",
    "stage transfers under computation": "@bubble",
    "reduction under computation": "@bubble",
    "pipeline bubble": "@bubble",
    "launches ahead": "@bubble",
    "covered by other micro-batches": "@bubble",
}
"""Parts of a step, and kinds of spans of its timeline."""

MEMORY = {
    "weights": "@forward",
    "gradients": "@reduction",
    "optimizer state": "@optimizer",
    "activations": "@transfer",
    "transient": "@gathering",
    "allocator slack and reserved": "@bubble",
}
"""Classes of memory."""

SERIES = tuple(f"@series-{number}" for number in range(1, 9))
"""The colour of things without their own."""


def series(number: int) -> str:
    """The colour of a thing by its number; colours repeat after eight."""
    return SERIES[number % len(SERIES)]
