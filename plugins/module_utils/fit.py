"""Whether a deployment can run on a device, told before anything is loaded.

A device holds, beside what its driver keeps, the weights, the activations of one step, the buffers of collective communication and
the KV cache. vLLM gives the KV cache what is left of ``gpu_memory_utilization`` and refuses to start when not even one request of
``max_model_len`` fits. The same sum is done here from the model's config.json, the headers of its weight files and the deployment's
arguments; docs/fit.md explains every term with its source.

Weights and KV cache are exact for the architectures of model_shape; activations and buffers are an estimate. Where only the
estimate stands between yes and no the finding is a warning, not an error. An unknown architecture is `unknown`, never a guess.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils.model_files import DTYPE_BITS, numbers, row_bytes
from ansible_collections.llmops.ascend.plugins.module_utils.model_shape import (
    FULL,
    LATENT,
    LINEAR,
    SLIDING,
    Shape,
    UnknownModel,
    expected_tensors,
    read_shape,
)
from ansible_collections.llmops.ascend.plugins.module_utils.tables import table
from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import choose_catalogue

MIB = 1024 * 1024

# What an idle device already holds, where no idle one can be asked; by the beginning of its name, the first that fits. On a 910B with
# 65536 MB vLLM sees 60.96 to 61.27 GiB (vllm-ascend issue 8621, pull request 8289); on a 910A with 32768 MB 0 to 3 MB are in use.
IDLE_MB: tuple[tuple[str, int], ...] = (("910A", 3), ("910Pro", 3), ("310", 0), ("NVIDIA", 500), ("", 3100))

# vLLM's defaults where its parser has none of its own (vllm/engine/arg_utils.py, API server on a device of less than 70 GiB).
BATCHED_TOKENS, SEQUENCES = 2048, 256
# vllm-ascend's block (platform.py) and vLLM's.
ASCEND_BLOCK, BLOCK = 128, 16
# Measured beside weights and activations on one device (vllm-ascend pull request 8289: 0.13 GiB).
CONTEXT_MIB = 133
# Two buffers of HCCL_BUFFSIZE (default 200 MB) for each communicator (CANN, environment variables).
HCCL_BUFFSIZE_MIB = 200
# The image of the largest size that Qwen's processors make, in tokens; vLLM profiles with one (encoder cache budget of 16384 tokens).
IMAGE_TOKENS = 16384

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float": 4, "float32": 4}
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|vision|multi_modal_projector)\.")
# Held whole by every rank: norms, routers, the projections into a latent space (they feed all heads), and an indexer's own.
_WHOLE = re.compile(r"norm|(?:^|\.)(?:gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|indexer|eh_proj|patch_embed|pos_embed)\."
                    r"|mtp\.fc\.|(?:o_proj|down_proj|out_proj)\.bias$|correction_bias$")
_KEYS = re.compile(r"\.(?:k_proj|v_proj)\.")
_SCALE = re.compile(r"(?:scale|offset|scale_inv)$")
_EXPERT = re.compile(r"\.experts\.")
_EMBEDDING = re.compile(r"(?:embed_tokens|shared_head\.head)\.")


class Parallel(NamedTuple):
    """How an instance is spread: tensor, pipeline, data and decode context parallel sizes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: bool = False


@dataclass(frozen=True)
class Plan:
    """A deployment's settings as far as memory depends on them, defaults filled in; sizes in tokens, requests and bytes."""

    parallel: Parallel
    utilization: float
    context: int | None                 # max_model_len; None: not known
    longest_that_fits: bool             # max_model_len: auto
    batched_tokens: int
    sequences: int
    block: int
    ascend: bool
    dtype_bytes: int
    cache_bytes: int
    state_bytes: int
    draft_tokens: int
    drafts: bool
    vision: bool
    vision_whole: bool
    prefix_caching: bool
    cache_size: int | None              # kv_cache_memory_bytes
    buffer_mib: int


class Cache(NamedTuple):
    """The KV cache of one device: blocks of `block_bytes`, and how many of them a request of so many tokens needs."""

    block_bytes: int
    blocks: Callable[[int], int]


# ---------------------------------------------------------------------------------------------------------------- plan

