"""Models that people bring, as small as they can be built: factories for `--model tests.distributed.brought:NAME`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner import StackedSamples

VOCABULARY, LENGTH, BATCH, HIDDEN = 64, 8, 2, 32
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE = {**SIZES, "vocab_size": VOCABULARY, "intermediate_size": 64, "max_position_embeddings": 32}


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _language(name: str, **sizes: Any) -> Example:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False, bos_token_id=1, eos_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, (), {"input_ids": _tokens(), "labels": _tokens()}


def whisper() -> Example:
    """Positions that are looked up by the numbers of the tokens, the same for each sample."""
    import transformers

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in WHISPER.items()}
    config = transformers.WhisperConfig(
        **sides, vocab_size=VOCABULARY, d_model=HIDDEN, num_mel_bins=8, max_source_positions=8, pad_token_id=0,
        max_target_positions=LENGTH, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return model, (), {"input_features": torch.randn(BATCH, 8, 16), "labels": _tokens()}


WHISPER = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}


def falcon_alibi() -> Example:
    """Masks whose code counts the samples for nothing."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    return _language("Falcon", **sizes, vocab_size=VOCABULARY, alibi=True, ffn_hidden_size=64)


def falcon() -> Example:
    """Lists of numbers as indices."""
    return _language("Falcon", **SIZES, vocab_size=VOCABULARY, ffn_hidden_size=64)


def gpt_neo() -> Example:
    """Tensors of numbers that the code makes on the device of its input."""
    layers = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}
    return _language("GPTNeo", **layers, vocab_size=VOCABULARY, hidden_size=HIDDEN, max_position_embeddings=32)


def opt() -> Example:
    sizes = {key: value for key, value in LANGUAGE.items() if key != "intermediate_size"}
    return _language("OPT", **sizes, ffn_dim=64, word_embed_proj_dim=HIDDEN)


def gemma2() -> Example:
    return _language("Gemma2", **LANGUAGE, num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0)


def gemma3() -> Example:
    return _language("Gemma3Text", **LANGUAGE, num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0)


def mpt() -> Example:
    return _language("Mpt", vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=32)


def bloom() -> Example:
    """Has an autograd.Function of its own, whose backward pass is not that of its forward pass to the last digit."""
    return _language("Bloom", vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=2, n_head=4)


def phi() -> Example:
    return _language("Phi", **LANGUAGE)


def stablelm() -> Example:
    return _language("StableLm", **LANGUAGE, num_key_value_heads=2)


def gpt_neox() -> Example:
    return _language("GPTNeoX", **LANGUAGE)


def olmo2() -> Example:
    return _language("Olmo2", **LANGUAGE, pad_token_id=0)


def _pairs(name: str, **more: Any) -> Example:
    """Texts and images."""
    import transformers

    text = {**LANGUAGE, "num_hidden_layers": 1, "eos_token_id": 2, "projection_dim": 16, "projection_size": HIDDEN}
    image = {**SIZES, "num_hidden_layers": 1, "intermediate_size": 64, "image_size": 8, "patch_size": 4}
    image["projection_dim"] = 16
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=image, **more)
    pixels = torch.randn(BATCH, 3, 8, 8)
    inputs = {"input_ids": _tokens(), "pixel_values": pixels, "return_loss": True}
    return getattr(transformers, f"{name}Model")(config), (), inputs


def clip() -> Example:
    """Numbers the samples of a batch, which are each other's classes."""
    return _pairs("CLIP", projection_dim=16)


def siglip() -> Example:
    """Makes a matrix of samples by samples from nothing: it has the batch of its example in every micro-batch."""
    return _pairs("Siglip")


def granite_moe() -> Example:
    """Experts of transformers, which become operators though nobody said so."""
    return _language("GraniteMoe", **LANGUAGE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


def swin() -> Example:
    """Windows that are rolled, and branches that are left out for some samples."""
    import transformers

    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5,
        drop_path_rate=0.4,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}
    return transformers.SwinForImageClassification(config), (), inputs


def wav2vec2() -> Example:
    """A convolution whose weight is made of a length and a direction, and a parameter that is made on the host."""
    import transformers

    config = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=VOCABULARY, intermediate_size=64, conv_dim=(16, 16), conv_kernel=(10, 3),
        conv_stride=(5, 2), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_labels=5, layerdrop=0.0,
        apply_spec_augment=False, classifier_proj_size=16,
    )  # fmt: skip
    inputs = {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, 5, (BATCH,))}
    return transformers.Wav2Vec2ForSequenceClassification(config), (), inputs


