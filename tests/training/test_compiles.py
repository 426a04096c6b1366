import jax
import jax.numpy as jnp

from memcalib_jax.training import compiles
from memcalib_jax.training.compiles import Compiled, CompileLog


def test_programs_are_counted_by_name():
    compiled = Compiled([("sample", 2.0), ("score", 1.0), ("score", 0.5), ("slice", 0.01)])
    assert str(compiled) == "3 programs compiled in 3.5 s: sample, score x2"
    metrics = compiled.metrics()
    assert metrics["time/programs_compiled"] == 3
    assert abs(metrics["time/compile"] - 3.51) < 1e-9


def test_nothing_compiled_is_not_mentioned():
    assert str(Compiled([])) == "" and str(Compiled([("slice", 0.01)])) == ""


def test_a_program_shows_once_and_not_again(monkeypatch):
    monkeypatch.setattr(compiles, "LONG", 0.0)
    log = CompileLog()

    def a_name_of_its_own(x):
        return jnp.sin(x) + 1

    function = jax.jit(a_name_of_its_own)
    function(jnp.ones(3))
    assert "a_name_of_its_own" in str(log.take())
    function(jnp.zeros(3))
    assert "a_name_of_its_own" not in str(log.take())
    function(jnp.ones(4))
    assert "a_name_of_its_own" in str(log.take())
