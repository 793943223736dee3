"""What a model's config.json says of its shape: layers and their kinds of attention, widths, experts, and from them its tensors.

Known are the architectures of MODEL_TYPES, each read as its reference implementation reads it (Hugging Face transformers,
``modeling_<model_type>.py``; the names of the tensors are those of the published checkpoints). Another one raises UnknownModel:
nothing is guessed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Iterator

from ansible_collections.llmops.ascend.plugins.module_utils.model_files import ranges

# Kinds of attention layers. FULL, SLIDING: keys and values for each KV head. LATENT: one compressed vector for all heads (MLA).
# LINEAR: a state of fixed size per request (Gated DeltaNet).
FULL, SLIDING, LATENT, LINEAR = "full", "sliding", "latent", "linear"

# model_type of the language model → how its attention is described.
MODEL_TYPES: dict[str, str] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "glm4v_moe_text",
                     "gpt_oss", "seed_oss", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), "heads"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "hybrid"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite"), "latent"),
}
# Of these the tensors are known too (`expected_tensors`); of the others only what is cached.
_DERIVED = {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "deepseek_v32",
            "kimi_k2", "glm_moe_dsa"}


class UnknownModel(ValueError):
    """A config.json that does not say enough, or whose architecture is not known here; one line."""


@dataclass(frozen=True)
class Shape:
    """A language model as config.json describes it; widths in elements, `kinds` has one kind of attention per layer."""

    model_type: str
    kinds: tuple[str, ...]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    dtype: str
    tied: bool
    context: int | None = None
    window: int | None = None
    latent: int = 0                                     # kv_lora_rank + qk_rope_head_dim
    index_dim: int = 0                                  # of a sparse attention's indexer (DSA)
    indexed: tuple[bool, ...] = ()                      # which layers keep an indexer's keys
    linear: dict[str, int] = field(default_factory=dict)  # key_heads, value_heads, key_dim, value_dim, kernel
    linear_dtype: str | None = None                     # of the recurrent state, where the model says it
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    expert_layers: tuple[bool, ...] = ()
    draft_layers: int = 0                               # multi-token prediction (MTP)
    vision: dict[str, int] | None = None

    @property
    def layers(self) -> int:
        """How many decoder layers there are, without those that only draft."""
        return len(self.kinds)


def read_shape(config: dict[str, Any]) -> Shape:
    """The shape that a config.json describes. Raises UnknownModel."""
    text = _language(config)
    kind = MODEL_TYPES.get(text["model_type"])
    if kind is None:
        raise UnknownModel(f"architecture {text['model_type']!r} is not known to the fit")
    with _readable(text["model_type"]):
        shape = _shape(config, text, kind)
    _refuse_the_impossible(shape)
    return shape


# What a value of the wrong kind raises where a number, a list or a dictionary is wanted.
_NO_NUMBER = (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError)


@contextlib.contextmanager
def _readable(model_type: str) -> Iterator[None]:
    """Turns whatever a damaged config.json makes of its reading into UnknownModel."""
    try:
        yield
    except UnknownModel:
        raise
    except KeyError as error:
        raise UnknownModel(f"config.json of a {model_type} has no {error.args[0]}") from None
    except _NO_NUMBER as error:
        raise UnknownModel(f"config.json of a {model_type} cannot be read: {error}") from None


# No model is near these; a config.json beyond them is damaged, and what would follow from it is no answer.
_WIDEST, _MOST_LAYERS = 1 << 24, 10_000


def _refuse_the_impossible(shape: Shape) -> None:
    """Raises UnknownModel for a shape that no model has."""
    at_least_one = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocabulary,
                    "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
                    **{f"the linear attention's {name}": size for name, size in shape.linear.items()}}
    if LATENT in shape.kinds:
        at_least_one["kv_lora_rank"] = shape.latent
    if shape.experts:
        at_least_one.update(num_experts=shape.experts, num_experts_per_tok=shape.experts_per_token, moe_intermediate_size=shape.expert_width)
    if shape.window is not None:
        at_least_one["sliding_window"] = shape.window
    at_least_none = {"intermediate_size": shape.feed_forward, "index_head_dim": shape.index_dim, "num_nextn_predict_layers": shape.draft_layers,
                     **{f"vision_config.{name}": size for name, size in (shape.vision or {}).items()}}
    for least, sizes in ((1, at_least_one), (0, at_least_none)):
        for name, size in sizes.items():
            if not least <= size <= _WIDEST:
                raise UnknownModel(f"config.json has {size} for {name}")
    if shape.draft_layers > shape.layers:
        raise UnknownModel(f"config.json has {shape.draft_layers} drafting layers")
    if shape.context is not None and (not isinstance(shape.context, int) or not 0 < shape.context < 1 << 40):
        raise UnknownModel(f"config.json has {shape.context!r} for max_position_embeddings")
    if not isinstance(shape.dtype, str) or not isinstance(shape.linear_dtype, (str, type(None))):
        raise UnknownModel(f"config.json has the dtype {shape.dtype!r}")
    if shape.indexed and len(shape.indexed) != shape.layers:
        raise UnknownModel(f"config.json names {len(shape.indexed)} indexer_types for {shape.layers} layers")


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model; what it leaves to the whole (dtype, tied embeddings) filled in."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        text = config
    else:
        text = {**{key: config[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in config}, **text}
        text.setdefault("model_type", f"{config.get('model_type')}_text")
    if not isinstance(text.get("model_type"), str):
        raise UnknownModel("config.json has no model_type")
    return text


def _shape(config: dict[str, Any], text: dict[str, Any], kind: str) -> Shape:
    layers, heads, hidden = int(text["num_hidden_layers"]), int(text["num_attention_heads"]), int(text["hidden_size"])
    if not 0 < layers <= _MOST_LAYERS:
        raise UnknownModel(f"config.json has {layers} layers")
    values: dict[str, Any] = {
        "model_type": text["model_type"], "hidden": hidden, "vocabulary": int(text["vocab_size"]), "heads": heads,
        "kv_heads": int(text.get("num_key_value_heads") or heads), "head_dim": int(text.get("head_dim") or hidden // heads),
        "feed_forward": int(text.get("intermediate_size") or 0), "dtype": text.get("dtype") or text.get("torch_dtype") or "float16",
        "tied": bool(text.get("tie_word_embeddings", False)), "context": text.get("max_position_embeddings"),
        "draft_layers": int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0),
        "vision": _vision(config),
    }
    if kind == "latent":
        values.update(kinds=(LATENT,) * layers, latent=int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]))
        if text.get("index_head_dim"):
            types = text.get("indexer_types") or ["full"] * layers
            values.update(index_dim=int(text["index_head_dim"]), indexed=tuple(name == "full" for name in types[:layers]))
    elif kind == "hybrid":
        interval = int(text.get("full_attention_interval") or 4)
        names = text.get("layer_types") or ["full_attention" if number % interval == 0 else "linear_attention"
                                            for number in range(1, layers + 1)]
        values.update(kinds=_kinds(names, {"full_attention": FULL, "linear_attention": LINEAR}), linear={
            "key_heads": int(text["linear_num_key_heads"]), "value_heads": int(text["linear_num_value_heads"]),
            "key_dim": int(text["linear_key_head_dim"]), "value_dim": int(text["linear_value_head_dim"]),
            "kernel": int(text["linear_conv_kernel_dim"])}, linear_dtype=text.get("mamba_ssm_dtype"))
    else:
        values.update(_windows(text, layers))
    if len(values["kinds"]) != layers:
        raise UnknownModel(f"config.json names {len(values['kinds'])} layer_types for {layers} layers")
    values.update(_experts(text, layers))
    return Shape(**values)


def _kinds(names: list[str], known: dict[str, str]) -> tuple[str, ...]:
    unknown = sorted({str(name) for name in names} - set(known))
    if unknown:
        raise UnknownModel(f"layers of the kind {unknown[0]!r} are not known to the fit")
    return tuple(known[name] for name in names)


def _windows(text: dict[str, Any], layers: int) -> dict[str, Any]:
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False or not window:
        return {"kinds": (FULL,) * layers}
    if text.get("layer_types"):
        kinds = _kinds(text["layer_types"], {"full_attention": FULL, "sliding_attention": SLIDING})
    elif text["model_type"] in ("mistral", "mixtral"):
        kinds = (SLIDING,) * layers
    else:
        raise UnknownModel("config.json has a sliding_window and no layer_types that say where it is used")
    return {"kinds": kinds, "window": int(window)}


def _experts(text: dict[str, Any], layers: int) -> dict[str, Any]:
    count = int(text.get("n_routed_experts") or text.get("num_experts") or text.get("num_local_experts") or 0)
    if not count:
        return {}
    dense = int(text.get("first_k_dense_replace") or 0)
    step = int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1)
    only = set(text.get("mlp_only_layers") or ())
    offset = 1 if text.get("decoder_sparse_step") else 0    # Qwen counts the layers from 1, DeepSeek from 0
    return {
        "experts": count,
        "experts_per_token": int(text["num_experts_per_tok"]),
        "expert_width": int(text.get("moe_intermediate_size") or text["intermediate_size"]),
        "expert_layers": tuple(number >= dense and (number + offset) % step == 0 and number not in only for number in range(layers)),
    }


def _vision(config: dict[str, Any]) -> dict[str, int] | None:
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    return {"hidden": int(vision.get("hidden_size") or 0), "feed_forward": int(vision.get("intermediate_size") or 0),
            "merge": int(vision.get("spatial_merge_size") or 1)}


# ------------------------------------------------------------------------------------------- tensors of a whole checkpoint

_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def expected_tensors(config: dict[str, Any]) -> list[dict]:
    """The tensors of an unquantised checkpoint of this configuration, as rows of model_files.

    For a model that is not on the machine yet. Raises UnknownModel, also for a quantised one: what is quantised in it is said by its
    weight files only.
    """
    shape, text = read_shape(config), _language(config)
    with _readable(shape.model_type):
        return _expected(shape, text, config)


def _expected(shape: Shape, text: dict[str, Any], config: dict[str, Any]) -> list[dict]:
    if config.get("quantization_config") or text.get("quantization_config"):
        raise UnknownModel("the weights are quantised, and which of them only their files say")
    if shape.model_type not in _DERIVED:
        raise UnknownModel(f"the tensors of a {shape.model_type} are not known without its weight files")
    dtype = _STORED.get(shape.dtype)
    if dtype is None:
        raise UnknownModel(f"config.json has the dtype {shape.dtype!r}")
    prefix = "model.language_model." if shape.vision else "model."
    rows = [(f"{prefix}embed_tokens.weight", [shape.vocabulary, shape.hidden], None, 1), (f"{prefix}norm.weight", [shape.hidden], None, 1)]
    if not shape.tied:
        rows.append(("lm_head.weight", [shape.vocabulary, shape.hidden], None, 1))
    for kind in sorted(set(shape.kinds)):
        rows += _layer_rows(f"{prefix}layers.*.", _attention(shape, text, kind),
                            [number for number, other in enumerate(shape.kinds) if other == kind])
    if shape.index_dim:
        rows += _layer_rows(f"{prefix}layers.*.", _indexer(shape, text), [n for n, kept in enumerate(shape.indexed) if kept])
    sparse = [number for number, has in enumerate(shape.expert_layers) if has]
    rows += _layer_rows(f"{prefix}layers.*.", _feed_forward(shape), [n for n in range(shape.layers) if n not in set(sparse)])
    rows += _layer_rows(f"{prefix}layers.*.", _sparse(shape, text), sparse)
    rows += _draft(shape, text, prefix)
    if shape.vision:
        rows += _vision_rows(config["vision_config"])
    # The router's correction is the one tensor these checkpoints keep in 32 bits.
    return [{"name": name, "dtype": "F32" if name.endswith("e_score_correction_bias") else dtype, "shape": size, "count": count,
             "layers": layers} for name, size, layers, count in rows]


def _layer_rows(prefix: str, weights: dict[str, Any], layers: list[int]) -> list[tuple]:
    """`weights` maps a name to a size, or to (size, how many of it a layer has)."""
    rows = []
    for name, size in weights.items():
        size, count = size if isinstance(size, tuple) else (size, 1)
        if layers:
            rows.append((prefix + name, size, ranges(layers), count))
    return rows


def _attention(shape: Shape, text: dict[str, Any], kind: str) -> dict[str, Any]:
    hidden = shape.hidden
    weights: dict[str, Any] = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
    if kind == LINEAR:
        keys = shape.linear["key_heads"] * shape.linear["key_dim"]
        values = shape.linear["value_heads"] * shape.linear["value_dim"]
        heads = shape.linear["value_heads"]
        weights.update({
            "linear_attn.in_proj_qkv.weight": [2 * keys + values, hidden], "linear_attn.in_proj_z.weight": [values, hidden],
            "linear_attn.in_proj_a.weight": [heads, hidden], "linear_attn.in_proj_b.weight": [heads, hidden],
            "linear_attn.conv1d.weight": [2 * keys + values, 1, shape.linear["kernel"]], "linear_attn.A_log": [heads],
            "linear_attn.dt_bias": [heads], "linear_attn.norm.weight": [shape.linear["value_dim"]],
            "linear_attn.out_proj.weight": [hidden, values]})
    elif kind == LATENT:
        rank, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
        nope, width = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
        queries = int(text.get("q_lora_rank") or 0)
        if queries:
            weights.update({"self_attn.q_a_proj.weight": [queries, hidden], "self_attn.q_a_layernorm.weight": [queries],
                            "self_attn.q_b_proj.weight": [shape.heads * (nope + rope), queries]})
        else:
            weights["self_attn.q_proj.weight"] = [shape.heads * (nope + rope), hidden]
        weights.update({
            "self_attn.kv_a_proj_with_mqa.weight": [rank + rope, hidden], "self_attn.kv_a_layernorm.weight": [rank],
            "self_attn.kv_b_proj.weight": [shape.heads * (nope + width), rank], "self_attn.o_proj.weight": [hidden, shape.heads * width]})
    else:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        gate = 2 if MODEL_TYPES[shape.model_type] == "hybrid" and text.get("attn_output_gate", True) else 1
        weights.update({"self_attn.q_proj.weight": [queries * gate, hidden], "self_attn.k_proj.weight": [keys, hidden],
                        "self_attn.v_proj.weight": [keys, hidden], "self_attn.o_proj.weight": [hidden, queries]})
        if shape.model_type == "qwen2":
            weights.update({"self_attn.q_proj.bias": [queries], "self_attn.k_proj.bias": [keys], "self_attn.v_proj.bias": [keys]})
        if shape.model_type.startswith("qwen3"):
            weights.update({"self_attn.q_norm.weight": [shape.head_dim], "self_attn.k_norm.weight": [shape.head_dim]})
    return weights


def _indexer(shape: Shape, text: dict[str, Any]) -> dict[str, Any]:
    heads, width = int(text["index_n_heads"]), shape.index_dim
    return {"self_attn.indexer.wq_b.weight": [heads * width, int(text["q_lora_rank"])], "self_attn.indexer.wk.weight": [width, shape.hidden],
            "self_attn.indexer.k_norm.weight": [width], "self_attn.indexer.k_norm.bias": [width],
            "self_attn.indexer.weights_proj.weight": [heads, shape.hidden]}


def _feed_forward(shape: Shape) -> dict[str, Any]:
    return {"mlp.gate_proj.weight": [shape.feed_forward, shape.hidden], "mlp.up_proj.weight": [shape.feed_forward, shape.hidden],
            "mlp.down_proj.weight": [shape.hidden, shape.feed_forward]}


def _sparse(shape: Shape, text: dict[str, Any]) -> dict[str, Any]:
    if not shape.experts:
        return {}
    wide, narrow = [shape.expert_width, shape.hidden], [shape.hidden, shape.expert_width]
    weights: dict[str, Any] = {"mlp.gate.weight": [shape.experts, shape.hidden], "mlp.experts.*.gate_proj.weight": (wide, shape.experts),
                               "mlp.experts.*.up_proj.weight": (wide, shape.experts), "mlp.experts.*.down_proj.weight": (narrow, shape.experts)}
    latent = MODEL_TYPES[shape.model_type] == "latent"
    shared = shape.expert_width * int(text.get("n_shared_experts") or 0) if latent else int(text.get("shared_expert_intermediate_size") or 0)
    if shared:
        name = "mlp.shared_experts." if latent else "mlp.shared_expert."
        weights.update({f"{name}gate_proj.weight": [shared, shape.hidden], f"{name}up_proj.weight": [shared, shape.hidden],
                        f"{name}down_proj.weight": [shape.hidden, shared]})
    if latent:
        weights["mlp.gate.e_score_correction_bias"] = [shape.experts]
    elif shared:
        weights["mlp.shared_expert_gate.weight"] = [1, shape.hidden]
    return weights


def _draft(shape: Shape, text: dict[str, Any], prefix: str) -> list[tuple]:
    """Layers that only draft: numbered after the last layer (DeepSeek, GLM), or under ``mtp.`` (Qwen)."""
    if not shape.draft_layers:
        return []
    hidden = shape.hidden
    kind = LATENT if LATENT in shape.kinds else FULL
    block = {**_attention(shape, text, kind), **(_sparse(shape, text) if shape.experts else _feed_forward(shape))}
    if kind == LATENT:
        if shape.index_dim:
            block.update(_indexer(shape, text))
        block.update({"enorm.weight": [hidden], "hnorm.weight": [hidden], "eh_proj.weight": [hidden, 2 * hidden],
                      "shared_head.norm.weight": [hidden]})
        if shape.model_type != "glm_moe_dsa":       # GLM drafts with the model's own embedding and head
            block.update({"embed_tokens.weight": [shape.vocabulary, hidden], "shared_head.head.weight": [shape.vocabulary, hidden]})
        return _layer_rows(f"{prefix}layers.*.", block, list(range(shape.layers, shape.layers + shape.draft_layers)))
    rows = _layer_rows("mtp.layers.*.", block, list(range(shape.draft_layers)))
    return rows + [("mtp.fc.weight", [hidden, 2 * hidden], None, 1), ("mtp.norm.weight", [hidden], None, 1),
                   ("mtp.pre_fc_norm_embedding.weight", [hidden], None, 1), ("mtp.pre_fc_norm_hidden.weight", [hidden], None, 1)]


def _vision_rows(vision: dict[str, Any]) -> list[tuple]:
    """The vision tower of Qwen3-VL and Qwen3.5."""
    hidden, wide, out = int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["out_hidden_size"])
    depth, merged = int(vision["depth"]), hidden * int(vision["spatial_merge_size"]) ** 2
    patch = [hidden, int(vision["in_channels"]), int(vision["temporal_patch_size"]), int(vision["patch_size"]), int(vision["patch_size"])]
    block = {"attn.qkv": [3 * hidden, hidden], "attn.proj": [hidden, hidden], "mlp.linear_fc1": [wide, hidden],
             "mlp.linear_fc2": [hidden, wide], "norm1": [hidden], "norm2": [hidden]}
    rows = [("model.visual.patch_embed.proj.weight", patch, None, 1), ("model.visual.patch_embed.proj.bias", [hidden], None, 1),
            ("model.visual.pos_embed.weight", [int(vision["num_position_embeddings"]), hidden], None, 1)]
    for name, size in block.items():
        rows += [(f"model.visual.blocks.*.{name}.weight", size, None, depth), (f"model.visual.blocks.*.{name}.bias", size[:1], None, depth)]
    for name, size in {"norm": [hidden], "linear_fc1": [merged, merged], "linear_fc2": [out, merged]}.items():
        rows += [(f"model.visual.merger.{name}.weight", size, None, 1), (f"model.visual.merger.{name}.bias", size[:1], None, 1)]
    return rows
