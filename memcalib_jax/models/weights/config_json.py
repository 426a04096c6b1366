"""Reading what a config.json says about a model's shape, and refusing what the forward lacks."""

import dataclasses
import math
from pathlib import Path

from memcalib_jax.models.config import DeltaNet, Experts, ModelConfig
from memcalib_jax.models.rope import Linear, Llama3, QueryScale, Rope, Yarn
from memcalib_jax.models.weights.checkpoint import (
    MOST_STACKED, ModelError, check_number, make_config)
from memcalib_jax.models.weights.families import (
    DELTA_SETTINGS, EXPERT_SETTINGS, EXPERT_WIDTH, FAMILIES, LAYER_KINDS, SETTINGS)

_FAMILY_OF = {architecture: name for name, family in FAMILIES.items()
              for architecture in (family.architecture, family.wrapper) if architecture}
_SCALINGS = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}


def read_config(settings: dict, path: Path, *, eos_ids=(),
                tie_embeddings: bool | None = None) -> ModelConfig:
    """Returns the ModelConfig that the `settings` of a config.json describe.

    Args:
      settings: the parsed file.
      path: where they come from, for messages.
      eos_ids: ids that end a response.
      tie_embeddings: whether the head is the embedding, where the settings contradict themselves
        about it (see `stated_ties`); None takes what they say.

    Raises:
      ModelError: the settings ask for something the forward does not do, or lack a number.
    """
    family = _family(settings, path)
    check_places(settings, path)
    if settings.get("quantization_config"):
        _refuse(path, "quantization_config", settings["quantization_config"],
                "use the unquantized weights")
    if tie_embeddings is None:
        ties = stated_ties(settings)
        if len(ties) > 1:
            _refuse(path, "tie_word_embeddings", "true in one place and false in another",
                    "say the same at the root and in text_config")
        tie_embeddings = True in ties
    text = _text_settings(settings, family, path)
    numbers = {field: text.get(names.hugging_face) for field, names in SETTINGS.items()}
    numbers["norm_eps"] = 1e-6 if numbers["norm_eps"] is None else numbers["norm_eps"]
    shape = {"tie_embeddings": tie_embeddings}
    if FAMILIES[family].experts:
        shape["experts"] = _read_experts(text, family, path)
        numbers["intermediate_size"] = text.get(EXPERT_WIDTH)
        check_number(path, EXPERT_WIDTH, numbers["intermediate_size"], int)
    if FAMILIES[family].hybrid:
        shape["delta"] = _read_delta(text, numbers["num_layers"], path)
    rope = _rope_settings(text, path)
    shape["rope"] = _read_rope(rope, text, family, path)
    if FAMILIES[family].query_scale and rope.get("llama_4_scaling_beta"):
        shape["query_scale"] = _read_query_scale(rope, path)
    config = make_config(path, family, numbers, eos_ids=eos_ids, **shape)
    _refuse_unsupported(text, config, path)
    return config


def write_config(config: ModelConfig) -> dict:
    """Returns the settings of a config.json that `read_config` reads as `config`."""
    traits, experts = FAMILIES[config.family], config.experts
    settings = {"architectures": [traits.architecture], "model_type": traits.model_type,
                "hidden_act": "silu", "tie_word_embeddings": config.tie_embeddings}
    settings |= {names.hugging_face: getattr(config, field) for field, names in SETTINGS.items()}
    if experts:
        settings |= {name: getattr(experts, field) for field, name in EXPERT_SETTINGS.items()
                     if getattr(experts, field)}
        settings |= {"norm_topk_prob": experts.normalize,
                     "moe_intermediate_size": config.intermediate_size}
    if config.delta:
        settings |= {name: getattr(config.delta, field) for field, name in DELTA_SETTINGS.items()}
        settings["layer_types"] = [LAYER_KINDS[kind] for kind in config.layer_kinds]
    settings["rope_parameters"] = _write_rope(config)
    if config.eos_ids:
        settings["eos_token_id"] = list(config.eos_ids)
    return settings


