"""Whether a deployment fits: weights, KV cache and verdicts, against sums done by hand and published sizes of checkpoints."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.filter import fit as fit_filter
from ansible_collections.llmops.ascend.plugins.module_utils import fit, model_files, model_shape
from hypothesis import given
from hypothesis import strategies as st

MODELS = Path(__file__).parent / "fixtures" / "models"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "fit.md"
GIB, MIB = 1 << 30, 1 << 20


def config(name):
    return json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))


def deployment(tp=1, pp=1, dp=1, env=None, name="d", **args):
    return {"name": name, "model_path": "/m", "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp,
            "devices_per_instance": tp * pp * dp, "devices": "all", "vllm_version": "0.18.0", "args": args, "env": env or {}}


def device(total=65536, used=None, name="910B4"):
    return {"name": name, "hbm_total_mb": total, "hbm_used_mb": used}


def model(name, as_stored=lambda row: row):
    """A model of the fixtures: its unquantised tensors, or what `as_stored` makes of each row of them."""
    whole = {key: value for key, value in config(name).items() if key != "quantization_config"}
    tensors = [as_stored(row) for row in model_shape.expected_tensors(whole)]
    return {"path": "/m", "config": whole, "tensors": tensors, "total_bytes": sum(map(model_files.row_bytes, tensors)), "missing": []}


def in_8_bits(pattern):
    """Matrices of the language model whose names match, stored in 8 bits."""
    return lambda row: {**row, "dtype": "I8"} if len(row["shape"]) == 2 and re.search(pattern, row["name"]) and "visual" not in row["name"] else row


def in_4_bits(row):
    """Experts with two weights in a byte, all other projections in 8 bits."""
    if ".experts." in row["name"]:
        return {**row, "dtype": "I8", "shape": [row["shape"][0], row["shape"][1] // 2]}
    return {**row, "dtype": "I8"} if "proj" in row["name"] and "visual" not in row["name"] else row


FEED_FORWARD, ATTENTION, LINEAR = r"\.mlp\.", r"self_attn.*proj", r"linear_attn.*(?:qkv|_z|out_proj)"


def weights(name, tp=1, pp=1, dp=1, as_stored=lambda row: row, **args):
    """Bytes on a device, for each stage."""
    given_model = model(name, as_stored)
    shape = model_shape.read_shape(given_model["config"])
    return fit.weight_bytes(given_model["tensors"], shape, fit.read_plan(deployment(tp, pp, dp, **args), shape, device()))


def cache(name, tp=1, pp=1, stage=0, **args):
    shape = model_shape.read_shape(config(name))
    plan = fit.read_plan(deployment(tp, pp, **args), shape, device(name=args.pop("device", "910B4")))
    return fit.cache_of(shape, plan, fit.stages(shape.layers, pp)[stage])


# ---------------------------------------------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize(("name", "size"), [
    ("Qwen3-0.6B", 2 * 596_049_920), ("Qwen3-8B", 16_381_470_720), ("Qwen3-32B", 65_524_246_528), ("Qwen3-30B-A3B", 61_064_245_248),
    ("GLM-5.2", 1_506_659_919_872),
])
def test_tensors_of_a_configuration_are_those_of_its_checkpoint(name, size):
    """The published checkpoints' own sums (metadata.total_size of their index)."""
    assert model(name)["total_bytes"] == size


def test_a_hybrid_with_vision_and_drafting_layers():
    assert model("Qwen3.6-27B")["total_bytes"] == pytest.approx(55.56e9, rel=2e-4)
    assert model("DeepSeek-V3")["total_bytes"] / 2 == pytest.approx(684.5e9, rel=1e-4)


@pytest.mark.parametrize(("changed", "said"), [
    ({"model_type": "brand_new"}, "architecture 'brand_new' is not known"),
    ({"model_type": None}, "config.json has no model_type"),
    ({"hidden_size": None}, "cannot be read"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "no layer_types"),
    ({"layer_types": ["chunked_attention"] * 36, "sliding_window": 8, "use_sliding_window": True}, "'chunked_attention' are not known"),
    ({"layer_types": ["full_attention"], "sliding_window": 8, "use_sliding_window": True}, "1 layer_types for 36 layers"),
])
def test_what_is_not_known_is_not_guessed(changed, said):
    with pytest.raises(model_shape.UnknownModel, match=re.escape(said)):
        model_shape.read_shape({**config("Qwen3-8B"), **changed})