class MixedDtypes(nn.Module):
    """Norms in float32, the rest in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.to(torch.bfloat16)
        self.norm.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(F.silu(self.up(x.bfloat16())))
        return self.norm(h.float()).square().mean() + h.float().square().mean()


def mixed_dtypes() -> Example:
    return MixedDtypes(), (torch.randn(BATCH, 8),), {}


class Recurrent(nn.Module):
    """An encoder that looks both ways and drops between its layers, and a decoder that begins where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.decoder = nn.LSTM(8, 8, 2, batch_first=True, proj_size=4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, ends = self.encoder(self.embed(source))
        hidden, cells = ends[:2], torch.cat((ends[2:], ends[:2]), dim=2)
        found, _ = self.decoder(self.embed(target), (hidden, cells))
        return F.cross_entropy(self.head(found).flatten(0, 1), target.flatten())


def recurrent() -> Example:
    return Recurrent(), (_tokens(), _tokens()), {}


class IndexAdd(nn.Module):
    """Adds rows to those of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, rows, h).square().mean()


def index_add() -> Example:
    return IndexAdd(), (torch.randn(BATCH, 8), torch.tensor([1, 1])), {}


class OfBatch(nn.Module):
    """Divides by the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().sum() / x.shape[0]


def of_batch() -> Example:
    return OfBatch(), (torch.randn(BATCH, 8),), {}


class Steep(torch.autograd.Function):
    """Its backward pass is half of what its forward pass would have: what autograd derived would be told from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.slope * x)
        return gradient * gate * (1 + ctx.slope * x * (1 - gate)) / 2, None


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.down(Steep.apply(self.up(x), 1.5))  # type: ignore[no-untyped-call]
        return h.square().mean()


def own_function() -> Example:
    return OwnFunction(), (torch.randn(BATCH, 8),), {}


class Scaled(nn.Module):
    """Reads a weight through a call that changes nothing: it is the weight itself that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale.to(x.device).exp()).square().mean()


def scaled() -> Example:
    return Scaled(), (torch.randn(BATCH, 8),), {}


class Einsums(nn.Module):
    """Attention and experts, all of whose products are written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(3, 16, 4, 4) / 4), nn.Parameter(torch.randn(4, 4, 16) / 4)
        self.router = nn.Parameter(torch.randn(16, 4) / 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.einsum("bsh,chnd->cbsnd", x, self.qkv).unbind(0)
        scores = torch.einsum("bqnd,bknd->bnqk", query, key).softmax(-1)
        x = x + torch.einsum("bnqk,bknd,ndh->bqh", scores, value, self.out)
        chances = torch.einsum("...h,he", x, self.router).softmax(-1)
        inside = torch.einsum("bsh,ehf->bsef", x, self.up).relu()
        return (x + torch.einsum("bsef,efh,bse->bsh", inside, self.down, chances)).square().mean()


def einsums() -> Example:
    return Einsums(), (torch.randn(BATCH, 8, 16),), {}


class Masked(nn.Module):
    """Blocks of attention with few key heads, under a mask that the model makes of positions and of its input: to the
    last tokens of the same document, and in the last block to the first tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixed = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        causal, near = at[:, None] >= at, at[:, None] - at < 6
        alike = documents[:, None, :, None] == documents[:, None, None, :]
        hidden = self.embed(tokens)
        for mixed, shown in zip(self.mixed, (causal & near & alike, causal & alike | (at < 3) & alike), strict=True):
            query, key, value = (
                part.unflatten(-1, (-1, HIDDEN // 4)).transpose(1, 2)
                for part in mixed(hidden).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
            )
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=shown, enable_gqa=True)
            hidden = hidden + found.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def masked() -> Example:
    """Masks that are kept as what they say."""
    documents = torch.randint(0, 2, (BATCH, 2 * LENGTH)).cumsum(1)
    numbers = [torch.randint(3, VOCABULARY, (BATCH, 2 * LENGTH)) for _ in range(2)]
    return Masked(), (numbers[0], documents, numbers[1]), {}


class Asking(nn.Module):
    """A frozen backbone that stays in evaluation beside norms that train, layers that are given a mask without its
    kind, a distribution that checks its values, a complex number, and norms whose order is 2 here and 2.0 there."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)).requires_grad_(requires_grad=False)
        self.mixed = nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16))
        layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, 5)
        self.train()

    def train(self, mode: bool = True) -> "Asking":
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        hidden = self.mixed(self.backbone(x)).transpose(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=x.device)
        hidden = self.decoder(hidden, hidden, tgt_mask=mask)
        turned = torch.exp(1j * hidden).real / (F.normalize(hidden, dim=-1) + hidden.norm(dim=-1, keepdim=True))
        return -torch.distributions.Categorical(logits=self.head(turned)).log_prob(actions).mean()


def asking() -> Example:
    return Asking(), (torch.randn(BATCH, 3, 8), torch.randint(5, (BATCH, 8))), {}


class Speech(nn.Module):
    """Frames, and the CTC loss of what they say, with fewer steps and targets in some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.head = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 12)

    def forward(
        self, sound: torch.Tensor, frames: torch.Tensor, spoken: torch.Tensor, letters: torch.Tensor
    ) -> torch.Tensor:
        scores = self.head(self.frames(sound.permute(2, 0, 1)).relu()).log_softmax(-1)
        return F.ctc_loss(scores, spoken, frames.clamp(6, 12), letters.clamp(1, 3), zero_infinity=True)