def _write_rope(config):
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config.rope.partial_rotary_factor
    scaling, query = config.rope.scaling, config.query_scale
    if scaling:
        kind, = (name for name, kind in _SCALINGS.items() if isinstance(scaling, kind))
        rope |= {name: value for name, value in dataclasses.asdict(scaling).items()
                 if value is not None} | {"rope_type": kind}
    if query:
        rope |= {"llama_4_scaling_beta": query.beta,
                 "original_max_position_embeddings": query.period}
    return rope


def check_places(settings: dict, path: Path) -> None:
    """Raises ModelError where what the settings hold cannot even be looked into."""
    text = settings.get("text_config")
    if not isinstance(text, (dict, type(None))):
        _refuse(path, "text_config", text, "it must be an object")
    for place in (settings, text or {}):
        if not isinstance(place.get("tie_word_embeddings"), (bool, type(None))):
            _refuse(path, "tie_word_embeddings", place["tie_word_embeddings"],
                    "it must be true or false")
        types = place.get("layer_types")
        if types is not None and not (isinstance(types, list)
                                      and all(isinstance(called, str) for called in types)):
            _refuse(path, "layer_types", types, "it must list the kind of each layer")


def stated_ties(settings: dict) -> set[bool]:
    """Returns what the settings say, at the root and in text_config, about tied embeddings."""
    places = (settings, settings.get("text_config") or {})
    return {bool(place["tie_word_embeddings"]) for place in places
            if place.get("tie_word_embeddings") is not None}


