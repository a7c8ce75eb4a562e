"""Whether a text says a word, denies it, or says nothing of it."""

from planner.validation.reading.words import mentions_of, says

_LIGER, _GRAPHS = r"(?<![a-z])liger(?![a-z])", r"cuda[-_ ]graphs?"
_DENIED = (
    "not liger", "without the liger kernel", "not using the liger kernel", "no use of liger kernels", "w/o liger",
    "not trained with liger", "neither apex nor liger", "no apex or liger", "no-liger-fusion", "disable_liger",
    "non-liger", "instead of liger", "liger=false", "liger kernel off", "liger kernels: off", "use_liger_kernel: false",
    "no use_liger_kernel", "'liger kernel': false", "liger liger off",
    "liger is not used", "liger isn't used", '"liger": false', "liger (disabled)", "liger=[]", "liger 0", "liger none",
)  # fmt: skip
_SAID = (
    "liger", "use_liger_kernel=true", "disable_liger=false", "--no-rope-fusion --liger", "--no-rope --liger",
    "no rope, liger", "liger, dropout 0", "liger with dropout 0", "liger fp8 off", "liger=1.0", "no liger; with liger",
    "instead of apex with liger",
)  # fmt: skip


def test_what_denies_a_word_and_what_does_not() -> None:
    assert {text: says(text, _LIGER) for text in _DENIED} == dict.fromkeys(_DENIED, False)
    assert {text: says(text, _LIGER) for text in _SAID} == dict.fromkeys(_SAID, True)
    assert says("apex", _LIGER) is None
    assert says("unfused rmsnorm", r"fused[- ]rmsnorm") is False
    assert says("pytorch without ddp", r"pytorch[^;]*ddp") is False


def test_a_part_is_said_where_the_whole_is() -> None:
    for text in ("cuda_graph_scope=attn moe_router", "cuda graphs of moe_router and attn", "cuda_graph_scope: [attn]"):
        assert mentions_of(text, _GRAPHS, r"\battn\b"), text
    for text in (
        "cuda_graph_scope none --attn flash",
        "cuda graphs; attn",
        "cuda graphs, attn by cudnn",
        "cuda graphs of all but no attn",
        "no cuda graphs of attn",
        "attn",
    ):
        assert not mentions_of(text, _GRAPHS, r"\battn\b"), text