def read_plan(deployment: dict[str, Any], shape: Shape, device: dict[str, Any]) -> Plan:
    """The settings of a resolved deployment. Raises UnknownModel for one whose memory is not known here."""
    try:
        plan = _plan(deployment, shape, device)
    except UnknownModel:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UnknownModel(f"args cannot be read: {error}") from None
    for name, size, least in (("decode_context_parallel_size", plan.parallel.context, 1), ("block_size", plan.block, 1),
                              ("max_num_batched_tokens", plan.batched_tokens, 1), ("max_num_seqs", plan.sequences, 1),
                              ("num_speculative_tokens", plan.draft_tokens, 0), ("max_model_len", 1 if plan.context is None else plan.context, 1)):
        if not least <= size < 1 << 40:
            raise UnknownModel(f"args.{name} is {size}")
    if not 0 < plan.utilization <= 1:
        raise UnknownModel(f"args.gpu_memory_utilization is {plan.utilization}")
    return plan


def _plan(deployment: dict[str, Any], shape: Shape, device: dict[str, Any]) -> Plan:
    args = deployment["args"]
    parallel = Parallel(deployment["tensor_parallel_size"], deployment["pipeline_parallel_size"], deployment["data_parallel_size"],
                        int(args.get("decode_context_parallel_size") or 1), bool(args.get("enable_expert_parallel")))
    dtype = args.get("dtype") or "auto"
    dtype = shape.dtype if dtype == "auto" else dtype
    if dtype not in _DTYPE_BYTES:
        raise UnknownModel(f"the size of an element of dtype {dtype!r} is not known")
    dtype_bytes = _DTYPE_BYTES[dtype]
    if dtype_bytes == 4 and args.get("dtype") in (None, "auto"):
        dtype_bytes = 2                     # vLLM loads a model of 32 bits in 16 unless it is told otherwise
    ascend = not str(device.get("name") or "").startswith("NVIDIA")
    speculative = _dictionary(args.get("speculative_config"))
    drafts = bool(shape.draft_layers) and "mtp" in str(speculative.get("method", ""))
    length = args.get("max_model_len")
    automatic = str(length) in ("auto", "-1")
    limits = _dictionary(args.get("limit_mm_per_prompt"))
    seen = any(limits.get(kind, 1) != 0 for kind in ("image", "video")) and not args.get("language_model_only")
    return Plan(
        parallel=parallel,
        utilization=_utilization(deployment),
        context=shape.context if length is None or automatic else tokens(length),
        longest_that_fits=automatic,
        batched_tokens=tokens(args.get("max_num_batched_tokens") or BATCHED_TOKENS),
        sequences=tokens(args.get("max_num_seqs") or SEQUENCES),
        block=int(args.get("block_size") or (ASCEND_BLOCK if ascend else BLOCK)),
        ascend=ascend,
        dtype_bytes=dtype_bytes,
        cache_bytes=_cache_bytes(str(args.get("kv_cache_dtype") or "auto"), dtype_bytes),
        state_bytes=_state_bytes(str(args.get("mamba_ssm_cache_dtype") or "auto"), shape, dtype_bytes),
        draft_tokens=int(speculative.get("num_speculative_tokens") or 0),
        drafts=drafts,
        vision=shape.vision is not None and seen,
        vision_whole=args.get("mm_encoder_tp_mode") == "data",
        prefix_caching=args.get("enable_prefix_caching") is not False,
        cache_size=tokens(args["kv_cache_memory_bytes"]) if args.get("kv_cache_memory_bytes") else None,
        buffer_mib=_buffers(parallel, deployment["env"]) if ascend else 0,
    )


def _dictionary(value: Any) -> dict[str, Any]:
    """An argument that is a dictionary, or JSON as the command line has it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _utilization(deployment: dict[str, Any]) -> float:
    """gpu_memory_utilization, by default that of the vLLM version in use."""
    options = choose_catalogue(deployment["vllm_version"]).catalogue["options"]
    return float(deployment["args"].get("gpu_memory_utilization", options["--gpu-memory-utilization"]["default"]))


def tokens(value: Any) -> int:
    """A number as vLLM reads it: ``4096``, ``"32k"`` (thousands), ``"32K"`` (1024), ``"1.5k"``. Raises UnknownModel."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", str(value).strip())
    if not match:
        raise UnknownModel(f"{value!r} is no number of tokens")
    number, unit = match.groups()
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1024 if unit.isupper() else 1000) ** power)