def as_list(value) -> list:
    """Returns a setting that may be absent, one value or several as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _family(settings, path):
    architectures = as_list(settings.get("architectures"))
    if (len(architectures) != 1 or not isinstance(architectures[0], str)
            or architectures[0] not in _FAMILY_OF):
        found = ", ".join(map(str, architectures)) or "(none named)"
        raise ModelError(f"{path}: unknown architecture {found}; known: {', '.join(_FAMILY_OF)}")
    return _FAMILY_OF[architectures[0]]


def _text_settings(settings, family, path):
    """Returns the settings of the text model, which a wrapper keeps apart."""
    traits = FAMILIES[family]
    if settings["architectures"] != [traits.wrapper]:
        return settings
    text = settings.get("text_config")
    if not isinstance(text, dict):
        _refuse(path, "text_config", text, "it must describe the text model")
    if text.get("model_type") != traits.model_type:
        _refuse(path, "text_config.model_type", text.get("model_type"),
                f"only {traits.model_type} is")
    return text


def _read_experts(text, family, path):
    """Returns the Experts; every layer must have them."""
    if text.get("mlp_only_layers"):
        _refuse(path, "mlp_only_layers", text["mlp_only_layers"], "only experts in every layer are")
    if text.get("decoder_sparse_step", 1) != 1:
        _refuse(path, "decoder_sparse_step", text["decoder_sparse_step"], "only 1 is")
    numbers = {}
    for field, name in EXPERT_SETTINGS.items():
        # The transformers library also writes num_experts under this name.
        value = text.get(name, text.get("num_local_experts") if field == "count" else None)
        if value is None and field == "shared_size":
            continue
        check_number(path, name, value, int,
                     most=MOST_STACKED if field == "count" else math.inf)
        numbers[field] = value
    try:
        return Experts(normalize=FAMILIES[family].normalized_experts
                       or bool(text.get("norm_topk_prob", False)), **numbers)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _read_delta(text, num_layers, path):
    """Returns the DeltaNet, its pattern the shortest that the kinds of layers repeat."""
    if text.get("attn_output_gate") is False:
        _refuse(path, "attn_output_gate", False, "only true is for this family")
    numbers = {field: text.get(name) for field, name in DELTA_SETTINGS.items()}
    for field, value in numbers.items():
        check_number(path, DELTA_SETTINGS[field], value, int)
    check_number(path, "num_hidden_layers", num_layers, int, most=MOST_STACKED)
    kinds = {called: kind for kind, called in LAYER_KINDS.items()}
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        check_number(path, "full_attention_interval", interval, int)
        types = ["linear_attention"] * num_layers
        types[interval - 1::interval] = ["full_attention"] * (num_layers // interval)
    if len(types) != num_layers or any(called not in kinds for called in types):
        _refuse(path, "layer_types", types, f"it must name one of {', '.join(kinds)} for each of "
                f"the {num_layers} layers")
    period = next(n for n in range(1, num_layers + 1)
                  if num_layers % n == 0 and types == types[:n] * (num_layers // n))
    try:
        return DeltaNet(pattern=tuple(kinds[called] for called in types[:period]), **numbers)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _rope_settings(text, path):
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: rope_parameters must be an object, not {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        _refuse(path, "rope_parameters", sorted(rope), "only one rotary setting for all layers is")
    if "original_max_position_embeddings" not in rope:
        context = text.get("original_max_position_embeddings", text.get("max_position_embeddings"))
        rope = rope | {"original_max_position_embeddings": context}
    return rope


def _read_rope(rope, text, family, path):
    theta = rope.get("rope_theta", text.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    check_number(path, "rope_theta", theta, float)
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    usual = FAMILIES[family].partial_rotary_factor
    if usual is None and partial not in (None, 1.0):
        _refuse(path, "partial_rotary_factor", partial, "only 1.0 is for this family")
    partial = partial or usual or 1.0
    check_number(path, "partial_rotary_factor", partial, float)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(theta, partial)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        _refuse(path, "rope_type", kind, f"known: default, {', '.join(_SCALINGS)}")
    return Rope(theta, partial, _read_scaling(kind, rope, path))


def _read_scaling(kind, rope, path):
    values = {}
    for field in dataclasses.fields(_SCALINGS[kind]):
        value = rope.get(field.name)
        if value is None and field.default is not dataclasses.MISSING:
            continue
        if field.type is not bool:
            check_number(path, f"{field.name} of {kind} rotary positions", value,
                         int if field.type is int else float)
        values[field.name] = value
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        _refuse(path, "high_freq_factor", values["high_freq_factor"],
                f"it must be above low_freq_factor, {values['low_freq_factor']!r}")
    return _SCALINGS[kind](**values)


def _read_query_scale(rope, path):
    names = ("llama_4_scaling_beta", "original_max_position_embeddings")
    for name, kind in zip(names, (float, int), strict=True):
        check_number(path, name, rope[name], kind)
    return QueryScale(*(rope[name] for name in names))


def _refuse_unsupported(text, config, path):
    if text.get("hidden_act", "silu") != "silu":
        _refuse(path, "hidden_act", text["hidden_act"], "only silu is")
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 always has its q, k and v biases and does not read the key.
        if text.get(key) and not config.attention_bias:
            _refuse(path, key, text[key], "only false is for this family")
    if config.family != "llama" and config.delta is None and _slides(text, config):
        _refuse(path, "layer_types or sliding_window",
                text.get("layer_types") or text.get("sliding_window"), "only full attention is")


def _slides(text, config):
    """Says whether any layer's attention is not full (a llama's always is)."""
    if text.get("layer_types"):
        return set(text["layer_types"]) != {"full_attention"}
    window = text.get("sliding_window")
    if config.family == "ministral3":  # which has no switch beside the window
        return bool(window)
    if not window or not text.get("use_sliding_window"):
        return False
    first = 0 if config.experts else text.get("max_window_layers", 28)
    return not isinstance(first, int) or first < config.num_layers


def _refuse(path, key, value, allowed):
    raise ModelError(f"{path}: {key} is {value!r}, which is not supported; {allowed}")
