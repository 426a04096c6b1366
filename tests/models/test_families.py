"""Layouts by hand, and every parameter out and in again."""

import hybrid_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from memcalib_jax import models
from memcalib_jax.models.weights.families import (
    PARAMETERS, Names, Placement, flat_shapes, tensor_names)


def test_projection_layout_by_hand():
    """Stored [outputs, inputs]; q wants [input, head, dim], o wants [head, dim, output]."""
    stored = np.arange(8).reshape(4, 2)
    q = PARAMETERS["layers/q"].to_parameter(stored, (2, 2, 2))
    np.testing.assert_array_equal(q[0], [[0, 2], [4, 6]])
    np.testing.assert_array_equal(q[1], [[1, 3], [5, 7]])
    stored = np.arange(8).reshape(2, 4)
    o = PARAMETERS["layers/o"].to_parameter(stored, (2, 2, 2))
    np.testing.assert_array_equal(o[0], [[0, 4], [1, 5]])
    np.testing.assert_array_equal(o[1], [[2, 6], [3, 7]])


def test_convolution_layout_by_hand():
    """Stored [channel, 1, tap], wanted [tap, channel]; a part is read alone."""
    conv, stored = PARAMETERS["delta_layers/conv"], np.arange(6).reshape(3, 1, 2)
    parameter = conv.to_parameter(stored, (2, 3))
    np.testing.assert_array_equal(parameter, [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(conv.to_stored(parameter), stored)
    index, shape, wanted = conv.covering((2, 3), (slice(1, 2), slice(0, 2)))
    np.testing.assert_array_equal(conv.to_parameter(stored[index], shape)[wanted], [[1, 3]])


@pytest.mark.parametrize("input_axes, shape, stored", [
    (None, (7, 4), (7, 4)), (None, (4,), (4,)), (0, (3, 2), (6,)),
    (1, (4, 3, 2), (6, 4)), (2, (3, 2, 4), (4, 6)), (1, (4, 9), (9, 4))])
def test_both_ways(input_axes, shape, stored):
    placement = Placement(Names("x", "x"), input_axes)
    parameter = np.arange(np.prod(shape)).reshape(shape)
    assert placement.stored_shape(shape) == stored
    assert placement.to_stored(parameter).shape == stored
    np.testing.assert_array_equal(
        placement.to_parameter(placement.to_stored(parameter), shape), parameter)


def test_tensor_names():
    assert PARAMETERS["layers/q"].tensor_names("gguf", (0, 1)) == [
        "blk.0.attn_q.weight", "blk.1.attn_q.weight"]
    assert PARAMETERS["final_norm"].tensor_names("hugging_face", (0, 1)) == ["model.norm.weight"]
    assert PARAMETERS["layers/expert_up"].tensor_names("hugging_face", (3,), 2) == [
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.1.up_proj.weight"]


def test_layers_of_a_kind_keep_their_numbers():
    config = hybrid_models.CONFIG  # delta, delta, attention, twice
    assert tensor_names("layers/k", config, "hugging_face") == [
        "model.layers.2.self_attn.k_proj.weight", "model.layers.5.self_attn.k_proj.weight"]
    assert tensor_names("delta_layers/up", config, "hugging_face") == [
        f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1, 3, 4)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("case", tiny_models.CASES)
def test_written_tensors_come_back_bit_for_bit(case, dtype, tmp_path):
    """A float32 read of `dtype` weights, cast back, is the checkpoint again."""
    golden = tiny_models.golden(case)
    tensors = {name: values.astype(dtype) for name, values in
               tiny_models.random_tensors(golden["shapes"], seed=1).items()}
    folder = tiny_models.write_folder(tmp_path, golden["config"], tensors)
    params, config = models.load(folder, dtype=jnp.float32)
    written = tiny_models.stored_tensors(jax.tree.map(lambda x: x.astype(dtype), params), config)
    assert written.keys() == tensors.keys()
    for name, values in tensors.items():
        assert written[name].dtype == values.dtype
        assert written[name].tobytes() == values.tobytes(), name
    direct, _ = models.load(folder, dtype=dtype)
    assert set(flat_shapes(config)) <= set(PARAMETERS)
    for x, y in zip(jax.tree.leaves(direct), jax.tree.leaves(params), strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x.astype(jnp.float32), y)