def _cache_bytes(name: str, dtype_bytes: int) -> int:
    if name == "auto":
        return dtype_bytes
    if name in _DTYPE_BYTES:
        return _DTYPE_BYTES[name]
    if name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8", "uint8"):
        return 1
    raise UnknownModel(f"the size of a KV cache of {name!r} is not known")


def _state_bytes(name: str, shape: Shape, dtype_bytes: int) -> int:
    name = (shape.linear_dtype or "auto") if name == "auto" else name
    return _DTYPE_BYTES.get(name, dtype_bytes)


def _buffers(parallel: Parallel, env: dict[str, str]) -> int:
    size = env.get("HCCL_BUFFSIZE", "")
    communicators = sum(edge > 1 for edge in parallel[:3]) + (parallel.expert and parallel.tensor * parallel.data > 1)
    return 2 * communicators * (int(size) if size.isdigit() else HCCL_BUFFSIZE_MIB)


# ------------------------------------------------------------------------------------------------------------- weights

def stages(layers: int, pipeline: int) -> list[range]:
    """Which layers each stage of a pipeline holds: even shares, the rest from the last but one backwards (vllm/distributed/utils.py)."""
    counts = [layers // pipeline] * pipeline
    for number in range(2, 2 + layers % pipeline):
        counts[-number] += 1
    return [range(sum(counts[:number]), sum(counts[:number + 1])) for number in range(pipeline)]


def weight_bytes(rows: list[dict], shape: Shape, plan: Plan) -> list[int]:
    """Bytes of weights on one device, for each stage of the pipeline."""
    return [sum(_row_bytes(row, _held(row, shape, plan, stage), shape, plan) for row in rows)
            for stage in stages(shape.layers, plan.parallel.pipeline)]


def _held(row: dict, shape: Shape, plan: Plan, stage: range) -> int:
    """How many tensors of a row a stage of the pipeline holds, before they are shared among its ranks."""
    name, first, last = row["name"], stage.start == 0, stage.stop == shape.layers
    layers = numbers(row["layers"])
    if _VISION.search(name):
        return row["count"] * max(len(layers), 1) if plan.vision and first else 0
    drafting = plan.drafts and last and not _EMBEDDING.search(name)     # a drafting layer uses the model's own embedding and head
    if name.startswith("mtp."):
        return row["count"] * max(len(layers), 1) if drafting else 0
    if layers:
        return row["count"] * sum(number in stage or (number >= shape.layers and drafting) for number in layers)
    if "embed_tokens." in name:
        needed = first or (shape.tied and last)
    elif "lm_head." in name:
        needed = last and not shape.tied        # tied weights are in some files twice
    else:
        needed = last                           # the norm after the last layer
    return row["count"] if needed else 0


def _row_bytes(row: dict, held: int, shape: Shape, plan: Plan) -> int:
    """Bytes of one rank's share of `held` tensors of a row."""
    name, size = row["name"], row_bytes(dict(row, layers=None, count=1))
    if row["dtype"] in ("BF16", "F16", "F32", "F64") and len(row["shape"]) > 1 and not _SCALE.search(name):
        size = size * 8 * plan.dtype_bytes // DTYPE_BITS[row["dtype"]]      # loaded in the dtype the engine was told
    if _EXPERT.search(name):
        # Whole experts on each rank, or a slice of every expert: data parallel ranks share them in both cases.
        ranks = plan.parallel.tensor * plan.parallel.data
        if plan.parallel.expert and row["count"] > 1:
            return size * math.ceil(row["count"] / ranks) * (held // row["count"])
        return math.ceil(size * held / ranks)
    return math.ceil(size * held * _share(name, shape, plan))


def _share(name: str, shape: Shape, plan: Plan) -> float:
    """Which part of a tensor one rank of tensor parallelism holds."""
    vision = bool(_VISION.search(name))
    if _WHOLE.search(name) or (vision and plan.vision_whole):
        return 1.0
    if _KEYS.search(name) and not vision:
        return 1 / min(plan.parallel.tensor, shape.kv_heads)    # fewer heads than ranks: several ranks hold the same
    return 1 / plan.parallel.tensor


# ------------------------------------------------------------------------------------------------------------ KV cache

def cache_of(shape: Shape, plan: Plan, stage: range) -> Cache:
    """The KV cache of a device that holds these layers (vllm/v1/core/kv_cache_utils.py, kv_cache_interface.py).

    Layers of one kind share their blocks. With several kinds the layers are cut into groups of one size and a block of any group
    takes the same room, so that one pool serves all.
    """
    kinds = [shape.kinds[number] for number in stage]
    kept = [shape.indexed[number] for number in stage] if shape.indexed else []
    if plan.drafts and stage.stop == shape.layers:
        kinds += [LATENT if LATENT in shape.kinds else FULL] * shape.draft_layers
        kept += [True] * shape.draft_layers if shape.indexed else []
    block, dcp = plan.block, plan.parallel.context
    if LATENT in kinds:
        per_token = (len(kinds) * shape.latent + sum(kept) * shape.index_dim) * plan.cache_bytes
        return Cache(block * per_token, lambda length: math.ceil(math.ceil(length / dcp) / block))
    per_layer = 2 * max(1, shape.kv_heads // plan.parallel.tensor) * shape.head_dim * plan.cache_bytes
    counts = {kind: kinds.count(kind) for kind in (FULL, SLIDING, LINEAR) if kind in kinds}
    few, many = min(counts.values(), default=0), max(counts.values(), default=0)
    group = many if many < few * 1.25 else few
    page = block * per_layer
    if LINEAR in counts:
        block, page = _hybrid_page(shape, plan, per_layer)
    groups = {kind: math.ceil(count / group) for kind, count in counts.items()}
    states = (2 if plan.prefix_caching else 1) + plan.draft_tokens

    def blocks(length: int) -> int:
        local = math.ceil(length / dcp)
        needed = groups.get(FULL, 0) * math.ceil(local / block)
        if SLIDING in groups:
            kept_tokens = min((shape.window or 0) - 1 + plan.batched_tokens, length)
            needed += groups[SLIDING] * (math.ceil(kept_tokens / block) + 1)
        return needed + groups.get(LINEAR, 0) * states

    return Cache(group * page, blocks)


def _hybrid_page(shape: Shape, plan: Plan, per_layer: int) -> tuple[int, int]:
    """Tokens of a block and bytes of a layer's page, so wide that a request's state fits in one page.

    vLLM makes a block of attention as large as a state; vllm-ascend makes its keys alone as large as the recurrent part and adds
    the convolution's (vllm_ascend/patch/platform/patch_mamba_config.py).
    """
    linear, tensor = shape.linear, plan.parallel.tensor
    recurrent = linear["value_heads"] // tensor * linear["value_dim"] * linear["key_dim"] * plan.state_bytes
    width = (2 * linear["key_heads"] * linear["key_dim"] + linear["value_heads"] * linear["value_dim"]) // tensor
    convolution = width * (linear["kernel"] - 1 + plan.draft_tokens) * plan.dtype_bytes
    if plan.ascend:
        block = max(plan.block, ASCEND_BLOCK * math.ceil(recurrent / (ASCEND_BLOCK * per_layer // 2)))
        return block, block * per_layer + convolution
    block = max(plan.block, BLOCK * math.ceil((recurrent + convolution) / (BLOCK * per_layer)))
    return block, block * per_layer


def longest(cache: Cache, room: int, limit: int) -> int:
    """The longest request, of at most `limit` tokens, that a KV cache of `room` bytes holds; 0 for none."""
    available = room // cache.block_bytes
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.blocks(middle) <= available else (low, middle - 1)
    return low


# ---------------------------------------------------------------------------------------------------------- activations

def activation_bytes(shape: Shape, plan: Plan) -> int:
    """An estimate of what one step needs beside weights and KV cache; docs/fit.md compares it with what was measured."""
    tensor = plan.parallel.tensor
    wide = 4 * shape.hidden + 3 * math.ceil(shape.feed_forward / tensor)
    if shape.experts:
        wide += shape.experts_per_token * (2 * shape.hidden + 3 * shape.expert_width // (1 if plan.parallel.expert else tensor))
    step = plan.batched_tokens * wide * plan.dtype_bytes
    logits = min(plan.sequences * (1 + plan.draft_tokens), plan.batched_tokens) * shape.vocabulary * 4
    seen = 0
    if plan.vision and shape.vision:
        patches = IMAGE_TOKENS * shape.vision["merge"] ** 2
        shards = 1 if plan.vision_whole else tensor
        seen = plan.dtype_bytes * (patches * (4 * shape.vision["hidden"] + shape.vision["feed_forward"] // shards)
                                   + IMAGE_TOKENS * shape.hidden)
    # The pictures are encoded before the step, and the room they had is used again.
    return max(step + logits, seen)


# -------------------------------------------------------------------------------------------------------------- verdict

def verdict(model: dict[str, Any], deployment: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Whether a resolved deployment's model runs on its devices.

    `model` is what model_files.read_model gives, `device` ``{"name", "hbm_total_mb", "hbm_used_mb"}``: of the smallest device, the last
    one of an idle device or None. The result, sizes in MiB for the fullest device, None where they are not known:

        {"deployment", "verdict": "fits" | "does_not_fit" | "unknown", "devices_per_instance", "device",
         "per_device": {"total", "idle", "budget", "weights", "activations", "kv_cache", "request", "left"},
         "max_model_len", "kv_tokens", "max_concurrency", "findings": [{"level", "message", "remedy"}], "remedy"}

    `budget` is what vLLM may use, `kv_cache` what of it is left for the KV cache, `request` what one request of `max_model_len` needs
    of that, `left` what then remains. `max_concurrency` is how many such requests fit at once and `kv_tokens` their tokens. Levels
    are error (vLLM would refuse to start), warning and info.
    """
    result: dict[str, Any] = {
        "deployment": deployment["name"], "verdict": "unknown", "devices_per_instance": deployment["devices_per_instance"],
        "device": device.get("name"),
        "per_device": dict.fromkeys(("total", "idle", "budget", "weights", "activations", "kv_cache", "request", "left")),
        "max_model_len": None, "kv_tokens": None, "max_concurrency": None, "findings": [], "remedy": "",
    }
    total = device.get("hbm_total_mb")
    if not total:
        return _unknown(result, "the size of the device's memory is not known", "see the warnings of accelerator_facts")
    idle = device["hbm_used_mb"] if device.get("hbm_used_mb") is not None else idle_mb(device.get("name"))
    result["per_device"].update(total=total, idle=idle)
    try:
        if model["config"] is None:
            raise UnknownModel(model["missing"][0] if model["missing"] else f"{model['path']} has no config.json")
        shape = read_shape(model["config"])
        plan = read_plan(deployment, shape, device)
        rows = _weights(model, deployment["args"])
    except UnknownModel as error:
        return _from_total(result, model, deployment, total - idle, str(error))
    faults = _indivisible(shape, plan)
    if faults:
        return _unknown(result, *faults)
    draft = _dictionary(deployment["args"].get("speculative_config"))
    if draft.get("model"):
        result["findings"].append({"level": "info", "remedy": "", "message": f"the drafting model {draft['model']} is not counted"})
    return _judge(result, rows, shape, plan, deployment)


def _weights(model: dict[str, Any], args: dict[str, Any]) -> list[dict]:
    """The tensors as the engine will hold them. Raises UnknownModel."""
    if args.get("cpu_offload_gb"):
        raise UnknownModel("args.cpu_offload_gb moves weights into the machine's memory")
    quantization = args.get("quantization")
    if quantization and quantization != "ascend" and not model["config"].get("quantization_config"):
        raise UnknownModel(f"args.quantization {quantization} changes the weights while they are loaded")
    if model["tensors"]:
        return model["tensors"]
    if quantization:
        raise UnknownModel(f"{model['path']} has no weight files yet, and what is quantised only they say")
    return expected_tensors(model["config"])


def idle_mb(name: str | None) -> int:
    """What an idle device of this name holds; see IDLE_MB."""
    return next(size for beginning, size in IDLE_MB if (name or "").startswith(beginning))


def _unknown(result: dict[str, Any], message: str, remedy: str) -> dict[str, Any]:
    result["remedy"] = remedy
    result["findings"].append({"level": "info", "message": f"whether it fits is not known: {message}", "remedy": remedy})
    return result


def _from_total(result: dict[str, Any], model: dict, deployment: dict, visible: int, why: str) -> dict[str, Any]:
    """What the sum of all weights alone tells: too large even if every device held its share and nothing twice."""
    if model["total_bytes"]:
        share = math.ceil(model["total_bytes"] / deployment["devices_per_instance"] / MIB)
        result["per_device"]["weights"] = share
        if share > visible:
            return _refuse(result, "error", f"its weights take at least {share} MiB of a device that has {visible} MiB for them",
                           "use more or larger devices for an instance")
    return _unknown(result, why, "judge by the engine's log; the sum of the weights alone does not exclude it"
                    if model["total_bytes"] else "copy the model, or write model_path as it is on the machine")


def _refuse(result: dict[str, Any], level: str, message: str, remedy: str) -> dict[str, Any]:
    result.update(verdict="does_not_fit", remedy=remedy)
    result["findings"].append({"level": level, "message": message, "remedy": remedy})
    return result


def _indivisible(shape: Shape, plan: Plan) -> tuple[str, str] | None:
    """What vLLM would refuse about the parallel sizes; their memory is nothing one can reckon."""
    tensor, pipeline = plan.parallel.tensor, plan.parallel.pipeline
    if shape.heads % tensor:
        return (f"{shape.heads} attention heads cannot be shared by a tensor_parallel_size of {tensor}",
                f"use a tensor_parallel_size that divides {shape.heads}")
    if pipeline > shape.layers:
        return f"{shape.layers} layers are too few for a pipeline_parallel_size of {pipeline}", "lower pipeline_parallel_size"
    return None


class Sum(NamedTuple):
    """Bytes on the fullest device, and its KV cache."""

    weights: int
    estimate: int
    cache: Cache


def _sums(rows: list[dict], shape: Shape, plan: Plan) -> list[Sum]:
    estimate = activation_bytes(shape, plan) + (CONTEXT_MIB + plan.buffer_mib) * MIB
    return [Sum(weights, estimate, cache_of(shape, plan, stage))
            for weights, stage in zip(weight_bytes(rows, shape, plan), stages(shape.layers, plan.parallel.pipeline))]


def _judge(result: dict[str, Any], rows: list[dict], shape: Shape, plan: Plan, deployment: dict) -> dict[str, Any]:
    sizes = result["per_device"]
    visible = (sizes["total"] - sizes["idle"]) * MIB
    budget = int(visible * plan.utilization)

    def room(part: Sum, within: int) -> int:
        return plan.cache_size if plan.cache_size is not None else within - part.weights - part.estimate

    def request(part: Sum, length: int) -> int:
        return part.cache.blocks(length) * part.cache.block_bytes

    context = plan.context
    parts = _sums(rows, shape, plan)
    # The stage with the least left decides for the whole pipeline.
    part = min(parts, key=lambda one: room(one, budget) - (request(one, context) if context else 0))
    if plan.cache_size is not None:
        budget = part.weights + part.estimate + plan.cache_size
    kv_room = room(part, budget)
    sizes.update(budget=_mib(budget), weights=_mib(part.weights), activations=_mib(part.estimate), kv_cache=_mib(kv_room))
    if context is None:
        return _unknown(result, "max_model_len is set neither in args nor in config.json", "set args.max_model_len")
    if plan.longest_that_fits:
        context = longest(part.cache, max(kv_room, 0), context)
    result["max_model_len"] = context
    if part.weights >= min(budget, visible):
        return _refuse(result, "error", f"its weights take {_mib(part.weights)} MiB of a device that has {_mib(min(budget, visible))} MiB for them",
                       _more_devices(result, rows, shape, plan, deployment) or "use larger devices, or weights of fewer bits")
    needed = request(part, max(context, 1))
    sizes.update(request=_mib(needed), left=_mib(kv_room - needed))
    whole = max(kv_room, 0) // part.cache.block_bytes / part.cache.blocks(max(context, 1))
    result.update(max_concurrency=round(whole, 2), kv_tokens=int(whole * context))
    if plan.cache_size is not None and budget > visible:
        return _refuse(result, "error", f"weights, activations and kv_cache_memory_bytes take {_mib(budget)} MiB of {_mib(visible)} MiB",
                       "lower args.kv_cache_memory_bytes")
    if whole < 1 or context < 1:
        sure = plan.cache_size is not None or needed > budget - part.weights
        remedies = [] if plan.cache_size is not None else _raised_utilization(part, needed, visible)
        fitting = longest(part.cache, max(kv_room, 0), context)
        remedies += [f"lower args.max_model_len to {fitting}"] if fitting > 0 else []
        remedies += [more for more in [_more_devices(result, rows, shape, plan, deployment)] if more]
        return _refuse(
            result, "error" if sure else "warning",
            f"its KV cache has {_mib(max(kv_room, 0))} MiB, one request of {context} tokens needs {_mib(needed)} MiB"
            + ("" if sure else f" (activations of {_mib(part.estimate)} MiB are an estimate)"),
            "; or ".join(remedies) or "use larger devices, or weights of fewer bits")
    result["verdict"] = "fits"
    if whole < plan.sequences:
        result["findings"].append({
            "level": "info", "remedy": "",
            "message": f"requests of {context} tokens: {whole:.1f} at once, max_num_seqs is {plan.sequences}; shorter ones are more at once"})
    return result


def _mib(size: int) -> int:
    return round(size / MIB)


def _raised_utilization(part: Sum, needed: int, visible: int) -> list[str]:
    """The utilisation that would do, in hundredths and with something left for what vLLM does not count (graphs)."""
    wanted = math.ceil((part.weights + part.estimate + needed) / visible * 100) / 100
    return [f"raise args.gpu_memory_utilization to {wanted:.2f}"] if wanted <= 0.97 else []


def _more_devices(result: dict[str, Any], rows: list[dict], shape: Shape, plan: Plan, deployment: dict) -> str:
    """The next tensor parallel size with which it would fit, up to 16; empty for none."""
    if plan.cache_size is not None:
        return ""
    sizes = result["per_device"]
    budget = int((sizes["total"] - sizes["idle"]) * MIB * plan.utilization)
    for tensor in (size for size in (2, 4, 8, 16) if size > plan.parallel.tensor and shape.heads % size == 0):
        wider = plan.parallel._replace(tensor=tensor)
        other = Plan(**{**vars(plan), "parallel": wider, "buffer_mib": _buffers(wider, deployment["env"]) if plan.ascend else 0})
        parts = _sums(rows, shape, other)
        if all(one.weights + one.estimate + one.cache.blocks(plan.context or 1) * one.cache.block_bytes <= budget for one in parts):
            return f"use tensor_parallel_size {tensor}"
    return ""


def device_of(devices: list[dict[str, Any]], deployment: dict[str, Any]) -> dict[str, Any]:
    """What `verdict` needs to know of the devices that a deployment may use, from the facts: the smallest one, and an idle one's use.

    Idle is a device that nobody holds; one that is said to hold more than an eighth of its memory has holders that are not seen.
    """
    wanted = [device for device in devices if deployment["devices"] == "all" or device["phy_id"] in deployment["devices"]]
    sized = [device for device in wanted if device.get("hbm_total_mb")]
    if not sized:
        return {"name": None, "hbm_total_mb": None, "hbm_used_mb": None}
    smallest = min(sized, key=lambda device: device["hbm_total_mb"])
    used = [device["hbm_used_mb"] for device in sized if device.get("hbm_used_mb") is not None and not device.get("holders")]
    idle = min(used, default=None)
    return {"name": smallest["name"], "hbm_total_mb": smallest["hbm_total_mb"],
            "hbm_used_mb": idle if idle is not None and idle * 8 <= smallest["hbm_total_mb"] else None}


def fit_table(verdicts: list[dict[str, Any]]) -> list[str]:
    """Verdicts as a table, sizes in MiB for each device."""
    rows = [{**one["per_device"], **{key: one.get(key) for key in ("machine", "deployment", "device", "kv_tokens")},
             "devices": one["devices_per_instance"], "verdict": one["verdict"].replace("_", " "),
             "concurrency": None if one["max_concurrency"] is None else f"{one['max_concurrency']:.1f}"} for one in verdicts]
    columns = {"machine": "machine", "deployment": "deployment", "device": "device", "devices": "devices", "total": "total", "idle": "idle",
               "budget": "usable", "weights": "weights", "activations": "activations", "kv_cache": "KV cache", "request": "one request",
               "left": "left", "kv_tokens": "KV tokens", "concurrency": "at once", "verdict": "verdict"}
    if not any(row["machine"] for row in rows):
        del columns["machine"]
    return table(rows, columns)