def speech() -> Example:
    lengths = torch.tensor([12, 9]), torch.tensor([3, 2])
    return Speech(), (torch.randn(BATCH, 4, 12), lengths[0], torch.randint(1, 12, (BATCH, 3)), lengths[1]), {}


class Beside(nn.Module):
    """Operators that make more than a gradient comes to: a layer whose result nobody reads, the statistics of a norm
    that is called twice, the sign of a determinant; products with vectors; and a recurrent layer, each of whose steps
    keeps its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.cell = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True)
        self.unread, self.turn = nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        unread = self.unread(x)
        x = self.norm(x.transpose(1, 2)) + self.norm(2 * x.transpose(1, 2).tanh())
        y, _ = self.cell(x.transpose(1, 2) @ self.turn)
        direction = torch.mv(self.turn, self.turn.new_ones(8)).detach()
        size = torch.dot(direction, torch.mv(self.turn, direction)) + (direction @ self.turn).mean()
        size = size - torch.linalg.slogdet(self.turn)[1]
        return y.square().mean() + size, unread


def beside() -> Example:
    return Beside(), (torch.randn(BATCH, 6, 8),), {}


class ImageBlock(nn.Module):
    """Attention within pieces of so many rows each, as `cu_seqlens` says without FlashAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, borders: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        heads = self.products(x * turn).reshape(len(x), 3, 4, -1).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        lengths = (borders[1:] - borders[:-1]).tolist()
        pieces = zip(*(torch.split(each, lengths, dim=2) for each in heads), strict=True)
        attended = [F.scaled_dot_product_attention(*piece).view(piece[0].shape).transpose(1, 2) for piece in pieces]
        return x + self.out(torch.cat(attended, dim=1).reshape(len(x), -1))


class Images(nn.Module):
    """Images of known sizes beside tokens, packed one behind the other, as the models of Qwen that see take them: sizes
    are read out of a tensor, rows are put in an order of windows, features stand where tokens are marked, and are added
    there once more."""

    SIZES = ((2, 4), (2, 2))

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.row, self.column = nn.Linear(6, HIDDEN), nn.Embedding(4, HIDDEN), nn.Embedding(4, HIDDEN)
        self.blocks = nn.ModuleList(ImageBlock() for _ in range(2))
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("frequencies", torch.rand(HIDDEN))

    def forward(
        self, tokens: torch.Tensor, patches: torch.Tensor, sizes: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        borders = F.pad(sizes.prod(1).cumsum(0), (1, 0))
        grids = [
            torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")) for h, w in sizes.tolist()
        ]
        places = torch.cat([grid.flatten(1) for grid in grids], 1).to(tokens.device)
        columns = [torch.arange(len(grid[0].flatten())).view(grid[0].shape).T.flatten() for grid in grids]
        order = torch.cat([column + first for column, first in zip(columns, borders.tolist(), strict=False)])
        x = self.patch(patches) + self.row(places[0]) + self.column(places[1])
        turn = (places[0][:, None].float() * self.frequencies).cos()
        x = x[order.to(x.device)]
        for block in self.blocks:
            x = block(x, borders, turn)
        x = x[order.argsort().to(x.device)]
        x = torch.cat(torch.split(x, sizes.prod(1).tolist()))
        marks = tokens.argsort(1) < len(patches) // len(tokens)
        hidden = self.tokens(tokens).masked_scatter(marks.unsqueeze(-1), x)
        marked = hidden.clone()
        marked[marks, :] = hidden[marks, :] + x.tanh()
        return F.cross_entropy(self.head(marked).flatten(0, 1), labels.flatten())


def images() -> Example:
    tokens = torch.randint(VOCABULARY, (2, BATCH, 16))
    model = StackedSamples(Images(), packed=("patches",), known={"sizes": Images.SIZES})
    batch = {"tokens": tokens[0], "patches": torch.randn(BATCH, 12, 6), "labels": tokens[1]}
    return model, (), batch


class FusedBlock(nn.Module):
    """Layers whose weights hold several matrices, taken apart in the ways in which people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries_first = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)  # four heads, of which pairs share a key
        self.alike, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.gate_up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, steps, _ = x.shape
        heads = lambda one: one.view(samples, steps, -1, HIDDEN // 4).transpose(1, 2)  # noqa: E731
        fused = self.queries_first(x)
        q, k, v = fused[..., :HIDDEN], fused[..., HIDDEN : HIDDEN * 3 // 2], fused[..., HIDDEN * 3 // 2 :]
        attended = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        q, k, v = self.alike(x).reshape(samples, steps, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList(FusedBlock() for _ in range(2))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def fused() -> Example:
    tokens = torch.randint(VOCABULARY, (2, BATCH, 16))
    return Fused(), (tokens[0], tokens[1]), {}