def test_a_missing_key_is_named():
    broken = config("Qwen3-8B")
    del broken["num_attention_heads"]
    with pytest.raises(model_shape.UnknownModel, match="has no num_attention_heads"):
        model_shape.read_shape(broken)


def test_quantised_tensors_are_not_derived():
    with pytest.raises(model_shape.UnknownModel, match="quantised"):
        model_shape.expected_tensors(config("DeepSeek-V3"))


# -------------------------------------------------------------------------------------------------------------- weights

def test_weights_are_shared_but_for_norms():
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert weights("Qwen3-8B") == [16_381_470_720]
    assert weights("Qwen3-8B", tp=4) == [(16_381_470_720 - norms) // 4 + norms]


def test_fewer_kv_heads_than_ranks_are_held_several_times():
    one, sixteen = weights("Qwen3-32B", tp=8)[0], weights("Qwen3-32B", tp=16)[0]
    keys = 2 * 64 * 2 * 8 * 128 * 5120                      # 64 layers, k and v, 8 heads of 128, 2 bytes each
    norms = 2 * (64 * (2 * 5120 + 2 * 128) + 5120)
    assert sixteen - norms - keys / 8 == (65_524_246_528 - norms - keys) / 16
    assert one - norms == (65_524_246_528 - norms) / 8


def test_tied_embeddings_are_counted_once_and_in_a_pipeline_at_both_ends():
    embedding = 2 * 151936 * 1024
    assert weights("Qwen3-0.6B") == [2 * 596_049_920]
    first, last = weights("Qwen3-0.6B", pp=2)
    assert first + last == 2 * 596_049_920 + embedding


def test_a_pipeline_shares_the_layers():
    layer = 2 * (2 * 4096 + 2 * 128 + 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    embedding = 2 * 151936 * 4096
    assert weights("Qwen3-8B", pp=4) == [9 * layer + embedding, 9 * layer, 9 * layer, 9 * layer + embedding + 2 * 4096]


@pytest.mark.parametrize(("layers", "pipeline", "counts"), [(61, 4, [15, 15, 16, 15]), (64, 4, [16] * 4), (7, 4, [2, 2, 2, 1]), (5, 1, [5])])
def test_stages(layers, pipeline, counts):
    assert [len(stage) for stage in fit.stages(layers, pipeline)] == counts


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_are_shared_by_tensor_and_data_parallel_ranks(expert_parallel):
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    alone = weights("Qwen3-30B-A3B")[0]
    data = weights("Qwen3-30B-A3B", dp=4, enable_expert_parallel=expert_parallel)[0]
    assert data == alone - experts + experts // 4           # everything else stands in every data parallel rank


def test_experts_that_do_not_divide_weigh_on_the_fullest_rank():
    expert = 48 * 3 * 2048 * 768 * 2
    assert weights("Qwen3-30B-A3B", dp=3, enable_expert_parallel=True)[0] == weights("Qwen3-30B-A3B")[0] - (128 - 43) * expert


def test_latent_projections_and_routers_are_whole_on_each_rank():
    rows = [row for row in model("DeepSeek-V3")["tensors"] if re.search(r"q_a_proj|kv_a_proj|mlp\.gate\.|norm", row["name"])]
    whole = sum(model_files.row_bytes({**row, "layers": "0"}) * len([n for n in model_files.numbers(row["layers"]) if n < 61])
                if row["layers"] else model_files.row_bytes(row) for row in rows)
    sixteen, thirty_two = weights("DeepSeek-V3", tp=16)[0], weights("DeepSeek-V3", tp=32)[0]
    assert sixteen - whole == pytest.approx(2 * (thirty_two - whole), rel=1e-6)


def test_drafting_layers_are_loaded_only_to_draft():
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    layer = 2 * (5120 * (12288 + 2 * 1024) + 6144 * 5120 + 3 * 5120 * 17408 + 2 * 5120 + 2 * 256 + 2 * 5120 * 5120 + 3 * 5120)
    assert weights("Qwen3.6-27B", speculative_config=mtp)[0] - weights("Qwen3.6-27B")[0] == layer
    assert weights("Qwen3.6-27B", speculative_config=json.dumps(mtp)) == weights("Qwen3.6-27B", speculative_config=mtp)
    assert weights("Qwen3.6-27B", speculative_config={"method": "ngram"}) == weights("Qwen3.6-27B")


def test_a_drafting_layer_folded_with_the_others_is_told_apart():
    """In a real checkpoint the drafting layer 61 has tensors of the same names and shapes as the layers 3 to 60."""
    expected = model("DeepSeek-V3")
    names = [(row["name"].replace("experts.*", f"experts.{expert}").replace("layers.*", f"layers.{layer}"), row["dtype"], row["shape"])
             for row in expected["tensors"] for layer in (model_files.numbers(row["layers"]) or [0]) for expert in range(row["count"])]
    folded = model_files.fold(names)
    assert any(row["layers"] == "3-61" for row in folded)
    shape = model_shape.read_shape(expected["config"])
    for args in ({}, {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 1}}):
        plan = fit.read_plan(deployment(16, enable_expert_parallel=True, **args), shape, device())
        assert fit.weight_bytes(folded, shape, plan) == fit.weight_bytes(expected["tensors"], shape, plan)


def test_a_vision_tower_may_be_left_out_or_held_whole():
    text_only = weights("Qwen3.6-27B", language_model_only=True)[0]
    assert weights("Qwen3.6-27B")[0] - text_only == pytest.approx(2 * 460.7e6, rel=1e-3)
    assert weights("Qwen3.6-27B", limit_mm_per_prompt={"image": 0, "video": 0})[0] == text_only
    assert (weights("Qwen3.6-27B", tp=2, mm_encoder_tp_mode="data")[0] - weights("Qwen3.6-27B", tp=2)[0]
            == pytest.approx(460.7e6, rel=2e-2))


def test_the_dtype_of_the_engine_decides_how_wide_weights_become():
    assert weights("Qwen3-8B", dtype="float32")[0] == pytest.approx(2 * 16_381_470_720, rel=1e-4)
    assert weights("Qwen3-8B", as_stored=in_8_bits("proj"), dtype="float32")[0] > weights("Qwen3-8B", as_stored=in_8_bits("proj"))[0]


@given(st.sampled_from(["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "GLM-5.2", "Qwen3.6-27B"]), st.integers(0, 3), st.sampled_from([1, 2, 4]),
       st.sampled_from([1, 2, 4]), st.booleans())
def test_more_ranks_never_hold_more(name, power, pp, dp, expert_parallel):
    args = {"pp": pp, "dp": dp, "enable_expert_parallel": expert_parallel}
    fewer, more = weights(name, tp=2 ** power, **args), weights(name, tp=2 ** (power + 1), **args)
    assert all(large >= small for large, small in zip(fewer, more))
    assert sum(weights(name, tp=2 ** power, pp=1, dp=dp, enable_expert_parallel=expert_parallel)) <= sum(fewer)


# ------------------------------------------------------------------------------------------------------------- KV cache

@pytest.mark.parametrize(("name", "tp", "length", "size"), [
    ("Qwen3-0.6B", 1, 40960, 28 * 2 * 8 * 128 * 2 * 40960),
    ("Qwen3-32B", 4, 32768, 64 * 2 * 2 * 128 * 2 * 32768),
    ("Qwen3-32B", 16, 32768, 64 * 2 * 1 * 128 * 2 * 32768),              # one head at least
    ("DeepSeek-V3", 1, 65536, 61 * 576 * 2 * 65536),
    ("DeepSeek-V3", 16, 65536, 61 * 576 * 2 * 65536),                    # the latent vector is not shared
    ("GLM-5.2", 8, 131072, (78 * 576 + 21 * 128) * 2 * 131072),          # 21 layers keep an indexer's keys
])
def test_a_request(name, tp, length, size):
    found = cache(name, tp)
    assert found.blocks(length) * found.block_bytes == size


def test_a_block_is_128_tokens_on_ascend_and_16_elsewhere():
    assert (cache("Qwen3-8B").blocks(129), cache("Qwen3-8B", device="NVIDIA GeForce RTX 4090").blocks(129)) == (2, 9)
    assert cache("Qwen3-8B", block_size=64).blocks(129) == 3


def test_a_narrower_cache():
    assert cache("Qwen3-8B", kv_cache_dtype="fp8").block_bytes * 2 == cache("Qwen3-8B").block_bytes


def test_decode_context_parallel_ranks_share_a_request():
    assert cache("GLM-5.2", 8, decode_context_parallel_size=8).blocks(262144) * 8 == cache("GLM-5.2", 8).blocks(262144)


def test_a_hybrid_model_as_vllm_itself_reckons_it():
    """vLLM 0.29 reserves 17,520,656,384 bytes for a request of 262,144 tokens of this model, 17,366,515,712 without prefix caching:
    blocks of 784 tokens (a state of 3,207,168 bytes), 16 layers to a group, one group of attention and three of states."""
    found = cache("Qwen3.6-27B", device="NVIDIA H20")
    assert found.blocks(262144) * found.block_bytes == 17_520_656_384
    found = cache("Qwen3.6-27B", device="NVIDIA H20", enable_prefix_caching=False)
    assert found.blocks(262144) * found.block_bytes == 17_366_515_712


def test_a_hybrid_models_block_with_a_narrow_cache():
    """vLLM's log for this model with an FP8 cache: "Setting attention block size to 1568 tokens"."""
    shape = model_shape.read_shape(config("Qwen3.6-27B"))
    plan = fit.read_plan(deployment(kv_cache_dtype="fp8"), shape, device(name="NVIDIA RTX A6000"))
    assert fit._hybrid_page(shape, plan, 2 * 4 * 256) == (1568, 1568 * 2048)


def test_a_hybrid_models_block_on_ascend():
    """Keys alone as large as the recurrent state (1536 tokens), and the convolution's state beside."""
    found = cache("Qwen3.6-27B")
    assert found.block_bytes == 16 * (1536 * 4096 + 10240 * 3 * 2)
    assert found.blocks(262144) == math.ceil(262144 / 1536) + 3 * 2


def test_drafting_keeps_states_and_a_layer_more():
    plain, drafting = cache("Qwen3.6-27B"), cache("Qwen3.6-27B", speculative_config={"method": "mtp", "num_speculative_tokens": 4})
    assert drafting.blocks(262144) == plain.blocks(262144) + 3 * 4
    assert drafting.block_bytes == 17 * (1536 * 4096 + 10240 * 7 * 2)


def test_sliding_windows_keep_their_window_only():
    half = {**config("Qwen3-8B"), "sliding_window": 1024, "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 18}
    shape = model_shape.read_shape(half)
    plan = fit.read_plan(deployment(max_num_batched_tokens=1024), shape, device())
    found = fit.cache_of(shape, plan, range(36))
    assert found.block_bytes == 18 * 128 * 2 * 8 * 128 * 2
    assert found.blocks(131072) == 1024 + (math.ceil(2047 / 128) + 1)


@given(st.sampled_from(["Qwen3-8B", "DeepSeek-V3", "GLM-5.2", "Qwen3.6-27B"]), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 2))
def test_a_longer_request_never_needs_less(name, length, more, power):
    found = cache(name, tp=2 ** power)
    assert found.blocks(length) <= found.blocks(length + more)


@given(st.sampled_from(["Qwen3-8B", "DeepSeek-V3", "Qwen3.6-27B"]), st.integers(0, 40 * GIB), st.integers(1, 300000))
def test_the_longest_that_fits_fits_and_one_more_does_not(name, room, limit):
    found = cache(name)
    length = fit.longest(found, room, limit)
    assert 0 <= length <= limit
    if length:
        assert found.blocks(length) * found.block_bytes <= room
    if length < limit:
        assert found.blocks(length + 1) * found.block_bytes > room


@pytest.mark.parametrize(("written", "meant"), [(4096, 4096), ("4096", 4096), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1M", 1 << 20)])
def test_numbers_of_tokens(written, meant):
    assert fit.tokens(written) == meant


# -------------------------------------------------------------------------------------------------------------- verdict

def levels(verdict):
    return [finding["level"] for finding in verdict["findings"]]


def test_what_a_small_model_measured():
    """Qwen3-0.6B on a 910B: weights 1.14 GiB, activations and what is outside torch 0.35 GiB, 60.86 of 61.27 GiB free at the start."""
    sizes = fit.verdict(model("Qwen3-0.6B"), deployment(gpu_memory_utilization=0.9), device(used=65536 - 62740))["per_device"]
    assert sizes["weights"] / 1024 == pytest.approx(1.14, abs=0.04)
    assert sizes["activations"] / 1024 == pytest.approx(0.35, abs=0.1)
    assert sizes["kv_cache"] / 1024 == pytest.approx(53.46, rel=0.02)


W8A8 = {
    "feed-forward in 8 bits": FEED_FORWARD,
    "and full attention": f"{FEED_FORWARD}|{ATTENTION}",
    "and linear attention": f"{FEED_FORWARD}|{ATTENTION}|{LINEAR}",
}


@pytest.mark.parametrize("pattern", W8A8.values(), ids=W8A8)
@pytest.mark.parametrize("utilization", [0.85, 0.95])
def test_27b_in_8_bits_is_too_large_for_32_gb(pattern, utilization):
    found = fit.verdict(model("Qwen3.6-27B", in_8_bits(pattern)),
                        deployment(gpu_memory_utilization=utilization, max_model_len=262144), device(32768))
    assert found["verdict"] == "does_not_fit"
    assert levels(found) == ["error"]
    assert found["findings"][0]["message"].startswith(f"its weights take {found['per_device']['weights']} MiB of a device that has")
    assert found["remedy"].startswith("use tensor_parallel_size")


@pytest.mark.parametrize("pattern", W8A8.values(), ids=W8A8)
def test_27b_in_8_bits_fits_on_64_gb(pattern):
    found = fit.verdict(model("Qwen3.6-27B", in_8_bits(pattern)), deployment(gpu_memory_utilization=0.95, max_model_len=262144), device())
    assert found["verdict"] == "fits"
    assert found["max_concurrency"] > 1


def test_a_utilization_of_085_is_enough_or_not_by_what_is_in_8_bits():
    """The report says neither what its checkpoint has in 8 bits nor the arguments of the start that failed; see docs/fit.md."""
    found = [fit.verdict(model("Qwen3.6-27B", in_8_bits(pattern)), deployment(gpu_memory_utilization=0.85, max_model_len=262144), device())
             for pattern in W8A8.values()]
    assert [one["verdict"] for one in found] == ["does_not_fit", "fits", "fits"]
    assert "raise args.gpu_memory_utilization to 0.88" in found[0]["remedy"]
    assert found[1]["max_concurrency"] < 1.05


def test_the_clusters_own_instances_of_two_devices_fit():
    found = fit.verdict(model("Qwen3.6-27B", in_8_bits(W8A8["and full attention"])),
                        deployment(2, max_model_len=262144, max_num_seqs=32, max_num_batched_tokens=4096, block_size=16,
                                   speculative_config={"method": "mtp", "num_speculative_tokens": 4}), device())
    assert found["verdict"] == "fits"
    assert levels(found) == ["info"]        # 32 sequences of the full length are not at once in it


def glm(**args):
    return fit.verdict(model("GLM-5.2", in_4_bits), deployment(
        8, enable_expert_parallel=True, max_model_len=262144, max_num_seqs=8, max_num_batched_tokens=4096, gpu_memory_utilization=0.95,
        speculative_config={"method": "deepseek_mtp", "num_speculative_tokens": 3}, **args), device())


def test_glm_on_eight_devices_fits_because_they_share_the_cache():
    assert glm(decode_context_parallel_size=8)["verdict"] == "fits"
    alone = glm()
    assert alone["verdict"] == "does_not_fit"
    assert "one request of 262144 tokens needs" in alone["findings"][0]["message"]


@pytest.mark.parametrize(("dtype", "pipeline", "answer"), [
    ("float16", 4, "fits"), ("float16", 8, "fits"), ("float32", 4, "does_not_fit"), ("float32", 8, "fits"),
])
def test_layers_of_a_pipeline_on_910a(dtype, pipeline, answer):
    """16 layers a card take 15 GiB in 16 bits and 29 in 32 bits; which of them the report's engine held it does not say."""
    found = fit.verdict(model("Qwen3.6-27B"), deployment(pp=pipeline, dtype=dtype, max_model_len=4096, gpu_memory_utilization=0.9),
                        device(32768, name="910A"))
    assert found["verdict"] == answer


@pytest.mark.parametrize(("version", "share"), [("0.18.0", 0.9), ("0.23.0", 0.92)])
def test_the_utilization_is_by_default_that_of_the_version(version, share):
    found = fit.verdict(model("Qwen3-8B"), {**deployment(max_model_len=4096), "vllm_version": version}, device(50000, used=0))
    assert found["per_device"]["budget"] == round(50000 * share)


def test_a_cache_too_small_says_what_would_do():
    found = fit.verdict(model("Qwen3-32B"), deployment(max_model_len=40960, gpu_memory_utilization=0.9), device(80000, used=0))
    assert found["verdict"] == "does_not_fit"
    remedies = found["remedy"].split("; or ")
    assert remedies[0] == "raise args.gpu_memory_utilization to 0.92"
    length = int(remedies[1].removeprefix("lower args.max_model_len to "))
    for changed, answer in [({"max_model_len": length}, "fits"), ({"max_model_len": length + 128}, "does_not_fit"),
                            ({"max_model_len": 40960, "gpu_memory_utilization": 0.92}, "fits"),
                            ({"max_model_len": 40960, "gpu_memory_utilization": 0.91}, "does_not_fit")]:
        assert fit.verdict(model("Qwen3-32B"), deployment(**{"gpu_memory_utilization": 0.9, **changed}), device(80000, used=0))["verdict"] == answer
    assert remedies[2] == "use tensor_parallel_size 2"
    assert fit.verdict(model("Qwen3-32B"), deployment(2, max_model_len=40960), device(80000, used=0))["verdict"] == "fits"


def test_where_only_the_estimate_decides_it_is_a_warning():
    """Between what is sure and what the estimate adds lie the activations' MiB."""
    need = fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096), device(used=0))["per_device"]
    sure = need["weights"] + need["request"]
    for budget, level in [(sure - 2, "error"), (sure + need["activations"] // 2, "warning")]:
        found = fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096, gpu_memory_utilization=1.0), device(budget, used=0))
        assert (found["verdict"], levels(found)) == ("does_not_fit", [level])
    assert fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096, gpu_memory_utilization=1.0),
                       device(sure + need["activations"] + 2, used=0))["verdict"] == "fits"


def test_a_length_left_to_the_engine_is_the_longest_that_fits():
    found = fit.verdict(model("Qwen3-32B"), deployment(max_model_len="auto"), device(80000, used=0))
    assert found["verdict"] == "fits"
    assert 0 < found["max_model_len"] < 40960


def test_a_cache_of_a_given_size():
    fits = fit.verdict(model("Qwen3-8B"), deployment(kv_cache_memory_bytes="8G", max_model_len=32768), device())
    assert (fits["verdict"], fits["per_device"]["kv_cache"]) == ("fits", 8192)
    small = fit.verdict(model("Qwen3-8B"), deployment(kv_cache_memory_bytes=GIB, max_model_len=32768), device())
    assert (small["verdict"], small["remedy"]) == ("does_not_fit", "lower args.max_model_len to 7168")
    large = fit.verdict(model("Qwen3-8B"), deployment(kv_cache_memory_bytes="60G", max_model_len=32768), device())
    assert large["remedy"] == "lower args.kv_cache_memory_bytes"


@pytest.mark.parametrize(("given_model", "args", "given_device", "said"), [
    ({"config": {"model_type": "brand_new"}}, {}, {}, "architecture 'brand_new' is not known"),
    ({"config": None, "missing": ["/m has no config.json"]}, {}, {}, "/m has no config.json"),
    ({"tensors": None}, {"quantization": "ascend"}, {}, "/m has no weight files yet"),
    ({}, {"quantization": "fp8"}, {}, "args.quantization fp8 changes the weights"),
    ({}, {"cpu_offload_gb": 4}, {}, "args.cpu_offload_gb"),
    ({}, {"kv_cache_dtype": "turboquant_k8v4"}, {}, "KV cache of 'turboquant_k8v4'"),
    ({}, {"max_model_len": "long"}, {}, "'long' is no number of tokens"),
    ({}, {}, {"hbm_total_mb": None}, "the size of the device's memory"),
])
def test_unknown(given_model, args, given_device, said):
    found = fit.verdict({**model("Qwen3-8B"), **given_model}, deployment(**args), {**device(), **given_device})
    assert (found["verdict"], levels(found)) == ("unknown", ["info"])
    assert said in found["findings"][0]["message"]


def test_heads_that_cannot_be_shared():
    found = fit.verdict(model("Qwen3.6-27B"), deployment(16), device())
    assert found["verdict"] == "unknown"
    assert "24 attention heads cannot be shared by a tensor_parallel_size of 16" in found["findings"][0]["message"]


def test_the_sum_of_the_weights_is_enough_to_refuse_an_unknown_architecture():
    unknown = {"path": "/m", "config": {"model_type": "brand_new"}, "tensors": None, "total_bytes": 700 * GIB, "missing": []}
    found = fit.verdict(unknown, deployment(8), device())
    assert (found["verdict"], levels(found)) == ("does_not_fit", ["error"])
    assert "at least 89600 MiB" in found["findings"][0]["message"]


def test_a_drafting_model_of_its_own_is_not_counted_and_that_is_said():
    found = fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096, speculative_config={"method": "eagle3", "model": "/e"}), device())
    assert "the drafting model /e is not counted" in [finding["message"] for finding in found["findings"]]


def test_an_idle_device_is_asked_before_a_table_is_believed():
    seen = fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096), device(used=2796))["per_device"]
    assumed = fit.verdict(model("Qwen3-8B"), deployment(max_model_len=4096), device())["per_device"]
    assert (seen["idle"], assumed["idle"]) == (2796, 3100)
    assert [fit.idle_mb(name) for name in ("910B4", "Ascend910", "910A", "310P3", "NVIDIA GeForce RTX 4090", None)] == [3100, 3100, 3, 0, 500, 3100]


@given(st.sampled_from(["Qwen3-8B", "Qwen3.6-27B", "GLM-5.2"]), st.integers(0, 3), st.integers(1, 200000), st.floats(0.3, 0.98),
       st.integers(8000, 140000))
def test_a_larger_device_or_a_shorter_request_never_turns_yes_into_no(name, power, length, utilization, total):
    def fits(total, length, tp):
        return fit.verdict(model(name), deployment(tp, max_model_len=length, gpu_memory_utilization=utilization), device(total))["verdict"] == "fits"
    if fits(total, length, 2 ** power):
        assert fits(total + 1000, length, 2 ** power)
        assert fits(total, max(length // 2, 1), 2 ** power)


# ------------------------------------------------------------------------------------------------------------ the reports

def reports():
    """The reports' deployments, as docs/fit.md shows them."""
    alone = {"max_model_len": 262144, "dtype": "bfloat16", "enforce_eager": True}
    cases = []
    for stored, pattern in zip("abc", W8A8.values()):
        quantised = model("Qwen3.6-27B", in_8_bits(pattern))
        for total, utilization in ((32768, 0.95), (65536, 0.85), (65536, 0.95)):
            cases.append((quantised, deployment(name=f"27B ({stored}) at {utilization}", gpu_memory_utilization=utilization, **alone), device(total)))
    cases.append((model("Qwen3.6-27B", in_8_bits(W8A8["and full attention"])), deployment(
        2, name="27B (b), two devices", max_model_len=262144, max_num_seqs=32, max_num_batched_tokens=4096, block_size=16,
        speculative_config={"method": "mtp", "num_speculative_tokens": 4}), device()))
    mtp = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
    for context_parallel in (8, 1):
        cases.append((model("GLM-5.2", in_4_bits), deployment(
            8, name=f"GLM-5.2 W4A8, DCP {context_parallel}", enable_expert_parallel=True, max_model_len=262144, max_num_seqs=8,
            max_num_batched_tokens=4096, gpu_memory_utilization=0.95, decode_context_parallel_size=context_parallel,
            speculative_config=mtp), device()))
    for dtype, bits in (("float16", 16), ("float32", 32)):
        for pipeline in (4, 8):
            cases.append((model("Qwen3.6-27B"), deployment(
                pp=pipeline, name=f"64 layers over {pipeline}, {bits} bits", dtype=dtype, max_model_len=4096), device(32768, name="910A")))
    return [fit.verdict(*case) for case in cases]


def test_the_page_shows_what_the_code_says():
    shown = re.search(r"<!-- the reports -->\n```text\n(.*?)\n```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert shown.group(1).splitlines() == fit.fit_table(reports())


# ---------------------------------------------------------------------------------------------------------------- filters

def fact(phy_id, total=65536, used=3000, holders=()):
    return {"phy_id": phy_id, "name": "910B4", "hbm_total_mb": total, "hbm_used_mb": used, "holders": list(holders)}


@pytest.mark.parametrize(("devices", "wanted", "found"), [
    ([fact(0), fact(1, 32768, 2800)], "all", (32768, 2800)),
    ([fact(0), fact(1, 32768, 2800)], [0], (65536, 3000)),
    ([fact(0, used=40000, holders=[{"pid": 1}]), fact(1, used=3100)], "all", (65536, 3100)),
    ([fact(0, used=40000)], "all", (65536, None)),             # a holder that is not seen
    ([fact(0, used=None)], "all", (65536, None)),
    ([], "all", (None, None)),
    ([fact(0, total=None)], "all", (None, None)),
])
def test_the_device_that_decides(devices, wanted, found):
    chosen = fit.device_of(devices, {"devices": wanted})
    assert (chosen["hbm_total_mb"], chosen["hbm_used_mb"]) == found


def test_filters():
    small, absent = deployment(max_model_len=4096, name="small"), {**deployment(name="absent"), "model_path": "/other"}
    verdicts = fit_filter.fit_verdicts({"small": small, "absent": absent}, {"/m": model("Qwen3-8B")}, {"devices": [fact(0)]}, "machine66")
    assert [(one["machine"], one["deployment"], one["verdict"]) for one in verdicts] == [("machine66", "small", "fits")]
    title, _line, row = fit_filter.fit_table(verdicts)
    assert title.split()[:4] == ["machine", "deployment", "device", "devices"]
    assert row.split()[0] == "machine66"
    assert row.endswith("fits")
    assert json.loads(json.dumps(verdicts)) == verdicts


# ------------------------------------------------------------------------------------------------------- whatever is written

ODD = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=True), st.text(max_size=3), st.just([]), st.just(["x"]),
                st.just({}), st.just(10 ** 30))


@given(st.sampled_from(["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "GLM-5.2", "Qwen3.6-27B"]), st.data())
def test_no_config_and_no_argument_is_a_traceback(name, data):
    """Models come from strangers, and args_check may be off."""
    odd = config(name)
    inner = data.draw(st.sampled_from([part for part in (odd, odd.get("text_config"), odd.get("vision_config")) if part]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(ODD)
    keys = ("max_model_len", "gpu_memory_utilization", "block_size", "max_num_seqs", "kv_cache_dtype", "kv_cache_memory_bytes", "dtype",
            "speculative_config", "limit_mm_per_prompt", "decode_context_parallel_size", "max_num_batched_tokens", "mamba_ssm_cache_dtype")
    args = data.draw(st.dictionaries(st.sampled_from(keys), ODD, max_size=2))
    tensors = data.draw(st.sampled_from([None, model(name)["tensors"]]))
    read = {"path": "/m", "config": odd, "tensors": tensors, "total_bytes": None, "missing": []}
    found = fit.verdict(read, deployment(2, **args), device())
    assert found["verdict"] in ("fits", "does_not_fit", "unknown")
    assert all("\n" not in finding["message"] for finding in found["findings"])
    json.dumps(found)
